"""Delivery (I9, I10) over a log, checkpoints and a handler in memory: what arrives, whatever the topic brings."""

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from schemaless.cell import StoredCell
from schemaless.consume.delivery import Delivery
from schemaless.consume.ports import Effect, Outcome, Run, ShardCheckpoint, StatelessHandler
from schemaless.errors import LocationGone, StorageUnavailable
from schemaless.location import Location
from schemaless.position import BEGINNING_DIGEST, Position, cell_digest, position_of, verify_position
from schemaless.shard_cursor import CursorState, ProvenPage
from schemaless.storage.entity_table import ShardCell
from schemaless.testing.memory_program import MemoryEntityTable
from schemaless.topology import Datastore

SHARDS = (0, 2)


def cells(shard, first, last, generation=1):
    return [
        StoredCell(bytes(16), "BASE", n, shard, generation, n, 0, b"") for n in range(first, last + 1)
    ]  # fmt: skip


class MemoryLog:
    """What the shards' homes hold, as delivery reads it. `limits` are those of the reads."""

    def __init__(self):
        self.table = MemoryEntityTable(Datastore("d", max(SHARDS) + 1, 1, ("a",)), clock_us=lambda: 0)
        self.unreachable = False
        self.limits = []

    @property
    def reads(self):
        return len(self.limits)

    def grow(self, shard, last):
        """Adds cells until the head is `last`."""
        first = self.table.history(shard)[0].added_id + 1
        self.table.put_cells([ShardCell(c.key, c.body, shard) for c in cells(shard, first, last)])

    def cells(self, shard):
        return self.table.read_after(shard, 0, 1000)

    def heads(self):
        return {head.shard: head for head in self.table.heads()}

    async def read(self, wanted, limit):
        self.limits.append(limit)
        await asyncio.sleep(0)
        if self.unreachable:
            raise StorageUnavailable("the home is unreachable")
        return {shard: self._page(position, limit) for shard, position in wanted.items()}

    def _page(self, position, limit):
        head, starts = self.table.history(position.shard)
        at = position.added_id
        there = self.table.read_after(position.shard, at - 1, 1) if at else []
        found = BEGINNING_DIGEST if not at else cell_digest(there[0]) if there else None
        try:
            verify_position(position, found, starts, head.location)
        except LocationGone as gone:
            return gone
        page = self.table.read_after(position.shard, at, limit)
        return ProvenPage(page, head.location, None if page else found)


class CheckpointTable:
    """The rows of one consumer, which several processes share."""

    def __init__(self):
        self.rows = {shard: (0, Position(shard, 1, 0, digest=BEGINNING_DIGEST)) for shard in SHARDS}
        self.counts = dict.fromkeys(SHARDS, 0)
        self.stopped = {}
        self.ahead = {}


class MemoryCheckpoints:
    """The rows as one process knows them. `moves` is how often it stored something."""

    consumer = "trigger:test"

    def __init__(self, table):
        self.table = table
        self.known = {}
        self.moves = 0

    async def read(self, shards):
        await asyncio.sleep(0)
        shards = [shard for shard in shards if shard in self.table.rows]
        self.known.update({shard: self.table.rows[shard][0] for shard in shards})
        table = self.table
        return {
            shard: ShardCheckpoint(table.rows[shard][1], table.stopped.get(shard), table.ahead.get(shard, ()))
            for shard in shards
        }

    async def move(self, advances, effects):
        await asyncio.sleep(0)
        self.moves += 1
        lost = frozenset(shard for shard in advances if self.table.rows[shard][0] != self.known[shard])
        for shard, advance in advances.items():
            if shard in lost or (lost and effects):
                continue
            self.known[shard] += 1
            self.table.rows[shard] = (self.known[shard], advance.to)
            if advance.restart:
                self.table.ahead.pop(shard, None)
            self.table.counts[shard] = 0 if advance.restart else self.table.counts[shard] + advance.finished
            if advance.stop_reason is not None:
                self.table.stopped[shard] = advance.stop_reason
        return lost


class Recorder(StatelessHandler):
    """Keeps what it was given. `judge` may say something else than finished. A shard with a gate waits for it."""

    def __init__(self, together, record_within_s):
        self.foreign_code = None
        self.together = together
        self.record_within_s = record_within_s
        self.seen = {shard: [] for shard in SHARDS}
        self.locations = set()
        self.judge = lambda cell: None
        self.idle = False
        self.begun = dict.fromkeys(SHARDS, 0)
        self.running = dict.fromkeys(SHARDS, 0)
        self.gates = {}
        self.superseded = []
        self.takes_nothing_back = False
        self.sizes = []

    async def handle(self, runs):
        self.sizes += [len(run.cells) for run in runs]
        for run in runs:
            self.begun[run.shard] += 1
            self.running[run.shard] += 1
            assert self.running[run.shard] == 1, "two calls of one shard at once"
        await asyncio.sleep(0)
        try:
            for run in runs:
                if run.shard in self.gates:
                    await self.gates[run.shard].wait()
            return Effect([self._outcome(run) for run in runs])
        finally:
            for run in runs:
                self.running[run.shard] -= 1

    async def supersede(self, shard, starts_at, generation):
        if self.takes_nothing_back:
            raise StorageUnavailable("a cluster is away")
        self.superseded.append((shard, starts_at, generation))
        return Effect([])

    def _outcome(self, run):
        for finished, cell in enumerate(run.cells):
            verdict = self.judge(cell)
            if isinstance(verdict, Exception):
                raise verdict
            if verdict is not None:
                return Outcome(finished, **verdict)
            self.seen[run.shard].append(cell.added_id)
            self.locations.add((run.shard, cell.location))
        return Outcome(len(run.cells), idle=self.idle)


