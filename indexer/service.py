"""The indexer process: one Faust app for each datastore, which feeds every index of it.

Datastores and indexes that are made while it runs are found by looking at the catalogue. A new index starts with its
checkpoints at the beginning: its deliveries read the log in MySQL until they meet the topic (I9). That is the build.
"""

from __future__ import annotations

import asyncio

import structlog

from indexer.builder import build_step
from indexer.maintainer import Maintainer
from schemaless.bus.faust_transport import FaustTransport
from schemaless.config import IndexerSettings
from schemaless.consume.checkpoints import Checkpoints, Stand
from schemaless.consume.host import Consumer, Subscription
from schemaless.errors import StorageUnavailable
from schemaless.index.catalogue import list_indexes
from schemaless.index.definition import IndexDefinition
from schemaless.names import index_consumer, indexer_group
from schemaless.ops.datastores import Catalogue
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import DefinedIndex
from schemaless.topology import Datastore

log = structlog.get_logger()

_LOOK_PAUSE_S = 0.5


class IndexerService:
    """Every datastore of the catalogue, or those that the settings name."""

    def __init__(self, settings: IndexerSettings, storage: AsyncStorage) -> None:
        self._settings = settings
        self._storage = storage
        self._catalogue = Catalogue(storage)

    async def run(self) -> None:
        """Until cancelled, or until one datastore's part fails: the process then ends and is started again."""
        known: set[str] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for name, datastore in (await self._datastores()).items():
                    if name not in known:
                        known.add(name)
                        tasks.create_task(DatastoreIndexer(self._settings, self._storage, datastore).run())
                await asyncio.sleep(_LOOK_PAUSE_S)

    async def _datastores(self) -> dict[str, Datastore]:
        named = self._settings.datastores
        try:
            found = await self._catalogue.all()
            return {name: datastore for name, datastore in found.items() if not named or name in named}
        except StorageUnavailable as error:
            log.warning("no catalogue of datastores", why=str(error))
            return {}


class DatastoreIndexer:
    """All indexes of one datastore, over one subscription."""

    def __init__(self, settings: IndexerSettings, storage: AsyncStorage, datastore: Datastore) -> None:
        self._storage = storage
        self._datastore = datastore
        self._subscription = Subscription(storage, datastore, settings)
        self._transport = FaustTransport(
            settings.kafka,
            indexer_group(datastore.name),
            datastore.topic,
            self._subscription,
            session_timeout_s=settings.session_timeout_s,
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._transport.run())
            tasks.create_task(self._subscription.run())
            tasks.create_task(self._follow_definitions())

    async def step(self) -> None:
        """Every defined index one stage further; those that have tables are kept current."""
        for name, index in (await list_indexes(self._storage, self._datastore)).items():
            await build_step(self._storage, self._datastore, index)
            if self._has_tables(index) and index_consumer(name) not in self._subscription.consumers:
                await self._subscription.add(self._consumer(index.definition))

    async def _follow_definitions(self) -> None:
        while True:
            try:
                await self.step()
            except StorageUnavailable as error:
                log.warning("indexes wait", datastore=self._datastore.name, why=str(error))
            await asyncio.sleep(_LOOK_PAUSE_S)

    def _has_tables(self, index: DefinedIndex) -> bool:
        return index.build_until is not None

    def _consumer(self, definition: IndexDefinition) -> Consumer:
        name = index_consumer(definition.name)
        return Consumer(
            Maintainer(self._storage, self._datastore, definition),
            Checkpoints(self._storage, self._datastore, name, Stand.EVERYWHERE),
        )
