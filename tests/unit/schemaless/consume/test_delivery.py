"""Delivery (I9, I10) over a log, checkpoints and a handler in memory: what arrives, whatever the topic brings."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemaless.cell import StoredCell
from schemaless.consume.delivery import Delivery
from schemaless.consume.ports import Effect, Outcome, ShardCheckpoint
from schemaless.errors import Fenced, StorageUnavailable
from schemaless.location import BEGINNING, GenerationStart, Location, resume_location
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.shard_head import Head
from schemaless.testing import MemoryEntityTable
from schemaless.topology import Datastore

SHARDS = (0, 2)
NO_PATIENCE_S = 0.001  # a call that is held up takes longer than any patience


def cells(shard, first, last, generation=1):
    return [
        StoredCell(bytes(16), "BASE", n, shard, generation, n, 0, b"") for n in range(first, last + 1)
    ]  # fmt: skip


class MemoryLog:
    """What the shards' homes hold, as delivery reads it."""

    def __init__(self):
        self.table = MemoryEntityTable(Datastore("d", max(SHARDS) + 1, 1, ("a",)), clock_us=lambda: 0)
        self.away = False
        self.reads = 0

    def grow(self, shard, last):
        """Adds cells until the head is `last`."""
        first = self.table.history(shard)[0].added_id + 1
        self.table.put_cells([ShardCell(c.key, c.body, shard) for c in cells(shard, first, last)])

    def cells(self, shard):
        return self.table.read_after(shard, 0, 1000)

    async def read_after(self, positions, limit):
        self.reads += 1
        await asyncio.sleep(0)
        if self.away:
            raise StorageUnavailable("the home is away")
        return {shard: self.table.read_after(shard, after, limit) for shard, after in positions.items()}

    async def generations(self, shard):
        return self.table.generations(shard)


class MemoryCheckpoints:
    consumer = "trigger:test"

    def __init__(self):
        self.stands = {}
        self.stopped = {}

    async def read(self, shards):
        await asyncio.sleep(0)
        self.known = {**getattr(self, "known", {}), **{s: self.stands.setdefault(s, BEGINNING) for s in shards}}
        return {shard: ShardCheckpoint(self.stands[shard], shard not in self.stopped) for shard in shards}

    async def move(self, advances, effects):
        await asyncio.sleep(0)
        for shard, advance in advances.items():
            if self.stands[shard] != self.known[shard]:
                raise Fenced("moved by another process")
            self.stands[shard] = self.known[shard] = advance.to
            if advance.stop_reason is not None:
                self.stopped[shard] = advance.stop_reason


class Recorder:
    """Keeps what it was given; `judge` may say something else than finished. A shard with a gate waits for it."""

    def __init__(self, together=True):
        self.together = together
        self.seen = {shard: [] for shard in SHARDS}
        self.judge = lambda cell: None
        self.begun = dict.fromkeys(SHARDS, 0)
        self.gates = {}
        self.held = asyncio.Event()

    async def handle(self, runs):
        await asyncio.sleep(0)
        for run in runs:
            self.begun[run.shard] += 1
            if run.shard in self.gates:
                self.held.set()
                await self.gates[run.shard].wait()
        return Effect([self._outcome(run) for run in runs])

    def _outcome(self, run):
        for finished, cell in enumerate(run.cells):
            verdict = self.judge(cell)
            if isinstance(verdict, Exception):
                raise verdict
            if verdict is not None:
                return Outcome(finished, **verdict)
            self.seen[run.shard].append(cell.added_id)
        return Outcome(len(run.cells))


class World:
    def __init__(self, together=True):
        self.log = MemoryLog()
        self.checkpoints = MemoryCheckpoints()
        self.handler = Recorder(together)
        self.now = 0.0
        self.restart()

    def restart(self, **options):
        self.delivery = Delivery(
            SHARDS, self.handler, self.checkpoints, self.log, batch_cells_max=7, clock=lambda: self.now, **options
        )

    async def settle(self, steps=50):
        for _ in range(steps):
            if await self.delivery.step():
                return

    async def until(self, holds, steps=1000):
        """Steps until something holds. Pauses after failures pass on the clock."""
        for _ in range(steps):
            if holds():
                return
            self.now += await self.delivery.step()
            await asyncio.sleep(0)
        raise AssertionError("it never holds")

    def finished(self, shard):
        return self.checkpoints.stands[shard].added_id


@pytest.fixture
async def world():
    made = World()
    await made.settle()
    return made


async def test_dense_records_are_handled_in_order_without_reading_the_log(world):
    """Once a shard met the topic, what the topic brings is enough."""
    reads = world.log.reads
    for first, last in ((1, 3), (4, 4), (5, 9)):
        world.log.grow(0, last)
        await world.delivery.deliver(cells(0, first, last))
    assert world.handler.seen[0] == list(range(1, 10))
    assert world.finished(0) == 9
    assert world.log.reads == reads


