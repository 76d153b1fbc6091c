"""Losses beyond one server at a time: islands, one loss after the other, restored data, a controller's first steps."""

import asyncio
import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from schemaless.runtime.events import Event, observing
from schemaless.stack.admin import session
from schemaless.storage.appointment_table import OrderKind
from schemaless.storage.asyncmy_driver import AsyncStorage
from tests.failover_harness import (
    ControllerDied,
    Drill,
    Puts,
    check,
    cleaning,
    controlled_servers,
    drill,
    drilling,
    in_thread,
    make_datastore,
)
from tests.relay import Relay, through

pytestmark = pytest.mark.faults


async def test_a_process_that_reaches_the_old_master_only_loses_nothing(tmp_path, chance):
    """An island of one process and a1, whose packets to everybody else are dropped. Each of its puts is refused, or can
    be read once the island ends (I5).
    """
    opened = []
    with ExitStack() as stack:
        running = stack.enter_context(controlled_servers(tmp_path))
        ports = {node.name: node.port for cluster in running.topology.clusters.values() for node in cluster.nodes}
        relays = {name: stack.enter_context(Relay(port)) for name, port in ports.items()}
        to_a1 = {"a1": relays["a1"]}  # of everybody else
        island = through(running.topology, {name: relay for name, relay in relays.items() if name != "a1"})
        mainland = replace(
            running,
            topology=through(running.topology, to_a1),
            administrators=through(running.administrators, to_a1),
        )
        drilled = stack.enter_context(drilling(mainland))
        datastore = await asyncio.to_thread(make_datastore, mainland)
        async with AsyncStorage(mainland.topology) as storage, AsyncStorage(island) as island_storage:
            puts, island_puts = Puts(storage, datastore, chance), Puts(island_storage, datastore, chance)
            async with puts.running(), island_puts.running(), cleaning(storage):
                await asyncio.sleep(1)
                with observing(lambda *_: opened.append(time.monotonic()), Event.MASTER_OPENED):
                    cut_at = time.monotonic()
                    for relay in relays.values():
                        relay.cut()
                    await in_thread(drilled.another_master, "a", "a1")
                await asyncio.sleep(2)
                answered_on_the_island = len(island_puts.acknowledged_at)
                for relay in relays.values():
                    relay.mend()
                await in_thread(drilled.until, lambda: island_storage.epoch("a") == storage.epoch("a"), "it learns")
                assert "a1" in await in_thread(drilled.whole)
                await asyncio.sleep(0.5)
            assert puts.failed == []
            print("island:", len(island_puts.failed), "refused,", dict(await check(island_puts)))
            assert island_puts.failed, (
                "what a1 alone had was called stored, and nobody knew whether it is still the master"
            )
            assert len(island_puts.acknowledged_at) > answered_on_the_island
            times = f"longest gap {puts.longest_gap_s * 1000:.0f} ms, {opened[0] - cut_at:.1f} s to open"
            print("mainland:", dict(await check(puts)), times)


@pytest.mark.storage
async def test_three_masters_are_lost_before_replication_caught_up(tmp_path, chance):
    """Each takes puts for a moment, and dies before anybody followed it. The other cluster has what they had."""
    with drill(tmp_path, minions=3) as drilled:
        datastore = await asyncio.to_thread(make_datastore, drilled.running)
        lost = ["a1"]

        def lose(*_):
            if len(lost) < 3:
                drilled.order("a", OrderKind.ACKNOWLEDGE)
                time.sleep(0.3)
                lost.append(drilled.master("a"))
                drilled.running.servers[lost[-1]].kill()

        async with AsyncStorage(drilled.running.topology) as storage:
            puts = Puts(storage, datastore, chance)
            async with puts.running(), cleaning(storage):
                await asyncio.sleep(1)
                with observing(lose, Event.MASTER_OPENED):
                    drilled.running.servers["a1"].kill()
                    await in_thread(drilled.until, lambda: len(lost) == 3, "three are lost")
                    await in_thread(drilled.another_master, "a", lost[-1])
                await asyncio.sleep(0.5)
            assert puts.failed == []
            assert len({*lost, drilled.master("a")}) == 4
            await in_thread(drilled.whole)
            print("lost", *lost, dict(await check(puts)), f"longest gap {puts.longest_gap_s * 1000:.0f} ms")


@pytest.mark.storage
async def test_a_master_restored_in_place_is_not_opened(tmp_path, chance):
    """It would give out added_ids again (I13). A person reads which server has all, and promotes it. Following, the
    restored one would leave out what it wrote itself, so it is made anew.
    """
    with drill(tmp_path) as drilled:
        server, data = drilled.running.servers["a1"], drilled.running.descriptions["a1"].data

        def back_up():
            server.terminate()
            shutil.copytree(data, tmp_path / "backup")
            server.start()

        def restore():
            server.kill()
            shutil.rmtree(data)
            shutil.copytree(tmp_path / "backup", data)
            server.start()

        datastore = await asyncio.to_thread(make_datastore, drilled.running)
        async with AsyncStorage(drilled.running.topology) as storage:
            puts = Puts(storage, datastore, chance)
            async with puts.running():
                await asyncio.sleep(0.5)
            await in_thread(drilled.end_controller)
            await in_thread(back_up)
            drilled.start_controller()
            await in_thread(drilled.healthy)
            assert drilled.master("a") == "a1"
            async with puts.running():
                await asyncio.sleep(1)
                await in_thread(drilled.end_controller)
                await in_thread(restore)
                drilled.start_controller()
                await in_thread(drilled.until, lambda: drilled.state("a") == "stuck", "told")
                assert "a1 lacks what a2 has" in drilled.controller.states["a"].why
                await asyncio.sleep(3)
                with session(drilled.running.administrators.cluster("a").nodes[0]) as connected:
                    assert connected.query("SELECT @@GLOBAL.read_only AS closed") == [{"closed": 1}]
                drilled.order("a", OrderKind.PROMOTE)
                await in_thread(drilled.another_master, "a", "a1")
                await asyncio.sleep(0.5)
            assert puts.failed == []
            assert "a1" in await in_thread(drilled.whole)
            print("restored:", dict(await check(puts)))


async def test_a_controller_dies_right_after_the_first_appointment(tmp_path, chance):
    """Another one opens the master, although no minion has a table yet."""
    with controlled_servers(tmp_path, minions=1) as running:

        def die(*_):
            if threading.current_thread() is not threading.main_thread():
                raise ControllerDied

        with observing(die, Event.MASTER_APPOINTED):
            first = Drill(running)
            await in_thread(first.until, lambda: not first.alive(), "dead")
        first.end_controller()
        with drilling(running) as drilled:
            datastore = await asyncio.to_thread(make_datastore, running)
            async with AsyncStorage(running.topology) as storage:
                puts = Puts(storage, datastore, chance)
                async with puts.running():
                    await asyncio.sleep(0.5)
                assert puts.failed == []
                assert await check(puts)
            assert {drilled.master(cluster) for cluster in ("a", "b")} == {"a1", "b1"}
