"""A build rests while a minion lags behind what it wrote, when its commits become slow, and while cells come in."""

import asyncio
from contextlib import suppress

from indexer.walker import BuildLoad, BusyTurns
from schemaless.errors import StorageUnavailable
from schemaless.storage import shard_head
from schemaless.storage.index_definition_table import NO_LIMITS, IndexLimits
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.shard_head import Movement
from schemaless.topology import Datastore, Node, Role


class FakeNode:
    def __init__(self, role, *walked):
        self.node = Node(name=f"a-{role}", cluster="a", host="", port=1, user="", password="")
        self.walked = list(walked)
        self.heads_sum = 100

    async def run(self, operation, *arguments, **options):
        """Answers in turn, the last one for ever. None doesn't answer."""
        if operation is shard_head.movement and self.walked[0] is not None:
            return Movement(self.heads_sum, 1)
        found = self.walked[0] if len(self.walked) == 1 else self.walked.pop(0)
        if found is None:
            raise StorageUnavailable("away")
        return found


class FakeStorage:
    def __init__(self, master, *minions):
        self.masters = {"a": master}
        self._minions = list(minions)

    def master(self, cluster):
        return self.masters[cluster]

    def minions(self, cluster):
        return self._minions


class World:
    def __init__(self, *minions, lag_cells_max=100, busy_share=1):
        self.now, self.rests = 0.0, []
        self.master = FakeNode(Role.MASTER, 1000)
        self.storage = FakeStorage(self.master, *(FakeNode(Role.MINION, *walked) for walked in minions))
        self.options = {"lag_cells_max": lag_cells_max, "commit_max_s": 0.5, "busy_share": busy_share}
        self.turns = BusyTurns()
        self.load = self.build()
        self.now += 1.0

    def build(self):
        """A build of this process."""
        datastore, version = Datastore("d", 4, 1, ("a",)), IndexVersion("d", "i", 1)
        given = {**self.options, "turns": self.turns, "clock": lambda: self.now, "sleep": self.sleep}
        return BuildLoad(self.storage, datastore, version, **given)

    async def page(self, work_s, cells=0, load=None):
        """Walks a page that takes so long, while some cells come in. Returns how many columns it may have."""
        async with (load or self.load).page(4096) as columns_max:
            self.now += work_s
            self.master.heads_sum += cells
        return columns_max

    async def sleep(self, seconds):
        self.rests.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)  # others have their turn


async def test_it_rests_until_the_minion_that_lags_most_is_near():
    world = World([950], [500, 800, 899, 900])
    await world.load.rest()
    assert len(world.rests) == 3


async def test_a_minion_that_does_not_answer_is_not_waited_for():
    world = World([None], [901])
    await world.load.rest()
    assert world.rests == []


async def test_without_a_bound_it_does_not_look():
    world = World([0], lag_cells_max=0)
    await world.load.rest()
    assert world.rests == []


async def test_slow_commits_make_it_rest_once_and_one_slow_commit_of_a_hundred_does_not():
    world = World()
    for commit_s in [0.01] * 99 + [3.0]:
        world.load.note(commit_s)
    await world.load.rest()
    assert world.rests == []
    world.load.note(3.0)
    await world.load.rest()
    await world.load.rest()
    assert len(world.rests) == 1


async def test_while_cells_come_in_pages_are_small_and_the_build_works_a_share_of_the_time():
    world = World(lag_cells_max=0, busy_share=0.1)
    began = world.now
    for _ in range(20):
        assert await world.page(0.05, cells=50) < 1000
    assert sum(world.rests) >= 0.85 * (world.now - began)


async def test_the_share_holds_for_all_builds_of_a_process_together():
    """Each of ten has its turn, and together they work as little as one does."""
    world = World(lag_cells_max=0, busy_share=0.1)
    builds, walked = [world.load, *(world.build() for _ in range(9))], []
    began = world.now

    async def walk(number):
        for _ in range(3):
            await world.page(0.05, cells=500, load=builds[number])
            walked.append(number)

    await asyncio.gather(*(walk(number) for number in range(10)))
    assert set(walked[:11]) == set(range(10))
    assert world.now - began >= 30 * 0.05 / 0.12


async def test_a_build_has_a_least_pace_however_slow_its_pages_are():
    world = World(lag_cells_max=0, busy_share=0.01)
    await world.page(30.0, cells=5000)
    began = world.now
    await world.page(30.0, cells=5000)
    assert world.now - began <= 30.0 + 5.0


async def test_a_page_that_fails_is_rested_for_too():
    world = World(lag_cells_max=0, busy_share=0.1)
    with suppress(StorageUnavailable):
        async with world.load.page(4096):
            world.now += 0.2
            world.master.heads_sum += 500
            raise StorageUnavailable("away")
    began = world.now
    await world.page(0.0, cells=500)
    assert world.now - began >= 1.7


async def test_pages_of_several_shards_take_turns_while_cells_come_in():
    world = World(lag_cells_max=0, busy_share=0.1)
    under_way = []

    async def page():
        async with world.load.page(4096):
            under_way.append(1)
            assert len(under_way) == 1
            await asyncio.sleep(0)
            under_way.pop()

    await asyncio.gather(*(page() for _ in range(5)))


async def test_a_build_knows_soon_that_no_cells_come_in_and_then_takes_all_it_can():
    world = World(lag_cells_max=0, busy_share=0.1)
    assert await world.page(0.1) < 1000
    assert await world.page(0.1) == 4096
    assert await world.page(0.6, cells=1000) == 4096
    assert await world.page(0.6) < 1000
    assert await world.page(0.6) == 4096
    without = World(lag_cells_max=0, busy_share=1)
    assert await without.page(0.1, cells=1000) == 4096


async def test_a_cluster_without_shards_of_the_datastore_is_not_waited_for():
    world = World([950], busy_share=0.1)
    world.storage.masters["b"] = FakeNode(Role.MASTER, None)
    assert await world.page(0.1)


async def test_an_order_changes_each_limit_while_a_build_rests():
    """An operator needn't wait until a long rest is over. Without an order the defaults count again."""
    world = World([0], lag_cells_max=1, busy_share=0.001)

    async def ordered_soon(seconds):
        await world.sleep(seconds)
        if len(world.rests) == 3:
            world.load.limit_to(IndexLimits(build_lag_cells_max=0, build_busy_share=1, build_commit_max_s=5))

    world.load._sleep = ordered_soon
    await world.load.rest()
    assert len(world.rests) == 3
    for _ in range(100):
        world.load.note(3.0)
    assert await world.page(60.0, cells=1000) == 4096  # neither slow commits nor cells that come in make it rest
    assert len(world.rests) == 3
    world.load.limit_to(NO_LIMITS)
    world.storage._minions[0].walked = [1000]
    await world.load.rest()
    assert len(world.rests) == 4  # the commits are slow by the setting


async def test_an_order_ends_the_rest_of_a_build_that_gives_way_to_puts():
    """A page of two seconds at a thousandth of the time would rest for half an hour."""
    world = World(lag_cells_max=0, busy_share=0.001)

    async def ordered_soon(seconds):
        await world.sleep(seconds)
        if len(world.rests) == 3:
            world.load.limit_to(IndexLimits(build_busy_share=0.5))

    assert await world.page(2.0, cells=1000) < 1000
    world.load._sleep = ordered_soon
    assert await world.page(2.0, cells=1000) < 1000
    assert sum(world.rests) <= 4.0
