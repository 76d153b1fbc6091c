"""The index cleaner compares the indexes of a process with their cells, for ever and slowly, and repairs them (I11).

In the same pass it deletes old tombstones.

The row keys are divided into ranges. It takes the range that was compared longest ago, of those with the numbers of the
shards that the group assigned to this process. So several processes share the work, and each goes on where it was after
a restart. A row in MySQL says what became of each range.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec
import structlog

from schemaless.cell import RowKey, row_key_text
from schemaless.errors import NotReady, SchemalessError, StorageUnavailable
from schemaless.index.check import REPLICATED_AFTER_S, RowRate, check_index, selections_of
from schemaless.index.comparison import FIRST_ROW, EntryFault, EntryPlace, FaultCounts
from schemaless.index.definition import IndexDefinition
from schemaless.index.inspection import IndexInspector, InspectedSpan, Repaired, bounds_of, ranges_of, sweep_span
from schemaless.index.versions import VersionKey
from schemaless.location import Location
from schemaless.runtime.batching import all_or_first_error, chunks
from schemaless.sharding import shard_of
from schemaless.storage import checkpoint_table, index_check_table, index_pass_table, index_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.failover import all_masters
from schemaless.storage.index_check_table import CheckPart
from schemaless.storage.index_definition_table import DefinedIndex
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.index_table import BEFORE_ALL, EntryKey
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
            found = await all_masters(
                self._storage, inspector.placed.clusters, index_pass_table.ages, version, self.compared_nodes
            )
            ages = {number: age_s for answer in found.values() for number, age_s in answer.items()}
            now = self._clock()
            never = now - 1e9  # a range that was never compared comes first
            self._due[key] = {
                number: now + self._pass_period_s - ages[number] if number in ages else never for number in owned
            }

    async def _compare(self, inspector: IndexInspector, number: int) -> None:
        definition = inspector.definition
        masters = [self._storage.master(cluster) for cluster in inspector.placed.clusters]
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
        home = self._storage.master(inspector.placed.home(number))
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


# The minion cleaner compares what minions have of the indexes with the cells, for ever and very slowly, and names it.
#
# It writes no entry anywhere. A minion takes writes from its master alone (docs/indexes.md, "A damaged minion"), and
# the masters have a cleaner of their own. One minion of each cluster is compared at a time, so the cells are read once
# for all of them.

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
        home = self._storage.master(inspector.placed.home(number))
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
        masters = [self._storage.master(cluster) for cluster in inspector.placed.clusters]
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


# Tombstones are deleted when they are old and nothing needs them any more (I11).
#
# A tombstone is old when every cluster's checkpoint of its source shard was at or beyond it some time ago. A promotion
# seldom takes back as much. If one does, the shard is evaluated again (schemaless/storage/index_table.py).

_PAGE_ROWS = 1000
_ROWS_FOR_ONE = 16  # so many rows that are only looked at cost as much as one that is compared


class _Reached(msgspec.Struct):
    """What all clusters had reached by source shard, at two times. Belongs to a version."""

    lately: Mapping[int, Location]
    read_at: float
    before: Mapping[int, Location] = {}


@dataclass(eq=False)
class Tombstones:
    """Belongs to one datastore of one process. All clusters were beyond what it deletes for `age_s`."""

    storage: AsyncStorage
    datastore: Datastore
    age_s: float
    clock: Callable[[], float] = time.monotonic
    _reached: dict[VersionKey, _Reached] = field(init=False, default_factory=dict)

    async def delete(self, definition: IndexDefinition, shard: int) -> AsyncIterator[int]:
        """Deletes the old tombstones of one shard of a version, by pages. Yields what each cost, in compared rows.

        Raises StorageUnavailable.
        """
        key = definition.name, definition.number
        known, now = self._reached.get(key), self.clock()
        if known is None or now - known.read_at >= self.age_s:
            of = definition.placed(self.datastore)
            found = await all_masters(
                self.storage, of.clusters, checkpoint_table.locations, of.name, definition.consumer
            )
            answers = list(found.values())
            everywhere = set(answers[0]).intersection(*answers)
            lately = {shard: min(found[shard] for found in answers) for shard in everywhere}
            known = self._reached[key] = _Reached(lately, now, {} if known is None else known.lately)
        reached = known.before
        master = self.storage.master(definition.placed(self.datastore).home(shard))
        version = IndexVersion(self.datastore.name, definition.name, definition.number)
        after: EntryKey | None = BEFORE_ALL if reached else None
        while after is not None:
            page = await master.run(index_table.tombstones, self.datastore, definition, shard, after, _PAGE_ROWS)
            old: dict[int, list[tuple[EntryKey, Location]]] = {}
            for entry, left_by in page.rows:
                source = shard_of(entry[0], self.datastore.shards)
                if source in reached and left_by <= reached[source]:
                    old.setdefault(source, []).append((entry, left_by))
            if old:
                await master.run(index_table.forget, version, self.datastore, definition, shard, old)
            yield max(len(page.rows), 0 if page.last is None else _PAGE_ROWS // _ROWS_FOR_ONE)
            after = page.last

    def keep(self, versions: Mapping[VersionKey, object]) -> None:
        """Forgets what it knows of other versions."""
        self._reached = {key: reached for key, reached in self._reached.items() if key in versions}


# Ordered checks: the indexers carry out the jobs of people that compare an index with its cells, shard by shard.
#
# A job has a part for each shard (schemaless/storage/index_check_table.py). The process that has a shard carries its
# part out. It goes on until it is done, whatever process has the shard then: a part that was begun is done again.

ROWS_PER_S = 5000
"""How many rows and entries a second are compared where an order doesn't say it."""

