"""Transitions: what each event of a shard's log changes in which index table (I11).

The cell at position n changes the entry of its row from what the log before n makes of it to what the log up to n
makes of it. That gives an upsert to the shard of the new entry and a tombstone to the shard that it left, both with
version (generation, n). They depend on the log alone: not on who computes them, when, or in which batches. So in
every index table the write with the greatest version is the right one, and any others may come late or again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from schemaless.cell import RefKey, RowKey, StoredCell
from schemaless.codec import Body, decode_body
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import IndexEntry, entry_for, entry_shard
from schemaless.location import Location

Row = Mapping[str, StoredCell]
"""The newest cell of each source column, as of one point of the log."""


class IndexWrite(msgspec.Struct, frozen=True, gc=False):
    """A write to the index table of `shard`. Without an entry it is a tombstone: the row's entry left that shard."""

    shard: int
    row_key: RowKey
    version: Location
    entry: IndexEntry | None


class _RowState:
    """One row while events are folded into it."""

    __slots__ = ("bodies", "definition", "entry", "ref_keys", "shard", "shards")

    def __init__(self, definition: IndexDefinition, shards: int, before: Row) -> None:
        self.definition = definition
        self.shards = shards
        self.ref_keys: dict[str, RefKey] = {column: cell.ref_key for column, cell in before.items()}
        self.bodies: dict[str, Body] = {column: decode_body(cell.body) for column, cell in before.items()}
        self.entry = entry_for(definition, self.bodies)
        self.shard = self._shard_of_entry()

    def take(self, cell: StoredCell) -> Sequence[IndexWrite]:
        """Folds one event in. Returns the writes that it causes, none for a version that is not the newest."""
        if cell.ref_key < self.ref_keys.get(cell.column_name, -1):
            return ()
        self.ref_keys[cell.column_name] = cell.ref_key
        self.bodies[cell.column_name] = decode_body(cell.body)
        old_entry, old_shard = self.entry, self.shard
        self.entry = entry_for(self.definition, self.bodies)
        if self.entry == old_entry:
            return ()
        self.shard = self._shard_of_entry()
        writes = []
        if self.shard is not None:
            writes.append(IndexWrite(self.shard, cell.row_key, cell.location, self.entry))
        if old_shard is not None and old_shard != self.shard:
            writes.append(IndexWrite(old_shard, cell.row_key, cell.location, None))
        return writes

    def _shard_of_entry(self) -> int | None:
        return None if self.entry is None else entry_shard(self.definition, self.entry, self.shards)


def index_writes(
    definition: IndexDefinition, shards: int, before: Mapping[RowKey, Row], cells: Iterable[StoredCell]
) -> list[IndexWrite]:
    """Returns the writes that consecutive cells of one shard cause, only the last for each (shard, row key).

    `before` holds the rows of these cells as the log makes them just before the first. The writes are sorted by shard
    and row key, so that concurrent transactions lock in the same order.
    """
    states: dict[RowKey, _RowState] = {}
    last: dict[tuple[int, RowKey], IndexWrite] = {}
    for cell in cells:
        if cell.column_name in definition.columns:
            state = states.get(cell.row_key)
            if state is None:
                state = states[cell.row_key] = _RowState(definition, shards, before.get(cell.row_key, {}))
            for write in state.take(cell):
                last[write.shard, write.row_key] = write
    return [last[key] for key in sorted(last)]
