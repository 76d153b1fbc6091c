"""Transitions: what each event of a shard's log changes in which shard's index table (I11).

The cell at position n changes the entry of its row from what the log before n makes of it to what the log up to n
makes of it. That gives an upsert to the shard of the new entry and a tombstone to the shard that it left, both with
version (generation, n). They depend on the log alone: not on who computes them, when, or in which batches. So in
every index table the write with the greatest version is the right one, and any others may come late or again.

A row with an array has an entry for each element. Each is known by its number, and has its own upserts and tombstones.
An element that is the same before and after is not written, so what others hold of it has no newer version.

What of a row doesn't fit the fields' types is a function of the log, too. It is written where it changes, with the same
version, and its home is the source shard.

A generation that starts at s rewrites the log from s on (I13). What was written by the cells that it superseded is
evaluated again, on the log up to s - 1, with version (generation, s - 1). That beats every superseded version, and
loses to every later event.

A cell whose body was erased is absent at every position (I19). What it had written is still there until the entry of
the erasure comes. At that position the row is written as it is left, in every table that has something of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from operator import attrgetter

import msgspec

from schemaless.cell import RefKey, RowKey, StoredCell, row_key_text
from schemaless.codec import decode_body
from schemaless.errors import Corrupt
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import IndexEntry, Misfit, Values, entries_of, entry_shard, misfits_of, with_column
from schemaless.location import GenerationStart, Location

Row = Mapping[str, StoredCell]
"""The newest cell of each source column, as of one point of the log."""


class IndexWrite(msgspec.Struct, frozen=True, gc=False):
    """A write to the index table of `shard`. Without an entry it is a tombstone: the entry left that shard."""

    shard: int
    row_key: RowKey
    version: Location
    entry: IndexEntry | None
    element: int = 0


class ProblemWrite(msgspec.Struct, frozen=True, gc=False):
    """What doesn't fit in a row of the source shard `shard`. Without misfits the row has become clean."""

    shard: int
    row_key: RowKey
    version: Location
    misfits: tuple[Misfit, ...]


class Transitions(msgspec.Struct, frozen=True):
    """What the first `finished` of some cells change: the last write for each entry of a shard, in their order.

    And the last one for each row whose problems changed, by row key.
    """

    writes: list[IndexWrite]
    finished: int
    problems: Sequence[ProblemWrite] = ()


class _RowState:
    """One row while events are folded into it. It keeps field values: a body may be much larger."""

    __slots__ = ("_misfits", "_shards", "definition", "entries", "ref_keys", "values")

    def __init__(self, definition: IndexDefinition, shards: int, before: Row) -> None:
        self.definition = definition
        self._shards = shards
        self.ref_keys: dict[str, RefKey] = {}
        self.values: Values = [None] * len(definition.fields)
        self._misfits: dict[str, tuple[Misfit, ...]] = {}
        for cell in before.values():
            self._put(cell)
        self.entries = entries_of(definition, self.values)

    def take(self, cell: StoredCell) -> tuple[Sequence[IndexWrite], ProblemWrite | None]:
        """Folds one event in. Returns the writes that it causes, none for a version that is not the newest."""
        if cell.ref_key < self.ref_keys.get(cell.column_name, -1):
            return (), None
        unfit = self._misfits.get(cell.column_name, ())
        self._put(cell)
        problem = None
        if self._misfits.get(cell.column_name, ()) != unfit:
            problem = ProblemWrite(cell.shard, cell.row_key, cell.location, self.misfits)
        before, self.entries = self.entries, entries_of(self.definition, self.values)
        if self.entries == before:
            return (), problem
        writes: list[IndexWrite] = []
        for element, (old, new) in enumerate(zip_longest(before, self.entries)):
            if new != old:
                writes += self._writes(cell, element, old, new)
        return writes, problem

    @property
    def misfits(self) -> tuple[Misfit, ...]:
        """What of the row doesn't fit, by column."""
        if not self._misfits:
            return ()
        return tuple(chain.from_iterable(self._misfits[column] for column in sorted(self._misfits)))

    def entry_in(self, shard: int, element: int) -> IndexEntry | None:
        """Returns the entry of an element if it is in that shard."""
        entry = self.entries[element] if element < len(self.entries) else None
        return entry if self._shard_of(entry) == shard else None

    def _writes(
        self, cell: StoredCell, element: int, old: IndexEntry | None, new: IndexEntry | None
    ) -> Iterator[IndexWrite]:
        left, entered = self._shard_of(old), self._shard_of(new)
        if entered is not None:
            yield IndexWrite(entered, cell.row_key, cell.location, new, element)
        if left is not None and left != entered:
            yield IndexWrite(left, cell.row_key, cell.location, None, element)

    def _put(self, cell: StoredCell) -> None:
        try:
            body = decode_body(cell.body)
        except Corrupt as error:
            where = f"{row_key_text(cell.row_key)}, column {cell.column_name}, ref_key {cell.ref_key}"
            raise Corrupt(f"cell of row {where}: {error}") from error
        self.ref_keys[cell.column_name] = cell.ref_key
        self.values = with_column(self.definition, self.values, cell.column_name, body)
        misfits = misfits_of(self.definition, cell.column_name, self.values, body)
        if misfits or self._misfits:  # most rows never have any
            self._misfits[cell.column_name] = misfits

    def _shard_of(self, entry: IndexEntry | None) -> int | None:
        return None if entry is None else entry_shard(self.definition, entry, self._shards)


