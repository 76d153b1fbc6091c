"""The indexer process: one Faust app for each datastore, which feeds every index of it.

Datastores and indexes that are made while it runs are found by looking at the catalogue. A new index is built by row up
to a fixed head of each shard. Then its deliveries read the log in MySQL from there until they meet the topic (I9).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import replace

import structlog

from indexer.build_load import BuildLoad, BusyTurns
from indexer.builder import build_step
from indexer.index_cleaner import IndexCleaner
from indexer.maintainer import Maintainer
from indexer.minion_cleaner import MINIONS_SHARE, MinionCleaner
from indexer.ordered_checks import OrderedChecks
from indexer.refused_writes import RefusedWrites
from indexer.removal import note_gone, remove_from, remove_strays
from indexer.sample_check import DiffersFromCells
from indexer.throttle import Throttle
from indexer.walker import WalkedCheckpoints, Walker
from schemaless.bus.transport import transport_of
from schemaless.config import IndexerSettings
from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints
from schemaless.consume.host import Consumer, ConsumerHost
from schemaless.consume.metrics import ConsumerMetrics
from schemaless.consume.worker import Worker
from schemaless.errors import RefusedForGood, SchemalessError
from schemaless.index.catalogue import IndexWatch, bring_up, fail_index
from schemaless.index.switch import retire_when_due, switch_to
from schemaless.index.versions import NamedIndex, VersionKey, VersionRole
from schemaless.names import INDEXER, index_consumer, indexer_group
from schemaless.ops.datastores import Catalogue
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import DefinedIndex, IndexLimits, IndexStage, IndexState, RunState
from schemaless.topology import Datastore

log = structlog.get_logger()

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
        self._settings = settings
        self._storage = storage
        self._datastore = datastore
        self._watch = IndexWatch(storage, datastore)
        self._host = ConsumerHost(storage, datastore, settings)
        if metrics is not None:
            metrics.watch(datastore, self._host)
        self._transport = transport_of(
            settings, indexer_group(datastore.name), datastore.topic, self._host, settings.read_pause_s
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
                tasks.create_task(self._transport.run())
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
            self._hosted[key] = await HostedIndex.begin(
                self._storage, self._datastore, index, self._host, self._settings, self._turns
            )
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
        for cluster in self._datastore.clusters:
            if cluster not in done and await self._guarded(
                remove_from(self._storage, self._datastore, deleted, cluster), index
            ):
                done.add(cluster)
        if len(done) == len(self._datastore.clusters) and await self._guarded(
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
        settings: IndexerSettings,
        turns: BusyTurns,
    ) -> HostedIndex:
        maintainer = Maintainer(storage, datastore, index.definition, Throttle(index.order.limits.cells_per_s))
        load = BuildLoad(
            storage,
            datastore,
            maintainer.version,
            lag_cells_max=settings.build_lag_cells_max,
            commit_max_s=settings.build_commit_max_s,
            busy_share=settings.build_busy_share,
            turns=turns,
        )
        load.limit_to(index.order.limits)
        walker = Walker(storage, datastore, index.definition, maintainer, load)
        kept = Checkpoints(host.lanes, index.definition.consumer, CheckpointPlacement.EVERYWHERE, start_at=None)
        writes = RefusedWrites(WalkedCheckpoints(kept, walker))
        await host.add(Consumer(maintainer, writes))
        return cls(maintainer, load, writes, walker)
