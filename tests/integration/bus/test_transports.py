"""What a transport must do for us on a transactional topic: the contract of both, and what we replace of Faust."""

import asyncio
import itertools
import time

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from schemaless.bus.faust_transport import FaustTransport
from schemaless.bus.plain_transport import PlainTransport
from schemaless.bus.topics import ensure_topics
from schemaless.consume.host import Consumer as ConsumerOfHost
from schemaless.consume.host import ConsumerHost
from schemaless.errors import BusUnavailable, SchemalessError
from tests.topic_harness import new_topic, publish, stored_cell
from tests.unit.schemaless.consume.test_host import SETTINGS as HOST_SETTINGS
from tests.unit.schemaless.consume.test_host import MemoryConsumer, MemoryMasters
from tests.waiting import async_until

pytestmark = pytest.mark.usefixtures("faust_garbage")

PARTITIONS = 3
READ_PAUSE_S = 0.03
GREETING = b"greeting "


class Collector:
    """A receiver that keeps what it was given, by partition."""

    def __init__(self):
        self.values = {n: [] for n in range(PARTITIONS)}
        self.kinds = set()
        self.kept = []
        self.fetches = 0
        self.owned = []
        self.transport = None
        self.assigned_at_all = asyncio.Event()
        self.greeted = {n: b"" for n in range(PARTITIONS)}

    async def assigned(self, partitions, kept=()):
        self.owned = list(partitions)
        self.kept.append(list(kept))
        self.assigned_at_all.set()

    async def revoked(self, partitions):
        self.owned = [n for n in self.owned if n not in set(partitions)]

    def take(self, partition, records):
        self.fetches += 1
        self.kinds.update(record.kind for record in records)
        for record in records:
            if record.value.startswith(GREETING):
                self.greeted[partition] = record.value
            else:
                self.values[partition].append(record.value)

    async def wait_for(self, count):
        await async_until(lambda: self.count() >= count, self.count)

    def count(self):
        return sum(map(len, self.values.values()))


@pytest.fixture
def datastore(make_datastore, kafka):
    made = make_datastore(shards=PARTITIONS, partitions=PARTITIONS)
    ensure_topics(kafka, made)
    return made


@pytest.fixture(params=[FaustTransport, PlainTransport])
def kind(request):
    return request.param


class running:  # reads as `async with running(…) as collector`
    """A transport in this event loop, with its partitions assigned."""

    def __init__(self, kafka, datastore, kind=FaustTransport, **options):
        self.kafka, self.datastore = kafka, datastore
        self._greetings = itertools.count()
        self.collector = Collector()
        self.transport = kind(kafka, f"{datastore.name}.test", datastore.topic, self.collector, **options)
        self.collector.transport = self.transport

    async def __aenter__(self):
        self.task = asyncio.create_task(self.transport.run())
        await self.collector.assigned_at_all.wait()
        await self.greeting()
        return self.collector

    async def greeting(self):
        """Writes records of their own until one has come from each partition of this member.

        What was written before has come, too. The first ones may be lost, because "latest" is looked up later.
        """
        for number in self._greetings:
            greeting = GREETING + str(number).encode()
            await asyncio.to_thread(greet, self.kafka, self.datastore, greeting)
            for _ in range(20):
                if {self.collector.greeted[n] for n in self.collector.owned} == {greeting}:
                    return
                await asyncio.sleep(0.02)

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.wait({self.task})


def greet(kafka, datastore, greeting):
    producer = Producer({"bootstrap.servers": kafka, "linger.ms": 0})
    for partition in range(PARTITIONS):
        producer.produce(datastore.topic, greeting, partition=partition, headers=[("v", b"1"), ("kind", b"cell")])
    assert producer.flush(10) == 0


