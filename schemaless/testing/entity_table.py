"""MemoryEntityTable: the shards of a datastore in memory, for unit tests of everything that builds on the store.

It keeps I1, I3, I4 and I13 as the real tables do: tests/contract/ runs one suite over both. Its methods have the names
and the parameters of the operations in schemaless/storage/entity_table.py and shard_head.py, without the datastore.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from schemaless.cell import CellKey, ColumnName, Placed, PutStatus, RowKey, StoredCell
from schemaless.codec import same_body
from schemaless.errors import Misconfigured, TooLarge
from schemaless.location import ADDED_ID_MAX, FIRST_GENERATION, GenerationStart
from schemaless.storage.entity_table import NEWEST_BYTES_MAX, CellPage, NewestRows, ShardCell
from schemaless.storage.shard_head import Head, Movement
from schemaless.topology import Datastore


class MemoryEntityTable:
    """All shards of one datastore, as the only cluster of its placement has them. Not to be shared by threads.

    `clock_us` returns microseconds since the epoch, and may go backwards.
    """

    def __init__(self, datastore: Datastore, clock_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        self._clock_us = clock_us
        self._logs: list[list[StoredCell]] = [[] for _ in range(datastore.shards)]
        self._heads = [Head(shard, FIRST_GENERATION, 0, 0) for shard in range(datastore.shards)]
        self._starts = [[GenerationStart(FIRST_GENERATION, 1)] for _ in range(datastore.shards)]
        self._cells: dict[tuple[int, CellKey], StoredCell] = {}

    def put_cells(self, cells: Sequence[ShardCell]) -> list[Placed]:
        """Returns one outcome for each, in order."""
        now = self._clock_us()
        return [self._put(cell, now) for cell in cells]

    def open_generation(self, shard: int, starts_at: int) -> None:
        """Does what a promoted minion does (I13): cells from `starts_at` on are lost, new ones get a new generation."""
        head = self._heads[shard]
        for lost in self._logs[shard][starts_at - 1 :]:
            del self._cells[shard, lost.key]
        del self._logs[shard][starts_at - 1 :]
        self._heads[shard] = Head(shard, head.generation + 1, starts_at - 1, head.last_created_at)
        self._starts[shard].append(GenerationStart(head.generation + 1, starts_at))

    def get(self, keys: Sequence[tuple[int, CellKey]]) -> list[StoredCell | None]:
        """Returns the cells under (shard, key), in order, None where there is none."""
        return [self._cells.get(key) for key in keys]

    def newest(self, columns: Sequence[tuple[int, RowKey, ColumnName]]) -> list[StoredCell | None]:
        """Returns the cell with the highest ref_key of each (shard, row key, column), in order."""
        return [self._newest_of(*column, ADDED_ID_MAX) for column in columns]

    def newest_until(
        self,
        rows: Mapping[int, tuple[int, Sequence[RowKey]]],
        columns: Iterable[str],
        bytes_max: int = NEWEST_BYTES_MAX,
    ) -> NewestRows:
        """Returns the newest cells of rows as the log makes them up to an added_id, in no order within a row.

        `rows`: by shard, that added_id and its row keys. It reads the rows in this order, as long as their bodies have
        at most `bytes_max` bytes together, but at least the first one.
        """
        names = sorted(columns)
        left, cells, unread = bytes_max, list[StoredCell](), dict[int, list[RowKey]]()
        wanted = [(shard, row_key) for shard, (_, row_keys) in rows.items() for row_key in row_keys]
        for position, (shard, row_key) in enumerate(wanted):
            newest = [self._newest_of(shard, row_key, ColumnName(name), rows[shard][0]) for name in names]
            found = [cell for cell in newest if cell is not None]
            left -= sum(len(cell.body) for cell in found)
            if unread or (left < 0 and position):
                unread.setdefault(shard, []).append(row_key)
            else:
                cells += found
        return NewestRows(cells, unread)

    def row(self, shard: int, row_key: RowKey, bytes_max: int) -> list[StoredCell]:
        """Returns the newest version of every column of a row, by column name."""
        names = sorted({cell.column_name for cell in self._logs[shard] if cell.row_key == row_key})
        newest = [self._newest_of(shard, row_key, name, ADDED_ID_MAX) for name in names]
        found = [cell for cell in newest if cell is not None]
        if _page(found, len(found), bytes_max).following is not None:
            raise TooLarge(f"the row has more than {bytes_max} bytes")
        return found

    def versions(
        self,
        shard: int,
        column: tuple[RowKey, ColumnName],
        ref_keys: tuple[int, int],
        descending: bool,
        limit: int,
        bytes_max: int,
    ) -> CellPage:
        """Returns versions of one column, with a ref_key from the first of `ref_keys` to the second, both included."""
        low, high = ref_keys
        found = [cell for cell in self._column(shard, *column) if low <= cell.ref_key <= high]
        return _page(sorted(found, key=_ref_key, reverse=descending), limit, bytes_max)

    def read_after(
        self, shard: int, after: int, limit: int, columns: Iterable[str] = (), until: int = ADDED_ID_MAX
    ) -> list[StoredCell]:
        """Returns at most `limit` cells with an added_id above `after` and up to `until`, in added_id order.

        Where `columns` are named, cells of others are left out.
        """
        wanted = set(columns)
        return [cell for cell in self._logs[shard][after:until] if not wanted or cell.column_name in wanted][:limit]

    def first_since(self, shard: int, created_at: int, head: int) -> int:
        """Returns the lowest added_id up to `head` whose created_at is not earlier, or head + 1."""
        return bisect_left([cell.created_at for cell in self._logs[shard][:head]], created_at) + 1

    def heads(self) -> list[Head]:
        """Returns the heads of all shards, by shard."""
        return list(self._heads)

    def heads_of(self, shards: Collection[int]) -> list[Head]:
        """Returns the heads of these shards, by shard, without those that don't exist."""
        return [head for head in self._heads if head.shard in shards]

    def movement(self) -> Movement:
        """Returns the sums that change whenever a head moves."""
        return Movement(sum(head.added_id for head in self._heads), sum(head.generation for head in self._heads))

    def generations(self, shard: int) -> list[GenerationStart]:
        """Returns where each generation of a shard begins, by generation."""
        return list(self._starts[shard])

    def history(self, shard: int) -> tuple[Head, list[GenerationStart]]:
        """Returns head and generations of one shard. Raises Misconfigured when there is no such shard."""
        if shard >= len(self._heads):
            raise Misconfigured(f"shard {shard} does not live here")
        return self._heads[shard], self.generations(shard)

    def _put(self, cell: ShardCell, now: int) -> Placed:
        stored = self._cells.get((cell.shard, cell.key))
        if stored is not None:
            status = PutStatus.ALREADY_STORED if same_body(cell.body, stored.body) else PutStatus.CONFLICT
        else:
            status = PutStatus.STORED
            head = self._heads[cell.shard]
            stored = StoredCell(
                *(cell.key.row_key, cell.key.column_name, cell.key.ref_key),
                shard=cell.shard,
                generation=head.generation,
                added_id=head.added_id + 1,
                created_at=max(now, head.last_created_at),
                body=cell.body,
                cause=cell.cause,
            )
            self._heads[cell.shard] = Head(cell.shard, head.generation, stored.added_id, stored.created_at)
            self._logs[cell.shard].append(stored)
            self._cells[cell.shard, cell.key] = stored
        return Placed(status, cell.shard, stored.generation, stored.added_id, stored.created_at)

    def _newest_of(self, shard: int, row_key: RowKey, column_name: ColumnName, until: int) -> StoredCell | None:
        found = [cell for cell in self._column(shard, row_key, column_name) if cell.added_id <= until]
        return max(found, key=_ref_key, default=None)

    def _column(self, shard: int, row_key: RowKey, column_name: ColumnName) -> list[StoredCell]:
        return [c for c in self._logs[shard] if (c.row_key, c.column_name) == (row_key, column_name)]


def _page(cells: Sequence[StoredCell], limit: int, bytes_max: int) -> CellPage:
    fitting = size = 0
    for cell in cells[:limit]:
        size += len(cell.body)
        if size > bytes_max and fitting:
            break
        fitting += 1
    return CellPage(list(cells[:fitting]), cells[fitting].ref_key if fitting < len(cells) else None)


def _ref_key(cell: StoredCell) -> int:
    return cell.ref_key
