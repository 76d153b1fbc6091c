"""A mover is killed, or stands still, within a switch: a controller ends the switch, and nobody runs a command (I3)."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from schemaless.config import ControllerMode
from schemaless.ops.datastores import list_datastores
from schemaless.ops.move_orders import move_shards, plan_move
from schemaless.ops.moves import MoveStep
from schemaless.stack.local import halt, halted
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.pymysql_driver import SyncStorage
from tests.failover_harness import (
    ROOT,
    Puts,
    check,
    controlled_servers,
    make_datastore,
    start_controller_process,
    until_ready,
)
from tests.integration.api.api_harness import production_api, row_in
from tests.mover_harness import fill, home_of, verify
from tests.waiting import async_until, until

pytestmark = [pytest.mark.storage, pytest.mark.faults]

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    """Servers, a controller that hears no Kafka, so that it always has the turn, and an API process."""
    with controlled_servers(tmp_path_factory.mktemp("movers"), minions=1) as running:
        controller = start_controller_process(running, "127.0.0.1:9", ControllerMode.AUTOMATIC, log_level="info")
        try:
            asyncio.run(ready(running))
            with production_api(running.path) as api:
                yield running, api, controller
        finally:
            controller.kill()
            controller.wait()


async def ready(running):
    async with AsyncStorage(running.topology) as storage:
        await until_ready(storage)


@contextmanager
def moving(running, datastore, shard, step, number):
    """A process that moves a shard from a to b, and gets a signal at a step."""
    command = [sys.executable, "-m", "tests.moving_process", running.path, datastore.name, str(shard), "b", step]
    process = subprocess.Popen([*command, number], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until_served(controller, api, datastore, shard):
    """Puts cells until one is stored. Returns their rows, and how long the controller took, which was halted."""
    rows = []

    def put_is(wanted):
        row = row_in(datastore, shard)
        status = api.put(row, 1, {"n": 0}).status_code
        if status in (201, 202):
            rows.append(row)
        return status == wanted

    assert put_is(202), "it isn't closed"
    controller.send_signal(signal.SIGCONT)
    began = time.monotonic()
    until(lambda: put_is(201))
    return rows, time.monotonic() - began


@pytest.mark.parametrize(
    ("step", "number", "home"),
    [
        (MoveStep.CLOSED, "SIGKILL", "a"),
        (MoveStep.OPENED, "SIGKILL", "b"),
        (MoveStep.CLOSED, "SIGSTOP", "a"),
        (MoveStep.OPENED, "SIGSTOP", "b"),
    ][: 4 if LONG else 3],
)
async def test_a_shard_takes_puts_again(step, number, home, installation, chance):
    """Nothing is lost, the shard has one home, and the mover changes nothing when it continues. The same command ends
    the move.
    """
    (running, process, controller), shard = installation, 0
    datastore = await asyncio.to_thread(make_datastore, running)
    api = process.at(datastore)
    async with AsyncStorage(running.topology) as storage:
        with SyncStorage(running.topology) as before:
            await asyncio.to_thread(fill, before, datastore, shard, 1500)
        puts = Puts(storage, storage.live(datastore), chance)
        async with puts.running():
            halt(controller.pid)
            with moving(running, datastore, shard, step, number) as mover:
                await async_until(lambda: halted(mover.pid) or mover.poll() is not None)
                assert mover.poll() == (-signal.SIGKILL if number == "SIGKILL" else None)
                rows, took_s = await asyncio.to_thread(until_served, controller, api, datastore, shard)
                assert await asyncio.to_thread(look, running, datastore, shard) == home
                if mover.poll() is None:
                    mover.send_signal(signal.SIGCONT)
                    await async_until(lambda: mover.poll() is not None)
                    assert await asyncio.to_thread(look, running, datastore, shard) == home
            await asyncio.to_thread(move, running, datastore, shard)
            assert await asyncio.to_thread(look, running, datastore, shard) == "b"
        print(f"{number} at {step}: served after {took_s:.1f} s", dict(await check(puts)))
        found = [await asyncio.to_thread(api.get, f"/cells/{row}/BASE/1") for row in rows]
        assert [answer.status_code for answer in found] == [200] * len(rows)
    with SyncStorage(running.topology) as after:
        await asyncio.to_thread(verify, after, datastore, shard, "b", "a", [])


def look(running, datastore, shard):
    with SyncStorage(running.topology) as storage:
        return home_of(storage, datastore, shard)


def move(running, datastore, shard):
    """Runs the command, which finishes what was switched."""
    with SyncStorage(running.topology) as storage:
        known = list_datastores(running.topology)[datastore.name]
        move_shards(storage, known, plan_move(storage, known, [shard], "b"), "b", lambda step, move: None)
