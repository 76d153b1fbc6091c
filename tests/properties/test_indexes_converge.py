"""Whatever happens to puts, processes, definitions and servers: an index comes to what its cells say (I11, I13).

One history after another runs on real servers. Indexers and their cleaners are stopped between any two of their
operations, continue later or never, and repeat one another. At the end nobody stops, and the index must be the one that
is computed from nothing. Then the processes that still stand somewhere wake up, and must change nothing.
"""

import asyncio
import itertools
import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from schemaless.index import inspection, switch
from schemaless.storage.asyncmy_driver import AsyncStorage
from tests.properties.index_world import COLUMNS, DEFINITIONS, OWNERS, ROWS, SHARDS, Process, World

pytestmark = pytest.mark.faults

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
EXAMPLES = 1500 if LONG else 8
PROMOTIONS_MAX = 3
ORDERS_MAX = 4  # with more of them no version would ever be complete

cells = st.lists(
    st.tuples(
        st.sampled_from(ROWS),
        st.sampled_from(COLUMNS),
        st.integers(0, 5),
        st.sampled_from([*OWNERS, *OWNERS, None, "a text"]),
    ),
    min_size=1,
    max_size=4,
)
processes = st.integers(0, 2)
operations = st.none() | st.integers(1, 40)
heard = st.lists(st.tuples(st.integers(0, SHARDS - 1), st.integers(0, 20), st.integers(1, 6)), max_size=2)
clusters = st.sampled_from(["a", "b"])


@pytest.fixture
def runner():
    """An event loop that outlives the histories, because the connections belong to it."""
    with asyncio.Runner() as started:
        yield started


@pytest.fixture
def world(runner, topology, storage, make_datastore, monkeypatch):
    monkeypatch.setattr(inspection, "_LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(switch, "CAUGHT_UP_WITHIN_S", 0.0)
    opened = AsyncStorage(topology, connections_max=64)
    runner.run(opened.__aenter__())
    yield World(storage, opened, make_datastore(shards=SHARDS, partitions=2))
    runner.run(opened.__aexit__(None, None, None))


class Histories(RuleBasedStateMachine):
    world: World
    runner: asyncio.Runner

    @initialize(found=cells, which=st.integers(0, len(DEFINITIONS) - 1))
    def begin(self, found, which):
        self.runner.run(self._begin())
        self.world.put(found)
        self.runner.run(self.world.define(which))

    async def _begin(self):
        self.world.reset()

    @rule(found=cells)
    def put(self, found):
        self.world.put(found)

    @precondition(lambda self: self.world.orders < ORDERS_MAX)
    @rule(which=st.integers(0, len(DEFINITIONS) - 1))
    def define(self, which):
        """Makes the index, or changes its definition."""
        self.runner.run(self.world.define(which))

    @precondition(lambda self: self.world.orders < ORDERS_MAX)
    @rule()
    def drop(self):
        self.runner.run(self.world.drop())

    @rule(which=processes, budget=operations, slices=heard)
    def index(self, which, budget, slices):
        """A process begins to do all that is to be done, or continues what it does. The topic brings anything."""
        said = [(shard, self.world.topic[shard][start : start + count]) for shard, start, count in slices]
        self.runner.run(self._advance(which, lambda process: process.index(said), budget))

    @rule(which=processes, budget=operations)
    def clean(self, which, budget):
        self.runner.run(self._advance(which, lambda process: process.clean(), budget))

    async def _advance(self, which, job, budget):
        process = self.world.processes[which]
        if not process.is_stopped:
            process.begin(job(process))
        await process.advance(budget)

    @rule(which=processes, budget=operations)
    def keep_up(self, which, budget):
        """Twice cleaned after everything is done: so old tombstones go."""
        self.runner.run(self._advance(which, lambda process: process.keep_up(), budget))

    @rule(which=processes)
    def kill(self, which):
        """What it was about to do never happens. What it did last was never answered."""
        self.world.processes[which].gate.is_dead = self.world.was_killed = True
        self.runner.run(self._replace(which))

    async def _replace(self, which):
        self.world.processes[which] = Process(self.world)

    @rule(cluster=clusters)
    def stand_still(self, cluster):
        self.world.stand_still(cluster)

    @precondition(lambda self: self.world.generation <= PROMOTIONS_MAX)
    @rule(cluster=clusters)
    def promote(self, cluster):
        self.world.promote(cluster)

    def teardown(self):
        try:
            definitions = self.runner.run(self.world.settle())
            self.world.check(definitions)
            for process in self.world.processes:
                if process.is_stopped:
                    self.runner.run(process.advance(None))
                    self.world.check(definitions)
                self.runner.run(process.do(process.index()))
                self.world.check(definitions)
            self.world.check_dropped(definitions)
        finally:
            self.runner.run(self._end())

    async def _end(self):
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            if task not in self.world.async_storage._tasks:
                task.cancel()
        await asyncio.sleep(0)


@pytest.mark.storage
@pytest.mark.timeout(7200 if LONG else 240)
def test_histories_of_everything_together_converge(world, runner):
    run_state_machine_as_test(
        type("Histories", (Histories,), {"world": world, "runner": runner}),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40 if LONG else 25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if LONG else [Phase.generate],
        ),
    )


