"""Where the tailer reads: the master or a minion, changing over by itself; nothing skipped, nothing called a hole that
is only replication's lag (I3, I7).
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from schemaless.audit.run import audit
from schemaless.bus.partition_log import PartitionLog
from schemaless.config import TailerSettings
from schemaless.location import Location
from schemaless.storage import shard_head
from schemaless.storage.operation import query
from schemaless.topology import Role
from tailer import service
from tailer.cluster_reader import ClusterReader
from tailer.partition_tail import PartitionTail, TailerContext, TailerSlots
from tests.log_harness import (
    new_cell,
    put,
    replication_stopped,
    wait_for_cells,
    write_for,
)
from tests.waiting import async_until

pytestmark = pytest.mark.storage

LAG_MAX_S = 1.0


def cells_of_shard_0(datastore, count):
    return [new_cell(datastore, shard=0) for _ in range(count)]


def assert_clean(running, kafka, datastore, cells):
    report = audit(running.topology, kafka, datastore, stall_s=10)
    assert (report.findings.named, report.cells()["matched"]) == ([], cells)


def errors(told):
    return [entry for entry in told if entry["log_level"] == "error"]


def shows(node, datastore, cells):
    return lambda: node.run(shard_head.movement, datastore.name).heads_sum >= cells


def has_shard_0(node, datastore):
    """Its database, its table and, made last, its head."""
    heads = f"SELECT 1 FROM schemaless.shard_head WHERE datastore = '{datastore.name}' AND shard = 0"
    return lambda: bool(node.run(query, heads))


async def test_a_minion_is_tailed_by_setting_and_left_when_it_lags(
    running, kafka, new_datastore, storage, admin, tailing, monkeypatch
):
    """Replication stops on the minion: what it lacks is only late, and read from the master once the minion is known
    to lag; replication goes on, and the log too, without a repeat.
    """
    monkeypatch.setattr(service, "LAG_MAX_S", LAG_MAX_S)
    datastore = new_datastore(shards=2, partitions=1)
    put(storage, datastore, cells_of_shard_0(datastore, 3))
    await async_until(shows(storage.minions("a")[0], datastore, 3))
    with capture_logs() as told, replication_stopped(admin.minions("a")[0]):
        tailing(datastore, read_from=Role.MINION)
        await asyncio.to_thread(wait_for_cells, kafka, datastore, 3)
        put(storage, datastore, cells_of_shard_0(datastore, 4))
        await asyncio.to_thread(wait_for_cells, kafka, datastore, 7)
        left = [entry["event"] for entry in told if "lags" in entry["event"] or "next node" in entry["event"]]
        assert left, "the minion showed no more"  # or it stood for a moment just then
    put(storage, datastore, cells_of_shard_0(datastore, 2))
    await asyncio.to_thread(assert_clean, running, kafka, datastore, 9)
    assert errors(told) == []


@pytest.mark.faults
@pytest.mark.parametrize("tail_from", Role)
async def test_a_node_that_hangs_is_left(running, kafka, new_datastore, async_storage, tailing, tail_from):
    """The node that is read stops answering under load, its port open, and comes back: every cell once, in order."""
    datastore = new_datastore(shards=4, partitions=2)
    with capture_logs() as told:
        tailing(datastore, read_from=tail_from)
        writing = asyncio.create_task(write_for(async_storage, datastore, seconds=3))
        await asyncio.to_thread(wait_for_cells, kafka, datastore, 10)
        hung = running.servers["b1" if tail_from is Role.MASTER else "b2"]
        hung.stop()
        await async_until(lambda: any("next node" in entry["event"] for entry in told))
        await asyncio.sleep(0.5)
        hung.cont()
        cells = await writing
        await asyncio.to_thread(assert_clean, running, kafka, datastore, cells)
    assert errors(told) == []


@pytest.mark.faults
async def test_a_master_dies_while_its_minion_lags(running, kafka, new_datastore, storage, admin, tailing):
    """The minion shows less than was published: it is not a hole, and nothing is said or published twice."""
    datastore = new_datastore(shards=2, partitions=1)
    master = running.servers["a1"]
    with capture_logs() as told:
        with replication_stopped(admin.minions("a")[0]):
            tailing(datastore)
            put(storage, datastore, cells_of_shard_0(datastore, 5))
            await asyncio.to_thread(wait_for_cells, kafka, datastore, 5)
            master.kill()
            try:
                await async_until(lambda: any("next node" in entry["event"] for entry in told))
                await asyncio.sleep(1.0)
            finally:
                master.start()
            put(storage, datastore, cells_of_shard_0(datastore, 5))
        await asyncio.to_thread(assert_clean, running, kafka, datastore, 10)
    assert errors(told) == []


@asynccontextmanager
async def open_tail(running, kafka, datastore, reader):
    """The tail of partition 0, to be stepped by hand."""
    settings = TailerSettings(topology=running.path, kafka=kafka)
    threads = ThreadPoolExecutor(1)
    partition_log = PartitionLog(kafka, datastore, 0)
    context = TailerContext(
        settings,
        {"a": reader},
        dict,
        lambda name: False,
        TailerSlots(1),
        threads,
        TailerSlots(1),
        threads,
        threads,
        asyncio.sleep,
    )
    yield PartitionTail(datastore, partition_log, await asyncio.to_thread(partition_log.open), context)
    partition_log.close()


async def test_cells_newer_than_the_head_that_was_seen_are_taken_along(
    running, kafka, new_datastore, storage, async_storage
):
    """What was written after the heads were read is published with them, once; the next turn goes on behind it."""
    datastore = new_datastore(shards=1, partitions=1)
    async with open_tail(running, kafka, datastore, ClusterReader(async_storage, "a")) as tail:
        put(storage, datastore, cells_of_shard_0(datastore, 5))
        tail.heads_moved({0: Location(1, 2)})
        assert await tail.step() == 5
        tail.heads_moved({0: Location(1, 4)})  # told late: nothing is published twice
        assert await tail.step() == 0
        put(storage, datastore, cells_of_shard_0(datastore, 2))
        tail.heads_moved({0: Location(1, 7)})
        assert await tail.step() == 2
    await asyncio.to_thread(assert_clean, running, kafka, datastore, 7)


async def test_a_head_of_the_master_with_cells_of_a_minion_is_no_hole(
    running, kafka, new_datastore, storage, admin, async_storage
):
    """The head was the master's, the cells are asked of a minion that lags: the shard waits, without a word."""
    datastore = new_datastore(shards=1, partitions=1)
    reader = ClusterReader(async_storage, "a", tail_from=Role.MINION)
    async with open_tail(running, kafka, datastore, reader) as tail:
        await publish_from_a_minion_that_lags(tail, datastore, storage, admin)
    await asyncio.to_thread(assert_clean, running, kafka, datastore, 5)


async def publish_from_a_minion_that_lags(tail, datastore, storage, admin):
    await async_until(has_shard_0(storage.minions("a")[0], datastore))
    with capture_logs() as told, replication_stopped(admin.minions("a")[0]):
        put(storage, datastore, cells_of_shard_0(datastore, 5))
        tail.heads_moved({0: Location(1, 5)})
        assert [await tail.step() for _ in range(2)] == [0, 0]
    assert told == []
    published = []

    async def has_published():
        published.append(await tail.step())
        return sum(published) >= 5

    await async_until(has_published)
