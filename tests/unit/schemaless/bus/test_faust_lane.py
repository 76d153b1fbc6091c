"""A partition's lane between Faust and the receiver: order, and nothing acknowledged before it is finished (I9)."""

import asyncio

import pytest

from schemaless.bus.faust_transport import _LANE_BATCHES_MAX, _LANE_RECORDS_MAX, _PartitionLane


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


@pytest.fixture
async def lane(receiver):
    made = _PartitionLane(3, receiver)
    yield made
    for task in made.tasks:
        task.cancel()


async def busy(lane, receiver):
    """As many batches under way as may be, of one event each; the events."""
    events = [Event(f"first of {n}") for n in range(_LANE_BATCHES_MAX)]
    for event in events:
        await lane.put(event)
        await receiver.begins()
    return events


async def test_a_batch_does_not_wait_for_those_before(lane, receiver):
    """They are begun in order, and each event is acknowledged when its own batch is finished, not before."""
    events = await busy(lane, receiver)
    assert receiver.taken == [(3, [f"first of {n}"]) for n in range(_LANE_BATCHES_MAX)]
    assert not any(event.acknowledged for event in events)
    receiver.may_finish.release()
    async with asyncio.timeout(10):
        await events[0].wait()
    assert [event.acknowledged for event in events] == [True] + [False] * (_LANE_BATCHES_MAX - 1)


async def test_what_came_while_all_were_busy_is_taken_in_one(lane, receiver):
    await busy(lane, receiver)
    late = [Event(1, 2), Event(3), Event(4, 5)]
    for event in late:
        await lane.put(event)
    receiver.may_finish.release()
    await receiver.begins()
    assert receiver.taken[_LANE_BATCHES_MAX:] == [(3, [1, 2, 3, 4, 5])]
    assert not any(event.acknowledged for event in late)


async def test_a_batch_is_bounded(lane, receiver):
    """I14: a consumer that is slow isn't given ever more at a time."""
    await busy(lane, receiver)
    many = range(_LANE_RECORDS_MAX)
    for records in (("second",), many, ("third",)):
        await lane.put(Event(*records))
    for _ in range(2):
        receiver.may_finish.release()
        await receiver.begins()
    assert [len(records) for _, records in receiver.taken[_LANE_BATCHES_MAX:]] == [1 + len(many), 1]


async def test_what_failed_is_not_acknowledged(lane, receiver):
    """It ends the process, and comes again elsewhere."""
    receiver.failing = True
    event = Event(1)
    await lane.put(event)
    done, _ = await asyncio.wait(lane.tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(ZeroDivisionError):
        done.pop().result()
    assert not event.acknowledged
