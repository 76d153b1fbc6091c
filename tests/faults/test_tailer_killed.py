"""Tailers killed and stopped at random while cells are written: the topic holds every cell once, in order (I7)."""

import asyncio
import os
import signal

import pytest

from schemaless.audit.run import audit
from tests.log_harness import running_tailers, wait_for_records, write_for

pytestmark = pytest.mark.faults

LOAD_S = 60.0 if os.environ.get("SCHEMALESS_FAULTS_LONG") else 6.0


def assert_clean(topology, kafka, datastore, cells):
    report = audit(topology, kafka, datastore, stall_s=15)
    assert report.findings.named == []
    assert report.cells()["matched"] == cells


async def stop_past_its_session(tailer):
    tailer.halt()
    await asyncio.sleep(3.0)
    tailer.send(signal.SIGCONT)


async def test_kills_and_stops_at_random_moments_lose_and_repeat_nothing(
    running, kafka, make_datastore, async_storage, chance
):
    """Two tailers share the partitions; one or the other is killed with its transactions open, or stopped past its
    session and woken, again and again.
    """
    datastore = make_datastore(shards=8, partitions=4)
    with running_tailers(2, running.path, kafka, datastore) as tailers:
        # Where a start takes long, all kills would come before the first transaction, and before there is a topic.
        before = await write_for(async_storage, datastore, 0.1)
        await asyncio.to_thread(wait_for_records, kafka, datastore, before)
        writing = asyncio.create_task(write_for(async_storage, datastore, LOAD_S))
        await asyncio.sleep(1.0)
        await stop_past_its_session(chance.choice(tailers))
        while not writing.done():
            await asyncio.sleep(chance.uniform(0.3, 1.5))
            if chance.random() < 0.8:
                await asyncio.to_thread(chance.choice(tailers).kill_and_restart)
            else:
                await stop_past_its_session(chance.choice(tailers))
        cells = before + await writing
        await asyncio.to_thread(assert_clean, running.topology, kafka, datastore, cells)