class World:
    def __init__(self, together=True, record_within_s=0.0):
        self.log = MemoryLog()
        self.table = CheckpointTable()
        self.handler = Recorder(together, record_within_s)
        self.now = 0.0
        self.is_member = True
        self.delivery = self.process()

    def process(self):
        """Returns a process that has all shards, beside those that there are."""
        self.checkpoints = MemoryCheckpoints(self.table)
        delivery = Delivery(
            self.handler,
            self.checkpoints,
            self.log,
            batch_cells_max=64,
            may_call=lambda: self.is_member,
            clock=lambda: self.now,
        )
        delivery.gain(SHARDS)
        return delivery

    async def settle(self, passes=60):
        """Makes passes while no time goes by."""
        for _ in range(passes):
            await self.delivery.step()
            await asyncio.sleep(0)

    async def until(self, holds, passes=2000):
        """Makes passes until something holds. Pauses go by on the clock."""
        for _ in range(passes):
            if holds():
                return
            self.now += await self.delivery.step()
            await asyncio.sleep(0)
        raise AssertionError("it never holds")

    async def bring(self, *found):
        for cell in found:
            self.delivery.take(cell.shard, [cell])
        await self.settle()

    async def look_twice(self):
        """Twice, because a head counts from one look to the next."""
        for _ in range(2):
            self.delivery.look(self.log.heads())
            await self.settle()

    def finished(self, shard):
        return self.table.rows[shard][1].added_id


@pytest.fixture
async def world():
    made = World()
    await made.settle()
    return made


async def test_dense_records_are_handled_in_order_without_reading_the_log(world):
    reads = world.log.reads
    for first, last in ((1, 3), (4, 4), (5, 9)):
        world.log.grow(0, last)
        await world.bring(*cells(0, first, last))
    assert world.handler.seen[0] == list(range(1, 10))
    assert world.finished(0) == 9
    assert world.log.reads == reads


async def test_a_shards_cells_wait_for_those_before_and_for_no_other_shard(world):
    world.handler.gates[0] = asyncio.Event()
    world.log.grow(0, 5)
    world.log.grow(2, 4)
    await world.bring(*cells(0, 1, 3))
    await world.bring(*cells(0, 4, 5), *cells(2, 1, 4))
    assert world.handler.seen == {0: [], 2: [1, 2, 3, 4]}
    assert world.handler.begun[0] == 1
    world.handler.gates[0].set()
    await world.settle()
    assert world.handler.seen[0] == [1, 2, 3, 4, 5]


async def test_what_one_fetch_brings_for_several_shards_is_one_call(world):
    """It comes shard by shard, and the first shard doesn't go alone."""
    for shard in SHARDS:
        world.log.grow(shard, 1)
    running = asyncio.create_task(world.delivery.run())
    await asyncio.sleep(0)
    calls, handle, both = [], world.handler.handle, asyncio.Event()

    async def noted(runs):
        calls.append([run.shard for run in runs])
        if sum(map(len, calls)) == len(SHARDS):
            both.set()
        return await handle(runs)

    world.handler.handle = noted
    for shard in SHARDS:
        world.delivery.take(shard, cells(shard, 1, 1))
        for _ in range(5):
            await asyncio.sleep(0)
    await asyncio.wait_for(both.wait(), 10)
    running.cancel()
    assert [sorted(shards) for shards in calls] == [list(SHARDS)]


async def test_what_comes_while_a_call_runs_is_one_call(world):
    world.handler.gates[0] = asyncio.Event()
    world.log.grow(0, 20)
    await world.bring(*cells(0, 1, 1))
    await world.bring(*cells(0, 2, 20))
    world.handler.gates[0].set()
    await world.settle()
    assert world.handler.sizes == [1, 19]


async def test_a_duplicate_is_passed_over(world):
    world.log.grow(0, 5)
    await world.bring(*cells(0, 1, 4), *cells(0, 2, 5))
    assert world.handler.seen[0] == [1, 2, 3, 4, 5]
    assert world.delivery.counts.duplicates == 3


async def test_a_hole_is_filled_from_the_log_before_going_on(world):
    world.log.grow(0, 30)
    await world.bring(*cells(0, 1, 2), *cells(0, 29, 30))
    assert world.handler.seen[0] == list(range(1, 31))
    reads = world.log.reads
    world.log.grow(0, 31)
    await world.bring(*cells(0, 31, 31))
    assert (world.handler.seen[0][-1], world.log.reads) == (31, reads)


async def test_what_the_topic_brought_before_the_start_is_read_from_the_log():
    made = World()
    made.log.grow(0, 200)
    made.log.grow(2, 3)
    await made.settle(200)
    assert made.handler.seen == {0: list(range(1, 201)), 2: [1, 2, 3]}


async def test_shards_at_their_head_are_not_read_at_a_start(world):
    world.log.grow(0, 3)
    await world.bring(*cells(0, 1, 3))
    reads = world.log.reads
    world.delivery = world.process()
    world.delivery.look(world.log.heads())
    await world.settle()
    assert world.log.reads == reads
    assert {cursor.state for cursor in world.delivery.cursors().values()} == {CursorState.LIVE}


async def test_a_tail_that_the_topic_never_brings_is_found_by_the_heads(world):
    world.log.grow(0, 4)
    world.delivery.look(world.log.heads())
    await world.settle()
    assert world.handler.seen[0] == []
    world.delivery.look(world.log.heads(), moved=())
    await world.settle()
    assert world.handler.seen[0] == [1, 2, 3, 4]


async def test_a_restart_continues_after_the_checkpoint(world):
    world.log.grow(0, 6)
    await world.bring(*cells(0, 1, 4))
    world.delivery = world.process()
    await world.settle()
    assert world.handler.seen[0] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("record_within_s", [0.0, 0.25])
