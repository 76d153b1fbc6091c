"""Whatever happens to puts, processes, definitions and servers: an index comes to what its cells say (I11, I13).

One history after another runs on real servers. Indexers and their cleaners are stopped between any two of their
operations, continue later or never, and repeat one another. At the end nobody stops, and the index must be the one that
is computed from nothing. Then the processes that still stand somewhere wake up, and must change nothing.
"""

import asyncio
import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from schemaless.index import inspection, switch
from schemaless.storage.asyncmy_driver import AsyncStorage
from tests.properties.index_world import COLUMNS, DEFINITIONS, OWNERS, ROWS, SHARDS, Process, World

pytestmark = [pytest.mark.storage, pytest.mark.faults]

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
EXAMPLES = 1500 if LONG else 8
PROMOTIONS_MAX = 3

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

    @rule(which=st.integers(0, len(DEFINITIONS) - 1))
    def define(self, which):
        """Makes the index, or changes its definition."""
        self.runner.run(self.world.define(which))

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
                self.runner.run(self._look_again(process))
                self.world.check(definitions)
            self.world.check_dropped(definitions)
        finally:
            self.runner.run(self._end())

    async def _look_again(self, process):
        process.begin(process.index())
        await process.advance(None)

    async def _end(self):
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            if task is not self.world.async_storage._ticking:
                task.cancel()
        await asyncio.sleep(0)


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
