"""TailerService: a tailer process. It watches the heads of every cluster and tails every datastore of the catalogue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Set
from concurrent.futures import ThreadPoolExecutor

import structlog

from schemaless.config import TailerSettings
from schemaless.errors import SchemalessError
from schemaless.location import Location
from schemaless.ops.datastores import Catalogue
from schemaless.ops.tailer_control import fetch_commands, latest
from schemaless.runtime.lifecycle import pause
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.tailer_order_table import NO_COMMAND, TailerCommand
from schemaless.topology import Datastore
from tailer.cluster_reader import ClusterReader
from tailer.datastore_tailer import DatastoreTailer
from tailer.head_watch import ClusterHeads
from tailer.metrics import TailerMetrics
from tailer.partition_tail import TailerContext
from tailer.slots import TailerSlots

log = structlog.get_logger()

COMMANDS_S = 1.0
CATALOGUE_S = 2.5  # asked of every server: dearer than reading commands
BUSY_S = 1.0  # so long after news a watch keeps its short pause
UNREACHABLE_RETRY_S = 0.5
CHECK_S = 0.5  # how soon a node that is back is used again
OPENINGS_MAX = 8  # at once: each one mostly waits for the broker, with clients of its own meanwhile
CLOSINGS_MAX = 4  # at once: closing a log waits for nobody


class TailerService:
    def __init__(self, settings: TailerSettings, storage: AsyncStorage, metrics: TailerMetrics | None = None) -> None:
        clusters = storage.topology.clusters
        readers = {
            name: ClusterReader(storage, name, tail_from=settings.read_from, lag_max_s=settings.lag_max_s)
            for name in clusters
        }
        self._settings = settings
        self._storage = storage
        self._readers = list(readers.values())
        self._commands: dict[str, TailerCommand] = {}
        self._catalogue = Catalogue(storage)
        self._watches = [ClusterHeads(reader, self._heads_moved) for reader in readers.values()]
        self._datastores: dict[str, DatastoreTailer] = {}
        self._readable = set[str]()
        self._stopping = asyncio.Event()
        self._context = TailerContext(
            settings=settings,
            readers=readers,
            heads=self._heads,
            paused=self.is_paused,
            slots=TailerSlots(settings.transactions_max),
            publishing=ThreadPoolExecutor(
                TailerSlots.threads_max(settings.transactions_max), thread_name_prefix="publish"
            ),
            metrics=metrics or TailerMetrics(),
            openings=TailerSlots(OPENINGS_MAX),
            opening=ThreadPoolExecutor(TailerSlots.threads_max(OPENINGS_MAX), thread_name_prefix="open"),
            closing=ThreadPoolExecutor(CLOSINGS_MAX, thread_name_prefix="close"),
        )

    @property
    def datastores(self) -> Collection[DatastoreTailer]:
        return self._datastores.values()

    @property
    def clusters(self) -> Set[str]:
        return self._storage.topology.clusters.keys()

    @property
    def unreadable_clusters(self) -> Set[str]:
        """The clusters whose heads couldn't be read at the last poll."""
        return self.clusters - self._readable

    def is_paused(self, datastore: str) -> bool:
        return self._commands.get(datastore, NO_COMMAND).paused

    def stop(self) -> None:
        """Lets `run` return after the transactions in flight."""
        self._stopping.set()
        for tailer in self._datastores.values():
            tailer.stop()

    async def run(self) -> None:
        """Runs until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            for reader in self._readers:
                tasks.create_task(self._check(reader))
            for watch in self._watches:
                tasks.create_task(self._watch(watch))
            await self._discover(tasks)

    async def _discover(self, tasks: asyncio.TaskGroup) -> None:
        looked_at = -CATALOGUE_S
        while not self._stopping.is_set():
            found: Mapping[str, Datastore] = {}
            try:
                self._obey(await fetch_commands(self._storage))
                if time.monotonic() - looked_at >= CATALOGUE_S:
                    named = self._settings.datastores
                    known = await self._catalogue.all()
                    found = {name: known[name] for name in known if not named or name in named}
                    looked_at = time.monotonic()
            except SchemalessError as error:
                log.warning("no catalogue of datastores", why=str(error))
            if self._stopping.is_set():  # meanwhile: a tailer that begins now would never be stopped
                return
            for name in found.keys() - self._datastores.keys():
                tailer = self._datastores[name] = DatastoreTailer(found[name], self._context)
                tasks.create_task(tailer.run())
            await pause(self._stopping, COMMANDS_S)

    def _obey(self, said: Mapping[str, TailerCommand]) -> None:
        """Obeys commands between two transactions. A minion that lags may answer alone, so earlier ones count, too."""
        before, self._commands = self._commands, latest([self._commands, said])
        for name, tailer in self._datastores.items():
            known, command = before.get(name, NO_COMMAND), self._commands.get(name, NO_COMMAND)
            if command.paused != known.paused:
                log.warning("datastore is paused" if command.paused else "datastore is tailed again", datastore=name)
                tailer.look_again()
            if command.seeks != known.seeks:
                tailer.progress_moved()

    async def _check(self, reader: ClusterReader) -> None:
        while not self._stopping.is_set():
            await reader.check()
            await pause(self._stopping, CHECK_S)

    async def _watch(self, watch: ClusterHeads) -> None:
        settings = self._settings
        news_at = 0.0
        unreachable = False
        while not self._stopping.is_set():
            try:
                if await watch.step():
                    news_at = time.monotonic()
                if unreachable:
                    log.info("heads can be read again", cluster=watch.cluster)
                self._readable.add(watch.cluster)
                unreachable = False
            except SchemalessError as error:
                if not unreachable:
                    log.warning("heads can't be read", cluster=watch.cluster, why=str(error))
                unreachable = True
                self._readable.discard(watch.cluster)
                await pause(self._stopping, UNREACHABLE_RETRY_S)
            busy = time.monotonic() - news_at < BUSY_S
            period_s = settings.poll_s if busy else settings.idle_poll_s
            await asyncio.sleep(period_s - time.monotonic() % period_s)  # clusters together: half as many awakenings

    def _heads_moved(self, name: str, heads: dict[int, Location]) -> None:
        if name in self._datastores:
            self._datastores[name].heads_moved(heads)

    def _heads(self, name: str) -> dict[int, Location]:
        return {shard: head for watch in self._watches for shard, head in watch.heads(name).items()}