def produce(kafka, datastore, transactions, first=0, size=5):
    """Transactions over all partitions, every third aborted; the committed values by partition, in order."""
    producer = Producer({"bootstrap.servers": kafka, "transactional.id": f"{datastore.name}.test", "linger.ms": 0})
    producer.init_transactions(10)
    committed = {n: [] for n in range(PARTITIONS)}
    for number in range(first, first + transactions):
        producer.begin_transaction()
        values = [f"{number}.{n}".encode() for n in range(size)]
        for partition in range(PARTITIONS):
            for value in values:
                producer.produce(datastore.topic, value, partition=partition, headers=[("v", b"1"), ("kind", b"cell")])
        producer.flush(10)
        if number % 3 == 1:
            producer.abort_transaction(10)
        else:
            producer.commit_transaction(10)
            for found in committed.values():
                found.extend(values)
    return committed


def trickle(kafka, datastore, records):
    """One record after the other, about 3 ms apart."""
    producer = Producer({"bootstrap.servers": kafka, "linger.ms": 0})
    for number in range(records):
        producer.produce(datastore.topic, b"%d" % number, partition=0, headers=[("v", b"1"), ("kind", b"cell")])
        producer.poll(0.003)
    assert producer.flush(10) == 0


def count(committed):
    return sum(map(len, committed.values()))


def lag(kafka, datastore):
    """Offsets of the topic that the group has not committed."""
    admin = AdminClient({"bootstrap.servers": kafka})
    group = f"{datastore.name}.test"
    (future,) = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
    offsets = {tp.partition: tp.offset for tp in future.result().topic_partitions if tp.topic == datastore.topic}
    reader = Consumer({"bootstrap.servers": kafka, "group.id": "x", "isolation.level": "read_committed"})
    ends = {
        n: reader.get_watermark_offsets(TopicPartition(datastore.topic, n), timeout=10)[1] for n in range(PARTITIONS)
    }
    reader.close()
    return sum(ends[n] - max(0, offsets.get(n, 0)) for n in ends)


async def test_committed_records_arrive_in_order_and_aborted_ones_never(kafka, datastore, kind):
    """All of each partition, once, in the order of the topic, and nothing of a transaction that was aborted."""
    member = running(kafka, datastore, kind)
    async with member as collector:
        committed = await asyncio.to_thread(produce, kafka, datastore, 30)
        await collector.wait_for(count(committed))
        await member.greeting()
        assert collector.values == committed
        assert collector.kinds == {b"cell"}


async def test_a_new_group_begins_at_the_end_of_the_topic(kafka, datastore, kind):
    """History comes from MySQL, several times faster. And nobody makes topics beside ours."""
    await asyncio.to_thread(produce, kafka, datastore, 3)
    member = running(kafka, datastore, kind)
    async with member as collector:
        await member.greeting()
        assert collector.values == {n: [] for n in range(PARTITIONS)}
        topics = await asyncio.to_thread(AdminClient({"bootstrap.servers": kafka}).list_topics, None, 10)
        assert not [name for name in topics.topics if f"{datastore.name}.test" in name]


async def test_on_faust_a_member_may_be_idle_for_a_day(kafka, datastore):
    """aiokafka takes a member for hung that has no partitions to read. It leaves the group then, and never joins."""
    async with running(kafka, datastore) as collector:
        assert collector.transport._thread._ensure_consumer()._coordinator._max_poll_interval >= 86_400


async def test_on_faust_the_task_that_knows_the_brokers_is_started_again(kafka, datastore):
    """uvloop ends it with an error that aiokafka doesn't expect. The group's coordinator is never found again then."""
    member = running(kafka, datastore)
    async with member as collector:
        thread = collector.transport._thread
        client = thread._ensure_consumer()._client
        died = []

        async def die():
            raise RuntimeError("unable to perform operation: the handler is closed")

        def swap():
            client._sync_task.cancel()
            client._sync_task = asyncio.ensure_future(die())
            died.append(client._sync_task)

        thread.thread_loop.call_soon_threadsafe(swap)
        await async_until(lambda: died and client._sync_task is not died[0] and not client._sync_task.done())
        committed = await asyncio.to_thread(produce, kafka, datastore, 3)
        await collector.wait_for(count(committed))


