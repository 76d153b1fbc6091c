"""The indexer process: one Faust app for each datastore, which feeds every index of it.

Datastores and indexes that are made while it runs are found by looking at the catalogue. A new index starts with its
checkpoints at the beginning: its deliveries read the log in MySQL until they meet the topic (I9). That is the build.
"""

from __future__ import annotations

import asyncio

import structlog

from indexer.builder import build_step
from indexer.maintainer import Maintainer
from schemaless.bus.transport import transport_of
from schemaless.config import IndexerSettings
from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints
from schemaless.consume.host import Consumer, ConsumerHost
from schemaless.consume.worker import Worker
from schemaless.errors import SchemalessError
from schemaless.index.catalogue import IndexWatch
from schemaless.names import INDEXER, index_consumer, indexer_group
from schemaless.ops.datastores import Catalogue
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import Datastore

log = structlog.get_logger()

_LOOK_PAUSE_S = 0.5


class IndexerService:
    """Runs a DatastoreIndexer for every datastore of the catalogue, or for those that the settings name."""

    def __init__(self, settings: IndexerSettings, storage: AsyncStorage) -> None:
        self._settings = settings
        self._storage = storage
        self._catalogue = Catalogue(storage)

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
                        tasks.create_task(DatastoreIndexer(self._settings, self._storage, datastore).run())
                await asyncio.sleep(_LOOK_PAUSE_S)


class DatastoreIndexer:
    """Keeps all indexes of one datastore current, in one host of consumers."""

    def __init__(self, settings: IndexerSettings, storage: AsyncStorage, datastore: Datastore) -> None:
        self._storage = storage
        self._datastore = datastore
        self._indexes = IndexWatch(storage, datastore)
        self._host = ConsumerHost(storage, datastore, settings)
        self._transport = transport_of(settings, indexer_group(datastore.name), datastore.topic, self._host)
        self._host.join(self._transport)
        self._worker = Worker(storage, datastore, INDEXER)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._transport.run())
                tasks.create_task(self._host.run())
                tasks.create_task(self._worker.run(self._host.report))
                tasks.create_task(self._follow_definitions())
        finally:
            await self._worker.leave()

    async def step(self) -> None:
        """Takes every defined index one stage further. One that has its tables becomes a consumer."""
        for name, index in (await self._indexes.look()).items():
            await build_step(self._storage, self._datastore, index)
            consumer = index_consumer(name)
            if index.has_tables and consumer not in self._host.consumers:
                maintainer = Maintainer(self._storage, self._datastore, index.definition)
                placement = CheckpointPlacement.EVERYWHERE
                checkpoints = Checkpoints(self._host.lanes, consumer, placement)
                await self._host.add(Consumer(maintainer, checkpoints))

    async def _follow_definitions(self) -> None:
        while True:
            try:
                await self.step()
            except SchemalessError as error:
                log.warning("indexes wait", datastore=self._datastore.name, why=str(error))
            await asyncio.sleep(_LOOK_PAUSE_S)