FAULTS_MAX = 10
"""How many faults of a part are kept. Each has the values of both sides."""


@dataclass(eq=False)
class OrderedChecks:
    """Belongs to one datastore of one process. `owned` returns its shards."""

    storage: AsyncStorage
    datastore: Datastore
    owned: Callable[[], Sequence[int]]
    clock: Callable[[], float] = time.monotonic
    _complete: dict[VersionKey, IndexDefinition] = field(init=False, default_factory=dict)
    _put_off: dict[int, float] = field(init=False, default_factory=dict)

    def watch(self, definitions: Iterable[IndexDefinition]) -> None:
        """Takes the versions that can be checked from now on: all that are complete."""
        self._complete = {(definition.name, definition.number): definition for definition in definitions}

    async def run(self) -> None:
        while True:
            if not await self.step():
                await asyncio.sleep(_LOOK_PAUSE_S)

    async def step(self) -> bool:
        """Carries out one part on each cluster. Returns whether there was one."""
        now = self.clock()
        self._put_off = {job: until for job, until in self._put_off.items() if until > now}
        owned = list(self.owned())  # a part stays where it was ordered
        masters = [self.storage.master(cluster) for cluster in self.datastore.clusters]
        done = [await self._next(master, owned) for master in masters] if owned else []
        return any(done)

    async def _next(self, master: AsyncNode, shards: Sequence[int]) -> bool:
        try:
            part = await master.run(index_check_table.due, self.datastore.name, shards, list(self._put_off))
        except SchemalessError as error:
            log.warning("ordered checks can't be read", cluster=master.node.cluster, why=str(error))
            return False
        if part is None:
            return False
        definition = self._complete.get((part.version.name, part.version.number))
        try:
            if definition is None:
                await self._wait(master, part, "the index isn't complete, or is being dropped")
            else:
                request = part.request
                check = await check_index(
                    self.storage,
                    IndexInspector(self.storage, self.datastore, definition),
                    selections_of(self.datastore, part.shard, request),
                    repair=request.repairs,
                    minions=request.minions,
                    rate=RowRate(ROWS_PER_S if request.rows_per_s is None else request.rows_per_s or None),
                )
                await master.run(index_check_table.done, part, check.result, check.faults[:FAULTS_MAX])
        except SchemalessError as error:  # a server is away
            log.warning("an ordered check waits", index=part.version.name, shard=part.shard, why=str(error))
            try:
                await self._wait(master, part, str(error))
            except SchemalessError:
                return False
        return True

    async def _wait(self, master: AsyncNode, part: CheckPart, why: str) -> None:
        self._put_off[part.job] = self.clock() + _AGAIN_AFTER_S
        await master.run(index_check_table.waits, part, why)


# Comparison of a new version of an index with a bounded sample of rows and entries, before it may answer.

SAMPLE_MAX = 4096
"""About how many rows, and how many entries, are compared in all shards."""

_PAGE_ROWS_MAX = 200
_SHARDS_AT_ONCE = 8


class DiffersFromCells(SchemalessError):
    """A new version of an index isn't what its cells make."""

    retryable = False
    hint = "the present version goes on answering; `schemaless index resume` compares again, a drop gives the change up"


async def compare(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> int:
    """Compares a sample of rows and entries of every shard with the cells, on masters. Returns how many it read.

    Raises DiffersFromCells, StorageUnavailable or NotReady.
    """
    page_rows = max(1, min(_PAGE_ROWS_MAX, SAMPLE_MAX // (2 * datastore.shards)))
    inspector = IndexInspector(storage, datastore, index.definition, page_rows)
    masters = [storage.master(cluster) for cluster in inspector.placed.clusters]
    somewhere = RowKey(os.urandom(16))

    async def sample(shard: int) -> tuple[int, list[EntryFault]]:
        """Compares two pages of a shard in each direction: the first ones, and some others."""
        read, faults = 0, list[EntryFault]()
        for begin in (FIRST_ROW, somewhere):
            rows = await inspector.rows(masters, shard, begin)
            entries = await inspector.entries(storage.master(inspector.placed.home(shard)), shard, (begin, 0))
            read += rows.rows + entries.entries
            faults += [fault for found in rows.faults.values() for fault in found] + list(entries.faults)
        return read, faults

    read, faults = 0, list[EntryFault]()
    for shards in chunks(range(datastore.shards), count_max=_SHARDS_AT_ONCE):
        for count, found in await all_or_first_error(sample(shard) for shard in shards):
            read += count
            faults += found
    if faults:
        raise DiffersFromCells(
            f"version {index.number} was compared with its cells: {len(faults)} of {read} rows and entries differ, such"
            f" as the {faults[0].kind} entry of row {row_key_text(faults[0].place.row_key)}"
        )
    return read