async def test_offsets_are_committed_across_markers_and_aborted_records(kafka, datastore):
    """The group's offsets come within the last transaction's marker of the end, not one transaction each interval."""
    async with running(kafka, datastore) as collector:
        committed = await asyncio.to_thread(produce, kafka, datastore, 60)
        await collector.wait_for(count(committed))

        async def committed_all():
            return await asyncio.to_thread(lag, kafka, datastore) <= PARTITIONS

        # 59 % 3 == 2: the last transaction was committed, so only its marker lies behind the last record.
        await async_until(committed_all)


async def test_the_next_member_goes_on_where_the_last_one_stopped(kafka, datastore):
    """What was acknowledged before an orderly stop doesn't come again; what was produced meanwhile does."""
    async with running(kafka, datastore) as first:
        before = await asyncio.to_thread(produce, kafka, datastore, 6)
        await first.wait_for(count(before))
    between = await asyncio.to_thread(produce, kafka, datastore, 6, 6)
    member = running(kafka, datastore)
    async with member as second:
        await second.wait_for(count(between))
        await member.greeting()
        assert second.values == between


async def test_records_that_come_soon_after_one_another_are_read_together(kafka, datastore, kind):
    """Work for each read is bounded: there is at most one in the pause."""
    member = running(kafka, datastore, kind, read_pause_s=READ_PAUSE_S)
    async with member as collector:
        before, began = collector.fetches, time.monotonic()
        await asyncio.to_thread(trickle, kafka, datastore, 150)
        await collector.wait_for(150)
        assert collector.fetches - before <= (time.monotonic() - began) / READ_PAUSE_S + 2


async def test_a_failure_of_the_receiver_ends_the_transport(kafka, datastore, kind):
    """No offset is committed behind a failure: `run` raises, and the process is started again."""
    member = running(kafka, datastore, kind)
    async with member as collector:

        def fail(partition, records):
            raise RuntimeError("broken")

        collector.take = fail
        await asyncio.to_thread(produce, kafka, datastore, 1)
        await asyncio.wait({member.task})
        assert isinstance(member.task.exception(), BusUnavailable)
        assert isinstance(member.task.exception().__cause__, RuntimeError)
    assert await asyncio.to_thread(lag, kafka, datastore) > PARTITIONS


async def test_on_faust_the_group_confirms_a_member_of_its_present_generation(kafka, datastore):
    """I10: an offset commit is answered without error for nobody else."""
    member = running(kafka, datastore)
    async with member:
        assert member.transport.is_alive()
        await member.transport.confirm([0, 2])
        coordinator = member.transport._thread._ensure_consumer()._coordinator
        generation, coordinator.generation = coordinator.generation, coordinator.generation - 1
        with pytest.raises(BusUnavailable):
            await member.transport.confirm([0])
        coordinator.generation = generation


async def test_a_member_confirms_only_what_it_owns(kafka, datastore):
    async with running(kafka, datastore, PlainTransport) as first, running(kafka, datastore, PlainTransport) as second:
        await async_until(lambda: first.owned and second.owned and len(first.owned) + len(second.owned) == PARTITIONS)
        await first.transport.confirm(first.owned)
        with pytest.raises(BusUnavailable, match="aren't ours"):
            await first.transport.confirm(second.owned)


async def test_a_member_whose_session_is_a_second_may_call(kafka, datastore, kind):
    """Its heartbeats come more often then. The group keeps it."""
    async with running(kafka, datastore, kind, session_timeout_s=1.0) as member:
        await async_until(member.transport.is_alive)
        await member.transport.confirm(member.owned)
        assert len(member.owned) == PARTITIONS


