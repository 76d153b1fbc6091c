"""The minion cleaner compares what minions have of the indexes with the cells, for ever and very slowly, and names it.

It writes no entry anywhere. A minion takes writes from its master alone (docs/indexes.md, "A damaged minion"), and the
masters have a cleaner of their own. One minion of each cluster is compared at a time, so the cells are read once for
all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import structlog

from indexer.index_cleaner import IndexCleaner
from schemaless.cell import RowKey
from schemaless.errors import NotReady, SchemalessError, StorageUnavailable
from schemaless.index.check import REPLICATED_AFTER_S
from schemaless.index.comparison import EntryFault, EntryPlace, FaultCounts
from schemaless.index.definition import IndexDefinition
from schemaless.index.inspection import IndexInspector
from schemaless.index.sweep import bounds_of, sweep_span
from schemaless.storage import checkpoint_table, index_pass_table
from schemaless.storage.asyncmy_driver import AsyncNode

log = structlog.get_logger()

MINIONS_SHARE = 8
"""How much slower minions are compared than masters. What is wrong there is named, and nobody repairs it."""

_COMPARED_AGAIN = 3  # times as much is read of a span in which something differs


class MinionCleaner(IndexCleaner):
    """An index cleaner for minions. Belongs to one datastore of one process, as the one for masters does."""

    @property
    def compared_nodes(self) -> Sequence[str]:
        return [minion.node.name for minions in self._minions() for minion in minions]

    def _minions(self) -> list[list[AsyncNode]]:
        """Returns the minions so that each list has one of each cluster that still has another one."""
        by_cluster = [self._storage.minions(cluster) for cluster in self._datastore.clusters]
        return [[minion for minion in together if minion is not None] for together in zip_longest(*by_cluster)]

    async def _compare(self, inspector: IndexInspector, number: int) -> None:
        compared = False
        for minions in self._minions():
            answering = [minion for minion in minions if await self._answers(minion, inspector.definition)]
            compared |= await self._tried(inspector, number, answering)
        if not compared:
            raise StorageUnavailable("no minion can be compared")

    async def _tried(self, inspector: IndexInspector, number: int, minions: Sequence[AsyncNode]) -> bool:
        """Compares minions together, and each alone if that fails. Returns whether one could be compared."""
        if not minions:
            return False
        try:
            await self._compare_together(inspector, number, minions)
        except SchemalessError as error:  # one may lack a table
            if len(minions) > 1:
                return any([await self._tried(inspector, number, [minion]) for minion in minions])
            self._warn(minions[0], inspector.definition, error)
            return False
        return True

    async def _answers(self, minion: AsyncNode, definition: IndexDefinition) -> bool:
        """Whether a minion has the checkpoints of an index. One that is made anew lacks them for a while."""
        try:
            found = await minion.run(checkpoint_table.locations, self._datastore.name, definition.consumer)
            if len(found) < self._datastore.shards:
                raise NotReady(f"{minion.node.name} has {len(found)} checkpoints of index {definition.name}")
        except SchemalessError as error:
            self._warn(minion, definition, error)
            return False
        return True

    def _warn(self, minion: AsyncNode, definition: IndexDefinition, error: SchemalessError) -> None:
        log.warning("a minion isn't compared", node=minion.node.name, index=definition.name, why=str(error))

    async def _compare_together(self, inspector: IndexInspector, number: int, minions: Sequence[AsyncNode]) -> None:
        counts = {minion.node.name: FaultCounts() for minion in minions}
        after, end = bounds_of(self._datastore, number)
        async for page in sweep_span(inspector, minions, after, end):
            faults = page.faults
            differs = any(faults.values())
            if differs:
                faults = await self._confirmed(inspector, minions, faults, (after, page.last))
            for name, found in faults.items():
                self._tell(inspector.definition, found, counts[name].faults, node=name)
                counts[name].take(page.rows, page.entries[name], len({*page.unsettled, *page.unreadable}), found)
            await self._wait(page, times=_COMPARED_AGAIN if differs else 1)
            after = page.last
        home = self._storage.master(self._datastore.home(number))
        for name, of_minion in counts.items():
            version = self._version(inspector.definition)
            await home.run(index_pass_table.note, version, number, of_minion, name)
            self._sum_up(inspector.definition, number, of_minion, node=name)

    async def _confirmed(
        self,
        inspector: IndexInspector,
        minions: Sequence[AsyncNode],
        faults: dict[str, list[EntryFault]],
        span: tuple[RowKey, RowKey],
    ) -> dict[str, list[EntryFault]]:
        """Returns the faults that the minions have of their own.

        What masters have as well is left to the cleaner that repairs it there, and counts it.
        """
        masters = [self._storage.master(cluster) for cluster in self._datastore.clusters]
        of_masters: set[EntryPlace] = set()
        async for page in sweep_span(inspector, masters, *span):
            of_masters |= {fault.place for found in page.faults.values() for fault in found}
        await self._sleep(REPLICATED_AFTER_S)
        places = {name: {fault.place for fault in found} - of_masters for name, found in faults.items()}
        confirmed: dict[str, list[EntryFault]] = {name: [] for name in faults}
        async for page in sweep_span(inspector, minions, *span):
            for name, found in page.faults.items():
                confirmed[name] += [fault for fault in found if fault.place in places[name]]
        return confirmed