def index_writes(
    definition: IndexDefinition,
    shards: int,
    before: Mapping[RowKey, Row],
    cells: Iterable[StoredCell],
    take: Callable[[Sequence[IndexWrite], ProblemWrite | None], bool] = lambda writes, problem: True,
) -> Transitions:
    """Returns what consecutive cells of one shard change.

    `before` holds the rows of these cells as the log makes them just before the first. `take` is asked before each
    cell's writes are taken, and ends the work at the first for which it returns False. The writes are sorted by shard,
    row key and element, so that concurrent transactions lock in the same order.
    """
    states: dict[RowKey, _RowState] = {}
    last: dict[tuple[int, RowKey, int], IndexWrite] = {}
    problems: dict[RowKey, ProblemWrite] = {}
    finished = 0
    for cell in cells:
        if cell.column_name in definition.columns and not cell.is_erased:
            state = states.get(cell.row_key)
            if state is None:
                state = states[cell.row_key] = _RowState(definition, shards, before.get(cell.row_key, {}))
            writes, problem = state.take(cell)
            if not take(writes, problem):
                break
            for write in writes:
                last[write.shard, write.row_key, write.element] = write
            if problem is not None:
                problems[cell.row_key] = problem
        finished += 1
    return Transitions([last[key] for key in sorted(last)], finished, [problems[key] for key in sorted(problems)])


def erasing_writes(
    definition: IndexDefinition, shards: int, entry: StoredCell, row: Row, found: Iterable[tuple[int, RowKey, int]]
) -> tuple[list[IndexWrite], ProblemWrite]:
    """Returns what the entry of an erasure leaves of its row: what the cells that are left make, and no more.

    `row` is as the log makes it up to the entry. `found`: (index shard, row key, element) of what index tables have.
    """
    state = _RowState(definition, shards, row)
    left = {
        (entry_shard(definition, made, shards), entry.row_key, element): made
        for element, made in enumerate(state.entries)
        if made is not None
    }
    writes = [
        IndexWrite(place[0], entry.row_key, entry.location, left.get(place), place[2])
        for place in sorted({*left, *found})
    ]
    return writes, ProblemWrite(entry.shard, entry.row_key, entry.location, state.misfits)


def superseding_writes(
    definition: IndexDefinition,
    shards: int,
    start: GenerationStart,
    before: Mapping[RowKey, Row],
    superseded: Iterable[tuple[int, RowKey, int]],
) -> list[IndexWrite]:
    """Returns what a new generation makes of (index shard, row key, element)s that superseded cells had written (I13).

    `before` holds their rows as the log makes them just before the generation starts.
    """
    version = Location(start.generation, start.starts_at - 1)
    states: dict[RowKey, _RowState] = {}
    writes = []
    for shard, row_key, element in superseded:
        state = states.get(row_key)
        if state is None:
            state = states[row_key] = _RowState(definition, shards, before.get(row_key, {}))
        writes.append(IndexWrite(shard, row_key, version, state.entry_in(shard, element), element))
    return writes


def superseding_problems(
    definition: IndexDefinition,
    shards: int,
    start: GenerationStart,
    shard: int,
    before: Mapping[RowKey, Row],
    superseded: Iterable[RowKey],
) -> list[ProblemWrite]:
    """Returns what a new generation of a source shard makes of rows whose problems superseded cells had written.

    `before` is as for `superseding_writes`.
    """
    version = Location(start.generation, start.starts_at - 1)
    return [
        ProblemWrite(shard, row_key, version, _RowState(definition, shards, before.get(row_key, {})).misfits)
        for row_key in superseded
    ]


def walked_writes(
    definition: IndexDefinition, shards: int, shard: int, row: Row
) -> tuple[list[IndexWrite], ProblemWrite | None]:
    """Returns what a row of a source shard is in an index that has nothing of it yet. It has at least one cell.

    The version is that of the last event that made the row what it is: the newest cell that was added last. Every
    event after it beats it, and where it is superseded it is found by it.
    """
    state = _RowState(definition, shards, row)
    last = max(row.values(), key=attrgetter("added_id"))
    writes = [
        IndexWrite(entry_shard(definition, entry, shards), last.row_key, last.location, entry, element)
        for element, entry in enumerate(state.entries)
        if entry is not None
    ]
    misfits = state.misfits
    return writes, ProblemWrite(shard, last.row_key, last.location, misfits) if misfits else None
