"""A sweep compares a selection of an index with its cells, page after page, and yields what each page came to.

It looks in both directions: the rows of the selected shards, then the entries of the selected shards. So a sweep of all
shards misses nothing. One of a single shard finds what the cells there lack, and what its own tables have too much.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from schemaless.cell import RowKey
from schemaless.index.comparison import FIRST_ROW, LAST_ROW, EntryFault
from schemaless.index.inspection import IndexInspector
from schemaless.runtime.batching import chunks
from schemaless.sharding import shard_of
from schemaless.storage.asyncmy_driver import AsyncNode
from schemaless.storage.index_table import BEFORE_ALL, EntryKey
from schemaless.topology import Datastore

_ELEMENT_MAX = 2**16 - 1
_SHARDS_AT_ONCE = 256


class SweepSelection(msgspec.Struct, frozen=True):
    """What a sweep compares: the rows of shards, the entries of shards, and both within a range of row keys."""

    of_rows: Sequence[int]
    of_entries: Sequence[int]
    first: RowKey = FIRST_ROW
    last: RowKey = LAST_ROW

    @property
    def steps(self) -> int:
        return len(self.of_rows) + len(self.of_entries)


def everything(datastore: Datastore) -> SweepSelection:
    return SweepSelection(range(datastore.shards), range(datastore.shards))


def one_row(datastore: Datastore, row_key: RowKey) -> SweepSelection:
    """Returns the selection of one row. Its entries may be in any shard."""
    return SweepSelection([shard_of(row_key, datastore.shards)], range(datastore.shards), row_key, row_key)


class SweptPage(msgspec.Struct, frozen=True):
    """A page of a sweep. `faults` is by node. `steps`: how many shards are done with it, in one direction."""

    rows: int
    entries: int
    faults: Mapping[str, Sequence[EntryFault]]
    unsettled: int
    steps: int


async def sweep(
    inspector: IndexInspector, nodes: Sequence[AsyncNode], selection: SweepSelection
) -> AsyncIterator[SweptPage]:
    """Compares the entries that some nodes have, one node of each cluster. Raises StorageUnavailable and NotReady."""
    datastore = inspector.datastore
    before = _before(selection.first)
    for shard in selection.of_rows:
        after: RowKey | None = before
        while after is not None:
            rows = await inspector.rows(nodes, shard, after, selection.last)
            after = rows.last
            yield SweptPage(rows.rows, 0, rows.faults, rows.unsettled, steps=int(after is None))
    by_cluster = {node.node.cluster: node for node in nodes}
    if selection.first == selection.last:
        for cluster, here in datastore.by_home(selection.of_entries, lambda shard: shard).items():
            for some in chunks(here, count_max=_SHARDS_AT_ONCE):
                found = await inspector.entries_of(by_cluster[cluster], some, selection.first)
                faults = {by_cluster[cluster].node.name: found.faults}
                yield SweptPage(0, found.entries, faults, found.unsettled, steps=len(some))
        return
    for shard in selection.of_entries:
        node = by_cluster[datastore.home(shard)]
        beyond: EntryKey | None = BEFORE_ALL if before == FIRST_ROW else (before, _ELEMENT_MAX)
        while beyond is not None:
            entries = await inspector.entries(node, shard, beyond, selection.last)
            beyond = entries.last
            faults = {node.node.name: entries.faults}
            yield SweptPage(0, entries.entries, faults, entries.unsettled, steps=int(beyond is None))


def _before(row_key: RowKey) -> RowKey:
    """Returns the greatest row key below this one, and one without bytes below the first."""
    number = int.from_bytes(row_key, "big")
    return RowKey((number - 1).to_bytes(16, "big")) if number else FIRST_ROW
