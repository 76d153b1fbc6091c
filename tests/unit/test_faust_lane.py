"""A partition's lane between Faust and the receiver: order, and nothing acknowledged before it is finished (I9)."""

import asyncio

import pytest

from schemaless.bus.faust_transport import _LANE_RECORDS_MAX, _Lane


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
        self.failing = False
        self.may_finish = asyncio.Semaphore(0)
        self._begun = asyncio.Semaphore(0)

    async def take(self, partition, records):
        if self.failing:
            raise ZeroDivisionError
        self.taken.append((partition, records))
        self._begun.release()
        await self.may_finish.acquire()

    async def begins(self):
        """Returns when one more batch was begun."""
        async with asyncio.timeout(10):
            await self._begun.acquire()


@pytest.fixture
async def receiver():
    return SlowReceiver()


async def test_what_came_while_a_batch_was_handled_is_taken_in_one(receiver):
    """And each event is acknowledged when its batch is finished, not before."""
    lane = _Lane(3, receiver)
    events = [Event(1, 2), Event(3), Event(4, 5)]
    await lane.put(events[0])
    await receiver.begins()
    await lane.put(events[1])
    await lane.put(events[2])
    assert not any(event.acknowledged for event in events)

    receiver.may_finish.release()
    await receiver.begins()
    assert receiver.taken == [(3, [1, 2]), (3, [3, 4, 5])]
    assert [event.acknowledged for event in events] == [True, False, False]

    receiver.may_finish.release()
    async with asyncio.timeout(10):
        await events[2].wait()
    assert events[1].acknowledged
    lane.task.cancel()


async def test_a_batch_is_bounded(receiver):
    """I14: a consumer that is slow isn't given ever more at a time."""
    lane = _Lane(0, receiver)
    many = range(_LANE_RECORDS_MAX)
    await lane.put(Event("first"))
    await receiver.begins()
    for records in (("second",), many, ("third",)):
        await lane.put(Event(*records))
    for _ in range(2):
        receiver.may_finish.release()
        await receiver.begins()
    assert [len(records) for _, records in receiver.taken] == [1, 1 + len(many), 1]
    lane.task.cancel()


async def test_what_failed_is_not_acknowledged(receiver):
    """It ends the process, and comes again elsewhere."""
    lane = _Lane(0, receiver)
    receiver.failing = True
    event = Event(1)
    await lane.put(event)
    with pytest.raises(ZeroDivisionError):
        await lane.task
    assert not event.acknowledged
