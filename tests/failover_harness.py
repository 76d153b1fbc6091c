"""Storage clusters with a controller, puts that never stop, and a checker that knows answers and final states only."""

import asyncio
import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from api.write.put import CellWriter, PutOutcome
from cleaner.service import Cleaner
from controller.service import Controller
from schemaless.cell import Cell, CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.config import ApiSettings, ControllerMode, ControllerSettings
from schemaless.errors import Overloaded, SchemalessError
from schemaless.ops.datastores import create_shards
from schemaless.runtime.events import Event, observing
from schemaless.stack.admin import session
from schemaless.stack.local import RunningTopology, running_topology
from schemaless.stack.plan import admin_document, write_private_json
from schemaless.storage import entity_table, shard_head
from schemaless.storage.appointment_table import OrderKind, OrderState, TopologyOrder
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.storage.sql import sql
from schemaless.topology import Datastore
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.environment import environment_of
from tests.log_harness import LOCAL_WRITE, run_sql
from tests.waiting import async_until, until

SETTINGS = ApiSettings(topology=Path("unused"), kafka="unused")
ROOT = Path(__file__).parents[1]
TIMEOUT_S = 60.0
PUTS_PER_S = 200
TAIL_S = 0.3


THREADS = ThreadPoolExecutor(2)
"""A server ends with the thread that started it, so these stay."""


async def in_thread(call, *arguments):
    return await asyncio.get_running_loop().run_in_executor(THREADS, call, *arguments)


class ControllerDied(BaseException):
    """What a test makes of an event: the controller does nothing after it, as after a kill."""


