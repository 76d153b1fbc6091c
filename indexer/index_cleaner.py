"""The index cleaner compares the indexes of a process with their cells, for ever and slowly, and repairs them (I11).

In the same pass it deletes old tombstones.

The row keys are divided into ranges. It takes the range that was compared longest ago, of those with the numbers of the
shards that the group assigned to this process. So several processes share the work, and each goes on where it was after
a restart. A row in MySQL says what became of each range.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import structlog

from indexer.tombstones import Tombstones
from schemaless.cell import row_key_text
from schemaless.errors import SchemalessError
from schemaless.index.check import RowRate
from schemaless.index.comparison import EntryFault, FaultCounts
from schemaless.index.definition import IndexDefinition
from schemaless.index.inspection import IndexInspector, InspectedSpan
from schemaless.index.repair import Repaired
from schemaless.index.sweep import bounds_of, ranges_of, sweep_span
from schemaless.index.versions import VersionKey
from schemaless.runtime.batching import all_or_first_error
from schemaless.storage import index_pass_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.topology import Datastore

log = structlog.get_logger()

PASS_PERIOD_S = 60.0
"""A range isn't compared again sooner. So an index that is small costs little. Tombstones are at least so old."""

ROWS_A_SHARD = 5
"""For the rate, a span counts at least so many rows for each shard: two statements there cost as much."""

BUSY_FACTOR = 10
"""How much slower it is while the indexes take cells. A span of it costs as much as some calls do."""

_LOOK_PAUSE_S = 1.0
_AGAIN_AFTER_S = 10.0
_LOGGED_MAX = 10


