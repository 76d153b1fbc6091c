"""The indexer process: one Faust app for each datastore, which feeds every index of it.

Datastores and indexes that are made while it runs are found by looking at the catalogue. A new index is built by row up
to a fixed head of each shard. Then its deliveries read the log in MySQL from there until they meet the topic (I9).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection
from dataclasses import replace

import structlog

from indexer.index_cleaner import MINIONS_SHARE, DiffersFromCells, IndexCleaner, MinionCleaner, OrderedChecks, compare
from indexer.maintainer import Maintainer
from indexer.throttle import Throttle
from indexer.walker import BuildLoad, BusyTurns, RefusedWrites, WalkedCheckpoints, Walker
from schemaless.bus.transport import transport_of
from schemaless.config import IndexerSettings
from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints
from schemaless.consume.host import Consumer, ConsumerHost
from schemaless.consume.metrics import ConsumerMetrics
from schemaless.consume.worker import Worker
from schemaless.errors import RefusedForGood, SchemalessError
from schemaless.index.catalogue import IndexWatch, bring_up, build_progress, fail_index, read_versions, run_on_masters
from schemaless.index.definition import IndexDefinition, placed_at
from schemaless.index.switch import retire_when_due, switch_to
from schemaless.index.versions import NamedIndex, VersionKey, VersionRole
from schemaless.names import INDEX_PREFIX, INDEXER, index_consumer, index_table_name, indexer_group
from schemaless.ops.datastores import Catalogue
from schemaless.ops.ownership import take_part
from schemaless.runtime.batching import all_or_first_error, chunks
from schemaless.storage import (
    checkpoint_table,
    consumer_summary,
    index_definition_table,
    index_problem_table,
    index_table,
    shard_head,
)
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.failover import all_masters
from schemaless.storage.index_definition_table import DefinedIndex, IndexLimits, IndexStage, IndexState, RunState
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.topology import Datastore

log = structlog.get_logger()

# Least time between two reads of the topic. A cell that comes alone doesn't wait, nor does a query with `after`.
READ_PAUSE_S = 0.05
_LOOK_PAUSE_S = 0.5


class IndexerService:
    """Runs a DatastoreIndexer for every datastore of the catalogue, or for those that the settings name."""

    def __init__(
        self, settings: IndexerSettings, storage: AsyncStorage, metrics: ConsumerMetrics | None = None
    ) -> None:
        self._metrics = metrics
        self._settings = settings
        self._storage = storage
        self._catalogue = Catalogue(storage)
        self._turns = BusyTurns()

    async def run(self) -> None:
        """Runs until it is cancelled, or until one datastore fails: the process then ends and is started again."""
        named, known = self._settings.datastores, set[str]()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    found = await self._catalogue.all()
                except SchemalessError as error:
                    log.warning("no catalogue of datastores", why=str(error))
                    found = {}
                for name, datastore in found.items():
                    if name not in known and (not named or name in named):
                        known.add(name)
                        indexer = DatastoreIndexer(self._settings, self._storage, datastore, self._turns, self._metrics)
                        tasks.create_task(indexer.run())
                await asyncio.sleep(_LOOK_PAUSE_S)


class DatastoreIndexer:
    """Keeps all indexes of one datastore current, in one host of consumers."""

    def __init__(
        self,
        settings: IndexerSettings,
        storage: AsyncStorage,
        datastore: Datastore,
        turns: BusyTurns,
        metrics: ConsumerMetrics | None = None,
    ) -> None:
        self._turns = turns
        self._storage = storage
        self._datastore = datastore
        self._watch = IndexWatch(storage, datastore)
        self._host = ConsumerHost(storage, datastore, settings)
        if metrics is not None:
            metrics.watch(datastore, self._host)
        self._kafka = settings.kafka
        self._transport = transport_of(
            settings, indexer_group(datastore.name), datastore.topic, self._host, READ_PAUSE_S
        )
        self._host.join(self._transport)
        self._worker = Worker(storage, datastore, INDEXER)
        self._cleaners = [
            cleaner(
                storage,
                datastore,
                lambda: self._host.shards,
                settings.cleaner_rows_per_s / share,
                is_busy=lambda: self._host.is_busy or any(hosted.is_walking for hosted in self._hosted.values()),
            )
            for cleaner, share in ((IndexCleaner, 1), (MinionCleaner, MINIONS_SHARE))
            if settings.cleaner_rows_per_s > 0
        ]
        self._checks = OrderedChecks(storage, datastore, lambda: self._host.shards)
        self._hosted: dict[VersionKey, HostedIndex] = {}
        self._touched: dict[VersionKey, DefinedIndex] = {}  # versions of which this process may have written something
        self._removed_from: dict[VersionKey, set[str]] = {}
        self._may_have_strays = True

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(take_part(self._transport, self._storage, self._kafka, self._datastore))
                tasks.create_task(self._host.run())
                tasks.create_task(self._worker.run(self._host.report))
                tasks.create_task(self._follow_definitions())
                tasks.create_task(self._checks.run())
                for cleaner in self._cleaners:
                    if cleaner.compared_nodes:
                        tasks.create_task(cleaner.run())
        finally:
            await self._worker.leave()

    async def step(self) -> None:
        """Takes every index one stage further. One that waits or fails doesn't hold up the others."""
        versions = await self._watch.look()
        present = {key: index for key, index in versions.merged.items() if index.stage is not IndexStage.GONE}
        late = {key: index for key, index in self._touched.items() if key not in present}
        tended = [self._tend(index) for index in present.values()] + [self._remove(index) for index in late.values()]
        await asyncio.gather(self._guarded(bring_up(self._storage, self._datastore, versions)), *tended)
        complete = {key: index.definition for key, index in present.items() if index.stage is IndexStage.ACTIVE}
        for cleaner in self._cleaners:
            cleaner.watch(definition for key, definition in complete.items() if key in self._hosted)
        self._checks.watch(complete.values())
        for named in versions.indexes().values():
            for index in named.versions:
                if (hosted := self._hosted.get((index.name, index.number))) is not None:
                    hosted.maintainer.is_kept = named.role(index) is VersionRole.KEPT
            if len(named.versions) > 1:
                await self._guarded(self._switch(named), named.answering)
        if self._may_have_strays and not versions.away:
            for consumer in await remove_strays(self._storage, self._datastore):
                log.info("what was left of a dropped index is deleted", consumer=consumer)
            self._may_have_strays = False

    async def _tend(self, index: DefinedIndex) -> None:
        """Does what an index's stage and its run state ask for. An error is logged, and it is tried again."""
        if index.stage is IndexStage.DELETING:
            await self._remove(index)
        elif index.order.run_state is RunState.RUNNING:
            await self._guarded(self._keep(index), index)
        else:
            await self._stop(index)

    async def _switch(self, named: NamedIndex) -> None:
        """Ends versions that were kept long enough. Lets a complete change answer, unless it waits for an order."""
        await retire_when_due(self._storage, self._datastore, named, time.time_ns() // 1000)
        change = named.change
        if change is not None and change.state is IndexState.ACTIVE and not change.switch.by_hand:
            answering = await switch_to(self._storage, self._datastore, named, change)
            log.info("index is switched", datastore=self._datastore.name, index=answering.name, number=answering.number)

    async def _keep(self, index: DefinedIndex) -> None:
        """Makes and builds the index, and hosts it from its tables on."""
        key = (index.name, index.number)
        self._touched[key] = index
        if index.has_tables and key not in self._hosted:  # before a change is compared, which needs its checkpoints
            self._hosted[key] = await HostedIndex.begin(self._storage, self._datastore, index, self._host, self._turns)
        hosted = self._hosted.get(key)
        if hosted is not None:
            hosted.limit_to(index.order.limits)
        try:
            await build_step(self._storage, self._datastore, index)
        except RefusedForGood as error:
            return await self._fail(index, f"its tables can't be made: {error}")
        except DiffersFromCells as error:
            return await self._fail(index, str(error))
        if hosted is not None and (reason := hosted.reason) is not None:
            await self._fail(index, reason)

    async def _fail(self, index: DefinedIndex, reason: str) -> None:
        log.error("index has failed", datastore=self._datastore.name, index=index.name, why=reason)
        await fail_index(self._storage, self._datastore, index, reason)
        await self._stop(index)

    async def _stop(self, index: DefinedIndex) -> None:
        if (hosted := self._hosted.pop((index.name, index.number), None)) is not None:
            await hosted.stop()
            await self._host.remove(index_consumer(index.name, index.number))

    async def _remove(self, index: DefinedIndex) -> None:
        """Removes a version from the clusters that can be reached, after this process has stopped to work on it."""
        key = (index.name, index.number)
        await self._stop(index)
        deleted = replace(index, stage=IndexStage.DELETING)
        done = self._removed_from.setdefault(key, set())
        placed = placed_at(self._datastore, index.homes)
        for cluster in placed.clusters:
            if cluster not in done and await self._guarded(remove_from(self._storage, placed, deleted, cluster), index):
                done.add(cluster)
        if len(done) == len(placed.clusters) and await self._guarded(
            note_gone(self._storage, self._datastore, deleted), index
        ):
            self._touched.pop(key, None)
            del self._removed_from[key]
            self._may_have_strays = True
            log.info("index is deleted", datastore=self._datastore.name, index=index.name, number=index.number)

    async def _guarded(self, work: Awaitable[None], index: DefinedIndex | None = None) -> bool:
        """Returns whether the work succeeded. An error is logged."""
        try:
            await work
        except SchemalessError as error:
            of = {} if index is None else {"index": index.name}
            log.warning("an index waits", datastore=self._datastore.name, **of, why=str(error))
            return False
        return True

    async def _follow_definitions(self) -> None:
        while True:
            await self._guarded(self.step())
            await asyncio.sleep(_LOOK_PAUSE_S)


class HostedIndex:
    """One version of an index while this process works on it."""

    def __init__(self, maintainer: Maintainer, load: BuildLoad, writes: RefusedWrites, walker: Walker) -> None:
        self.maintainer = maintainer
        self._load = load
        self._writes = writes
        self._walker = walker
        self._walking = asyncio.create_task(walker.run(writes))

    @property
    def reason(self) -> str | None:
        """Why the index has failed. Raises what ended its walker."""
        if self._walking.done():
            self._walking.result()
        return self._writes.reason or self._walker.reason

    def limit_to(self, limits: IndexLimits) -> None:
        """Changes what it may take of the servers, from now on."""
        self.maintainer.throttle.limit_to(limits.cells_per_s)
        self._load.limit_to(limits)

    @property
    def is_walking(self) -> bool:
        """Whether it is built by row just now."""
        return self._walker.is_walking

    async def stop(self) -> None:
        """Ends the walks. They continue where they are."""
        self._walking.cancel()
        await asyncio.wait([self._walking])

    @classmethod
    async def begin(
        cls,
        storage: AsyncStorage,
        datastore: Datastore,
        index: DefinedIndex,
        host: ConsumerHost,
        turns: BusyTurns,
    ) -> HostedIndex:
        maintainer = Maintainer(storage, datastore, index.definition, Throttle(index.order.limits.cells_per_s))
        placed = index.definition.placed(datastore)
        load = BuildLoad(
            storage,
            datastore,
            maintainer.version,
            clusters=placed.clusters,
            turns=turns,
        )
        load.limit_to(index.order.limits)
        walker = Walker(storage, datastore, index.definition, maintainer, load)
        kept = Checkpoints(
            host.lanes, index.definition.consumer, CheckpointPlacement.EVERYWHERE, start_at=None, placed=placed
        )
        writes = RefusedWrites(WalkedCheckpoints(kept, walker))
        await host.add(Consumer(maintainer, writes))
        return cls(maintainer, load, writes, walker)


# The builder takes a defined index through its stages: tables on every shard, then building, then active.
#
# Any number of indexer processes may do it at once. Each stage is idempotent, and the first process to begin the build
# fixes how far it must come. What a stage needs is on every master before any row says that the stage has begun.

_TABLES_AT_ONCE = 4  # on one server: its fsyncs overlap, more would only queue


async def build_step(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> None:
    """Takes an index one stage further if it is time. Raises StorageUnavailable.

    A change of an index is compared with the cells before it counts as complete. Raises DiffersFromCells.
    """
    where = {"datastore": datastore.name, "index": index.name, "number": index.number}
    if index.stage is IndexStage.DEFINED:
        cells = await _make_and_begin(storage, datastore, index)
        await _bring_to(storage, datastore, index, IndexStage.BUILDING)
        log.info("index tables are made", **where, cells=cells)
    elif index.stage is IndexStage.BUILDING:
        progress = await build_progress(storage, datastore, index)
        if progress.total is None:
            # A promotion may lose what was made on a master just before. Or the index is built, or dropped, meanwhile.
            known = (await read_versions(storage, datastore)).merged.get((index.name, index.number))
            if known is not None and known.stage is IndexStage.BUILDING:
                log.info("index tables are made again", **where, cells=await _make_and_begin(storage, datastore, index))
        elif progress.done == progress.total and await _has_checkpoints(storage, datastore, index.definition):
            if not index.switch.number:
                log.info(
                    "new version is compared with its cells", **where, rows=await compare(storage, datastore, index)
                )
            await _bring_to(storage, datastore, index, IndexStage.ACTIVE)
            log.info("index is active", **where)


async def _make_and_begin(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> int:
    """Makes the tables, and notes how far the build must come where nobody has. Returns how many cells there are."""
    await make_tables(storage, datastore, index.definition)
    answers = await all_masters(storage, datastore.clusters, shard_head.heads, datastore.name)
    heads = {head.shard: head.added_id for head in datastore.of_home(answers, lambda head: head.shard)}
    arguments = (datastore.name, index.name, index.number, heads)
    await run_on_masters(storage.masters, index_definition_table.begin_build, *arguments)
    return sum(heads.values())


async def _has_checkpoints(storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition) -> bool:
    """Whether each shard has its checkpoint on every master. One without cells counts as done before it has one.

    Queries with `after` wait for it, and comparisons need it.
    """
    answers = await all_masters(
        storage, definition.placed(datastore).clusters, checkpoint_table.locations, datastore.name, definition.consumer
    )
    return all(len(found) == datastore.shards for found in answers.values())


async def _bring_to(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex, stage: IndexStage) -> None:
    further = replace(index, stage=stage)
    await run_on_masters(storage.masters, index_definition_table.bring_to, datastore.name, further)


async def make_tables(storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition) -> None:
    """Makes the index table of every shard that has none. Raises StorageUnavailable."""
    placed = definition.placed(datastore)
    slots = {cluster: asyncio.Semaphore(_TABLES_AT_ONCE) for cluster in placed.clusters}

    async def make(shard: int) -> None:
        home = placed.home(shard)
        async with slots[home]:
            await storage.master(home).run(index_table.create, datastore, shard, definition)

    await all_or_first_error(make(shard) for shard in range(datastore.shards))


# Removal deletes what a version of an index has on each cluster: checkpoints, tables, problems, the rows of its build.
#
# Any number of indexer processes may do it at once, and again after a kill: each step is idempotent. A process that
# worked on the version does it too, once it has stopped. So what it wrote last, perhaps late, goes as well.

_TABLES_PER_STATEMENT = 16


async def remove_from(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex, cluster: str) -> None:
    """Deletes everything of a version on one cluster, but for its row. `datastore` is as its entries lie.

    Raises StorageUnavailable.

    The row there says before that the version goes. Checkpoints go first: a process that still follows the log then
    loses its compare-and-set, and nothing of its transaction stays (I10).
    """
    master = storage.master(cluster)
    await master.run(index_definition_table.bring_to, datastore.name, index)
    consumer, table = index_consumer(index.name, index.number), index_table_name(index.name, index.number)
    await master.run(checkpoint_table.delete_all, datastore.name, consumer)
    shards = [shard for shard in range(datastore.shards) if datastore.home(shard) == cluster]
    for some in chunks(shards, count_max=_TABLES_PER_STATEMENT):
        await master.run(index_table.drop, datastore, some, table)
    await _delete_rows(master, IndexVersion(datastore.name, index.name, index.number))


async def _delete_rows(master: AsyncNode, version: IndexVersion) -> None:
    while await master.run(index_problem_table.delete_some, version):
        pass


async def note_gone(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> None:
    """Records that no cluster has anything of a version. Only its number is left. Raises StorageUnavailable."""
    gone = replace(index, text="", stage=IndexStage.GONE)
    await run_on_masters(storage.masters, index_definition_table.bring_to, datastore.name, gone)


async def remove_strays(storage: AsyncStorage, datastore: Datastore) -> Collection[str]:
    """Deletes what versions that are gone have: a process that was killed late may have left tables, checkpoints and
    rows.

    Returns whose the checkpoints were. Raises StorageUnavailable, also when a master is away: then nobody knows all
    versions.
    """
    found, rows = set[tuple[str, str]](), set[tuple[str, VersionKey]]()
    tables: dict[str, list[tuple[int, str]]] = {}
    for cluster in datastore.clusters:
        master = storage.master(cluster)
        names = await master.run(consumer_summary.names, datastore.name)
        found |= {(cluster, name) for name in names if name.startswith(INDEX_PREFIX)}
        rows |= {(cluster, key) for key in await master.run(index_problem_table.versions, datastore.name)}
        tables[cluster] = await master.run(index_table.places, datastore)
    versions = await read_versions(storage, datastore)  # after the names: a version is noted before anything is made
    if versions.away:
        return ()
    keys = {key for key, index in versions.merged.items() if index.stage is not IndexStage.GONE}
    for cluster, (index, number) in sorted(rows):
        if (index, number) not in keys:
            await _delete_rows(storage.master(cluster), IndexVersion(datastore.name, index, number))
    needed = {index_table_name(*key) for key in keys}
    for cluster, places in tables.items():
        master = storage.master(cluster)
        for dropped in sorted({name for _, name in places} - needed):
            shards = [shard for shard, name in places if name == dropped]
            log.info("tables of a dropped index are deleted", node=master.node.name, table=dropped, shards=len(shards))
            for some in chunks(shards, count_max=_TABLES_PER_STATEMENT):
                await master.run(index_table.drop, datastore, some, dropped)
    present = {index_consumer(*key) for key in keys}
    strays = [(cluster, name) for cluster, name in sorted(found) if name not in present]
    for cluster, name in strays:
        await storage.master(cluster).run(checkpoint_table.delete_all, datastore.name, name)
    return sorted({name for _, name in strays})
