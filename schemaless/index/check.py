"""A check of an index: one sweep over the masters, which may repair, and one over the minions, which only names.

A minion takes writes from its master alone, so what is damaged there is not repaired: the minion is made anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from schemaless.cell import RowKey, row_key_text
from schemaless.errors import NotReady, StorageUnavailable
from schemaless.index.catalogue import find_versions, version_of
from schemaless.index.comparison import (
    UNREADABLE_NAMED_MAX,
    CheckRequest,
    CheckResult,
    EntryFault,
    FaultCounts,
    fault_document,
)
from schemaless.index.definition import IndexDefinition
from schemaless.index.inspection import (
    IndexInspector,
    SweepSelection,
    SweptPage,
    one_row,
    range_of,
    sweep,
    whole_ranges,
)
from schemaless.storage import index_pass_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.index_definition_table import IndexStage
from schemaless.storage.shard_head import clock
from schemaless.storage.sql import Time
from schemaless.topology import Datastore, Role

FAULTS_MAX = 100
"""How many faults a check keeps, of masters and of minions. It counts all."""


class CheckedNodes(msgspec.Struct):
    """What a check found on the nodes of one role. `counts` are of all of them, `faults` the first ones, as JSON."""

    counts: FaultCounts
    faults: list[dict[str, Any]]

    def add(self, definition: IndexDefinition, page: SweptPage, unjudged: set[RowKey]) -> None:
        """Adds a page. `unjudged` has rows of the same nodes that weren't judged in other pages, and gets those of it.

        A row that is looked at in both directions, and in several shards, counts as unsettled once.
        """
        found = [fault for faults in page.faults.values() for fault in faults]
        here = {*page.unsettled, *page.unreadable} - unjudged
        self.counts.take(page.rows, page.entries, len(here), found)
        unjudged.update(here)
        for node, faults in page.faults.items():
            room = max(0, FAULTS_MAX - len(self.faults))
            self.faults += [fault_document(definition, node, fault) for fault in faults[:room]]


class IndexCheck(msgspec.Struct):
    """What a check found. Its members are those of a CheckResult."""

    masters: CheckedNodes
    minions: CheckedNodes
    unreached: dict[str, str]
    unreadable: dict[str, str]
    withheld: Counter[str]

    @property
    def result(self) -> CheckResult:
        return CheckResult(
            self.masters.counts, self.minions.counts, self.unreached, self.unreadable, dict(self.withheld)
        )

    @property
    def faults(self) -> list[dict[str, Any]]:
        return self.masters.faults + self.minions.faults


REPLICATED_AFTER_S = 2.0
"""After which time a change of a master is looked for again on its minions."""
_LOOKS_MAX = 10
"""How often a repair is looked for on a minion that is late, before it counts as different."""


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


async def complete_definition(
    storage: AsyncStorage, datastore: Datastore, name: str, number: int | None = None
) -> IndexDefinition:
    """Returns the definition of a version that can be checked, by default of the one that answers.

    Raises NotFound, NotReady or StorageUnavailable.
    """
    named = await find_versions(storage, datastore, name)
    index = named.answering if number is None else version_of(named, number)
    if index.stage is not IndexStage.ACTIVE:
        which = f"index {name}" if number is None else f"version {number} of index {name}"
        raise NotReady(f"{which} of {datastore.name} is {index.state}: only a complete one can be checked")
    return index.definition


def selections_of(datastore: Datastore, shard: int, request: CheckRequest) -> list[SweepSelection]:
    """Returns what a check of one shard compares."""
    if request.row_keys:
        return [one_row(datastore, row_key) for row_key in request.row_keys]
    return [SweepSelection([shard], [shard], request.first, request.last)]


async def check_index(
    storage: AsyncStorage,
    inspector: IndexInspector,
    selections: Sequence[SweepSelection],
    *,
    repair: bool = False,
    minions: bool = True,
    rate: RowRate | None = None,
    on_page: Callable[[Role, SweptPage], None] = lambda role, page: None,
) -> IndexCheck:
    """Checks selections of an index on all masters, and then on each minion that answers.

    With `repair` it repairs what it finds on masters. What differs on a minion is noted on the masters, so that queries
    leave the minion out.

    Raises StorageUnavailable when a master is unreachable, and NotReady where a master has no checkpoint of the index.
    """
    rate = rate or RowRate()
    datastore = inspector.placed
    check = IndexCheck(CheckedNodes(FaultCounts(), []), CheckedNodes(FaultCounts(), []), {}, {}, Counter())

    async def over(nodes: Sequence[AsyncNode], role: Role, checked: CheckedNodes) -> list[RowKey]:
        """Returns the first rows that differ."""
        here, differing = {node.node.cluster for node in nodes}, dict[RowKey, None]()
        unjudged = set[RowKey]()
        for selection in selections:
            of_entries = [shard for shard in selection.of_entries if datastore.home(shard) in here]
            async for page in sweep(inspector, nodes, msgspec.structs.replace(selection, of_entries=of_entries)):
                checked.add(inspector.definition, page, unjudged)
                for row_key, why in page.unreadable.items():
                    if len(check.unreadable) < UNREADABLE_NAMED_MAX:
                        check.unreadable[row_key_text(row_key)] = why
                if repair and role is Role.MASTER:
                    repaired = await inspector.repair(fault for faults in page.faults.values() for fault in faults)
                    checked.counts.repaired += repaired.written
                    check.withheld += repaired.withheld
                found = [fault.place.row_key for faults in page.faults.values() for fault in faults]
                differing.update(dict.fromkeys(found[: FAULTS_MAX - len(differing)]))
                on_page(role, page)
                await asyncio.sleep(rate.wait_s(page.rows + page.entries))
        return list(differing)

    masters = [storage.master(cluster) for cluster in datastore.clusters]
    on_masters = await over(masters, Role.MASTER, check.masters)
    for minion in [minion for cluster in datastore.clusters for minion in storage.minions(cluster) if minions]:
        unsettled = check.minions.counts.unsettled
        try:
            if check.masters.counts.repaired:
                await _own_faults(inspector, masters, minion, on_masters, _LOOKS_MAX)
            since = {cluster: Time(await storage.master(cluster).run(clock)) for cluster in datastore.clusters}
            differing = await over([minion], Role.MINION, check.minions)
            judged_all = check.minions.counts.unsettled == unsettled
            judged = whole_ranges(datastore, selections) if judged_all else []
            await _note(storage, inspector, masters, minion, differing, judged, since)
        except (StorageUnavailable, NotReady) as error:
            check.unreached[minion.node.name] = str(error)
    return check


async def _own_faults(
    inspector: IndexInspector, masters: Sequence[AsyncNode], minion: AsyncNode, row_keys: Sequence[RowKey], looks: int
) -> list[EntryFault]:
    """Returns the faults of some rows that a minion has and no master, looking again while there are any.

    Raises StorageUnavailable and NotReady.
    """
    found: list[EntryFault] = []
    for _ in range(looks):
        await asyncio.sleep(REPLICATED_AFTER_S)
        of_masters = (await inspector.of_rows(masters, row_keys)).faults.values()
        theirs = {fault.place for faults in of_masters for fault in faults}
        of_minion = (await inspector.of_rows([minion], row_keys)).faults[minion.node.name]
        if not (found := [fault for fault in of_minion if fault.place not in theirs]):
            break
    return found


async def _note(
    storage: AsyncStorage,
    inspector: IndexInspector,
    masters: Sequence[AsyncNode],
    minion: AsyncNode,
    row_keys: Sequence[RowKey],
    judged: Sequence[int],
    since: Mapping[str, Time],
) -> None:
    """Notes in which ranges a minion differs, if it still does when it had time to follow its master (C17).

    What the masters have as well is their fault. Without such rows a minion is noted as clean in the ranges that were
    judged: all their rows were, `since` a time by the clock of each master. Raises StorageUnavailable and NotReady.
    """
    if not row_keys:
        for cluster, time_there in since.items() if judged else ():
            await storage.master(cluster).run(
                index_pass_table.note_clean, inspector.version, minion.node.name, judged, time_there
            )
        return
    datastore = inspector.datastore
    by_range: dict[int, FaultCounts] = {}
    for fault in await _own_faults(inspector, masters, minion, row_keys, 1):
        counts = by_range.setdefault(range_of(datastore, fault.place.row_key), FaultCounts())
        counts.take(0, 0, 0, [fault])
    for number, counts in by_range.items():
        home = storage.master(datastore.home(number))
        await home.run(index_pass_table.note_found, inspector.version, number, counts, minion.node.name)