async def held(world):
    """Shard 0 is being worked on, and stays so until the event is set; with that delivery."""
    world.handler.gates[0] = asyncio.Event()
    world.log.grow(0, 9)
    world.log.grow(2, 9)
    first = asyncio.create_task(world.delivery.deliver(cells(0, 1, 3)))
    await world.handler.held.wait()
    return first


async def test_a_shards_cells_wait_for_those_before_and_for_no_other_shard(world):
    """What is called meanwhile keeps its order in each shard, and reads no log."""
    reads = world.log.reads
    first = await held(world)
    later = [asyncio.create_task(world.delivery.deliver(cells(0, n, n))) for n in (4, 5)]
    async with asyncio.timeout(10):
        await world.delivery.deliver(cells(2, 1, 4))
    assert (world.handler.seen, world.handler.begun[0]) == ({0: [], 2: [1, 2, 3, 4]}, 1)

    world.handler.gates[0].set()
    await asyncio.gather(first, *later)
    assert world.handler.seen[0] == [1, 2, 3, 4, 5]
    assert (world.delivery.counts.holes, world.log.reads) == (0, reads)


async def test_a_delivery_of_several_shards_keeps_the_order_of_each(world):
    """It waits for the one that is busy, and the next of either shard waits for it."""
    reads = world.log.reads
    first = await held(world)
    both = asyncio.create_task(world.delivery.deliver([*cells(0, 4, 5), *cells(2, 1, 2)]))
    last = asyncio.create_task(world.delivery.deliver(cells(2, 3, 3)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert world.handler.seen == {0: [], 2: []}

    world.handler.gates[0].set()
    await asyncio.gather(first, both, last)
    assert world.handler.seen == {0: [1, 2, 3, 4, 5], 2: [1, 2, 3]}
    assert (world.delivery.counts.holes, world.log.reads) == (0, reads)


async def test_whoever_waited_too_long_comes_from_the_log(world):
    """A slow call holds up what comes behind it no longer than `patience_s`."""
    world.restart(patience_s=NO_PATIENCE_S)
    await world.settle()
    first = await held(world)
    second = asyncio.create_task(world.delivery.deliver(cells(0, 4, 9)))
    async with asyncio.timeout(10):
        await asyncio.gather(first, second)
    assert world.handler.begun[0] == 1
    world.handler.gates[0].set()
    await world.until(lambda: world.finished(0) == 9)
    assert world.handler.seen[0] == list(range(1, 10))


async def test_what_waits_when_delivery_is_closed_is_not_begun(world):
    first = await held(world)
    waiting = asyncio.create_task(world.delivery.deliver(cells(0, 4, 5)))
    closing = asyncio.create_task(world.delivery.close(10.0))
    await asyncio.sleep(0)
    world.handler.gates[0].set()
    await asyncio.gather(first, waiting, closing)
    assert world.handler.seen[0] == [1, 2, 3]


async def test_a_duplicate_is_passed_over(world):
    """Records at or below the checkpoint are not handled again, also when new ones come with them."""
    world.log.grow(0, 5)
    await world.delivery.deliver(cells(0, 1, 4))
    await world.delivery.deliver(cells(0, 2, 5))
    assert world.handler.seen[0] == [1, 2, 3, 4, 5]
    assert world.delivery.counts.duplicates == 3


async def test_a_hole_is_filled_from_the_log_before_going_on(world):
    """Missing cells come from the log, in order, and only then the record that showed the hole."""
    world.log.grow(0, 30)
    await world.delivery.deliver(cells(0, 1, 2))
    await world.delivery.deliver(cells(0, 29, 30))
    assert world.handler.seen[0] == [1, 2]
    await world.settle()
    assert world.handler.seen[0] == list(range(1, 31))
    assert world.delivery.counts.holes == 1


async def test_after_a_hole_the_topic_is_taken_again(world):
    """A shard that caught up takes from the topic without reading its log."""
    world.log.grow(0, 6)
    await world.delivery.deliver(cells(0, 5, 6))
    await world.settle()
    reads = world.log.reads
    world.log.grow(0, 7)
    await world.delivery.deliver(cells(0, 7, 7))
    assert world.handler.seen[0] == list(range(1, 8))
    assert world.log.reads == reads


async def test_what_the_topic_brought_before_the_start_is_read_from_the_log():
    """Cells whose records were consumed by somebody else, or never came, are found without a record."""
    made = World()
    made.log.grow(0, 20)
    made.log.grow(2, 3)
    await made.settle()
    assert made.handler.seen == {0: list(range(1, 21)), 2: [1, 2, 3]}


async def test_a_tail_that_the_topic_never_brings_is_found_by_the_heads(world):
    """A shard that has not reached the last look's head falls behind, and catches up."""
    world.log.grow(0, 4)
    heads = {0: Head(0, 1, 4, 0)}
    world.delivery.notice(heads)
    await world.settle()
    assert world.handler.seen[0] == []
    world.delivery.notice(heads)
    await world.settle()
    assert world.handler.seen[0] == [1, 2, 3, 4]


async def test_a_restart_goes_on_after_the_checkpoint(world):
    """A new process repeats nothing that was finished."""
    world.log.grow(0, 6)
    await world.delivery.deliver(cells(0, 1, 4))
    world.restart()
    await world.settle()
    assert world.handler.seen[0] == [1, 2, 3, 4, 5, 6]


async def test_a_checkpoint_that_another_process_moved_is_read_again(world):
    """Compare-and-set refuses; the shard goes on from where the checkpoint stands now (I10)."""
    world.log.grow(0, 8)
    await world.delivery.deliver(cells(0, 1, 2))
    world.checkpoints.stands[0] = Location(1, 6)
    await world.delivery.deliver(cells(0, 3, 4))
    assert world.finished(0) == 6
    await world.until(lambda: world.finished(0) == 8)
    assert world.handler.seen[0] == [1, 2, 3, 4, 7, 8]


async def test_a_home_that_is_away_loses_nothing(world):
    """Nothing raises; the shard waits and goes on by itself."""
    world.log.grow(0, 5)
    world.log.away = True
    await world.delivery.deliver(cells(0, 4, 5))
    await world.delivery.step()
    assert world.handler.seen[0] == []
    world.log.away = False
    await world.until(lambda: world.finished(0) == 5)
    assert world.handler.seen[0] == [1, 2, 3, 4, 5]


async def test_an_outage_is_forgotten_by_shards_without_news():
    """A shard that failed while it had nothing to read is served together with others again."""
    world = World()
    world.log.away = True
    await world.delivery.step()
    world.log.away = False
    world.now += 0.3
    await world.settle()
    for shard in SHARDS:
        world.log.grow(shard, 3)
        await world.delivery.deliver(cells(shard, 3, 3))
    reads = world.log.reads
    await world.settle()
    assert world.handler.seen == {0: [1, 2, 3], 2: [1, 2, 3]}
    assert world.log.reads == reads + 1


async def test_an_unfinished_run_comes_again_and_others_go_on():
    """A cell that must be tried again holds up its own shard only."""
    world = World(together=False)
    await world.settle()
    tries = iter([{"retry_in_s": 0.05}, {"retry_in_s": 0.05}])
    world.handler.judge = lambda cell: next(tries, None) if (cell.shard, cell.added_id) == (0, 2) else None
    world.log.grow(0, 3)
    world.log.grow(2, 3)
    await world.delivery.deliver(cells(0, 1, 3) + cells(2, 1, 3))
    assert world.handler.seen == {0: [1], 2: [1, 2, 3]}
    await world.until(lambda: world.finished(0) == 3)
    assert world.handler.seen[0] == [1, 2, 3]


async def test_a_stopped_shard_says_why_and_goes_on_when_it_is_resumed():
    """The state stands with the checkpoint; whoever resumes it there is obeyed at the next look."""
    world = World(together=False)
    await world.settle()
    world.handler.judge = lambda cell: {"stop_reason": "broken"} if (cell.shard, cell.added_id) == (0, 2) else None
    world.log.grow(0, 3)
    world.log.grow(2, 3)
    await world.delivery.deliver(cells(0, 1, 3) + cells(2, 1, 3))
    world.delivery.notice({})
    await world.settle()
    assert world.checkpoints.stopped == {0: "broken"}
    assert world.finished(0) == 1
    assert world.finished(2) == 3
    world.handler.judge = lambda cell: None
    world.checkpoints.stopped.clear()
    world.delivery.notice({})
    await world.settle()
    assert world.handler.seen[0] == [1, 2, 3]


async def test_an_unforeseen_failure_stays_inside_and_is_tried_again():
    """No exception leaves delivery, and a shard that fails does not fail those it came with."""
    world = World()
    await world.settle()
    world.handler.judge = lambda cell: RuntimeError("a bug") if (cell.shard, cell.added_id) == (0, 2) else None
    world.log.grow(0, 3)
    world.log.grow(2, 3)
    await world.delivery.deliver(cells(0, 1, 3) + cells(2, 1, 3))
    await world.until(lambda: world.finished(2) == 3)
    world.handler.judge = lambda cell: None
    await world.until(lambda: world.finished(0) == 3)


async def test_a_slow_call_does_not_hold_up_the_topic():
    """After its patience, delivery lets the topic go on; the slow shard catches up from its log."""
    world = World(together=False)
    world.restart(patience_s=NO_PATIENCE_S)
    await world.settle()
    gate = asyncio.Event()
    handle = world.handler.handle

    async def slow(runs):
        if runs[0].shard == 0:
            await gate.wait()
        return await handle(runs)

    world.handler.handle = slow
    world.log.grow(0, 4)
    world.log.grow(2, 2)
    await world.delivery.deliver(cells(0, 1, 2) + cells(2, 1, 1))
    await world.delivery.deliver(cells(0, 3, 4) + cells(2, 2, 2))
    assert world.handler.seen == {0: [], 2: [1, 2]}
    gate.set()
    await world.until(lambda: world.finished(0) == 4)
    assert world.handler.seen[0] == [1, 2, 3, 4]


async def test_a_closed_delivery_finishes_what_is_in_hand_and_takes_nothing_new():
    """A partition that goes to another process leaves nothing half done, if it can be finished in time."""
    world = World(together=False)
    await world.settle()
    world.log.grow(0, 2)
    in_hand = asyncio.create_task(world.delivery.deliver(cells(0, 1, 1)))
    await asyncio.sleep(0)
    await world.delivery.close(1.0)
    await in_hand
    await world.delivery.deliver(cells(0, 2, 2))
    await world.settle()
    assert world.finished(0) == 1
    assert world.handler.seen[0] == [1]


async def test_a_superseded_location_goes_back_to_the_new_generation(world):
    """What generation 1 had beyond the promotion is gone; the cells that took its place are handled (I13)."""
    world.log.grow(0, 6)
    await world.delivery.deliver(cells(0, 1, 6))
    world.log.table.open_generation(0, 5)
    world.log.grow(0, 7)
    await world.delivery.deliver(cells(0, 5, 7, generation=2))
    await world.settle()
    assert world.handler.seen[0] == [1, 2, 3, 4, 5, 6, 5, 6, 7]
    assert world.checkpoints.stands[0] == Location(2, 7)


async def test_records_that_the_log_does_not_have_are_passed_over(world):
    """A forced promotion leaves records without cells: they are no reason to read the log for ever."""
    world.log.grow(0, 2)
    await world.delivery.deliver(cells(0, 1, 5))
    world.checkpoints.stands[0] = world.checkpoints.known[0] = BEGINNING
    world.restart()
    await world.settle()
    await world.delivery.deliver(cells(0, 4, 5))
    await world.settle()
    reads = world.log.reads
    await world.settle()
    assert world.log.reads == reads
    assert world.finished(0) == 2


def test_a_location_resumes_before_the_first_generation_that_superseded_it():
    """Not superseded: it stays."""
    starts = [GenerationStart(3, 12), GenerationStart(1, 1), GenerationStart(2, 8)]
    assert resume_location(Location(1, 7), starts) == Location(1, 7)
    assert resume_location(Location(1, 9), starts) == Location(2, 7)
    assert resume_location(Location(2, 12), starts) == Location(3, 11)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.sampled_from(SHARDS), st.integers(1, 9)),
            st.tuples(st.just("topic"), st.sampled_from(SHARDS), st.integers(0, 12)),
            st.tuples(st.just("skip"), st.sampled_from(SHARDS), st.integers(1, 5)),
            st.tuples(st.just("again"), st.sampled_from(SHARDS), st.integers(1, 9)),
            st.tuples(st.sampled_from(["restart", "step", "zombie"]), st.sampled_from(SHARDS), st.just(0)),
        ),
        max_size=25,
    )
)
def test_every_cell_arrives_in_order_whatever_the_topic_does(events):
    """Records that come late, twice or never, restarts and zombies: each shard's cells are all finished, in order."""
    asyncio.run(_play(events))


