"""A build rests while a minion lags behind what it wrote, and when its commits become slow."""

from indexer.build_load import BuildLoad
from schemaless.errors import StorageUnavailable
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.topology import Node, Role


class FakeNode:
    def __init__(self, role, *walked):
        self.node = Node(name=f"a-{role}", cluster="a", role=role, host="", port=1, user="", password="")
        self.walked = list(walked)

    async def run(self, operation, *arguments, **options):
        """Answers in turn, the last one for ever. None doesn't answer."""
        found = self.walked[0] if len(self.walked) == 1 else self.walked.pop(0)
        if found is None:
            raise StorageUnavailable("away")
        return found


class FakeStorage:
    def __init__(self, master, *minions):
        self.masters = [master]
        self._minions = list(minions)

    def minions(self, cluster):
        return self._minions


class World:
    def __init__(self, *minions, lag_cells_max=100):
        self.now, self.rests = 0.0, []
        storage = FakeStorage(FakeNode(Role.MASTER, 1000), *(FakeNode(Role.MINION, *walked) for walked in minions))
        self.load = BuildLoad(
            storage,
            IndexVersion("d", "i", 1),
            lag_cells_max=lag_cells_max,
            commit_max_s=0.5,
            clock=lambda: self.now,
            sleep=self.sleep,
        )
        self.now += 1.0

    async def sleep(self, seconds):
        self.rests.append(seconds)
        self.now += seconds


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