class Drill:
    """Six servers, and one controller in a thread, which a test may end at any event and start again."""

    def __init__(self, running: RunningTopology, mode: ControllerMode = ControllerMode.AUTOMATIC) -> None:
        self.running = running
        self.mode = mode
        self.remake_command: str | None = None
        self.orders: dict[str, TopologyOrder] = {}
        self.settled: dict[str, tuple[OrderState, str]] = {}
        self.controller: Controller
        self._stop = threading.Event()
        self._acts = threading.Lock()
        self._number = 0
        self._thread: threading.Thread
        self.start_controller()

    def start_controller(self) -> None:
        self._stop = threading.Event()
        self._number += 1
        self.controller = Controller(
            self.running.administrators,
            self.mode,
            services=self.running.topology,
            remake_command=self.remake_command,
            name=f"c{self._number}",
            settle=self._settle,
        )
        self._thread = threading.Thread(target=self._run, args=(self.controller, self._stop), daemon=True)
        self._thread.start()

    def end_controller(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        self.controller.close()

    @asynccontextmanager
    async def dying_at(self, event: Event):
        """The controller dies when the event happens. Returns once it has, and another one runs."""

        def die(*_: object) -> None:
            if threading.current_thread() is self._thread:
                raise ControllerDied

        with observing(die, event):
            yield
            await asyncio.to_thread(self._thread.join, TIMEOUT_S)
            assert not self._thread.is_alive(), f"{event} didn't happen: {self.controller.states}"
        self.controller.close()
        self.start_controller()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def order(self, cluster: str, kind: OrderKind, node: str | None = None, without: tuple[str, ...] = ()) -> None:
        self.settled.pop(cluster, None)
        self.orders[cluster] = TopologyOrder(
            cluster, kind, node, without, "test", OrderState.OPEN, "", uuid.uuid4().hex, time.time_ns() // 1000
        )

    def until(self, condition, what: str) -> None:
        until(condition, lambda: f"{what}: {self.controller.states} {self.controller.known}")

    def master(self, cluster: str) -> str:
        """The one that the present controller knows of, '' before it has looked."""
        known = self.controller.known.get(cluster)
        return known.master if known else ""

    @contextmanager
    def acting_alone(self):
        """The controller does nothing meanwhile."""
        with self._acts:
            yield

    def kill_with_tail(self, cluster: str) -> float:
        """Kills a master that has what no minion received. Returns when that was."""
        old = self.master(cluster)
        with self.acting_alone():  # the controller would let them receive again
            for minion in self.running.administrators.cluster(cluster).nodes:
                if minion.name != old:
                    with session(minion) as connected:
                        connected.query("STOP REPLICA IO_THREAD")
            time.sleep(TAIL_S)
            self.running.servers[old].kill()
            return time.monotonic()

    def healthy(self, *clusters: str) -> None:
        """Returns when these clusters, or both, have been healthy twice in a row."""

        def are() -> bool:
            return all(self.state(cluster) == "healthy" for cluster in clusters or ("a", "b"))

        def twice() -> bool:
            first = are()
            time.sleep(0.7)
            return first and are()

        self.until(twice, "healthy")

    def whole(self) -> set[str]:
        """Returns when all servers run and follow. One whose tail is kept and put again is made anew from a minion, as
        a person would. Returns these.
        """
        remade = set()
        for server in self.running.servers.values():
            if not server.alive():
                server.start()
            server.cont()
        self.healthy()
        for cluster in ("a", "b"):
            for name in self._made_anew(cluster):
                known = self.controller.known[cluster]
                donors = [voter for voter in known.voters if voter not in self._away(cluster)]
                with self.acting_alone():  # a master that is copied is away for a moment, and nobody takes its place
                    self.make_anew(name, (*donors, known.master)[0])
                remade.add(name)
        self.until(lambda: not any(map(self._away, ("a", "b"))), "all follow")
        return remade

    def _away(self, cluster: str) -> set[str]:
        """The servers that follow nobody, or don't vote. A voter with a tail leaves when another one stays."""
        known, away = self.controller.known[cluster], set()
        for node in self.running.administrators.cluster(cluster).nodes:
            if node.name == known.master:
                continue
            with session(node) as connected:
                replication = connected.replication()
            if node.name not in known.voters or replication is None:
                away.add(node.name)
        return away

    def _made_anew(self, cluster: str) -> set[str]:
        """The servers whose tail is kept and put again."""

        def are_told() -> bool:
            why = self.controller.states[cluster].why
            return all(f"what only {name} had is kept and put again" in why for name in self._away(cluster))

        until(are_told, lambda: f"{self._away(cluster)}: {self.controller.states}")
        return self._away(cluster)

    def make_anew(self, name: str, donor: str) -> None:
        server, copied = self.running.descriptions[name], self.running.descriptions[donor]
        self.running.servers[name].kill()
        self.running.servers[donor].terminate()
        shutil.rmtree(server.data)
        shutil.copytree(copied.data, server.data)
        (server.data / "auto.cnf").unlink(missing_ok=True)
        self.running.servers[donor].start()
        self.running.servers[name].start()

    def state(self, cluster: str) -> str:
        return self.controller.states[cluster].state if cluster in self.controller.states else "unknown"

    def another_master(self, cluster: str, old: str) -> None:
        self.until(lambda: self.master(cluster) not in ("", old), f"another master than {old}")
        self.healthy()

    def switch(self, cluster: str) -> None:
        """Orders it, and again when it was refused: a minion may be late, and then nothing has changed."""
        old = self.master(cluster)
        self.order(cluster, OrderKind.SWITCH)

        def is_another() -> bool:
            if cluster in self.settled and self.settled[cluster][0] is not OrderState.DONE:
                self.order(cluster, OrderKind.SWITCH)
            return self.master(cluster) not in ("", old)

        self.until(is_another, f"another master than {old}")
        self.until(lambda: cluster in self.settled, "the order's end")
        self.healthy()

    def _settle(self, order: TopologyOrder, state: OrderState, told: str) -> None:
        if state is OrderState.OPEN:  # it goes on, also under the next controller
            self.orders[order.cluster] = order
            return
        self.orders.pop(order.cluster, None)
        self.settled[order.cluster] = state, told

    def _run(self, controller: Controller, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                with self._acts:
                    controller.step(dict(self.orders))
                stop.wait(0.1)
        except ControllerDied:
            return


@contextmanager
def drill(folder: Path, minions: int = 2, mode: ControllerMode = ControllerMode.AUTOMATIC):
    with controlled_servers(folder, minions) as running, drilling(running, mode) as drilled:
        yield drilled


def controlled_servers(folder: Path, minions: int = 2):
    return running_topology(folder, minions=minions, flavour=FLAVOUR, options=SMALL_REDO_LOGS, controlled=True)


@contextmanager
def drilling(running: RunningTopology, mode: ControllerMode = ControllerMode.AUTOMATIC):
    drilled = Drill(running, mode)
    try:
        drilled.healthy()
        yield drilled
    finally:
        drilled.end_controller()


def start_controller_process(
    running: RunningTopology, kafka: str, mode: ControllerMode, **others: object
) -> subprocess.Popen[bytes]:
    """Starts a controller as a service, with other settings. The caller ends it."""
    path = running.path.with_name("admin.json")
    write_private_json(path, admin_document(msgspec.json.decode(running.path.read_bytes()), running.accounts))
    named = {"topology": running.path, "kafka": kafka, "admin_topology": path, "mode": mode, "log_level": "warning"}
    named |= others
    env = os.environ | environment_of(ControllerSettings, named)
    return subprocess.Popen([sys.executable, "-m", "controller"], cwd=ROOT, env=env)


async def until_ready(storage: AsyncStorage) -> None:
    """Returns when each master was opened and is known as durable, and its minions vote."""

    def is_ready(cluster: str) -> bool:
        opened = storage.epoch(cluster) and not storage.master(cluster).settings.faults
        return bool(opened and len(storage.minions(cluster)) == len(storage.others(cluster)))

    await async_until(lambda: all(map(is_ready, storage.topology.clusters)))


def make_datastore(running: RunningTopology) -> Datastore:
    with SyncStorage(running.topology) as storage:
        name = f"t{uuid.uuid4().hex[:12]}"
        return create_shards(storage, Datastore(name, 8, 2, ("a", "b")), administrators=running.administrators)


def leave_out(node: SyncNode, datastore: Datastore, shard: int = 0) -> None:
    """Takes the newest cell of a shard out of a minion alone, as a filter or a wrong server id does. Its heads stay."""
    database = datastore.database(shard)
    newest = f"SELECT head FROM schemaless.shard_head WHERE datastore = '{datastore.name}' AND shard = {shard}"
    entity, kept = f"{database}.entity", f"{database}.kept"
    run_sql(node, f"{LOCAL_WRITE}; CREATE TABLE {kept} AS SELECT * FROM {entity} WHERE added_id = ({newest})")
    run_sql(node, f"{LOCAL_WRITE}; DELETE FROM {entity} WHERE added_id = ({newest})")


def give_back(node: SyncNode, datastore: Datastore, shard: int = 0) -> None:
    database = datastore.database(shard)
    run_sql(node, f"{LOCAL_WRITE}; INSERT INTO {database}.entity SELECT * FROM {database}.kept")


class Puts:
    """A client that puts at a rate, whatever happens, through a process of the API's write tier."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, chance: random.Random) -> None:
        self.storage = storage
        self.datastore = datastore
        self.told: list[tuple[Cell, PutOutcome | SchemalessError]] = []
        self.acknowledged_at: list[float] = []
        self._writer = CellWriter(storage, SETTINGS)
        self._chance = chance
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def failed(self) -> list[SchemalessError]:
        return [outcome for _, outcome in self.told if isinstance(outcome, SchemalessError)]

    @property
    def longest_gap_s(self) -> float:
        times = sorted(self.acknowledged_at)
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    @asynccontextmanager
    async def running(self):
        going = asyncio.create_task(self._keep_putting())
        try:
            yield
        finally:
            going.cancel()
            await asyncio.gather(*self._tasks)

    async def _keep_putting(self) -> None:
        while True:
            task = asyncio.create_task(self._put())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(1 / PUTS_PER_S)

    async def _put(self) -> None:
        row = uuid.UUID(int=self._chance.randrange(200)) if self._chance.random() < 0.1 else uuid.uuid4()
        body = encode_body({"n": self._chance.randrange(2)})
        cell = Cell(CellKey(RowKey(row.bytes), ColumnName("BASE"), RefKey(1)), body)
        (outcome,) = await self._writer.put(self.datastore, [cell])
        while isinstance(outcome, Overloaded):  # this process was too late to see an answer, so the client tries again
            (outcome,) = await self._writer.put(self.datastore, [cell])
        self.told.append((cell, outcome))
        if isinstance(outcome, PutOutcome):
            self.acknowledged_at.append(time.monotonic())


@asynccontextmanager
async def cleaning(storage: AsyncStorage):
    stop = asyncio.Event()
    running = asyncio.create_task(Cleaner(storage).run(stop))
    try:
        yield
    finally:
        stop.set()
        await running


async def check(puts: Puts) -> Counter:
    """All that was acknowledged is at home with its body, or in a conflict. No place ever had two cells."""
    storage, datastore = puts.storage, puts.datastore
    async with cleaning(storage):
        await _buffers_are_empty(storage, datastore)
    found: dict[CellKey, bytes] = {}
    places: dict[tuple[int, int, int], CellKey] = {}
    for cluster in datastore.placement:
        node = storage.master(cluster)
        for head in await node.run(shard_head.heads, datastore.name):
            cells = await node.run(entity_table.read_after, datastore, head.shard, 0, 10**6)
            assert [cell.added_id for cell in cells] == list(range(1, head.added_id + 1)), f"a hole in {head.shard}"
            found.update({cell.key: cell.body for cell in cells})
            places.update({(head.shard, cell.generation, cell.added_id): cell.key for cell in cells})
    recorded = await _conflicts(storage, datastore)
    for cell, outcome in puts.told:
        if isinstance(outcome, SchemalessError) or outcome.status is PutStatus.CONFLICT:
            continue
        stands = found.get(cell.key) == cell.body
        assert stands or (cell.key.row_key, cell.body) in recorded, f"{cell.key} is lost, answered {outcome}"
        if (placed := outcome.placed) is not None:
            place = placed.shard, placed.generation, placed.added_id
            assert places.setdefault(place, cell.key) == cell.key, f"{place} was two cells"
    return Counter(outcome.status for _, outcome in puts.told if isinstance(outcome, PutOutcome))


async def _buffers_are_empty(storage: AsyncStorage, datastore: Datastore) -> None:
    select = sql("SELECT COUNT(*) FROM schemaless.buffer WHERE datastore = %s", datastore.name.encode())

    async def are_empty() -> bool:
        return not any([(await storage.master(name).run(query, select))[0][0] for name in ("a", "b")])

    await async_until(are_empty)


async def _conflicts(storage: AsyncStorage, datastore: Datastore) -> set[tuple[bytes, bytes]]:
    select = sql("SELECT row_key, buffered_body FROM schemaless.conflict WHERE datastore = %s", datastore.name.encode())
    return {(key, body) for name in ("a", "b") for key, body in await storage.master(name).run(query, select)}