async def test_whoever_lost_a_shard_without_being_told_calls_nothing_more_until_the_group_has_confirmed_it(
    record_within_s,
):
    """I10: two processes believe that the shard is theirs. The one that moves the checkpoint second lets go."""
    world = World(record_within_s=record_within_s)
    await world.settle()
    loser = world.delivery
    owner = world.delivery = world.process()
    await world.settle()
    world.log.grow(0, 8)
    await world.bring(*cells(0, 1, 2))
    await world.until(lambda: world.finished(0) == 2)
    world.delivery = loser
    await world.bring(*cells(0, 1, 2))
    await world.until(lambda: loser.unconfirmed() == [0])
    calls = world.handler.begun[0]
    world.delivery = owner
    await world.bring(*cells(0, 3, 8))
    await world.until(lambda: world.finished(0) == 8)
    world.delivery = loser
    await world.look_twice()
    assert loser.cursors()[0].state is CursorState.UNCONFIRMED
    assert world.handler.begun[0] == calls + 1  # the owner's one
    loser.confirmed([0])
    await world.settle()
    assert loser.cursors()[0].state is CursorState.LIVE
    assert loser.cursors()[0].done.location == Location(1, 8)
    assert world.handler.begun[0] == calls + 1


async def test_a_call_of_a_shard_that_another_process_took_meanwhile_says_nothing_of_it():
    """I10: its outcome can't be stored. The shard waits for the group, whatever the handler wants."""
    world = World(together=False, record_within_s=0.25)
    await world.settle()
    world.log.grow(0, 3)
    await world.bring(*cells(0, 1, 2))
    world.handler.gates[0] = asyncio.Event()
    world.handler.judge = lambda cell: {"stop_reason": "out of cards"} if cell.added_id == 3 else None
    await world.bring(*cells(0, 3, 3))
    number, at = world.table.rows[0]
    world.table.rows[0] = (number + 5, at)
    world.now += 0.25
    await world.settle()
    assert world.delivery.cursors()[0].state is CursorState.UNCONFIRMED

    async def move(advances, effects):
        raise StorageUnavailable("the home is unreachable")

    world.checkpoints.move = move
    world.delivery.confirmed([0])  # too early: the call still runs
    world.handler.gates[0].set()
    await world.settle()
    assert world.delivery.cursors()[0].state is CursorState.UNCONFIRMED
    assert world.table.stopped == {}


async def test_nothing_is_called_while_the_group_may_have_given_the_shards_away(world):
    world.log.grow(0, 2)
    world.is_member = False
    await world.bring(*cells(0, 1, 2))
    assert world.handler.begun[0] == 0
    world.is_member = True
    await world.settle()
    assert world.handler.seen[0] == [1, 2]


async def test_a_home_that_is_unreachable_loses_nothing(world):
    world.log.grow(0, 5)
    world.log.unreachable = True
    await world.bring(*cells(0, 4, 5))
    assert world.handler.seen[0] == []
    world.log.unreachable = False
    await world.until(lambda: world.finished(0) == 5)
    assert world.handler.seen[0] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("record_within_s", [0.0, 0.25])
async def test_a_page_that_can_not_be_read_beside_a_call_repeats_nothing_that_the_call_finishes(record_within_s):
    """Otherwise its cells would be called again and counted twice, and the checkpoint would go back (I9, I10)."""
    world = World(together=False, record_within_s=record_within_s)
    world.handler.gates[0] = asyncio.Event()
    world.log.grow(0, 100)
    await world.until(lambda: world.handler.begun[0])
    world.log.unreachable = True
    await world.settle()
    assert world.delivery.counts.failures
    world.log.unreachable = False
    world.handler.gates[0].set()
    await world.until(lambda: world.finished(0) == 100)
    assert world.handler.seen[0] == list(range(1, 101))
    assert world.table.counts[0] == 100


async def test_a_page_that_fails_while_an_unfinished_call_is_stored_loses_none_of_its_cells():
    """The call has handed its cells back by then, and they come again (I9)."""
    world = World(together=False, record_within_s=0.25)
    called, stored, read = asyncio.Event(), asyncio.Event(), asyncio.Event()
    world.handler.gates[0] = called
    refused = iter([{"durable": True}])
    world.handler.judge = lambda cell: next(refused, None) if cell.added_id == 6 else None
    world.log.grow(0, 100)
    await world.until(lambda: world.handler.begun[0])
    move, read_page = world.checkpoints.move, world.log.read

    async def move_later(advances, effects):
        await stored.wait()
        return await move(advances, effects)

    async def fail_later(wanted, limit):
        await read.wait()
        raise StorageUnavailable("the home hangs")

    world.checkpoints.move, world.log.read = move_later, fail_later
    passes = asyncio.create_task(world.settle(10))
    await asyncio.sleep(0)
    called.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert world.handler.seen[0] == list(range(1, 6))
    read.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert world.delivery.counts.failures == 1
    stored.set()
    world.log.read = read_page
    await passes
    await world.until(lambda: world.finished(0) == 100)
    assert world.handler.seen[0] == list(range(1, 101))


async def test_an_unfinished_run_comes_again_without_being_read_again_and_others_continue():
    world = World(together=False)
    await world.settle()
    tries = iter([{"retry_in_s": 0.05}, {"retry_in_s": 0.05}])
    world.handler.judge = lambda cell: next(tries, None) if (cell.shard, cell.added_id) == (0, 2) else None
    world.log.grow(0, 3)
    world.log.grow(2, 3)
    reads = world.log.reads
    await world.bring(*cells(0, 1, 3), *cells(2, 1, 3))
    assert world.handler.seen == {0: [1], 2: [1, 2, 3]}
    await world.until(lambda: world.finished(0) == 3)
    assert world.handler.seen[0] == [1, 2, 3]
    assert world.log.reads == reads


