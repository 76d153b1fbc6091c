"""Those who wait for cells: woken when there may be some, never left waiting, never asking in a loop."""

import asyncio
import itertools
from contextlib import ExitStack

import pytest

from api.follow.followers import Followers, RequestsInFlight
from api.follow.head_watch import FollowedHeads
from api.follow.reread_backoff import PAUSE_MAX_S, PAUSE_S, Lagging
from schemaless.errors import StorageUnavailable, Unavailable
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
        self.asked = 0
        self.heads_asked = 0
        self.away = False

    async def ask(self, seen, watched):
        if self.away:
            raise StorageUnavailable("away")
        operation = shard_head.moved_since(seen, watched)
        answer = None
        try:
            while True:
                script = operation.send(answer)
                self.asked += 1
                answer = [_Result(self._rows(script))]
        except StopIteration as stop:
            return stop.value

    def _rows(self, script):
        if " DIV " in script:
            blocks = {shard // BLOCK_SHARDS for shard in self.heads}
            return [(block, *self._block_sums(block)) for block in blocks]
        if "SUM(head)" in script:
            return [("trips", sum(self.heads.values()), self.generation * len(self.heads))]
        listed = script.split(" IN (")[1].rstrip(")").split(",")
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
async def followers(cluster):
    watch = FollowedHeads(cluster.ask, poll_s=0.001)
    task = asyncio.create_task(watch.run())
    yield Followers({"a": watch}, RequestsInFlight(), followers_max=3)
    task.cancel()


async def test_a_follower_is_woken_by_its_own_shards_only(cluster, followers):
    """When the head passes its position, at once when it has already; otherwise when the time is over."""
    with followers.follow(DATASTORE, [0, 1]) as follower:
        assert await follower.moved({0: Location(1, 4), 1: Location(1, 3)}, 1) == [0]
        here = {0: Location(1, 5), 1: Location(1, 3)}
        assert await follower.moved(here, 0.01) == []
        waiting = asyncio.create_task(follower.moved(here, 5))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        cluster.heads[1] = 4
        assert await waiting == [1]
        assert follower.head(1) == 4


async def test_a_new_generation_wakes_a_follower_that_has_all_cells(cluster, followers):
    """Its location may be superseded: the same added_id in a later generation is further on."""
    with followers.follow(DATASTORE, [0]) as follower:
        waiting = asyncio.create_task(follower.moved({0: Location(1, 5)}, 5))
        await asyncio.sleep(0.01)
        cluster.generation = 2
        assert await waiting == [0]


async def test_nobody_is_asked_while_nobody_follows(cluster, followers):
    """And with followers one small question in a turn, however many they are; heads are asked when something moved."""
    await asyncio.sleep(0.01)
    assert cluster.asked == 0
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(followers.follow(DATASTORE, [0, 1]))
        await asyncio.sleep(0.01)
        assert cluster.asked > 0
    await asyncio.sleep(0.01)
    asked = cluster.asked
    await asyncio.sleep(0.01)
    assert cluster.asked == asked


async def test_one_more_shard_is_known_in_the_next_turn(cluster, followers):
    """Although nothing moved since the others were asked."""
    with followers.follow(DATASTORE, [0]):
        await asyncio.sleep(0.01)
        with followers.follow(DATASTORE, [1]) as later:
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


async def test_a_minion_that_lags_takes_nothing_back(cluster, followers):
    """Heads that a less advanced node shows hide nothing of what is known; a cluster that is away is waited for."""
    with followers.follow(DATASTORE, [0]) as follower:
        assert await follower.moved({0: Location(1, 4)}, 1) == [0]
        cluster.heads[0] = 2
        await asyncio.sleep(0.01)
        assert follower.head(0) == 5
        cluster.away = True
        await asyncio.sleep(0.01)
        cluster.away, cluster.heads[0] = False, 6
        assert await follower.moved({0: Location(1, 5)}, 1) == [0]


async def test_a_follower_that_stands_nowhere_is_woken_once_its_cluster_answers(cluster, followers):
    """It couldn't be read when the call came."""
    cluster.away = True
    with followers.follow(DATASTORE, [0]) as follower:
        assert await follower.moved({0: None}, 0.01) == []
        cluster.away = False
        assert await follower.moved({0: None}, 1) == [0]


async def test_when_the_process_stops_everybody_is_let_go(followers):
    """At once, and nobody follows from then on."""
    with followers.follow(DATASTORE, [0]) as follower:
        waiting = asyncio.create_task(follower.moved({0: Location(1, 5)}, 30))
        await asyncio.sleep(0)
        followers.close()
        assert await asyncio.wait_for(waiting, 1) == []
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


def test_a_shard_that_brings_nothing_is_read_ever_more_seldom():
    """At the same position only, up to a bound; others are not held up by it."""
    now = 0.0
    lagging = Lagging(lambda: now)
    stuck, moving = Location(1, 5), Location(1, 1)
    tries = []
    while now < 10:
        for shard in lagging.due({0: stuck, 1: moving}):
            if shard == 0:
                tries.append(now)
            else:
                moving = Location(1, moving.added_id + 1)
        now += 0.01
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert pauses[0] == pytest.approx(PAUSE_S, abs=0.011)
    assert pauses[-1] == pytest.approx(PAUSE_MAX_S, abs=0.011)
    assert moving.added_id == pytest.approx(1000, abs=2)
    assert lagging.due({0: Location(1, 6)}) == [0]
