"""A check of an index: one sweep over the masters, which may repair, and one over the minions, which only names.

A minion takes writes from its master alone, so what is damaged there is not repaired: the minion is made anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from schemaless.errors import NotReady, StorageUnavailable
from schemaless.index.catalogue import find_index
from schemaless.index.comparison import EntryFault, FaultCounts
from schemaless.index.definition import IndexDefinition
from schemaless.index.inspection import IndexInspector
from schemaless.index.sweep import SweepSelection, SweptPage, sweep
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.index_definition_table import IndexStage
from schemaless.topology import Datastore, Role

FAULTS_MAX = 100
"""How many faults a check keeps, of masters and of minions. It counts all."""


class FoundFault(msgspec.Struct, frozen=True):
    node: str
    fault: EntryFault


class CheckedNodes(msgspec.Struct):
    """What a check found on the nodes of one role. `counts` are of all of them, `faults` the first ones."""

    counts: FaultCounts
    faults: list[FoundFault]

    def add(self, page: SweptPage) -> None:
        found = [fault for faults in page.faults.values() for fault in faults]
        self.counts.take(page.rows, page.entries, page.unsettled, found)
        for node, faults in page.faults.items():
            room = max(0, FAULTS_MAX - len(self.faults))
            self.faults += [FoundFault(node, fault) for fault in faults[:room]]


class IndexCheck(msgspec.Struct):
    """What a check found. `unreached`: minions that weren't asked, and why."""

    masters: CheckedNodes
    minions: CheckedNodes
    unreached: dict[str, str]

    @property
    def clean(self) -> bool:
        return self.masters.counts.faults == self.masters.counts.repaired and not self.minions.counts.faults

    @property
    def faulty_minions(self) -> list[str]:
        return sorted({found.node for found in self.minions.faults})


class RowRate:
    """Bounds how many rows a second are compared. None: no bound."""

    def __init__(self, rows_per_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rows_per_s = rows_per_s
        self._clock = clock
        self._due = clock()

    def wait_s(self, rows: int) -> float:
        """Takes rows that were compared. Returns how long to wait before the next page."""
        if self._rows_per_s is None:
            return 0.0
        now = self._clock()
        self._due = max(self._due, now - 1.0) + rows / self._rows_per_s  # a second that was not used is made up for
        return max(0.0, self._due - now)


async def complete_definition(storage: AsyncStorage, datastore: Datastore, name: str) -> IndexDefinition:
    """Returns the definition of an index that can be checked. Raises NotFound, NotReady or StorageUnavailable."""
    index = await find_index(storage, datastore, name)
    if index.stage is not IndexStage.ACTIVE:
        raise NotReady(f"index {name} of {datastore.name} is {index.state}: only a complete one can be checked")
    return index.definition


async def check_index(
    storage: AsyncStorage,
    inspector: IndexInspector,
    selection: SweepSelection,
    *,
    repair: bool = False,
    minions: bool = True,
    rate: RowRate | None = None,
    on_page: Callable[[Role, SweptPage], None] = lambda role, page: None,
) -> IndexCheck:
    """Checks an index on all masters, and on each minion that answers. Repairs what it finds on masters if it may.

    Raises StorageUnavailable when a master is unreachable, and NotReady where a master has no checkpoint of the index.
    """
    rate = rate or RowRate()
    datastore = inspector.datastore
    check = IndexCheck(CheckedNodes(FaultCounts(), []), CheckedNodes(FaultCounts(), []), {})

    async def over(nodes: Sequence[AsyncNode], role: Role, checked: CheckedNodes) -> None:
        here = {node.node.cluster for node in nodes}
        of_entries = [shard for shard in selection.of_entries if datastore.home(shard) in here]
        part = msgspec.structs.replace(selection, of_entries=of_entries)
        async for page in sweep(inspector, nodes, part):
            checked.add(page)
            if repair and role is Role.MASTER:
                for faults in page.faults.values():
                    checked.counts.repaired += await inspector.repair(faults)
            on_page(role, page)
            await asyncio.sleep(rate.wait_s(page.rows + page.entries))

    await over([storage.master(cluster) for cluster in datastore.clusters], Role.MASTER, check.masters)
    for minion in [minion for cluster in datastore.clusters for minion in storage.minions(cluster) if minions]:
        try:
            await over([minion], Role.MINION, check.minions)
        except (StorageUnavailable, NotReady) as error:
            check.unreached[minion.node.name] = str(error)
    return check
