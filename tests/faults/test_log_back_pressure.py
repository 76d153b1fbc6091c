"""The broker hangs and dies, longer than any time-out: the log waits in MySQL, in bounded memory, and catches up."""

import asyncio
import os
import random
import time

import pytest

from schemaless.audit import audit
from schemaless.stack.local import running_kafka
from tests.log_harness import new_cell, put, running_tailers, wait_for_records, write_for

pytestmark = [pytest.mark.storage, pytest.mark.faults]

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
# Sessions, transactions and deliveries time out after 2 s here. A lone broker that hangs beyond its own session, 9 s,
# may leave a transaction without its end (docs/exactly-once.md).
HANG_S = 7.0 if LONG else 4.0
DOWN_S = 60.0 if LONG else 1.0
BATCH_BYTES = 1 << 20
BATCHES_MAX = 2
BODY_BYTES = 200_000
BACKLOG_BODIES = 200
GROWTH_BYTES_MAX = 20 << 20


def put_large_bodies(storage, datastore, count):
    """Bodies that compression hardly makes smaller; how many megabytes."""
    for number in range(count):
        body = {"noise": random.randbytes(BODY_BYTES).decode("latin-1")}
        put(storage, datastore, [new_cell(datastore, body, shard=number % datastore.shards)])


async def test_a_broker_that_hangs_and_dies_costs_nothing_but_time(
    running, storage, async_storage, make_datastore, tmp_path
):
    """Stopped, then killed and started again, while puts go on and a large backlog grows.

    Nothing is lost or repeated, the tailer lives through it, and its memory grows by a few batches, not by the backlog.
    """
    datastore = make_datastore(shards=8, partitions=4)
    with running_kafka(tmp_path) as (kafka, broker):
        settings = {"batch_bytes_max": BATCH_BYTES, "batches_max": BATCHES_MAX}
        with running_tailers(1, running.path, kafka, datastore, **settings) as (tailer,):
            await asyncio.to_thread(put_large_bodies, storage, datastore, 2 * datastore.shards)
            await asyncio.to_thread(wait_for_records, kafka, datastore, 2 * datastore.shards)
            before = tailer.resident_bytes_max()
            writing = asyncio.create_task(write_for(async_storage, datastore, HANG_S + DOWN_S + 4, writers=2))
            broker.stop()
            hung_at = time.monotonic()
            await asyncio.to_thread(put_large_bodies, storage, datastore, BACKLOG_BODIES)
            await asyncio.sleep(HANG_S - (time.monotonic() - hung_at))
            broker.cont()
            await asyncio.sleep(1)
            broker.kill()
            await asyncio.sleep(DOWN_S)
            await asyncio.to_thread(broker.start)
            cells = await writing + 2 * datastore.shards + BACKLOG_BODIES
            report = await asyncio.to_thread(audit, running.topology, kafka, datastore, stall_s=20)
            assert (report.findings.named, report.cells()["matched"]) == ([], cells)
            assert tailer.process.poll() is None, "the tailer lived through it"
            growth = tailer.resident_bytes_max() - before
    print(f"the tailer grew by {growth >> 20} MiB with {BODY_BYTES * BACKLOG_BODIES >> 20} MiB waiting")
    assert growth < GROWTH_BYTES_MAX