async def test_a_stopped_shard_says_why_and_continues_when_it_is_resumed():
    world = World(together=False)
    await world.settle()
    world.handler.judge = lambda cell: {"stop_reason": "broken"} if (cell.shard, cell.added_id) == (0, 2) else None
    world.log.grow(0, 3)
    world.log.grow(2, 3)
    await world.bring(*cells(0, 1, 3), *cells(2, 1, 3))
    await world.look_twice()
    assert world.table.stopped == {0: "broken"}
    assert (world.finished(0), world.finished(2)) == (1, 3)
    assert world.table.rows[0][1].digest == cell_digest(world.log.cells(0)[0])
    world.handler.judge = lambda cell: None
    world.table.stopped.clear()
    await world.look_twice()
    assert world.handler.seen[0] == [1, 2, 3]


async def test_an_unforeseen_failure_stays_inside_and_fails_no_other_shard(world):
    world.handler.judge = lambda cell: RuntimeError("a bug") if (cell.shard, cell.added_id) == (0, 2) else None
    world.log.grow(0, 3)
    world.log.grow(2, 3)
    await world.bring(*cells(0, 1, 3), *cells(2, 1, 3))
    await world.until(lambda: world.finished(2) == 3)
    world.handler.judge = lambda cell: None
    await world.until(lambda: world.finished(0) == 3)


async def test_an_error_whose_text_raises_is_a_failure_like_any_other(world):
    """Otherwise the cells of the call would be missing, and those after them would move the checkpoint."""

    class Nameless(Exception):
        def __str__(self):
            raise ValueError("no text")

        __repr__ = __str__

    world.handler.judge = lambda cell: Nameless() if (cell.shard, cell.added_id) == (0, 2) else None
    world.log.grow(0, 3)
    await world.bring(*cells(0, 1, 3))
    await world.until(world.delivery.failing, passes=20_000)
    ((shard, why),) = world.delivery.failing()
    assert (shard, why.endswith("Nameless: <exception str() failed>")) == (0, True)
    world.handler.judge = lambda cell: None
    world.log.grow(0, 5)
    await world.bring(*cells(0, 4, 5))
    await world.until(lambda: world.finished(0) == 5)
    assert sorted(set(world.handler.seen[0])) == [1, 2, 3, 4, 5]


async def test_what_fails_comes_again_in_smaller_pages_down_to_one_cell(world):
    """A handler that can't take more than two cells at once gets through."""
    world.log.grow(0, 60)
    handle = world.handler.handle

    async def small(runs):
        if any(len(run.cells) > 2 for run in runs):
            raise StorageUnavailable("too much at once")
        return await handle(runs)

    world.handler.handle = small
    await world.bring(*cells(0, 59, 60))
    await world.until(lambda: world.finished(0) == 60, passes=20_000)
    assert world.handler.seen[0] == list(range(1, 61))


async def test_a_shard_that_fails_with_a_single_cell_says_why_and_not_any_longer_when_it_goes_on(world):
    """L12c: an index that can't write, or a body that can't be read. Others continue, and nothing else tells people."""
    handle = world.handler.handle
    broken = {0}

    async def fail(runs):
        if any(run.shard in broken for run in runs):
            raise ValueError(f"cell {runs[0].cells[0].added_id} can't be read, {len(runs[0].cells)} at once")
        return await handle(runs)

    world.handler.handle = fail
    world.log.grow(0, 40)
    await world.bring(*cells(0, 40, 40))
    await world.until(world.delivery.failing, passes=20_000)
    only_one = [(0, "ValueError: cell 1 can't be read, 1 at once")]
    await world.until(lambda: world.delivery.failing() == only_one, passes=20_000)
    world.log.grow(2, 1)
    await world.bring(*cells(2, 1, 1))
    await world.until(lambda: world.finished(2) == 1)
    broken.clear()
    await world.until(lambda: world.finished(0) == 40, passes=20_000)
    await world.settle()
    assert world.delivery.failing() == []


async def test_a_shard_whose_server_was_away_and_that_has_nothing_to_do_fails_no_longer(world):
    """Its failures are forgotten: the next one is the first again."""
    world.log.grow(0, 1)
    await world.bring(*cells(0, 1, 1))
    await world.until(lambda: world.finished(0) == 1)
    world.log.grow(0, 2)
    world.log.unreachable = True
    await world.bring(*cells(0, 3, 3))
    await world.until(world.delivery.failing, passes=20_000)
    assert world.delivery.failing() == [(0, "the home is unreachable")]
    world.log.unreachable = False
    world.log.grow(0, 3)
    await world.until(lambda: world.finished(0) == 3, passes=20_000)
    await world.settle()
    assert (world.delivery.failing(), world.delivery._shards[0].failures) == ([], 0)


async def test_a_slow_shard_costs_no_memory_and_catches_up_from_the_log(world):
    world.handler.gates[0] = asyncio.Event()
    world.log.grow(0, 2000)
    await world.bring(*cells(0, 1, 1))
    world.delivery.take(0, cells(0, 2, 2000))
    assert world.delivery.cursors()[0].state is CursorState.BEHIND
    await world.settle()
    assert sum(map(len, (work.cells for work in world.delivery._shards.values()))) <= 64
    world.handler.gates[0].set()
    await world.until(lambda: world.finished(0) == 2000, passes=5000)
    assert world.handler.seen[0] == list(range(1, 2001))


async def test_checkpoints_may_be_stored_a_little_later_and_count_the_finished_cells():
    world = World(together=False, record_within_s=0.25)
    await world.settle()
    world.log.grow(0, 9)
    for n in range(1, 10):
        await world.bring(*cells(0, n, n))
    assert world.handler.seen[0] == list(range(1, 10))
    assert (world.checkpoints.moves, world.finished(0)) == (0, 0)
    world.now += 0.25
    await world.settle()
    assert (world.checkpoints.moves, world.finished(0)) == (1, 9)
    assert world.table.counts[0] == 9


