"""TailerService: a tailer process. It watches the heads of every cluster and tails every datastore of the catalogue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import structlog

from schemaless.config import TailerSettings
from schemaless.consume.worker import Worker
from schemaless.errors import SchemalessError
from schemaless.location import Location
from schemaless.names import TAILER
from schemaless.ops.datastores import Catalogue
from schemaless.ops.ownership import challenge, fetch_challenges, prove_ours
from schemaless.ops.tailers import fetch_commands, latest
from schemaless.runtime.lifecycle import pause
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.tailer_order_table import NO_COMMAND, TailerCommand
from schemaless.topology import Datastore, Placement
from tailer.cluster_reader import ClusterHeads, ClusterReader
from tailer.datastore_tailer import DatastoreTailer
from tailer.metrics import TailerMetrics
from tailer.partition_tail import TailerContext, TailerSlots

log = structlog.get_logger()

POLL_S = 0.005  # how often each cluster is asked which heads moved, while one moved lately
IDLE_POLL_S = 0.05  # while nothing moves
LAG_MAX_S = 5.0  # a minion that lags more is read only while nothing better answers
TRANSACTIONS_MAX = 4  # in flight, however many partitions. Three times as many more may wait for hanging servers
COMMANDS_S = 1.0
CHALLENGE_S = 10.0  # how old a copy of the databases is told from its original by what tailers answered last
CATALOGUE_S = 2.5  # asked of every server: dearer than reading commands
BUSY_S = 1.0  # so long after news a watch keeps its short pause
UNREACHABLE_RETRY_S = 0.5
CHECK_S = 0.5  # how soon a node that is back is used again
OPENINGS_MAX = 8  # at once: each one mostly waits for the broker, with clients of its own meanwhile
CLOSINGS_MAX = 4  # at once: closing a log waits for nobody


class TailerService:
    def __init__(self, settings: TailerSettings, storage: AsyncStorage, metrics: TailerMetrics | None = None) -> None:
        self._settings = settings
        self._storage = storage
        self._readers: dict[str, ClusterReader] = {}
        self._commands: dict[str, TailerCommand] = {}
        self._catalogue = Catalogue(storage)
        self._watches: list[ClusterHeads] = []
        self._datastores: dict[str, DatastoreTailer] = {}
        self._moves: dict[str, dict[int, Placement]] = {}
        self._readable = set[str]()
        self._challenged_at = time.monotonic()
        self._stopping = asyncio.Event()
        self._context = TailerContext(
            settings=settings,
            readers=self._readers,
            heads=self._heads,
            prove=partial(prove_ours, storage, settings.kafka),
            paused=self.is_paused,
            slots=TailerSlots(TRANSACTIONS_MAX),
            publishing=ThreadPoolExecutor(TailerSlots.threads_max(TRANSACTIONS_MAX), thread_name_prefix="publish"),
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
            answering = tasks.create_task(self._keep_answering())
            await self._discover(tasks)
            answering.cancel()

    async def _discover(self, tasks: asyncio.TaskGroup) -> None:
        looked_at = -CATALOGUE_S
        while not self._stopping.is_set():
            self._meet(tasks)
            found: Mapping[str, Datastore] = {}
            try:
                self._obey(await fetch_commands(self._storage))
                if time.monotonic() - looked_at >= CATALOGUE_S:
                    named = self._settings.datastores
                    known = await self._catalogue.all()
                    found = {name: known[name] for name in known if not named or name in named}
                    found = {name: one for name, one in found.items() if self._reads(one)}
                    looked_at = time.monotonic()
            except SchemalessError as error:
                log.warning("no catalogue of datastores", why=str(error))
            if self._stopping.is_set():  # meanwhile: a tailer that begins now would never be stopped
                return
            for name in found.keys() - self._datastores.keys():
                tailer = self._datastores[name] = DatastoreTailer(found[name], self._context)
                tasks.create_task(self._tail(tailer))
            await pause(self._stopping, COMMANDS_S)

    async def _keep_answering(self) -> None:
        while True:
            with suppress(SchemalessError):  # of a server that is away, of which the others tell
                await self._answer()
            await asyncio.sleep(COMMANDS_S)

    async def _answer(self) -> None:
        """Finds what the groups of the datastores have to answer (I20), and asks something new itself now and then."""
        if time.monotonic() - self._challenged_at >= CHALLENGE_S:
            self._challenged_at = time.monotonic()
            for name, tailer in list(self._datastores.items()):
                await challenge(self._storage, name, tailer.answered)
        asked = await fetch_challenges(self._storage)
        for name, tailer in self._datastores.items():
            tailer.challenges = asked.get(name, ())

    def _reads(self, datastore: Datastore) -> bool:
        """Returns whether all clusters of a datastore are read: the file of this machine may lack one."""
        if lacking := set(datastore.clusters) - self._readers.keys():
            log.warning("a datastore isn't tailed yet", datastore=datastore.name, lacks=sorted(lacking))
        return not lacking

    def _meet(self, tasks: asyncio.TaskGroup) -> None:
        """Begins to read the clusters that are new."""
        for name in self.clusters - self._readers.keys():
            if not self._storage.is_joining(name):
                reader = ClusterReader(self._storage, name, tail_from=self._settings.read_from, lag_max_s=LAG_MAX_S)
                watch = ClusterHeads(reader, partial(self._heads_moved, name))
                self._readers[name] = reader
                self._watches.append(watch)
                tasks.create_task(self._check(reader))
                tasks.create_task(self._watch(watch))

    async def _tail(self, tailer: DatastoreTailer) -> None:
        """Tails a datastore until `stop`, and reports what this process does."""
        worker = Worker(self._storage, tailer.datastore, TAILER)
        async with asyncio.TaskGroup() as tasks:
            reporting = tasks.create_task(worker.run(tailer.report))
            await tailer.run()
            reporting.cancel()
        await worker.leave()

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
        news_at = 0.0
        unreachable = False
        while not self._stopping.is_set():
            try:
                if await watch.step():
                    news_at = time.monotonic()
                self._follow_moves()
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
            period_s = POLL_S if busy else IDLE_POLL_S
            await asyncio.sleep(period_s - time.monotonic() % period_s)  # clusters together: half as many awakenings

    def _heads_moved(self, cluster: str, name: str, heads: Mapping[int, Location]) -> None:
        if (tailer := self._datastores.get(name)) is not None:
            tailer.heads_moved({n: head for n, head in heads.items() if tailer.datastore.home(n) == cluster})

    def _follow_moves(self) -> None:
        """Passes the heads of shards that moved on: their new homes were seen before it was known that they are."""
        for name, tailer in self._datastores.items():
            known, moves = self._moves.get(name), tailer.datastore.moves
            if known != moves:
                self._moves[name] = dict(moves)
                tailer.heads_moved(self._heads(name))

    def _heads(self, name: str) -> dict[int, Location]:
        """Returns the heads at the shards' homes. A former home keeps its own, which stands still."""
        home = self._datastores[name].datastore.home
        return {
            shard: head
            for watch in self._watches
            for shard, head in watch.heads(name).items()
            if home(shard) == watch.cluster
        }