@pytest.mark.parametrize(("there", "newcomer"), [(FaustTransport, PlainTransport), (PlainTransport, FaustTransport)])
async def test_a_member_with_the_other_transport_is_refused_and_the_group_goes_on(kafka, datastore, there, newcomer):
    """Two ways of assigning in one group would give a partition to two processes."""
    member = running(kafka, datastore, there)
    async with member as collector:
        other = running(kafka, datastore, newcomer)
        refused = asyncio.create_task(other.transport.run())
        await asyncio.wait({refused})
        assert isinstance(refused.exception(), SchemalessError)
        assert "need the same transport" in str(refused.exception())
        assert not other.collector.owned
        committed = await asyncio.to_thread(produce, kafka, datastore, 3)
        await collector.wait_for(count(committed))
        assert collector.values == committed


async def test_partitions_that_come_back_in_the_next_generation_are_kept(kafka, datastore, kind):
    """Eager assignment takes all away from everybody. Between two generations that follow, nobody else had them."""
    async with running(kafka, datastore, kind) as first:
        async with running(kafka, datastore, kind) as second:
            await async_until(
                lambda: first.owned and second.owned and len(first.owned) + len(second.owned) == PARTITIONS
            )
            assert first.kept[-1] == first.owned
            assert second.kept[-1] == []
        await async_until(lambda: len(first.owned) == PARTITIONS)  # no rebalance is under way when the loop closes


class GatedConsumer(MemoryConsumer):
    """A trigger program whose calls of a shard wait at its gate, if it has one."""

    together = False

    def __init__(self, name):
        super().__init__(name)
        self.gates = {}

    async def handle(self, runs):
        if (gate := self.gates.get(runs[0].shard)) is not None:
            await gate.wait()
        return await super().handle(runs)

    def places(self, shard):
        return [added_id for number, added_id in self.seen if number == shard]


async def test_a_slow_shard_and_a_cluster_that_is_away_hold_up_no_other(kafka, kind):
    """I9: all of them are in one partition of the topic, and the group has one member."""
    datastore = new_topic(kafka, shards=4, partitions=1, placement=("a", "b"))
    masters, consumer = MemoryMasters(), GatedConsumer("trigger:p")
    host = ConsumerHost(masters, datastore, HOST_SETTINGS)
    await host.add(ConsumerOfHost(consumer, consumer))
    transport = kind(kafka, f"{datastore.name}.test", datastore.topic, host)
    host.join(transport)
    tasks = [asyncio.create_task(transport.run()), asyncio.create_task(host.run())]

    async def bring(added_id):
        await asyncio.to_thread(publish, kafka, datastore, [stored_cell(shard, added_id) for shard in range(4)])
        masters.heads.update(dict.fromkeys(range(4), added_id))

    try:
        await bring(1)
        await async_until(lambda: sorted(consumer.seen) == [(0, 1), (1, 1), (2, 1), (3, 1)])
        consumer.gates[1] = asyncio.Event()
        masters.unreachable.add("a")
        for added_id in (2, 3, 4):
            await bring(added_id)
            await async_until(lambda added_id=added_id: consumer.places(3)[-1] == added_id)
        assert consumer.places(3) == [1, 2, 3, 4]
        assert consumer.places(1) == [1]
        masters.unreachable.clear()
        consumer.gates[1].set()
        await async_until(lambda: len(consumer.seen) == 16)
        assert [consumer.places(shard) for shard in range(4)] == [[1, 2, 3, 4]] * 4
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_topic_that_was_made_anew_is_read_within_a_session(kafka, datastore, kind):
    """The clients look for new topics and partitions every few seconds, and not every five minutes."""
    async with running(kafka, datastore, kind) as collector:
        admin = AdminClient({"bootstrap.servers": kafka})
        await asyncio.to_thread(admin.delete_topics([datastore.topic])[datastore.topic].result)
        await async_until(lambda: not collector.owned)
        await asyncio.to_thread(ensure_topics, kafka, datastore)
        await async_until(lambda: sorted(collector.owned) == list(range(PARTITIONS)))
