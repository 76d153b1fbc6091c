"""Troubles that others reported of their failover managers: relay logs that aren't applied, a switch behind a backup's
lock, and a supervisor that revives a dead master a little too early.
"""

import asyncio
import os
import time
from contextlib import ExitStack, contextmanager

import pytest

from controller.server import Server
from schemaless.errors import SchemalessError
from schemaless.stack.admin import session
from schemaless.stack.programs import Flavour
from schemaless.storage.appointment_table import OrderKind, OrderState
from schemaless.storage.asyncmy_driver import AsyncStorage
from tests.conftest import FLAVOUR
from tests.failover_harness import Puts, check, cleaning, drill, in_thread, make_datastore
from tests.waiting import async_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
REVIVALS = 25 if LONG else 5
REVIVED_AFTER_S = 0.7
SAMPLED_S = 0.05


@pytest.fixture(scope="module")
def drilled(tmp_path_factory):
    with drill(tmp_path_factory.mktemp("troubles")) as running:
        yield running


@pytest.fixture(autouse=True)
def whole(drilled):
    """Every test leaves servers that run and follow."""
    for cluster in ("a", "b"):
        drilled.order(cluster, OrderKind.ACKNOWLEDGE)
    yield
    drilled.whole()


@pytest.fixture
async def puts(drilled, chance):
    datastore = await asyncio.to_thread(make_datastore, drilled.running)
    async with AsyncStorage(drilled.running.topology) as storage:
        yield Puts(storage, datastore, chance)


def nodes_of(drilled, cluster):
    return {node.name: node for node in drilled.running.administrators.cluster(cluster).nodes}


async def test_what_minions_received_and_did_not_apply_is_not_lost(drilled, puts):
    """Both appliers were stopped, as by a full disk or by hand. The new master has all that any minion had received."""
    old, nodes = drilled.master("a"), nodes_of(drilled, "a")
    minions = [name for name in nodes if name != old]
    async with puts.running(), cleaning(puts.storage):
        await asyncio.sleep(0.5)
        await in_thread(drilled.end_controller)  # it would start them again
        for name in minions:
            with session(nodes[name]) as connected:
                connected.query("STOP REPLICA SQL_THREAD")
        await asyncio.sleep(3)
        drilled.running.servers[old].kill()
        received = []
        for name in minions:
            with Server(nodes[name]) as server:
                received.append(server.look().received)
        await in_thread(drilled.start_controller)
        await in_thread(drilled.another_master, "a", old)
        with Server(nodes[drilled.master("a")]) as server:
            assert [server.lacks(server.look().executed, position) for position in received] == ["", ""]
        await asyncio.sleep(0.5)
    assert puts.failed == []
    assert await check(puts)


async def test_a_minion_that_applies_nothing_holds_up_no_promotion(drilled, puts):
    """Its applier waits for a lock that a person holds. The other one has applied all, and is promoted."""
    old, nodes = drilled.master("b"), nodes_of(drilled, "b")
    first, second = drilled.controller.known["b"].voters
    async with puts.running(), cleaning(puts.storage):
        await asyncio.sleep(0.5)
        with ExitStack() as stack:
            connected = stack.enter_context(session(nodes[first]))
            connected.query(f"LOCK TABLES {puts.datastore.database(1)}.entity READ")
            await asyncio.sleep(1)
            drilled.running.servers[old].kill()
            await in_thread(drilled.another_master, "b", old)
            assert drilled.master("b") == second
        await asyncio.sleep(0.5)
    assert puts.failed == []
    assert await check(puts)


@contextmanager
def backup_lock(node):
    """What a backup holds while it copies: nothing is committed meanwhile."""
    with session(node) as connected:
        if FLAVOUR is Flavour.MARIADB:
            for stage in ("START", "FLUSH", "BLOCK_DDL", "BLOCK_COMMIT"):
                connected.query(f"BACKUP STAGE {stage}")
        else:
            connected.query("FLUSH TABLES WITH READ LOCK")
        try:
            yield
        finally:
            connected.query("BACKUP STAGE END" if FLAVOUR is Flavour.MARIADB else "UNLOCK TABLES")


