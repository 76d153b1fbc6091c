"""Masters die, hang and come back while puts run: nothing acknowledged is lost, and no put fails (I1, I5, I6, I13)."""

import asyncio
import os
import statistics
import time

import pytest

from schemaless.runtime.events import Event, observing
from schemaless.storage.appointment_table import OrderKind, OrderState
from schemaless.storage.asyncmy_driver import AsyncStorage
from tests.failover_harness import Puts, check, cleaning, drill, in_thread, make_datastore

pytestmark = [pytest.mark.storage, pytest.mark.faults]

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
KILLS = 20 if LONG else 3
OF_A_PROMOTION = [
    Event.VOTERS_PROMISED,
    Event.RECEIVED_APPLIED,
    Event.MASTER_APPOINTED,
    Event.HEADS_OPENED,
    Event.MASTER_OPENED,
]
OF_A_SWITCH = [Event.VOTERS_PROMISED, Event.MASTER_FENCED, *OF_A_PROMOTION[1:]]


@pytest.fixture(scope="module")
def drilled(tmp_path_factory):
    with drill(tmp_path_factory.mktemp("lost")) as running:
        yield running


@pytest.fixture(autouse=True)
def whole(drilled):
    """Every test leaves servers that run and follow. The hour between two promotions is not waited for."""
    drilled.order("a", OrderKind.ACKNOWLEDGE)
    drilled.order("b", OrderKind.ACKNOWLEDGE)
    yield
    drilled.whole()


@pytest.fixture
async def puts(drilled, chance):
    datastore = await asyncio.to_thread(make_datastore, drilled.running)
    async with AsyncStorage(drilled.running.topology) as storage:
        yield Puts(storage, datastore, chance)


async def test_masters_are_killed_for_good_one_after_another(drilled, puts, chance):
    """Each has a tail, and is dead until another one is open. Back again, its tail is put again and it is made anew."""
    opened: list[float] = []
    seconds = []
    with observing(lambda *_: opened.append(time.monotonic()), Event.MASTER_OPENED):
        async with puts.running(), cleaning(puts.storage):
            await asyncio.sleep(1)
            for _ in range(KILLS):
                cluster = chance.choice(("a", "b"))
                old = drilled.master(cluster)
                killed = await in_thread(drilled.kill_with_tail, cluster)
                await in_thread(drilled.another_master, cluster, old)
                seconds.append(opened[-1] - killed)
                assert await in_thread(drilled.whole) == {old}
                drilled.order(cluster, OrderKind.ACKNOWLEDGE)
                await asyncio.sleep(0.5)
    assert puts.failed == []
    counts = await check(puts)
    times = f"{min(seconds):.1f}, {statistics.median(seconds):.1f}, {max(seconds):.1f} s to open"
    print("kills:", len(seconds), dict(counts), f"longest gap {puts.longest_gap_s * 1000:.0f} ms,", times)
    assert counts


async def test_a_master_that_hangs_is_replaced_and_fenced_when_it_goes_on(drilled, puts):
    """SIGSTOP and SIGCONT: it doesn't know that it is no master any more."""
    old = drilled.master("a")
    async with puts.running():
        await asyncio.sleep(1)
        drilled.running.servers[old].stop()
        await in_thread(drilled.another_master, "a", old)
        drilled.running.servers[old].cont()
        await asyncio.sleep(3)
    assert puts.failed == []
    assert await check(puts)


@pytest.mark.parametrize("event", OF_A_PROMOTION if LONG else OF_A_PROMOTION[1:4:2])
async def test_a_controller_dies_within_a_promotion(drilled, puts, event):
    old = drilled.master("a")
    async with puts.running():
        await asyncio.sleep(0.5)
        async with drilled.dying_at(event):
            drilled.running.servers[old].kill()
        await in_thread(drilled.another_master, "a", old)
        await asyncio.sleep(0.5)
    assert puts.failed == []
    assert await check(puts)


@pytest.mark.parametrize("event", OF_A_SWITCH if LONG else OF_A_SWITCH[1:4:2])
async def test_a_controller_dies_within_a_planned_change(drilled, puts, event):
    """Nothing was lost, so no generation begins."""
    generations = {appointment.generation for appointment in drilled.controller.known.values()}
    async with puts.running():
        await asyncio.sleep(0.5)
        async with drilled.dying_at(event):
            drilled.order("b", OrderKind.SWITCH)
        drilled.orders.clear()
        await in_thread(drilled.healthy)
        await asyncio.sleep(0.5)
    assert puts.failed == []
    assert await check(puts)
    assert drilled.controller.known["b"].generation in {0, *generations}


async def test_every_server_is_restarted_in_turn_without_a_failed_put(drilled, puts):
    """The procedure of docs/failover.md: minions first, then the master after it gave way."""
    async with puts.running():
        await asyncio.sleep(0.5)
        for cluster in ("a", "b"):
            old = drilled.master(cluster)
            names = [node.name for node in drilled.running.topology.cluster(cluster).nodes if node.name != old]
            for name in names:
                await in_thread(drilled.running.servers[name].terminate)
                await in_thread(drilled.running.servers[name].start)
                await in_thread(drilled.healthy)
            await in_thread(drilled.switch, cluster)
            assert drilled.settled[cluster][0] is OrderState.DONE
            await in_thread(drilled.running.servers[old].terminate)
            await in_thread(drilled.running.servers[old].start)
            await in_thread(drilled.healthy)
    assert puts.failed == []
    counts = await check(puts)
    print("rolling restart:", dict(counts), f"longest gap {puts.longest_gap_s * 1000:.0f} ms")


async def test_after_a_power_cut_of_everything_masters_open_again(drilled, puts):
    """Without a person, and without Kafka, which isn't there in this test at all."""
    async with puts.running():
        await asyncio.sleep(1)
    masters = {cluster: drilled.master(cluster) for cluster in ("a", "b")}
    drilled.end_controller()
    for server in drilled.running.servers.values():
        server.kill()
    for server in drilled.running.servers.values():
        await in_thread(server.start)
    drilled.start_controller()
    await in_thread(drilled.healthy)
    assert {cluster: drilled.master(cluster) for cluster in masters} == masters
    assert puts.failed == []
    async with puts.running():
        await asyncio.sleep(0.5)
    assert puts.failed == []
    assert await check(puts)


async def test_a_voter_that_is_dead_as_well_is_for_a_person_to_decide(drilled, puts):
    """It may have what the master confirmed. An order names it, because somebody fenced it."""
    old = drilled.master("a")
    first, second = (node.name for node in drilled.running.topology.cluster("a").nodes if node.name != old)
    drilled.running.servers[first].kill()
    drilled.running.servers[old].kill()
    await in_thread(drilled.until, lambda: drilled.state("a") == "dead", "told as dead")
    assert first in drilled.controller.states["a"].why
    await asyncio.sleep(3)
    assert drilled.master("a") == old
    drilled.order("a", OrderKind.PROMOTE, second, (first,))
    await in_thread(drilled.until, lambda: drilled.master("a") == second, "promoted by hand")
    assert puts.failed == []
