"""MemoryEntityTable: the entity table of a datastore in memory, for tests of programs that build on the core.

It keeps I1, I3 and I4 as the real one does: tests/contract/ runs one suite over both. Not to be shared by threads.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from schemaless.cell import CellKey, ColumnName, Placed, PutStatus, RowKey, StoredCell
from schemaless.codec import same_body
from schemaless.location import FIRST_GENERATION
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.shard_head import Head
from schemaless.topology import Datastore


class MemoryEntityTable:
    """All shards of one datastore. `clock_us` gives microseconds since the epoch, and may go backwards."""

    def __init__(self, datastore: Datastore, clock_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        self._clock_us = clock_us
        self._logs: list[list[StoredCell]] = [[] for _ in range(datastore.shards)]
        self._cells: dict[CellKey, StoredCell] = {}

    def put_cells(self, cells: Sequence[ShardCell]) -> list[Placed]:
        """One outcome for each, in order."""
        now = self._clock_us()
        return [self._put(cell, now) for cell in cells]

    def get(self, keys: Sequence[tuple[int, CellKey]]) -> list[StoredCell | None]:
        return [self._cells.get(key) for _, key in keys]

    def newest(self, columns: Sequence[tuple[int, RowKey, ColumnName]]) -> list[StoredCell | None]:
        """The cell with the highest ref_key of each column."""
        return [max(self._column(*column), key=_ref_key, default=None) for column in columns]

    def row(self, shard: int, row_key: RowKey) -> list[StoredCell]:
        """The newest version of every column of a row, by column name."""
        names = sorted({cell.column_name for cell in self._logs[shard] if cell.row_key == row_key})
        return [max(self._column(shard, row_key, name), key=_ref_key) for name in names]

    def versions(
        self,
        shard: int,
        column: tuple[RowKey, ColumnName],
        *,
        ref_keys: tuple[int, int],
        descending: bool,
        limit: int,
    ) -> list[StoredCell]:
        """Versions of one column with a ref_key from the first of `ref_keys` to the second, both included."""
        low, high = ref_keys
        found = [cell for cell in self._column(shard, *column) if low <= cell.ref_key <= high]
        return sorted(found, key=_ref_key, reverse=descending)[:limit]

    def read_after(self, shard: int, after: int, limit: int, columns: Iterable[str] = ()) -> list[StoredCell]:
        """At most `limit` cells with an added_id above `after`; only of `columns` if any are named."""
        wanted = set(columns)
        return [cell for cell in self._logs[shard][after:] if not wanted or cell.column_name in wanted][:limit]

    def first_since(self, shard: int, created_at: int, head: int) -> int:
        """Lowest added_id up to `head` whose created_at is not earlier; head + 1 if there is none."""
        return bisect_left([cell.created_at for cell in self._logs[shard][:head]], created_at) + 1

    def heads(self) -> list[Head]:
        return [self._head(shard) for shard in range(len(self._logs))]

    def _put(self, cell: ShardCell, now: int) -> Placed:
        found = self._cells.get(cell.key)
        if found is not None:
            same = same_body(cell.body, found.body)
            return _placed(PutStatus.ALREADY_STORED if same else PutStatus.CONFLICT, found)
        head = self._head(cell.shard)
        stored = StoredCell(
            *(cell.key.row_key, cell.key.column_name, cell.key.ref_key),
            shard=cell.shard,
            generation=head.generation,
            added_id=head.added_id + 1,
            created_at=max(now, head.last_created_at),
            body=cell.body,
        )
        self._logs[cell.shard].append(stored)
        self._cells[cell.key] = stored
        return _placed(PutStatus.STORED, stored)

    def _head(self, shard: int) -> Head:
        log = self._logs[shard]
        return Head(shard, FIRST_GENERATION, len(log), log[-1].created_at if log else 0)

    def _column(self, shard: int, row_key: RowKey, column_name: ColumnName) -> list[StoredCell]:
        return [c for c in self._logs[shard] if (c.row_key, c.column_name) == (row_key, column_name)]


def _placed(status: PutStatus, cell: StoredCell) -> Placed:
    return Placed(status, cell.shard, cell.generation, cell.added_id, cell.created_at)


def _ref_key(cell: StoredCell) -> int:
    return cell.ref_key