@contextmanager
def held_head(node, datastore):
    with session(node) as connected:
        connected.query("BEGIN")
        connected.query(
            f"SELECT head FROM schemaless.shard_head WHERE datastore = '{datastore.name}' AND shard = 0 FOR UPDATE"
        )
        yield
        connected.query("ROLLBACK")


@pytest.mark.parametrize("where", ["backup on the master", "backup on a minion", "a held head"])
async def test_a_switch_behind_a_lock_is_done_or_taken_back_with_a_reason(drilled, puts, where):
    """And the cluster takes puts again within seconds either way: it isn't left closed."""
    old, nodes = drilled.master("b"), nodes_of(drilled, "b")
    new = next(name for name in nodes if name != old)
    holds = {
        "backup on the master": lambda: backup_lock(nodes[old]),
        "backup on a minion": lambda: backup_lock(nodes[new]),
        "a held head": lambda: held_head(nodes[old], puts.datastore),
    }
    async with puts.running(), cleaning(puts.storage):
        await asyncio.sleep(0.5)
        with ExitStack() as stack:
            await in_thread(stack.enter_context, holds[where]())
            drilled.order("b", OrderKind.SWITCH, new)
            await async_until(lambda: "b" in drilled.settled, saying=lambda: drilled.controller.states)
            state, told = drilled.settled["b"]
            assert state is OrderState.DONE or told
            await in_thread(stack.close)
        await in_thread(drilled.healthy, "b")
        assert (drilled.master("b") == new) == (state is OrderState.DONE)
        await asyncio.sleep(0.5)
    assert puts.failed == []
    assert await check(puts)


class Writable:
    """Samples which servers of a cluster take writes, and of which epoch. Notes the moments with two of one epoch.

    One that hung while another one was promoted is open until it is closed. Its epoch is over, so what it takes doesn't
    count.
    """

    def __init__(self, nodes):
        self.nodes = nodes
        self.double = []
        self.samples = 0

    async def run(self):
        while True:
            self.samples += 1
            found = await asyncio.gather(*(in_thread(self._epoch, node) for node in self.nodes.values()))
            epochs = [epoch for epoch in found if epoch is not None]
            if len(epochs) > len(set(epochs)):
                self.double.append((time.monotonic(), dict(zip(self.nodes, found, strict=True))))
            await asyncio.sleep(SAMPLED_S)

    def _epoch(self, node):
        """The epoch of the writes that a server takes, None of one that takes none."""
        try:
            with session(node) as connected:
                (state,) = connected.query("SELECT @@GLOBAL.read_only AS is_closed")
                (epoch,) = connected.query("SELECT COALESCE(MAX(epoch), 0) AS epoch FROM schemaless.shard_head")
        except SchemalessError:
            return None
        return None if int(state["is_closed"]) else int(epoch["epoch"])


async def test_a_master_that_is_revived_each_time_a_little_too_early(drilled, puts):
    """It dies again and again before it is opened, then hangs until it is called dead. No epoch has two masters."""
    old, nodes = drilled.master("a"), nodes_of(drilled, "a")
    server, sampler = drilled.running.servers[old], Writable(nodes)
    before = drilled.controller.known["a"].generation
    sampling = asyncio.create_task(sampler.run())
    async with puts.running(), cleaning(puts.storage):
        await asyncio.sleep(0.5)
        for _ in range(REVIVALS):
            server.kill()
            await asyncio.sleep(REVIVED_AFTER_S)
            await in_thread(server.start)
        for _ in range(REVIVALS // 5):
            await in_thread(drilled.healthy, "a")
            hung = drilled.running.servers[drilled.master("a")]
            hung.stop()
            await asyncio.sleep(6)
            hung.cont()
        await asyncio.sleep(1)
        drilled.order("a", OrderKind.ACKNOWLEDGE)
        await in_thread(drilled.healthy, "a")
    sampling.cancel()
    assert sampler.samples > 20
    assert sampler.double == []
    generations = drilled.controller.known["a"].generation - before
    print(f"{REVIVALS} kills: generation {before} to {before + generations}, {sampler.samples} samples")
    assert puts.failed == []
    assert await check(puts)