async def test_checkpoints_of_cells_without_an_effect_are_stored_within_five_seconds():
    world = World(together=False, record_within_s=0.25)
    await world.settle()
    world.handler.idle = True
    world.log.grow(0, 9)
    await world.bring(*cells(0, 1, 9))
    world.now += 4.9
    await world.settle()
    assert world.finished(0) == 0
    world.now += 0.1
    await world.settle()
    assert world.finished(0) == 9


async def test_before_a_call_that_follows_a_failure_the_checkpoint_is_stored():
    world = World(together=False, record_within_s=0.25)
    await world.settle()
    world.handler.judge = lambda cell: {"retry_in_s": 9.0} if cell.added_id == 3 else None
    world.log.grow(0, 3)
    await world.bring(*cells(0, 1, 3))
    assert world.finished(0) == 2


async def test_suspended_shards_finish_what_is_in_flight_and_continue_where_they_are_if_nobody_else_had_them():
    world = World(together=False, record_within_s=0.25)
    await world.settle()
    world.log.grow(0, 3)
    world.delivery.take(0, cells(0, 1, 2))
    await world.delivery.step()
    await world.delivery.suspend(SHARDS, 10.0)
    assert world.finished(0) == 2
    world.delivery.take(0, cells(0, 3, 3))
    await world.settle()
    assert world.handler.seen[0] == [1, 2]
    reads = world.log.reads
    world.delivery.gain(SHARDS, kept=True)
    await world.bring(*cells(0, 3, 3))
    assert world.handler.seen[0] == [1, 2, 3]
    assert world.log.reads == reads


async def test_a_shard_has_one_call_at_a_time_also_when_it_is_given_away_and_comes_back(world):
    """The Recorder asserts it. The outcome of the call that still ran counts."""
    world.handler.gates[0] = asyncio.Event()
    world.log.grow(0, 3)
    await world.bring(*cells(0, 1, 2))
    suspending = asyncio.create_task(world.delivery.suspend(SHARDS, 0.0))
    await suspending
    world.delivery.release(SHARDS)
    world.delivery.gain(SHARDS)
    await world.settle()
    assert world.handler.begun[0] == 1
    world.handler.gates[0].set()
    await world.until(lambda: world.finished(0) == 3)
    assert world.handler.seen[0] == [1, 2, 3]


async def test_a_busy_shard_stores_its_checkpoint_too():
    """A backlog leaves no moment in which its shard isn't called for."""
    world = World(together=False, record_within_s=0.25)
    world.log.grow(0, 900)
    handle = world.handler.handle

    async def one_cell(runs):
        world.now += 0.02
        (outcome,) = (await handle([Run(run.shard, run.after, run.cells[:1]) for run in runs])).outcomes
        return Effect([outcome])

    world.handler.handle = one_cell
    unstored = 0
    while len(world.handler.seen[0]) < 300:
        await world.delivery.step()
        await asyncio.sleep(0)
        unstored = max(unstored, len(world.handler.seen[0]) - world.finished(0))
    assert unstored < 20


async def test_a_shard_that_comes_back_during_a_call_begins_anew_after_it_and_counts_right():
    """The call that still ran may have left a rest. It is read again, in order, and counted once."""
    world = World(together=False, record_within_s=0.25)
    await world.settle()
    world.handler.gates[0] = asyncio.Event()
    world.log.grow(0, 8)
    await world.bring(*cells(0, 1, 6))
    tries = iter([{}])
    world.handler.judge = lambda cell: next(tries, None) if (cell.shard, cell.added_id) == (0, 2) else None
    await world.delivery.suspend(SHARDS, 0.0)
    world.delivery.release(SHARDS)
    world.delivery.gain(SHARDS)
    await world.settle()
    world.handler.gates[0].set()
    await world.until(lambda: world.finished(0) == 8)
    assert world.handler.seen[0] == list(range(1, 9))
    assert world.table.counts[0] == 8


@pytest.mark.parametrize("record_within_s", [0.0, 0.25])
async def test_a_shard_that_comes_back_and_then_loses_its_checkpoint_waits_for_the_group(record_within_s):
    """I10: the loss is later than the group's word, so another process may have had the shard since."""
    world = World(together=False, record_within_s=record_within_s)
    await world.settle()
    world.handler.gates[0] = asyncio.Event()
    world.log.grow(0, 5)
    await world.bring(*cells(0, 1, 3))
    await world.delivery.suspend([0], 0.0)
    world.delivery.release([0])
    world.delivery.gain([0])
    number, _ = world.table.rows[0]
    world.table.rows[0] = (number + 1, position_of(world.log.cells(0)[3]))
    calls = world.handler.begun[0]
    world.handler.gates[0].set()
    await world.settle()
    assert world.delivery.unconfirmed() == [0]
    assert world.handler.begun[0] == calls
    world.delivery.confirmed([0])
    await world.settle()
    assert world.handler.seen[0] == [1, 2, 3, 5]


async def test_a_shard_that_waited_for_the_group_and_is_gained_again_is_looked_at(world):
    """It is at its head, so it is live at once. The topic never brings what comes then (I9)."""
    number, at = world.table.rows[0]
    world.table.rows[0] = (number + 1, at)
    world.log.grow(0, 1)
    await world.bring(*cells(0, 1, 1))
    assert world.delivery.unconfirmed() == [0]
    world.table.rows[0] = (number + 2, position_of(world.log.cells(0)[0]))
    await world.delivery.suspend([0], 0.0)
    world.delivery.look(world.log.heads(), moved=())
    world.delivery.gain([0])
    await world.settle()
    assert world.delivery.cursors()[0].state is CursorState.LIVE
    world.log.grow(0, 2)
    await world.look_twice()
    assert world.finished(0) == 2


