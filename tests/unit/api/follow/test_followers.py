"""Those who wait for cells: woken when there may be some, never left waiting, never asking in a loop."""

import asyncio
import itertools
import re
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from api.follow.followers import PAUSE_MAX_S, PAUSE_S, FollowedHeads, Followers, RereadBackoff
from api.http.budget import RequestsInFlight
from schemaless.access import issue, now_us
from schemaless.errors import StorageUnavailable, TooManyRequests, Unavailable
from schemaless.location import Location
from schemaless.storage import shard_head
from schemaless.storage.shard_head import BLOCK_SHARDS
from schemaless.topology import Datastore

DATASTORE = Datastore("trips", 4, 2, ("a",))


class Cluster:
    """Answers what one server would, from its heads by shard; counts the questions."""

    def __init__(self, **heads: int) -> None:
        self.heads = {int(name[1:]): head for name, head in heads.items()}
        self.generation = 1
        self.polls = 0
        self.heads_asked = 0
        self.away = False

    async def ask(self, seen, watched):
        self.polls += 1
        if self.away:
            raise StorageUnavailable("away")
        operation = shard_head.moved_since(seen, watched)
        answer = None
        try:
            while True:
                script = operation.send(answer)
                answer = [_Result(self._rows(script))]
        except StopIteration as stop:
            return stop.value

    def _rows(self, script):
        if " DIV " in script:
            blocks = {shard // BLOCK_SHARDS for shard in self.heads}
            return [(block, *self._block_sums(block)) for block in blocks]
        if "SUM(head)" in script:
            return [("trips", sum(self.heads.values()), self.generation * len(self.heads))]
        listed = re.search(r" IN \(([\d,]+)\)", script)[1].split(",")
        self.heads_asked = len(listed)
        return [(int(shard), self.generation, self.heads[int(shard)], 0) for shard in listed]

    def _block_sums(self, block):
        heads = [head for shard, head in self.heads.items() if shard // BLOCK_SHARDS == block]
        return sum(heads), self.generation * len(heads)


class _Result:
    def __init__(self, rows):
        self.rows = rows


@pytest.fixture
def cluster():
    return Cluster(s0=5, s1=3)


@pytest.fixture
def watch(cluster):
    """Polls when the test says so."""
    return FollowedHeads(cluster.ask, poll_s=1)


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def followers(watch, clock):
    return Followers({"a": watch}, RequestsInFlight(), followers_max=3, clock=lambda: clock.now)


async def settled():
    """All tasks have run as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_follower_is_woken_by_its_own_shards_only(cluster, watch, followers):
    """When the head passes its position, at once when it has already, and not by a poll that shows nothing new."""
    with followers.follow(DATASTORE, [0, 1]) as follower:
        await watch.step()
        assert await follower.moved({0: Location(1, 4), 1: Location(1, 3)}, 1) == [0]
        waiting = asyncio.create_task(follower.moved({0: Location(1, 5), 1: Location(1, 3)}, 5))
        await watch.step()
        await settled()
        assert not waiting.done()
        cluster.heads[1] = 4
        await watch.step()
        assert await waiting == [1]
        assert follower.head(1) == 4


async def test_when_the_time_is_over_nothing_has_moved(cluster, watch, followers, clock):
    """The follower is at the head of the shard that it waits for, and only another one moves."""
    with followers.follow(DATASTORE, [0, 1]) as follower:
        await watch.step()
        waiting = asyncio.create_task(follower.moved({0: Location(1, 5)}, 5))
        await settled()
        clock.now += 5
        cluster.heads[1] = 4
        await watch.step()
        assert await waiting == []


async def test_a_new_generation_wakes_a_follower_that_has_all_cells(cluster, watch, followers):
    """Its location may be superseded: the same added_id in a later generation is further on."""
    with followers.follow(DATASTORE, [0]) as follower:
        await watch.step()
        waiting = asyncio.create_task(follower.moved({0: Location(1, 5)}, 5))
        await settled()
        cluster.generation = 2
        await watch.step()
        assert await waiting == [0]


async def test_nothing_is_asked_while_nobody_follows(cluster):
    """The first question comes with the first follower, and the last one with the last."""
    paused = asyncio.Queue()
    polls = asyncio.Event()

    async def pause(seconds):
        paused.put_nowait(seconds)
        await polls.wait()

    watch = FollowedHeads(cluster.ask, poll_s=0.5, pause=pause)
    followers = Followers({"a": watch}, RequestsInFlight(), followers_max=3)
    running = asyncio.create_task(watch.run())
    await settled()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(followers.follow(DATASTORE, [0, 1]))
        assert await paused.get() == 0.5
        assert cluster.polls == 1
    polls.set()
    await settled()
    polls.clear()
    with followers.follow(DATASTORE, [0]):
        await paused.get()
        assert cluster.polls == 2
    running.cancel()


async def test_one_more_shard_is_known_after_the_next_poll(watch, followers):
    """Although nothing moved since the others were asked."""
    with followers.follow(DATASTORE, [0]):
        await watch.step()
        with followers.follow(DATASTORE, [1]) as later:
            await watch.step()
            assert await later.moved({1: Location(1, 2)}, 1) == [1]


async def test_of_many_shards_only_the_heads_of_their_block_are_read(cluster):
    """Whoever follows thousands doesn't cost the server as many heads whenever one moves."""
    cluster.heads = dict.fromkeys(range(1000), 1)
    wide = Datastore("trips", 1000, 1, ("a",))
    watch = FollowedHeads(cluster.ask, poll_s=1)
    with Followers({"a": watch}, RequestsInFlight(), followers_max=3).follow(wide, range(1000)) as follower:
        await watch.step()
        assert cluster.heads_asked == 1000
        here = dict.fromkeys(range(1000), Location(1, 1))
        for shard in (999, 0, 500):
            cluster.heads[shard] += 1
            await watch.step()
            assert cluster.heads_asked <= BLOCK_SHARDS
            assert await follower.moved(here, 0) == [shard]
            here[shard] = Location(1, 2)


async def test_a_minion_that_lags_takes_nothing_back(cluster, watch, followers):
    """Heads that a less advanced node shows hide nothing of what is known; an unreachable cluster is waited for."""
    with followers.follow(DATASTORE, [0]) as follower:
        await watch.step()
        assert await follower.moved({0: Location(1, 4)}, 1) == [0]
        cluster.heads[0] = 2
        await watch.step()
        assert follower.head(0) == 5
        cluster.away = True
        await watch.step()
        cluster.away, cluster.heads[0] = False, 6
        await watch.step()
        assert await follower.moved({0: Location(1, 5)}, 1) == [0]


async def test_a_follower_without_a_position_is_woken_once_its_cluster_answers(cluster, watch, followers):
    """It couldn't be read when the request came."""
    cluster.away = True
    with followers.follow(DATASTORE, [0]) as follower:
        await watch.step()
        assert await follower.moved({0: None}, 0) == []
        cluster.away = False
        await watch.step()
        assert await follower.moved({0: None}, 0) == [0]


async def test_when_the_process_stops_every_wait_ends(followers):
    """At once, and nobody follows from then on."""
    with followers.follow(DATASTORE, [0]) as follower:
        waiting = asyncio.create_task(follower.moved({0: Location(1, 5)}, 30))
        await settled()
        followers.close()
        assert await waiting == []
        with pytest.raises(Unavailable), followers.follow(DATASTORE, [0]):
            pass
    assert len(followers) == 0


async def test_followers_are_bounded_and_are_no_calls_in_flight(cluster):
    """Each gives its place among the calls back while it follows."""
    in_flight = RequestsInFlight(5)
    followers = Followers({"a": FollowedHeads(cluster.ask, poll_s=1)}, in_flight, followers_max=2)
    with followers.follow(DATASTORE, [0]), followers.follow(DATASTORE, [0]):
        assert in_flight.count == 3
        with pytest.raises(Unavailable), followers.follow(DATASTORE, [0]):
            pass
    assert (in_flight.count, len(followers)) == (5, 0)


async def test_one_token_has_half_of_the_places(cluster):
    """Another one still finds some."""
    flood, honest = (issue(name, ["*"], "read", "1h", now_us())[1] for name in ("flood", "honest"))
    in_flight = RequestsInFlight()
    followers = Followers({"a": FollowedHeads(cluster.ask, poll_s=1)}, in_flight, followers_max=4)
    in_flight.begin(flood)
    with followers.follow(DATASTORE, [0], flood), followers.follow(DATASTORE, [0], flood):
        with pytest.raises(TooManyRequests), followers.follow(DATASTORE, [0], flood):
            pass
        with followers.follow(DATASTORE, [0], honest):
            pass
    assert (in_flight.count, in_flight.of(flood), in_flight.of(honest)) == (1, 1, 0)


def test_a_shard_that_brings_nothing_is_read_ever_more_seldom():
    """At the same position only, up to a bound; others are not held up by it."""
    now = 0.0
    rereads = RereadBackoff(lambda: now)
    stuck, moving = Location(1, 5), Location(1, 1)
    tries = []
    while now < 10:
        for shard in rereads.due({0: stuck, 1: moving}):
            if shard == 0:
                tries.append(now)
            else:
                moving = Location(1, moving.added_id + 1)
        now += 0.01
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert pauses[0] == pytest.approx(PAUSE_S, abs=0.011)
    assert pauses[-1] == pytest.approx(PAUSE_MAX_S, abs=0.011)
    assert moving.added_id == pytest.approx(1000, abs=2)
    assert rereads.due({0: Location(1, 6)}) == [0]
