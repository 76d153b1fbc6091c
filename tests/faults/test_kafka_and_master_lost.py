"""Kafka says which controller tries, and none needs it: Kafka, a controller and a master die at the same moment."""

import asyncio
import time

import pytest

from schemaless.config import ControllerMode
from schemaless.stack.local import running_kafka
from schemaless.storage.asyncmy_driver import AsyncStorage
from tests.failover_harness import (
    Puts,
    check,
    controlled_servers,
    make_datastore,
    start_controller_process,
    until_ready,
)
from tests.waiting import async_until

pytestmark = pytest.mark.faults


async def test_a_master_that_dies_with_kafka_is_replaced(tmp_path, chance):
    """The controller that had the turn dies, too. The other one tries, because no turn is given."""
    with running_kafka(tmp_path / "kafka") as (bootstrap, kafka), controlled_servers(tmp_path) as running:
        async with AsyncStorage(running.topology) as storage:
            controllers = [start_controller_process(running, bootstrap, ControllerMode.AUTOMATIC)]
            try:
                await until_ready(storage)
                controllers.append(start_controller_process(running, bootstrap, ControllerMode.AUTOMATIC))
                puts = Puts(storage, await asyncio.to_thread(make_datastore, running), chance)
                async with puts.running():
                    await asyncio.sleep(3)
                    kafka.kill()
                    controllers[0].kill()
                    running.servers["a1"].kill()
                    killed_at = time.monotonic()
                    await async_until(lambda: storage.master("a").node.name != "a1" and storage.is_open("a"))
                    seconds = time.monotonic() - killed_at
                    await asyncio.sleep(1)
                assert puts.failed == []
                counts = dict(await check(puts))  # the cleaner needs a minion that follows
            finally:
                for controller in controllers:
                    controller.kill()
                    controller.wait()
    print("without Kafka:", counts, f"longest gap {puts.longest_gap_s * 1000:.0f} ms, {seconds:.1f} s to open")