async def test_a_shard_that_comes_back_while_its_last_checkpoint_is_stored_stays():
    world = World(together=False, record_within_s=0.25)
    await world.settle()
    world.handler.gates[0] = asyncio.Event()
    world.log.grow(0, 2)
    await world.bring(*cells(0, 1, 2))
    await world.delivery.suspend(SHARDS, 0.0)
    world.delivery.release(SHARDS)
    answered, move = asyncio.Event(), world.checkpoints.move

    async def slow(advances, effects):
        await answered.wait()
        return await move(advances, effects)

    world.checkpoints.move = slow
    world.handler.gates[0].set()
    for _ in range(10):
        await asyncio.sleep(0)
    world.delivery.gain(SHARDS)
    answered.set()
    world.log.grow(0, 3)
    await world.until(lambda: world.finished(0) == 3)
    assert world.handler.seen[0] == [1, 2, 3]


async def test_a_shard_that_waits_for_the_group_is_named_while_others_have_a_backlog(world):
    world.log.grow(2, 3)
    await world.bring(*cells(2, 1, 3))
    number, at = world.table.rows[2]
    world.table.rows[2] = (number + 5, at)
    world.log.grow(0, 4000)
    world.log.grow(2, 4)
    world.delivery.look(world.log.heads())
    world.delivery.look(world.log.heads())
    world.delivery.take(2, cells(2, 4, 4))
    while world.delivery.cursors()[2].state is not CursorState.UNCONFIRMED:
        await world.delivery.step()
        await asyncio.sleep(0)
    await world.delivery.step()
    assert world.delivery.unconfirmed() == [2]
    assert world.finished(0) < 4000


async def test_nothing_is_read_ahead_while_nothing_may_be_called_or_too_much_waits():
    world = World()
    world.log.grow(0, 500)
    world.is_member = False
    await world.settle()
    assert world.log.reads == 0
    world.is_member = True
    world.delivery._shared.queued.total = 1 << 30  # of other consumers of this process
    await world.settle()
    assert world.log.reads == 0
    world.delivery._shared.queued.total = 0
    await world.until(lambda: world.finished(0) == 500)
    assert world.delivery._shared.queued.total == 0


async def test_a_supersession_waits_until_the_checkpoint_before_it_is_stored():
    """Else its cells would be counted on top of those after it."""
    world = World(together=False, record_within_s=0.25)
    await world.settle()
    world.log.grow(0, 10)
    await world.bring(*cells(0, 1, 10))
    failures, move = iter([StorageUnavailable("the answer is lost")]), world.checkpoints.move

    async def fails_once(advances, effects):
        if (error := next(failures, None)) is not None:
            raise error
        return await move(advances, effects)

    world.checkpoints.move = fails_once
    world.log.table.open_generation(0, 8)
    world.log.grow(0, 12)
    await world.look_twice()
    await world.until(lambda: world.finished(0) == 12)
    assert world.table.counts[0] == 5  # after 7, where it went back to


async def test_a_closed_delivery_finishes_what_is_in_flight_and_takes_nothing_new():
    world = World(together=False, record_within_s=0.25)
    await world.settle()
    world.log.grow(0, 2)
    world.delivery.take(0, cells(0, 1, 1))
    await world.delivery.step()
    await world.delivery.close(10.0)
    world.delivery.take(0, cells(0, 2, 2))
    await world.settle()
    assert world.finished(0) == 1
    assert world.handler.seen[0] == [1]


async def test_a_delivery_that_closes_while_mysql_is_away_says_how_many_cells_come_again():
    world = World(together=False, record_within_s=0.25)
    await world.settle()
    world.log.grow(0, 9)
    await world.bring(*cells(0, 1, 9))

    async def move(advances, effects):
        raise StorageUnavailable("the home is unreachable")

    world.checkpoints.move = move
    with capture_logs() as logs:
        await world.delivery.close(10.0)
    assert [(line["event"], line.get("cells")) for line in logs][-1] == (
        "finished cells may come again", 9,
    )  # fmt: skip


async def test_a_checkpoint_whose_move_is_cancelled_is_not_forgotten():
    """A server hangs longer than a delivery waits when it closes."""
    world = World(together=False, record_within_s=0.25)
    await world.settle()
    world.handler.judge = lambda cell: {"durable": True} if cell.added_id == 3 else None
    began = asyncio.Event()

    async def hang(advances, effects):
        began.set()
        await asyncio.Event().wait()

    async def refuse(advances, effects):
        raise StorageUnavailable("the home is unreachable")

    world.checkpoints.move = hang
    world.log.grow(0, 3)
    world.delivery.take(0, cells(0, 1, 3))
    await world.delivery.step()
    await began.wait()
    world.checkpoints.move = refuse
    with capture_logs() as logs:
        await world.delivery.close(0.0)
    assert [(line["event"], line.get("cells")) for line in logs][-1] == (
        "finished cells may come again", 2,
    )  # fmt: skip


async def test_a_superseded_position_goes_back_to_the_new_generation(world):
    """What generation 1 had beyond the promotion is gone. The cells that took its place are handled (I13)."""
    world.log.grow(0, 6)
    await world.bring(*cells(0, 1, 6))
    world.log.table.open_generation(0, 5)
    world.log.grow(0, 7)
    await world.bring(*cells(0, 5, 7, generation=2))
    assert world.handler.seen[0] == [1, 2, 3, 4, 5, 6, 5, 6, 7]
    assert world.handler.superseded == [(0, 5, 2)]
    assert world.table.rows[0][1].location == Location(2, 7)