async def _play(events):
    world, sent = World(), dict.fromkeys(SHARDS, 0)
    for kind, shard, count in events:
        if kind == "write":
            world.log.grow(shard, len(world.log.cells(shard)) + count)
        elif kind == "topic":
            await world.delivery.deliver(world.log.cells(shard)[sent[shard] : sent[shard] + count])
            sent[shard] = min(len(world.log.cells(shard)), sent[shard] + count)
        elif kind == "skip":
            sent[shard] = min(len(world.log.cells(shard)), sent[shard] + count)
        elif kind == "again":
            sent[shard] = max(0, sent[shard] - count)
        elif kind == "restart":
            world.restart()
        elif kind == "zombie" and shard in world.checkpoints.stands:
            location = world.checkpoints.stands[shard]
            if location.added_id < len(world.log.cells(shard)):
                world.handler.seen[shard].append(location.added_id + 1)
                world.checkpoints.stands[shard] = Location(1, location.added_id + 1)
        else:
            await world.delivery.step()
    world.restart()
    await world.settle()
    for shard in SHARDS:
        assert world.finished(shard) == len(world.log.cells(shard))
        firsts = list(dict.fromkeys(world.handler.seen[shard]))
        assert firsts == list(range(1, len(world.log.cells(shard)) + 1))
