"""How far an index is behind: what samples say, what they cost, and what is not known."""

import asyncio
import math

import pytest

from api.index.freshness import AGE_MAX_S, KNOWN_S, UNKNOWN, IndexFreshness
from api.read.reader import Served
from schemaless.errors import StorageUnavailable
from schemaless.location import GenerationStart, Location
from schemaless.storage import checkpoint_table, shard_head, shard_log
from schemaless.storage.shard_head import Head, Moment
from schemaless.topology import Datastore, Role

DATASTORE = Datastore("trips", 4, 1, ("a", "b"))
SECOND = 1_000_000


class Servers:
    """Heads and checkpoints by shard, and when the cell at each head was created."""

    def __init__(self):
        self.heads = dict.fromkeys(range(4), 10)
        self.reached = dict.fromkeys(range(4), Location(1, 10))
        self.starts = {}
        self.server_s, self.now = 1000, 50.0
        self.asked = 0
        self.away = False

    async def read(self, cluster, operation, *args, read_from):
        assert read_from is Role.MASTER
        await asyncio.sleep(0)
        if self.away:
            raise StorageUnavailable("away")
        self.asked += 1
        if operation is shard_head.moment:
            here = [shard for shard in self.heads if DATASTORE.home(shard) == cluster]
            heads = [Head(shard, 1 + bool(self.starts), self.heads[shard], 0) for shard in here]
            return Moment(self.server_s * SECOND, heads, self.starts), None
        if operation is checkpoint_table.locations:
            return dict(self.reached), None
        assert operation is shard_log.oldest
        (places,) = args[1:]
        return min(900 * SECOND + added_id for added_id in places.values()), None


@pytest.fixture
def servers():
    return Servers()


@pytest.fixture
def freshness(servers):
    return IndexFreshness(servers, lambda: servers.now)


async def ask(freshness, role=Role.MASTER, added_ids_sum=None, clusters=("a",), read_at=math.inf):
    await freshness.refresh(DATASTORE, "index:x", clusters)
    served = {cluster: (Served(role, cluster, 0), added_ids_sum) for cluster in clusters}
    return freshness.of(DATASTORE, "index:x", served, read_at)


async def test_an_index_at_its_heads_is_complete_up_to_the_servers_clock(freshness, servers):
    """Nothing is behind."""
    found = await ask(freshness, clusters=("a", "b"))
    assert (found.cells, found.seconds, found.complete_until) == (0, 0.0, 1000 * SECOND)


async def test_a_missing_cell_is_what_it_is_complete_up_to(freshness, servers):
    """Cells are counted over all shards, the oldest one decides."""
    servers.reached[1], servers.reached[2] = Location(1, 7), Location(1, 9)
    found = await ask(freshness)
    assert (found.cells, found.complete_until) == (4, 900 * SECOND + 8)
    assert found.seconds == pytest.approx(100, abs=0.1)


async def test_superseded_cells_count_as_missing(freshness, servers):
    """I13: a checkpoint of an old generation counts up to where the new one begins."""
    servers.starts = {3: [GenerationStart(2, 6)]}
    assert (await ask(freshness)).cells == 5


async def test_queries_share_samples(freshness, servers):
    """Hundreds in a second cost one sample."""
    await asyncio.gather(*(ask(freshness) for _ in range(100)))
    assert servers.asked == 3
    servers.now += AGE_MAX_S * 0.6
    await ask(freshness)
    for _ in range(20):
        await asyncio.sleep(0)
    assert servers.asked == 6  # taken beside the query, which didn't wait


async def test_a_minion_is_as_complete_as_its_checkpoints_say(freshness, servers):
    """An older sample speaks for a minion that lags. None does for one that is older than all."""
    await ask(freshness)
    servers.now += 3
    servers.heads = dict.fromkeys(range(4), 12)
    servers.reached = dict.fromkeys(range(4), Location(1, 12))
    servers.server_s += 3
    assert (await ask(freshness, Role.MINION, 48)).complete_until == 1003 * SECOND
    lagging = await ask(freshness, Role.MINION, 44)
    assert (lagging.cells, lagging.complete_until) == (4, 1000 * SECOND)
    assert (await ask(freshness, Role.MINION, 39)).complete_until is None
    assert await ask(freshness, Role.MINION) == UNKNOWN


async def test_a_sample_that_is_taken_during_the_reads_says_nothing(freshness, servers):
    """It may speak of cells that weren't there when the answer was read."""
    servers.reached[1] = Location(1, 7)
    assert (await ask(freshness)).cells == 3
    servers.reached[1] = Location(1, 10)
    servers.now += AGE_MAX_S
    assert (await ask(freshness, read_at=servers.now - 0.1)).cells == 3
    assert (await ask(freshness, Role.MINION, 37, read_at=servers.now - 0.1)).cells == 3
    assert (await ask(freshness)).cells == 0


async def test_nothing_is_claimed_while_a_master_can_t_be_asked(freshness, servers):
    """Neither by a first sample that fails, nor by one that is too old."""
    await ask(freshness)
    servers.away = True
    servers.now += AGE_MAX_S + 1
    assert await ask(freshness) == UNKNOWN
    servers.away = False
    servers.now += KNOWN_S
    assert (await ask(freshness)).cells == 0


async def test_samples_of_dropped_versions_go(freshness, monkeypatch):
    """Indexes are dropped and made for years: what is kept of them is bounded (I14)."""
    monkeypatch.setattr("api.index.freshness.INDEXES_MAX", 3)
    for number in range(10):
        await freshness.refresh(DATASTORE, f"index:x:{number}", ["a"])
    assert len(freshness._of) == 3
    assert (await ask(freshness)).cells == 0