async def test_what_a_call_leaves_is_called_before_its_superseded_cells_are_taken_back(world):
    """It ended while the log said so. Its rest would be passed by the checkpoint, and called too late (I10, I13)."""
    gate = world.handler.gates[0] = asyncio.Event()
    verdicts, seen_before = [{}], []
    world.handler.judge = lambda cell: verdicts.pop() if verdicts and cell.added_id == 3 else None
    world.log.grow(0, 4)
    await world.bring(*cells(0, 1, 4))
    read, supersede = world.log.read, world.handler.supersede

    async def read_while_the_call_ends(wanted, limit):
        gate.set()
        await asyncio.gather(*world.delivery.calls)
        return await read(wanted, limit)

    async def noted(*generation):
        seen_before.extend(world.handler.seen[0])
        return await supersede(*generation)

    world.log.read, world.handler.supersede = read_while_the_call_ends, noted
    world.log.table.open_generation(0, 4)
    world.log.grow(0, 5)
    await world.bring(*cells(0, 4, 5, generation=2))
    await world.until(lambda: world.table.rows[0][1].location == Location(2, 5))
    assert seen_before == [1, 2, 3, 4]
    assert world.handler.superseded == [(0, 4, 2)]
    assert world.handler.seen[0] == [1, 2, 3, 4, 4, 5]


async def test_a_checkpoint_that_goes_back_has_the_digest_of_the_cell_that_it_goes_back_to(world):
    """I16: also where no cell follows that would bring one. Else it would be taken by its number after a restore."""
    world.log.grow(0, 6)
    await world.bring(*cells(0, 1, 6))
    world.log.table.open_generation(0, 5)
    await world.look_twice()
    assert world.handler.superseded == [(0, 5, 2)]
    assert world.table.rows[0][1] == position_of(cells(0, 4, 4)[0])


async def test_nothing_goes_on_until_what_was_superseded_is_taken_back(world):
    """A cluster is away. Otherwise its effects of superseded cells would stay for ever (I11)."""
    world.log.grow(0, 6)
    await world.bring(*cells(0, 1, 6))
    world.handler.takes_nothing_back = True
    world.log.table.open_generation(0, 5)
    world.log.grow(0, 7)
    await world.bring(*cells(0, 5, 7, generation=2))
    world.now += 10
    await world.look_twice()
    assert world.handler.seen[0] == [1, 2, 3, 4, 5, 6]
    world.handler.takes_nothing_back = False
    world.now += 10
    await world.look_twice()
    assert world.handler.superseded == [(0, 5, 2)]
    assert world.handler.seen[0] == [1, 2, 3, 4, 5, 6, 5, 6, 7]


async def test_what_another_cluster_has_of_superseded_cells_is_taken_back_too(world):
    """A promotion takes one cluster's checkpoint back with its cells. The others keep what they have (I13)."""
    world.log.grow(0, 6)
    await world.bring(*cells(0, 1, 6))
    version, _ = world.table.rows[0]
    world.table.ahead[0] = (position_of(world.log.cells(0)[5]),)
    world.table.rows[0] = (version, position_of(world.log.cells(0)[2]))
    world.log.table.open_generation(0, 5)
    world.log.grow(0, 7)
    world.delivery = world.process()
    await world.look_twice()
    assert world.handler.superseded == [(0, 5, 2)]
    assert world.handler.seen[0] == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7]


@pytest.mark.parametrize("is_begun", [True, False])
async def test_whoever_loses_the_checkpoint_while_cells_are_taken_back_waits_for_the_group(world, is_begun):
    """I10: also where a shard begins, and another cluster is further."""
    world.log.grow(0, 6)
    await world.bring(*cells(0, 1, 6))
    if not is_begun:
        world.table.ahead[0] = (position_of(world.log.cells(0)[5]),)
        world.table.rows[0] = (world.table.rows[0][0], position_of(world.log.cells(0)[2]))

    async def another_process_moves_it(shard, starts_at, generation):
        number, at = world.table.rows[0]
        world.table.rows[0] = (number + 5, at)
        return Effect([])

    world.handler.supersede = another_process_moves_it
    world.log.table.open_generation(0, 5)
    if not is_begun:
        world.delivery = world.process()
    await world.look_twice()
    assert world.delivery.unconfirmed() == [0]


async def test_a_cluster_that_is_only_further_than_another_has_nothing_to_take_back(world):
    """A process ended between two clusters. The log still has what the first of them finished."""
    world.log.grow(0, 6)
    await world.bring(*cells(0, 1, 6))
    version, _ = world.table.rows[0]
    world.table.ahead[0] = (position_of(world.log.cells(0)[5]),)
    world.table.rows[0] = (version, position_of(world.log.cells(0)[2]))
    world.delivery = world.process()
    await world.look_twice()
    assert world.handler.superseded == []
    assert world.handler.seen[0] == [1, 2, 3, 4, 5, 6, 4, 5, 6]


async def test_effects_of_another_history_on_one_cluster_hold_up_their_shard_only(world):
    """The home was restored, and its checkpoint with it. The shard waits until a generation is opened (I16)."""
    for shard in SHARDS:
        world.log.grow(shard, 6)
        await world.bring(*cells(shard, 1, 3))
    world.table.ahead[0] = (Position(0, 1, 6, digest=12345),)
    world.delivery = world.process()
    await world.look_twice()
    states = {shard: cursor.state for shard, cursor in world.delivery.cursors().items()}
    assert states == {0: CursorState.LOCATING, 2: CursorState.LIVE}
    assert (world.finished(0), world.finished(2)) == (3, 6)
    world.log.table.open_generation(0, 5)
    world.log.grow(0, 7)
    world.now += 10
    await world.look_twice()
    assert world.handler.superseded == [(0, 5, 2)]
    assert world.handler.seen[0] == [1, 2, 3, 4, 5, 6, 7]


async def test_superseded_records_that_come_late_are_not_called(world):
    world.log.grow(0, 3)
    await world.bring(*cells(0, 1, 3))
    world.log.grow(0, 8)
    world.log.table.open_generation(0, 5)
    world.log.grow(0, 6)
    world.delivery = world.process()
    await world.settle()
    assert world.handler.seen[0] == [1, 2, 3, 4, 5, 6]
    await world.bring(*cells(0, 4, 8))
    world.log.grow(0, 9)
    await world.bring(*cells(0, 5, 9, generation=2))
    assert world.handler.seen[0] == list(range(1, 10))


