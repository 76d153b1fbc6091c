"""A sweep compares a selection of an index with its cells, page after page, and yields what each page came to.

It looks in both directions: the rows of the selected shards, then the entries of the selected shards. So a sweep of all
shards misses nothing. One of a single shard finds what the cells there lack, and what its own tables have too much.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from schemaless.cell import RowKey
from schemaless.index.comparison import FIRST_ROW, LAST_ROW, EntryFault, row_before
from schemaless.index.inspection import IndexInspector, InspectedSpan
from schemaless.sharding import shard_of
from schemaless.storage.asyncmy_driver import AsyncNode
from schemaless.storage.index_table import BEFORE_ALL, EntryKey
from schemaless.topology import Datastore

_ELEMENT_MAX = 2**16 - 1
_RANGES_MAX = 64


class SweepSelection(msgspec.Struct, frozen=True):
    """What a sweep compares: the rows of shards, the entries of shards, and both within a range of row keys.

    With `row_key` it is this row alone, with its entries in all shards.
    """

    of_rows: Sequence[int]
    of_entries: Sequence[int]
    first: RowKey = FIRST_ROW
    last: RowKey = LAST_ROW
    row_key: RowKey | None = None

    @property
    def steps(self) -> int:
        return len(self.of_rows) + len(self.of_entries)


def everything(datastore: Datastore) -> SweepSelection:
    return SweepSelection(range(datastore.shards), range(datastore.shards))


def one_row(datastore: Datastore, row_key: RowKey) -> SweepSelection:
    """Returns the selection of one row. Its entries may be in any shard."""
    return SweepSelection([shard_of(row_key, datastore.shards)], range(datastore.shards), row_key=row_key)


class SweptPage(msgspec.Struct, frozen=True):
    """A page of a sweep. `faults` is by node. `steps`: how many shards are done with it, in one direction.

    `unreadable` are rows that weren't judged, because a cell of theirs can't be decoded, and why.
    """

    rows: int
    entries: int
    faults: Mapping[str, Sequence[EntryFault]]
    unsettled: Sequence[RowKey]
    unreadable: Mapping[RowKey, str]
    steps: int


async def sweep(
    inspector: IndexInspector, nodes: Sequence[AsyncNode], selection: SweepSelection
) -> AsyncIterator[SweptPage]:
    """Compares the entries that some nodes have, one node of each cluster. Raises StorageUnavailable and NotReady."""
    datastore = inspector.datastore
    if selection.row_key is not None:
        row = await inspector.of_rows(nodes, [selection.row_key])
        entries_read = sum(row.entries.values())
        yield SweptPage(row.rows, entries_read, row.faults, row.unsettled, row.unreadable, steps=selection.steps)
        return
    before = row_before(selection.first)
    for shard in selection.of_rows:
        after: RowKey | None = before
        while after is not None:
            rows = await inspector.rows(nodes, shard, after, selection.last)
            after = rows.last
            yield SweptPage(rows.rows, 0, rows.faults, rows.unsettled, rows.unreadable, steps=int(after is None))
    by_cluster = {node.node.cluster: node for node in nodes}
    for shard in selection.of_entries:
        node = by_cluster[datastore.home(shard)]
        beyond: EntryKey | None = BEFORE_ALL if before == FIRST_ROW else (before, _ELEMENT_MAX)
        while beyond is not None:
            entries = await inspector.entries(node, shard, beyond, selection.last)
            beyond = entries.last
            faults, steps = {node.node.name: entries.faults}, int(beyond is None)
            yield SweptPage(0, entries.entries, faults, entries.unsettled, entries.unreadable, steps=steps)


def ranges_of(datastore: Datastore) -> int:
    """Returns how many ranges of row keys the index cleaner has. They are equally wide."""
    return min(_RANGES_MAX, datastore.shards)


def range_of(datastore: Datastore, row_key: RowKey) -> int:
    """Returns the number of the range that has a row key."""
    return _number(row_key) * ranges_of(datastore) >> 128


def bounds_of(datastore: Datastore, number: int) -> tuple[RowKey, RowKey]:
    """Returns the row key before the first one of a range, and its last one."""
    ranges = ranges_of(datastore)
    last = LAST_ROW if number == ranges - 1 else row_before(_row_key((number + 1 << 128) // ranges))
    return row_before(_row_key((number << 128) // ranges)), last


def whole_ranges(datastore: Datastore, selections: Sequence[SweepSelection]) -> list[int]:
    """Returns the numbers of the ranges of which one of these selections is all rows and all entries."""
    every = set(range(datastore.shards))
    spans = [
        (row_before(selection.first), selection.last)
        for selection in selections
        if selection.row_key is None and set(selection.of_rows) == set(selection.of_entries) == every
    ]
    bounds = [bounds_of(datastore, number) for number in range(ranges_of(datastore))]
    return [
        number
        for number, (after, last) in enumerate(bounds)
        if any(begin <= after and last <= end for begin, end in spans)
    ]


async def sweep_span(
    inspector: IndexInspector, nodes: Sequence[AsyncNode], after: RowKey, last: RowKey
) -> AsyncIterator[InspectedSpan]:
    """Compares the rows above `after`, up to `last`, span after span. Raises StorageUnavailable and NotReady.

    A span is as wide as the one before was in the end, so few reads are cut off. It becomes wider where rows are few.
    """
    wide = _number(last) - _number(after)
    while after < last:
        end = _row_key(min(_number(last), _number(after) + wide))
        page = await inspector.span(nodes, after, end)
        wide = max(1, _number(page.last) - _number(after)) * (1 if page.rows > inspector.page_rows // 2 else 2)
        after = page.last
        yield page


def _number(row_key: RowKey) -> int:
    return int.from_bytes(row_key, "big")


def _row_key(number: int) -> RowKey:
    return RowKey(number.to_bytes(16, "big"))
