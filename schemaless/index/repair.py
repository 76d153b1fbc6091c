"""Repair brings the entries of masters to what the cells say, where their minions can follow (I11).

Replication compares rows by their keys. So a write stops it on a minion that has a row which its master lacks, or
lacks one which its master has. Such a place is left as it is until the minion is made anew.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from schemaless.errors import NotReady, StorageUnavailable
from schemaless.index.comparison import EntryFault, EntryPlace, repairs
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import IndexEntry
from schemaless.index.expected import ExpectedEntries
from schemaless.runtime.batching import chunks
from schemaless.sharding import shard_of
from schemaless.storage import checkpoint_table, index_inspection, index_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.checkpoint_table import Checkpoint
from schemaless.topology import Datastore

_PLACES_AT_ONCE = 100
_ATTEMPTS_MAX = 5
_AGAIN_AFTER_S = 0.05


class Repaired(msgspec.Struct):
    """What became of faults. `written` places are as the cells say.

    `withheld` counts by minion the places whose write would have stopped its replication. The others wait for a later
    pass: their checkpoint moved all the time, its generation is superseded, or a cell of their row can't be decoded.
    """

    written: int = 0
    withheld: Counter[str] = msgspec.field(default_factory=Counter)


class EntryRepairs:
    """Belongs to a version of an index."""

    def __init__(
        self, storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition, cells: ExpectedEntries
    ) -> None:
        self._storage = storage
        self._datastore = datastore
        self._definition = definition
        self._cells = cells

    async def repair(self, faults: Iterable[EntryFault]) -> Repaired:
        """Writes what the cells say at the places of faults, on masters.

        Each write is in a transaction in which the checkpoint of the row's shard on that cluster can't move: so the
        cells up to it are what the place must show, whoever else writes. Raises StorageUnavailable and NotReady.
        """
        places: dict[tuple[str, int], list[EntryPlace]] = {}
        for fault in faults:
            source = shard_of(fault.place.row_key, self._datastore.shards)
            places.setdefault((self._datastore.home(fault.place.shard), source), []).append(fault.place)
        repaired = Repaired()
        for (cluster, source), here in places.items():
            for some in chunks(here, count_max=_PLACES_AT_ONCE):
                await self._repair(self._storage.master(cluster), source, some, repaired)
        return repaired

    async def _repair(self, master: AsyncNode, source: int, places: Sequence[EntryPlace], repaired: Repaired) -> None:
        """Repairs places of a cluster whose rows are of one shard. What can't be done now is tried again."""
        left, withheld = places, Counter[str]()
        for attempt in range(_ATTEMPTS_MAX):
            if attempt:
                await asyncio.sleep(_AGAIN_AFTER_S)
            checkpoint = await self._checkpoint(master, source)
            differing, is_behind = await self._differing(master, checkpoint, left)
            if is_behind and attempt < _ATTEMPTS_MAX - 1:
                continue
            withheld = Counter(name for names in differing.values() for name in names)
            free = [place for place in left if place not in differing]
            if await self._write(master, checkpoint, free, repaired):
                left = list(differing)
            if not left:
                return
        repaired.withheld += withheld

    async def _write(
        self, master: AsyncNode, checkpoint: Checkpoint, places: Sequence[EntryPlace], repaired: Repaired
    ) -> bool:
        """Writes places. Returns False, and nothing is written, if the checkpoint moved or is superseded."""
        source = checkpoint.shard
        row_keys = list(dict.fromkeys(place.row_key for place in places))
        expected: dict[EntryPlace, IndexEntry] = {}
        unreadable: set[bytes] = set()
        async for made in self._cells.of_rows({source: row_keys}, {source: checkpoint.location.added_id}):
            expected |= {place: made.entries[place] for place in places if place in made.entries}
            unreadable |= made.unreadable.keys()
        places = [place for place in places if place.row_key not in unreadable]
        if not places:
            return True
        if not await self._cells.are_kept(source, [checkpoint.location]):
            return False
        writes = repairs(places, expected, checkpoint.location)
        script = index_table.overwrites(self._datastore, self._definition, writes)
        if not await master.run(checkpoint_table.write_at, self._datastore.name, checkpoint, script):
            return False
        repaired.written += len(places)
        return True

    async def _checkpoint(self, node: AsyncNode, source: int) -> Checkpoint:
        found = await node.run(checkpoint_table.of_consumer, self._datastore.name, self._definition.consumer, [source])
        if not found:
            raise NotReady(f"{node.node.name}: no checkpoint of shard {source}")
        return found[0]

    async def _differing(
        self, master: AsyncNode, checkpoint: Checkpoint, places: Sequence[EntryPlace]
    ) -> tuple[Mapping[EntryPlace, Sequence[str]], bool]:
        """Returns the places where a minion has a row that its master lacks, or the reverse, with these minions.

        A minion that doesn't answer is believed to become what its master is. One that isn't at the checkpoint can't be
        compared: the second value says that there is one.
        """
        is_behind = False
        names: dict[EntryPlace, list[str]] = {}
        on_master = await master.run(index_inspection.held, self._datastore, self._definition, places)
        for minion in self._storage.minions(master.node.cluster):
            try:
                at = (await self._checkpoint(minion, checkpoint.shard)).location
                held = await minion.run(index_inspection.held, self._datastore, self._definition, places)
                after = (await self._checkpoint(minion, checkpoint.shard)).location
            except (StorageUnavailable, NotReady):
                continue
            if at == after == checkpoint.location:
                for place in on_master ^ held:
                    names.setdefault(place, []).append(minion.node.name)
            else:
                is_behind = True
        return names, is_behind