def moved(ref_key):
    """Each row has another owner, or none, with each version."""
    return [(row, "BASE", ref_key, [*OWNERS, None][(n + ref_key) % 5]) for n, row in enumerate(ROWS)]


async def stopped_after(world, operations, late_for):
    """A process that has so many operations done stands while another one does everything and deletes the tombstones.

    Then it wakes up. `late_for` is what it stands in. Returns whether it had ended before.
    """
    world.reset()
    late, keeper = Process(world), Process(world)
    for ref_key in (1, 2):
        world.put(moved(ref_key))
    await world.define(2)
    if late_for != "walk":
        await late.do(late.keep_up())
        for cluster in ("a", "b"):
            world.stand_still(cluster)
    if late_for == "promotion":
        world.put(moved(3))
        await late.do(late.keep_up())
        world.lose("a")
        world.lose("b")
    world.put(moved(4))
    late.begin(late.keep_up())
    await late.advance(operations)
    world.put(moved(5))
    for _ in range(2):
        await keeper.do(keeper.keep_up())
    definitions = await world.settle()
    world.check(definitions)
    assert [world.tombstones(definition) for definition in definitions] == [0]
    ended = not late.is_stopped
    if not ended:
        await late.advance(None)
        world.check(definitions)
    return ended


@pytest.mark.parametrize("late_for", ["walk", "log", "promotion"])
def test_a_late_process_brings_no_ghost_back(world, runner, chance, late_for):
    """Wherever it stood when the tombstones went that would have refused it."""
    numbers = itertools.count() if LONG else sorted(chance.sample(range(100), 4))
    for operations in numbers:
        if runner.run(stopped_after(world, operations, late_for)):
            break


def test_what_was_forgotten_comes_back_with_a_generation_that_needs_it(world, runner):
    """Rows left the index, their tombstones went, and then a promotion takes the cells back that they left by."""

    async def history():
        world.reset()
        process = Process(world)
        world.put([(row, "BASE", 1, n) for n, row in enumerate(ROWS)])
        await world.define(2)
        await process.do(process.keep_up())
        for cluster in ("a", "b"):
            world.stand_still(cluster)
        world.put([(row, "BASE", 2, None) for row in ROWS])
        await process.do(process.keep_up())
        (definition,) = await world.settle()
        assert (world.found(definition), world.tombstones(definition)) == ({}, 0)
        world.lose("a")
        world.lose("b")
        await process.do(process.index())
        assert len(world.wanted(definition)) == len(ROWS)
        world.check([definition])

    runner.run(history())