class IndexCleaner:
    """Belongs to one datastore of one process. `owned` returns its shards. `rows_per_s` bounds what it compares: rows
    with their entries.

    While `is_busy` returns true, the bound is a tenth of that.
    """

    def __init__(  # noqa: PLR0913  # four of them are named, and have defaults
        self,
        storage: AsyncStorage,
        datastore: Datastore,
        owned: Callable[[], Sequence[int]],
        rows_per_s: float,
        *,
        is_busy: Callable[[], bool] = lambda: False,
        pass_period_s: float = PASS_PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._storage = storage
        self._datastore = datastore
        self._owned = owned
        self._rate = RowRate(rows_per_s)
        self._is_busy = is_busy
        self._pass_period_s = pass_period_s
        self._clock = clock
        self._sleep = sleep
        self._tombstones = Tombstones(storage, datastore, age_s=pass_period_s, clock=clock)
        self._inspectors: dict[VersionKey, IndexInspector] = {}
        self._due: dict[VersionKey, dict[int, float]] = {}

    @property
    def compared_nodes(self) -> Sequence[str]:
        """The names under which it notes what it compared."""
        return [index_pass_table.MASTERS]

    def watch(self, definitions: Iterable[IndexDefinition]) -> None:
        """Compares these indexes from now on, and no others. All of them are complete."""
        watched = {(definition.name, definition.number): definition for definition in definitions}
        self._inspectors = {
            key: self._inspectors.get(key) or IndexInspector(self._storage, self._datastore, definition)
            for key, definition in watched.items()
        }
        self._due = {key: due for key, due in self._due.items() if key in watched}
        self._tombstones.keep(watched)

    async def run(self) -> None:
        while True:
            wait_s = await self.step()
            await asyncio.sleep(wait_s)

    async def step(self) -> float:
        """Compares the range that is due first, if it is time. Returns after how many seconds to look again."""
        try:
            await self._look()
        except SchemalessError as error:
            log.warning("the index cleaner waits", datastore=self._datastore.name, why=str(error))
            return _AGAIN_AFTER_S
        owned = set(self._owned())
        due = [(at, key, number) for key, known in self._due.items() for number, at in known.items() if number in owned]
        if not due:
            return _LOOK_PAUSE_S
        at, key, number = min(due)
        if (wait_s := at - self._clock()) > 0:
            return min(wait_s, _LOOK_PAUSE_S)
        inspector = self._inspectors[key]
        try:
            await self._compare(inspector, number)
        except SchemalessError as error:  # a server is away, or the index is being dropped
            log.warning(
                "a range of an index isn't compared",
                datastore=self._datastore.name,
                index=inspector.definition.name,
                range=number,
                why=str(error),
            )
            self._put_off(key, number, _AGAIN_AFTER_S)
        else:
            self._put_off(key, number, self._pass_period_s)
        return 0.0

    async def _look(self) -> None:
        """Reads when the ranges were compared of which this process doesn't know it."""
        owned = set(self._owned()) & set(range(ranges_of(self._datastore)))
        for key, inspector in self._inspectors.items():
            known = self._due.get(key, {})
            if owned <= known.keys():
                continue
            version = self._version(inspector.definition)
            answers = await all_or_first_error(
                self._storage.master(cluster).run(index_pass_table.ages, version, self.compared_nodes)
                for cluster in self._datastore.clusters
            )
            ages = {number: age_s for answer in answers for number, age_s in answer.items()}
            now = self._clock()
            never = now - 1e9  # a range that was never compared comes first
            self._due[key] = {
                number: now + self._pass_period_s - ages[number] if number in ages else never for number in owned
            }

    async def _compare(self, inspector: IndexInspector, number: int) -> None:
        definition = inspector.definition
        masters = [self._storage.master(cluster) for cluster in self._datastore.clusters]
        counts = FaultCounts()
        async for page in sweep_span(inspector, masters, *bounds_of(self._datastore, number)):
            faults = [fault for found in page.faults.values() for fault in found]
            self._tell(definition, faults, counts.faults)
            self._tell_unreadable(definition, page)
            counts.take(page.rows, sum(page.entries.values()), len({*page.unsettled, *page.unreadable}), faults)
            if faults:
                repaired = await inspector.repair(faults)
                counts.repaired += repaired.written
                self._tell_withheld(definition, repaired)
            await self._wait(page)
        for shard in range(number, self._datastore.shards, ranges_of(self._datastore)):
            async for cost in self._tombstones.delete(definition, shard):
                await self._sleep(self._rate.wait_s(max(cost, ROWS_A_SHARD)))
        home = self._storage.master(self._datastore.home(number))
        await home.run(index_pass_table.note, self._version(definition), number, counts)
        self._sum_up(definition, number, counts)

    async def _wait(self, page: InspectedSpan, times: int = 1) -> None:
        """Waits as long as the rate says after a span that was compared, or was so many times."""
        compared = times * max(page.rows, sum(page.entries.values()), ROWS_A_SHARD * self._datastore.shards)
        await self._sleep(self._rate.wait_s(compared * BUSY_FACTOR if self._is_busy() else compared))

    def _sum_up(self, definition: IndexDefinition, number: int, counts: FaultCounts, **where: str) -> None:
        if counts.faults:
            log.warning(
                "an index differed from its cells",
                datastore=self._datastore.name,
                index=definition.name,
                range=number,
                missing=counts.missing,
                stale=counts.stale,
                ghost=counts.ghost,
                repaired=counts.repaired,
                **where,
            )

    def _tell(self, definition: IndexDefinition, faults: Sequence[EntryFault], told: int, **where: str) -> None:
        """Logs the first faults of a range, of which `told` are known."""
        for fault in faults[: max(0, _LOGGED_MAX - told)]:
            log.warning(
                "an entry of an index differs from its cells",
                **where,
                datastore=self._datastore.name,
                index=definition.name,
                kind=fault.kind.value,
                shard=fault.place.shard,
                row_key=row_key_text(fault.place.row_key),
                element=fault.place.element,
            )

    def _tell_unreadable(self, definition: IndexDefinition, page: InspectedSpan) -> None:
        """Logs the first rows of a span that aren't compared, because a cell of theirs can't be decoded."""
        for row_key, why in list(page.unreadable.items())[:_LOGGED_MAX]:
            log.error(
                "a row isn't compared with its index",
                datastore=self._datastore.name,
                index=definition.name,
                row_key=row_key_text(row_key),
                why=why,
            )

    def _tell_withheld(self, definition: IndexDefinition, repaired: Repaired) -> None:
        """Logs the minions whose replication a repair would stop."""
        for node, entries in repaired.withheld.items():
            log.error(
                "entries aren't repaired: make the minion anew, it has rows that its master lacks or lacks some",
                datastore=self._datastore.name,
                index=definition.name,
                node=node,
                entries=entries,
            )

    def _put_off(self, key: VersionKey, number: int, seconds: float) -> None:
        if key in self._due:
            self._due[key][number] = self._clock() + seconds

    def _version(self, definition: IndexDefinition) -> IndexVersion:
        return IndexVersion(self._datastore.name, definition.name, definition.number)
