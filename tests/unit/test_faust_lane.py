"""A partition's lane between Faust and the receiver: order, and nothing acknowledged before it is finished (I9)."""

import asyncio

import pytest

from schemaless.bus.faust_transport import _Lane


class Event:
    def __init__(self, *records):
        self.value = records
        self._acknowledged = asyncio.Event()
        self.wait = self._acknowledged.wait

    @property
    def acknowledged(self):
        return self._acknowledged.is_set()

    def ack(self):
        self._acknowledged.set()


class SlowReceiver:
    """Finishes a batch when it is let."""

    def __init__(self):
        self.taken = []
        self.begun = asyncio.Event()
        self.may_finish = asyncio.Semaphore(0)

    async def take(self, partition, records):
        self.taken.append((partition, records))
        self.begun.set()
        await self.may_finish.acquire()


@pytest.fixture
async def receiver():
    return SlowReceiver()


async def test_what_came_while_a_batch_was_handled_is_taken_in_one(receiver):
    lane = _Lane(3, receiver)
    events = [Event(1, 2), Event(3), Event(4, 5)]
    await lane.put(events[0])
    await receiver.begun.wait()
    await lane.put(events[1])
    await lane.put(events[2])
    assert not any(event.acknowledged for event in events)

    receiver.begun.clear()
    receiver.may_finish.release()
    async with asyncio.timeout(10):
        await receiver.begun.wait()
    assert receiver.taken == [(3, [1, 2]), (3, [3, 4, 5])]
    assert [event.acknowledged for event in events] == [True, False, False]

    receiver.may_finish.release()
    async with asyncio.timeout(10):
        await events[2].wait()
    assert events[1].acknowledged
    lane.task.cancel()
