"""Nothing dies, and both cores are busy: a controller takes no slow server for a dead one."""

import asyncio
import os

import pytest

from bench.load import run_load
from bench.trips import TripMaker, put_request
from schemaless.config import ControllerMode
from schemaless.storage import appointment_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from tests.failover_harness import controlled_servers, make_datastore, start_controller_process, until_ready
from tests.integration.api.api_harness import production_api

pytestmark = pytest.mark.faults

LOADS = 24 if os.environ.get("SCHEMALESS_FAULTS_LONG") else 2
LOAD_S = 5.0
PUTS_PER_S_MAX = 4000


async def test_under_full_load_nobody_is_promoted_or_opened_again(tmp_path):
    """More connections than the cores can serve put as fast as they can."""
    with controlled_servers(tmp_path) as running:
        controller = start_controller_process(running, "127.0.0.1:9", ControllerMode.AUTOMATIC)
        try:
            async with AsyncStorage(running.topology) as storage:
                await until_ready(storage)
                datastore, trips, puts = await asyncio.to_thread(make_datastore, running), TripMaker(seed=1), 0
                before = await steps_of(storage)
                with production_api(running.path) as api:
                    for _ in range(LOADS):
                        made = trips.make(round(LOAD_S * PUTS_PER_S_MAX))
                        requests = [put_request(trip, f"/v1/{datastore.name}") for trip in made]
                        load = {"connections": 64, "seconds": LOAD_S}
                        outcome = await asyncio.to_thread(run_load, api.port, requests, **load)
                        puts += len(outcome.expect(201).latencies_ms)
                assert await steps_of(storage) == before
        finally:
            controller.kill()
            controller.wait()
    print(f"{puts} puts in {LOADS * LOAD_S:.0f} s")


async def steps_of(storage):
    """What controllers did, once the last minion follows."""
    while True:
        found = [await master.run(appointment_table.steps, master.node.cluster, 1000) for master in storage.masters]
        if all([step.step for step in steps].count("follows") >= 2 for steps in found):
            return found
        await asyncio.sleep(0.1)
