"""Tailers killed, stopped and doubled while cells are written: the topic holds every cell once, in order (I7)."""

import asyncio
import os
import random
import signal

import pytest

from schemaless.audit import audit
from schemaless.bus.topics import ensure_topics
from schemaless.stack.local import running_kafka
from tests.log_harness import running_tailers, write_for

pytestmark = [pytest.mark.storage, pytest.mark.faults]

LOAD_S = 60.0 if os.environ.get("SCHEMALESS_FAULTS_LONG") else 6.0


def assert_clean(topology, kafka, datastore, cells):
    report = audit(topology, kafka, datastore, stall_s=15)
    assert report.findings.named == []
    assert report.cells()["matched"] == cells


async def test_kills_at_random_moments_lose_and_repeat_nothing(running, kafka, make_datastore, async_storage):
    """Two tailers share the partitions; one or the other is killed with its transactions open, again and again."""
    datastore = make_datastore(shards=8, partitions=4)
    with running_tailers(2, running.path, kafka, datastore) as tailers:
        writing = asyncio.create_task(write_for(async_storage, datastore, LOAD_S))
        while not writing.done():
            await asyncio.sleep(random.uniform(0.3, 1.5))
            await asyncio.to_thread(random.choice(tailers).kill_and_restart)
        cells = await writing
        await asyncio.to_thread(assert_clean, running.topology, kafka, datastore, cells)


async def test_a_tailer_that_was_stopped_past_its_session_publishes_nothing(
    running, kafka, make_datastore, async_storage
):
    """Stopped under load, its partitions taken over, woken again: what it held in hand is refused, and it goes on."""
    datastore = make_datastore(shards=8, partitions=4)
    with running_tailers(2, running.path, kafka, datastore) as tailers:
        writing = asyncio.create_task(write_for(async_storage, datastore, LOAD_S))
        for tailer in tailers:
            await asyncio.sleep(random.uniform(0.5, 1.0))
            tailer.send(signal.SIGSTOP)
            await asyncio.sleep(3.0)
            tailer.send(signal.SIGCONT)
        cells = await writing
        await asyncio.to_thread(assert_clean, running.topology, kafka, datastore, cells)
        assert [tailer.stop() for tailer in tailers] == [0, 0]


async def test_a_broker_that_hangs_and_dies_costs_nothing_but_time(running, make_datastore, async_storage, tmp_path):
    """The broker is stopped, then killed and started again, while cells are written: the tailer goes on by itself."""
    datastore = make_datastore(shards=8, partitions=4)
    with running_kafka(tmp_path) as (kafka, broker):
        await asyncio.to_thread(ensure_topics, kafka, datastore)
        with running_tailers(1, running.path, kafka, datastore) as (tailer,):
            writing = asyncio.create_task(write_for(async_storage, datastore, LOAD_S))
            await asyncio.sleep(1.5)
            broker.stop()
            await asyncio.sleep(3)
            broker.cont()
            await asyncio.sleep(1)
            broker.kill()
            await asyncio.sleep(1)
            await asyncio.to_thread(broker.start)
            cells = await writing
            await asyncio.to_thread(assert_clean, running.topology, kafka, datastore, cells)
            assert tailer.process.poll() is None, "the tailer lived through it"
