"""Transitions: what each event of a shard's log changes in which shard's index table (I11).

The cell at position n changes the entry of its row from what the log before n makes of it to what the log up to n
makes of it. That gives an upsert to the shard of the new entry and a tombstone to the shard that it left, both with
version (generation, n). They depend on the log alone: not on who computes them, when, or in which batches. So in
every index table the write with the greatest version is the right one, and any others may come late or again.

A generation that starts at s rewrites the log from s on (I13). What was written by the cells that it superseded is
evaluated again, on the log up to s - 1, with version (generation, s - 1). That beats every superseded version, and
loses to every later event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from schemaless.cell import RefKey, RowKey, StoredCell
from schemaless.codec import decode_body
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import IndexEntry, Values, entry_of, entry_shard, with_column
from schemaless.location import GenerationStart, Location

Row = Mapping[str, StoredCell]
"""The newest cell of each source column, as of one point of the log."""


class IndexWrite(msgspec.Struct, frozen=True, gc=False):
    """A write to the index table of `shard`. Without an entry it is a tombstone: the row's entry left that shard."""

    shard: int
    row_key: RowKey
    version: Location
    entry: IndexEntry | None


class Transitions(msgspec.Struct, frozen=True):
    """What the first `finished` of some cells change: the last write for each (shard, row key), in their order."""

    writes: list[IndexWrite]
    finished: int


class _RowState:
    """One row while events are folded into it. It keeps field values: a body may be much larger."""

    __slots__ = ("definition", "entry", "ref_keys", "shard", "shards", "values")

    def __init__(self, definition: IndexDefinition, shards: int, before: Row) -> None:
        self.definition = definition
        self.shards = shards
        self.ref_keys: dict[str, RefKey] = {}
        self.values: Values = [None] * len(definition.fields)
        for cell in before.values():
            self._put(cell)
        self.entry = entry_of(definition, self.values)
        self.shard = self._shard_of_entry()

    def take(self, cell: StoredCell) -> Sequence[IndexWrite]:
        """Folds one event in. Returns the writes that it causes, none for a version that is not the newest."""
        if cell.ref_key < self.ref_keys.get(cell.column_name, -1):
            return ()
        self._put(cell)
        old_entry, old_shard = self.entry, self.shard
        self.entry = entry_of(self.definition, self.values)
        if self.entry == old_entry:
            return ()
        self.shard = self._shard_of_entry()
        writes = []
        if self.shard is not None:
            writes.append(IndexWrite(self.shard, cell.row_key, cell.location, self.entry))
        if old_shard is not None and old_shard != self.shard:
            writes.append(IndexWrite(old_shard, cell.row_key, cell.location, None))
        return writes

    def _put(self, cell: StoredCell) -> None:
        self.ref_keys[cell.column_name] = cell.ref_key
        self.values = with_column(self.definition, self.values, cell.column_name, decode_body(cell.body))

    def _shard_of_entry(self) -> int | None:
        return None if self.entry is None else entry_shard(self.definition, self.entry, self.shards)


def index_writes(
    definition: IndexDefinition,
    shards: int,
    before: Mapping[RowKey, Row],
    cells: Iterable[StoredCell],
    take: Callable[[Sequence[IndexWrite]], bool] = lambda writes: True,
) -> Transitions:
    """Returns what consecutive cells of one shard change.

    `before` holds the rows of these cells as the log makes them just before the first. `take` is asked before each
    cell's writes are taken, and ends the work at the first for which it returns False. The writes are sorted by shard
    and row key, so that concurrent transactions lock in the same order.
    """
    states: dict[RowKey, _RowState] = {}
    last: dict[tuple[int, RowKey], IndexWrite] = {}
    finished = 0
    for cell in cells:
        if cell.column_name in definition.columns:
            state = states.get(cell.row_key)
            if state is None:
                state = states[cell.row_key] = _RowState(definition, shards, before.get(cell.row_key, {}))
            writes = state.take(cell)
            if not take(writes):
                break
            for write in writes:
                last[write.shard, write.row_key] = write
        finished += 1
    return Transitions([last[key] for key in sorted(last)], finished)


def superseding_writes(
    definition: IndexDefinition,
    shards: int,
    start: GenerationStart,
    before: Mapping[RowKey, Row],
    superseded: Iterable[tuple[int, RowKey]],
) -> list[IndexWrite]:
    """Returns what a new generation makes of (index shard, row key)s that superseded cells had written (I13).

    `before` holds their rows as the log makes them just before the generation starts.
    """
    version = Location(start.generation, start.starts_at - 1)
    states: dict[RowKey, _RowState] = {}
    writes = []
    for shard, row_key in superseded:
        state = states.get(row_key)
        if state is None:
            state = states[row_key] = _RowState(definition, shards, before.get(row_key, {}))
        writes.append(IndexWrite(shard, row_key, version, state.entry if state.shard == shard else None))
    return writes
