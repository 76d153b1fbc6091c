"""cells_topic on a real broker: what an agent is given, what is committed, and that a crash loses nothing."""

import asyncio

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer
from confluent_kafka.admin import AdminClient

from schemaless import cells_topic, each_cell, faust_app
from schemaless.codec import encode_record
from schemaless.location import GenerationStart
from tests.topic_harness import announce, new_topic, produce_foreign, publish, stored_cell
from tests.waiting import async_until

pytestmark = pytest.mark.usefixtures("faust_garbage")


class Agent:
    """An app with one agent that keeps what it was given, and raises once it is given `poison`."""

    def __init__(self, kafka, datastore, group, poison=None):
        self.given = []
        self.poison = poison
        self.app = faust_app(group, kafka, broker_commit_interval=0.3)
        self.topic = cells_topic(self.app, datastore.name)
        self.app.agent(self.topic)(self.work)

    async def work(self, stream):
        async for cell in each_cell(stream):
            if cell.added_id == self.poison:
                raise RuntimeError("poison")
            self.given.append(cell.added_id)

    async def __aenter__(self):
        self.app.finalize()
        await self.app.maybe_start()
        return self

    async def __aexit__(self, *_):
        self.app.conf.stream_wait_empty = False
        await self.app.stop()

    async def wait_for(self, condition):
        await async_until(lambda: condition(self), lambda: self.given)


def committed(kafka, datastore, group):
    """The group's offset of partition 0; -1: none."""
    admin = AdminClient({"bootstrap.servers": kafka})
    (asked,) = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
    places = asked.result(10).topic_partitions
    return max((place.offset for place in places if place.topic == datastore.topic), default=-1)


def abort(kafka, datastore):
    """A transaction that leaves records behind which nobody may see."""
    producer = Producer({"bootstrap.servers": kafka, "transactional.id": f"{datastore.name}.aborted"})
    producer.init_transactions(10)
    producer.begin_transaction()
    headers = [("v", b"1"), ("kind", b"cell")]
    producer.produce(datastore.topic, encode_record(stored_cell(0, 999)), partition=0, headers=headers)
    producer.flush(10)
    producer.abort_transaction(10)


async def test_an_agent_is_given_cells_and_nothing_else(kafka):
    """Committed ones, in order; notices and foreign records are counted, and offsets are committed across them."""
    datastore = new_topic(kafka)
    publish(kafka, datastore, [stored_cell(0, n) for n in range(1, 6)])
    foreign = produce_foreign(kafka, datastore, [b"", b"\xc1", b"x" * 1000])
    abort(kafka, datastore)
    announce(kafka, datastore, 0, GenerationStart(2, 6))
    publish(kafka, datastore, [stored_cell(0, n, generation=2) for n in range(6, 9)])
    group = f"{datastore.name}.agents"
    async with Agent(kafka, datastore, group) as agent:
        await agent.wait_for(lambda agent: len(agent.given) == 8)
        publish(kafka, datastore, [stored_cell(0, 9, generation=2)])
        await agent.wait_for(lambda agent: len(agent.given) == 9)
        last = 5 + 1 + 3 + 2 + 2 + 3 + 1 + 1  # cells, foreign, aborted, announced, cells, one more; and their markers

        async def are_committed():
            return await asyncio.to_thread(committed, kafka, datastore, group) >= last

        await async_until(are_committed)
        counts = agent.topic.counts
    assert agent.given == list(range(1, 10))
    assert (counts.cells, counts.generations, counts.foreign) == (9, 1, 3)
    assert [found.offset for found in counts.named] == foreign


async def test_a_cell_whose_agent_raised_comes_again(kafka):
    """Foreign records behind it, acknowledged at once, commit nothing of it: the next process is given it first."""
    datastore = new_topic(kafka)
    publish(kafka, datastore, [stored_cell(0, n) for n in range(1, 21)])
    produce_foreign(kafka, datastore, [b"not ours"] * 50)
    publish(kafka, datastore, [stored_cell(0, n) for n in range(21, 31)])
    group = f"{datastore.name}.agents"
    async with Agent(kafka, datastore, group, poison=8) as first:
        await first.wait_for(lambda agent: agent.app.crash_reason is not None)
    assert first.given == [1, 2, 3, 4, 5, 6, 7]
    async with Agent(kafka, datastore, group) as second:
        await second.wait_for(lambda agent: agent.given[-1:] == [30])
    assert second.given == list(range(second.given[0], 31))
    assert second.given[0] <= 8
