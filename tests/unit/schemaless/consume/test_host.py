"""The host of consumers: what each consumer of a datastore gets of the partitions that the process has."""

import asyncio
import types

import pytest

from schemaless.cell import StoredCell
from schemaless.codec import encode_body, encode_record
from schemaless.consume.host import Consumer, ConsumerHost
from schemaless.consume.ports import Effect, Outcome, ShardCheckpoint
from schemaless.errors import StorageUnavailable
from schemaless.location import BEGINNING
from schemaless.record import Record
from schemaless.storage import entity_table, shard_head
from schemaless.storage.shard_head import Head
from schemaless.topology import Datastore

DATASTORE = Datastore("d", 4, 2, ("a", "b"))  # shards 0 and 2 are partition 0, with their homes a; 1 and 3 the others
SETTINGS = types.SimpleNamespace(batch_cells_max=100)


def record(shard, added_id, partition=None):
    cell = StoredCell(bytes(16), "BASE", added_id, shard, 1, added_id, 0, encode_body({}))
    at = shard % 2 if partition is None else partition
    return Record("t", at, added_id, 0, None, encode_record(cell), {"v": b"1", "kind": b"cell"})


class MemoryMasters:
    """Masters of clusters whose logs hold `heads` cells of each shard."""

    def __init__(self):
        self.heads = dict.fromkeys(range(DATASTORE.shards), 0)
        self.unreachable = set()

    def master(self, cluster):
        async def run(operation, *args, **_):
            await asyncio.sleep(0)
            if cluster in self.unreachable:
                raise StorageUnavailable(f"{cluster} is unreachable")
            if operation is entity_table.read_after:
                _, shard, after, limit = args
                last = min(self.heads[shard], after + limit)
                return [StoredCell(bytes(16), "BASE", n, shard, 1, n, 0, b"") for n in range(after + 1, last + 1)]
            if operation is shard_head.movement:
                return sum(self.heads.values())
            assert operation is shard_head.heads
            return [Head(n, 1, last, 0) for n, last in self.heads.items() if DATASTORE.home(n) == cluster]

        return types.SimpleNamespace(run=run)


class MemoryConsumer:
    """A consumer that keeps its checkpoints and what it was given."""

    together = True

    def __init__(self, name):
        self.consumer = name
        self.finished = {}
        self.seen = []
        self.news = asyncio.Event()

    async def read(self, shards):
        return {shard: ShardCheckpoint(self.finished.get(shard, BEGINNING)) for shard in shards}

    async def move(self, advances, effects):
        self.finished.update({shard: advance.to for shard, advance in advances.items()})

    async def handle(self, runs):
        self.seen += [(run.shard, cell.added_id) for run in runs for cell in run.cells]
        self.news.set()
        return Effect([Outcome(len(run.cells)) for run in runs])

    async def until_seen(self, *expected):
        async with asyncio.timeout(20):
            while not set(expected) <= set(self.seen):
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def masters():
    return MemoryMasters()


@pytest.fixture
async def host(masters):
    made = ConsumerHost(masters, DATASTORE, SETTINGS)
    yield made
    await made.revoked(range(DATASTORE.partitions))


async def added(host, name):
    consumer = MemoryConsumer(name)
    await host.add(Consumer(consumer, consumer))
    return consumer


async def test_every_consumer_gets_the_cells_of_assigned_partitions_once(host, masters):
    """Also one that is added later. What the topic brings again, or in a wrong partition, is nobody's."""
    first = await added(host, "index:one")
    await host.assigned([0])
    masters.heads.update({0: 2, 1: 1, 2: 1})
    await host.take(0, [record(0, 1), record(1, 1, partition=0), record(0, 2), record(0, 2), record(2, 1)])
    await first.until_seen((0, 1), (0, 2), (2, 1))
    second = await added(host, "index:two")
    await second.until_seen((0, 1), (0, 2), (2, 1))
    assert sorted(first.seen) == sorted(second.seen) == [(0, 1), (0, 2), (2, 1)]


async def test_a_revoked_partition_is_not_delivered(host, masters):
    """The cell of the partition that stays, which is taken later, shows that the other one would have come."""
    consumer = await added(host, "trigger:p")
    await host.assigned([0, 1])
    await host.revoked([0])
    masters.heads.update({0: 1, 1: 1})
    await host.take(0, [record(0, 1)])
    await host.take(1, [record(1, 1)])
    await consumer.until_seen((1, 1))
    assert consumer.seen == [(1, 1)]


async def test_what_the_topic_never_brought_is_found_by_the_heads(host, masters):
    """The second look finds shards that have not reached the heads of the first one (I9)."""
    consumer = await added(host, "trigger:p")
    await host.assigned([0])
    masters.heads[0] = 1
    await host.take(0, [record(0, 1)])
    await consumer.until_seen((0, 1))
    masters.heads[0] = 3
    await host.step()
    await host.step()
    await consumer.until_seen((0, 1), (0, 2), (0, 3))


async def test_an_unreachable_cluster_holds_up_its_own_shards_only(host, masters):
    """There is a delivery for each home."""
    consumer = await added(host, "trigger:p")
    masters.unreachable.add("a")
    await host.assigned([0, 1])
    masters.heads.update({0: 1, 1: 1})
    await host.take(0, [record(0, 1)])
    await host.take(1, [record(1, 1)])
    await consumer.until_seen((1, 1))
    assert consumer.seen == [(1, 1)]
    masters.unreachable.clear()
    await consumer.until_seen((0, 1))