async def test_another_history_is_refused_and_nothing_of_it_is_called(world):
    """A master that was restored, and has grown again beyond the checkpoint (I16)."""
    world.log.grow(0, 6)
    await world.bring(*cells(0, 1, 6))
    number, at = world.table.rows[0]
    world.table.rows[0] = (number, Position(0, 1, at.added_id, digest=12345))
    world.log.grow(0, 9)
    world.delivery = world.process()
    await world.look_twice()
    assert world.delivery.cursors()[0].state is CursorState.REFUSED
    assert world.handler.seen[0] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("in_flight", [1, 0])
async def test_what_a_queue_left_to_the_log_comes_from_the_same_history(world, in_flight):
    """I16: a shard is slow or paused while its master is restored and grows again, with other cells under the numbers.

    The position to read on from is the cell in flight, or else the checkpoint. Either has a digest.
    """
    world.log.grow(0, 2000)
    await world.bring(*cells(0, 1, 3))
    world.handler.gates[0] = asyncio.Event()
    if in_flight:
        await world.bring(*cells(0, 4, 4))
    else:
        world.delivery.pause(lambda shard: True)
    world.delivery.take(0, cells(0, 4 + in_flight, 2000))
    assert world.delivery.cursors()[0].at.added_id == 3 + in_flight
    world.log.table = MemoryEntityTable(Datastore("d", max(SHARDS) + 1, 1, ("a",)), clock_us=lambda: 1_000_000)
    world.log.grow(0, 2001)
    world.delivery.pause(lambda shard: False)
    await world.settle()
    world.handler.gates[0].set()
    await world.until(lambda: world.delivery.cursors()[0].state is CursorState.REFUSED)
    assert world.handler.seen[0] == list(range(1, 4 + in_flight))


async def test_records_that_the_log_does_not_have_cost_no_read_until_the_next_look(world):
    world.log.grow(0, 2)
    await world.bring(*cells(0, 1, 2), *cells(0, 4, 5))
    reads = world.log.reads
    await world.bring(*cells(0, 6, 6))
    assert world.log.reads == reads
    assert world.delivery.cursors()[0].state is CursorState.REFUSED
    world.log.grow(0, 7)
    await world.look_twice()
    assert world.handler.seen[0] == list(range(1, 8))


_CALL_OUTLIVES_ITS_PROCESS = [
    ("write", 0, 1),
    ("step", 0, 0),
    ("promote", 0, 0),
    ("restart", 0, 0),
    ("write", 0, 1),
    ("step", 0, 0),
    ("write", 0, 1),
]


@example(_CALL_OUTLIVES_ITS_PROCESS, 0.0)
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.sampled_from(SHARDS), st.integers(1, 9)),
            st.tuples(st.just("topic"), st.sampled_from(SHARDS), st.integers(0, 12)),
            st.tuples(st.just("skip"), st.sampled_from(SHARDS), st.integers(1, 5)),
            st.tuples(st.just("again"), st.sampled_from(SHARDS), st.integers(1, 9)),
            st.tuples(st.just("promote"), st.sampled_from(SHARDS), st.integers(0, 4)),
            st.tuples(st.sampled_from(["restart", "step", "look", "other"]), st.sampled_from(SHARDS), st.just(0)),
        ),
        max_size=25,
    ),
    st.sampled_from([0.0, 0.25]),
)
def test_every_cell_arrives_whatever_topic_log_and_other_processes_do(events, record_within_s):
    """Records that come late, twice or never, restarts, promotions, and a process that lost its shards unknowingly."""
    asyncio.run(_play(events, record_within_s))


async def _play(events, record_within_s):  # noqa: C901, PLR0912  # a branch for each event
    world = World(record_within_s=record_within_s)
    topic = {shard: [] for shard in SHARDS}
    sent = dict.fromkeys(SHARDS, 0)
    other = world.process()
    for kind, shard, count in events:
        known = world.log.cells(shard)
        if kind == "write":
            world.log.grow(shard, len(known) + count)
            topic[shard] += world.log.cells(shard)[len(known) :]
        elif kind == "topic":
            found = topic[shard][sent[shard] : sent[shard] + count]
            sent[shard] += len(found)
            if found:
                world.delivery.take(shard, found)
        elif kind == "skip":
            sent[shard] = min(len(topic[shard]), sent[shard] + count)
        elif kind == "again":
            sent[shard] = max(0, sent[shard] - count)
        elif kind == "promote":
            world.log.table.open_generation(shard, max(1, len(known) - count))
        elif kind == "restart":
            world.delivery = world.process()
        elif kind == "look":
            world.delivery.look(world.log.heads())
        elif kind == "other":
            world.delivery, other = other, world.delivery
        else:
            await world.settle(3)
    world.delivery = world.process()
    for _ in range(4):
        world.now += 10.0
        await world.look_twice()
        # A call of a process before may have moved a checkpoint only now. Then the group must confirm the shard.
        world.delivery.confirmed(world.delivery.unconfirmed())
    for shard in SHARDS:
        found = world.log.cells(shard)
        assert world.table.rows[shard][1].location.added_id == len(found)
        assert {(shard, cell.location) for cell in found} <= world.handler.locations


async def test_a_shard_without_a_checkpoint_waits_for_it_and_holds_up_no_other():
    """Somebody else makes it, as the build of an index does. Then the shard begins there."""
    world = World()
    del world.table.rows[0]
    world.log.grow(0, 5)
    world.log.grow(2, 4)
    await world.look_twice()
    await world.until(lambda: world.finished(2) == 4)
    assert world.handler.seen[0] == []
    world.table.rows[0] = (0, position_of(world.log.cells(0)[2]))
    await world.until(lambda: world.finished(0) == 5)
    assert world.handler.seen == {0: [4, 5], 2: [1, 2, 3, 4]}
