"""A tailer process: watches the heads of every cluster and tails every datastore of the catalogue, new ones too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import structlog

from schemaless.config import TailerSettings
from schemaless.datastores import Catalogue
from schemaless.errors import StorageUnavailable
from schemaless.location import Location
from schemaless.storage.async_driver import AsyncStorage
from schemaless.topology import Datastore
from tailer.datastore_tailer import DatastoreTailer
from tailer.head_watch import HeadWatch
from tailer.shared import Shared, pause
from tailer.source import ClusterSource

log = structlog.get_logger()

DISCOVERY_S = 1.0
BUSY_S = 1.0  # so long after news a watch keeps its short pause
AWAY_RETRY_S = 0.5
OPENINGS_MAX = 32  # at once: each one mostly waits for the broker


class TailerService:
    def __init__(self, settings: TailerSettings, storage: AsyncStorage) -> None:
        clusters = storage.topology.clusters
        sources = {name: ClusterSource(storage, name) for name in clusters}
        self._settings = settings
        self._catalogue = Catalogue(storage)
        self._watches = [HeadWatch(source, self._heads_moved) for source in sources.values()]
        self._datastores: dict[str, DatastoreTailer] = {}
        self._stopping = asyncio.Event()
        self._shared = Shared(
            settings=settings,
            sources=sources,
            heads=self._heads,
            slots=asyncio.Semaphore(settings.batches_max),
            publishing=ThreadPoolExecutor(settings.batches_max, thread_name_prefix="publish"),
            opening=ThreadPoolExecutor(OPENINGS_MAX, thread_name_prefix="open"),
        )

    def stop(self) -> None:
        """Lets `run` return once the transactions in hand are finished."""
        self._stopping.set()
        for tailer in self._datastores.values():
            tailer.stop()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for watch in self._watches:
                tasks.create_task(self._watch(watch))
            await self._discover(tasks)

    async def _discover(self, tasks: asyncio.TaskGroup) -> None:
        while not self._stopping.is_set():
            try:
                found = self._wanted(await self._catalogue.all())
            except StorageUnavailable as error:
                log.warning("no catalogue of datastores", why=str(error))
                found = {}
            if self._stopping.is_set():  # meanwhile: who begins now would never be stopped
                return
            for name in found.keys() - self._datastores.keys():
                tailer = self._datastores[name] = DatastoreTailer(found[name], self._shared)
                tasks.create_task(tailer.run())
            await pause(DISCOVERY_S, self._stopping)

    def _wanted(self, found: Mapping[str, Datastore]) -> Mapping[str, Datastore]:
        named = self._settings.datastores
        return {name: datastore for name, datastore in found.items() if not named or name in named}

    async def _watch(self, watch: HeadWatch) -> None:
        settings = self._settings
        news_at = 0.0
        away = False
        while not self._stopping.is_set():
            try:
                if await watch.step():
                    news_at = time.monotonic()
                away = False
            except StorageUnavailable as error:
                if not away:
                    log.warning("heads can't be read", why=str(error))
                away = True
                await pause(AWAY_RETRY_S, self._stopping)
            busy = time.monotonic() - news_at < BUSY_S
            await asyncio.sleep(settings.poll_s if busy else settings.idle_poll_s)

    def _heads_moved(self, name: str, heads: dict[int, Location]) -> None:
        if name in self._datastores:
            self._datastores[name].heads_moved(heads)

    def _heads(self, name: str) -> dict[int, Location]:
        return {shard: head for watch in self._watches for shard, head in watch.heads.get(name, {}).items()}
