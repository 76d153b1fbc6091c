"""Queries that wait for an index to reach a put: they share polls, and none is left waiting."""

import asyncio
from types import SimpleNamespace

import pytest

from api.index.entry_reader import PAUSE_MAX_S, PAUSE_S, CheckpointsAt, CheckpointWaiter
from schemaless.errors import StorageUnavailable
from schemaless.location import Location, ShardLocation

PLACE = CheckpointsAt("a", None, "trips", "index:driver")


class Index:
    """Shows its checkpoints by shard. The test lets each pause end, and counts what was asked."""

    def __init__(self):
        self.reached = {}
        self.asked = []
        self.pauses = asyncio.Queue()
        self.now = 100.0
        self.error = None

    async def read(self, cluster, operation, datastore, consumer, shards, *, read_from):
        self.asked.append(shards)
        if self.error is not None:
            raise self.error
        checkpoints = [SimpleNamespace(shard=shard, location=Location(1, n)) for shard, n in self.reached.items()]
        return checkpoints, None

    async def pause(self, seconds):
        end = asyncio.get_running_loop().create_future()
        self.pauses.put_nowait((seconds, end))
        await end

    async def poll(self):
        """Ends the pause under way, and returns how long it was to be and the next one has begun, if there is one."""
        seconds, end = await self.pauses.get()
        end.set_result(None)
        for _ in range(10):
            await asyncio.sleep(0)
        return seconds


@pytest.fixture
def index():
    return Index()


@pytest.fixture
def waiter(index):
    return CheckpointWaiter(index, clock=lambda: index.now, pause=index.pause)


def waiting_for(waiter, shard, added_id, place=PLACE):
    return asyncio.create_task(waiter.reached(place, ShardLocation(shard, Location(1, added_id))))


async def test_a_query_waits_until_its_own_shard_has_reached_the_put(index, waiter):
    """A poll that shows too little, or another shard only, wakes nobody."""
    query = waiting_for(waiter, 3, 10)
    for reached in ({}, {3: 9}, {3: 9, 4: 99}):
        index.reached = reached
        await index.poll()
        assert not query.done()
    index.reached = {3: 10}
    await index.poll()
    await query


async def test_a_checkpoint_that_goes_ends_the_wait(index, waiter):
    """The index was dropped. Where none was seen yet, a minion may only be late."""
    query = waiting_for(waiter, 3, 10)
    for reached in ({}, {3: 9}):
        index.reached = reached
        await index.poll()
        assert not query.done()
    index.reached = {}
    await index.poll()
    await query


async def test_a_checkpoint_that_went_before_the_first_poll_ends_the_wait_of_who_had_seen_it(index, waiter):
    """The index may be dropped between a query's page and its wait."""
    unseen = waiting_for(waiter, 3, 10)
    seen = asyncio.create_task(waiter.reached(PLACE, ShardLocation(3, Location(1, 10)), has_seen=True))
    await index.poll()
    await seen
    assert not unseen.done()
    unseen.cancel()


async def test_queries_of_one_index_share_polls(index, waiter):
    """One question for all of them; each leaves when its own put is reached, and then nobody asks any more."""
    first, second, third = (waiting_for(waiter, shard, 5) for shard in (1, 2, 2))
    index.reached = {1: 5}
    await index.poll()
    assert index.asked == [[1, 2]]
    assert (first.done(), second.done(), third.done()) == (True, False, False)
    index.reached = {2: 7}
    await index.poll()
    await asyncio.gather(first, second, third)
    assert index.asked == [[1, 2], [2]]
    later = waiting_for(waiter, 4, 1)
    index.reached = {4: 1}
    while not later.done():
        await index.poll()
    assert index.asked == [[1, 2], [2], [4]]


async def test_an_unreachable_node_ends_every_wait_and_the_next_query_asks_again(index, waiter):
    """The caller answers 503 with it; nothing of the failed poll stays."""
    queries = [waiting_for(waiter, shard, 5) for shard in (1, 2)]
    index.error = StorageUnavailable("down")
    await index.poll()
    assert [str(error) for error in await asyncio.gather(*queries, return_exceptions=True)] == ["down", "down"]
    index.error, index.reached = None, {1: 5}
    again = waiting_for(waiter, 1, 5)
    await index.poll()
    await again


async def test_a_query_that_is_cancelled_takes_nobody_with_it(index, waiter):
    """Its time was over; the other one still gets its answer."""
    gone, stays = waiting_for(waiter, 1, 5), waiting_for(waiter, 2, 5)
    await asyncio.sleep(0)
    gone.cancel()
    index.reached = {2: 5}
    await index.poll()
    await stays
    assert index.asked == [[2]]


async def test_pauses_grow_with_the_wait_and_shrink_for_a_newcomer(index, waiter):
    """Who has waited for long can wait a tenth of that longer; a new query is answered soon."""
    first = waiting_for(waiter, 1, 5)
    assert await index.poll() == PAUSE_S
    index.now += 0.2
    assert await index.poll() == PAUSE_S  # it began before the time passed
    assert await index.poll() == pytest.approx(0.02)
    index.now += 100
    await index.poll()
    assert await index.poll() == PAUSE_MAX_S
    second = waiting_for(waiter, 1, 5)
    await index.poll()
    assert await index.poll() == PAUSE_S
    index.reached = {1: 5}
    await index.poll()
    await asyncio.gather(first, second)
