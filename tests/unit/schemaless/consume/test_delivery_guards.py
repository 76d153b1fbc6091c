"""What keeps two things of delivery apart that rarely meet: a call, a page, a move of a checkpoint, a rebalance."""

import asyncio

import pytest

from schemaless.consume.delivery import CarefulCalls, Recorder
from schemaless.consume.ports import Effect, Mark, Outcome, Predecessor, Run, ShardCheckpoint, StatelessHandler
from schemaless.consume.shard_work import Assignment, DeliveryCounts, MarkedCalls, QueuedBytes, ShardWork
from schemaless.errors import StorageUnavailable
from schemaless.location import Location
from schemaless.position import BEGINNING_DIGEST, Position, position_of
from schemaless.storage.entity_table import ShardCell
from tests.unit.schemaless.consume.test_delivery import World, cells


class Store:
    """Moves checkpoints. As on a server, nothing of effects stays where one of their moves is lost."""

    consumer = "trigger:test"

    def __init__(self, lost=()):
        self.lost = frozenset(lost)
        self.moved = {}
        self.marks = []
        self.moving = set()

    async def move(self, advances, effects):
        assert self.moving.isdisjoint(advances), "two moves from one version: the second one is lost"
        self.moving |= advances.keys()
        for _ in range(3):
            await asyncio.sleep(0)
        self.moving -= advances.keys()
        lost = self.lost & advances.keys()
        if not (lost and any(advance.effect for advance in advances.values())):
            self.moved.update({shard: advance.to.added_id for shard, advance in advances.items() if shard not in lost})
        self.marks += [advance.mark for advance in advances.values() if advance.mark is not None]
        return lost


def work_of(shard, finished=0, predecessor=Predecessor.OURSELVES):
    """Returns a shard of which cells are finished and not recorded."""
    work = ShardWork(shard, DeliveryCounts(), QueuedBytes())
    work.begin(ShardCheckpoint(Position(shard, 1, 0, digest=BEGINNING_DIGEST), predecessor=predecessor), None)
    if finished:
        work.cursor.finish(position_of(cells(shard, finished, finished)[0]))
    return work


async def test_a_mark_waits_for_what_moves_the_checkpoint_already():
    """Otherwise both would name one version of the row, and the process would take itself for another one (I10)."""
    store = Store()
    recorder, work = Recorder(store, 0.25), work_of(0, finished=1)
    recorder.note(work, Outcome(1), 0.0)
    storing = asyncio.create_task(recorder.record([work], 1.0))
    await asyncio.sleep(0)
    assert await recorder.mark(work, Mark(begun=True))
    assert await storing == []
    assert (store.moved, store.marks) == ({0: 1}, [Mark(begun=True)])


@pytest.mark.parametrize("lost_has_effect", [False, True])
async def test_a_checkpoint_that_is_lost_takes_no_effect_of_another_shard_with_it(lost_has_effect):
    """The other one's record of a parked cell would be missing, and its checkpoint taken for stored (I12)."""
    store = Store(lost=[2])
    recorder, kept, lost = Recorder(store, 0.25), work_of(0, finished=1), work_of(2, finished=1)
    recorder.note(kept, Outcome(1, script="INSERT"), 0.0)
    recorder.note(lost, Outcome(1, script="INSERT" if lost_has_effect else ""), 0.0)
    assert await recorder.record([kept, lost], 1.0) == [lost]
    assert store.moved == {0: 1}


class Called(StatelessHandler):
    """Notes what it was given. All of it is foreign code."""

    together = False
    record_within_s = 0.25

    def __init__(self):
        self.foreign_code = self
        self.runs = []

    def calls(self, cell):
        return True

    def judge_suspect(self, cell, kills, death):
        return None

    async def handle(self, runs):
        self.runs += runs
        return Effect([Outcome(len(run.cells)) for run in runs])


@pytest.mark.parametrize(
    ("assignment", "is_member"),
    [(Assignment.SUSPENDED, True), (Assignment.RELEASED, True), (Assignment.RETURNING, True), (Assignment.OURS, False)],
)
async def test_a_call_whose_shard_went_while_it_waited_for_its_turn_is_not_made(assignment, is_member):
    """A call with care may wait behind a suspect. Another process may have the shard by then, so nothing is marked."""
    handler, store = Called(), Store()
    careful = CarefulCalls(handler, store, Recorder(store, 0.25), MarkedCalls(), lambda: is_member)
    work = work_of(0, predecessor=Predecessor.DIED)
    work.assignment = assignment
    run = Run(0, Location(1, 0), cells(0, 1, 1), True)
    assert await careful.handle([work], [run]) == Effect([Outcome(0)])
    assert (handler.runs, store.marks) == ([], [])
    work.assignment, is_member = Assignment.OURS, True
    await careful.handle([work], [run])
    assert (handler.runs, store.marks) == ([run], [Mark(begun=True)])


async def test_after_a_failure_pages_grow_only_when_several_calls_went_well():
    """Otherwise every second call would be the one that is too large."""
    world = World(together=False)
    world.log.grow(0, 600)
    failures = iter([StorageUnavailable("too much at once")])
    world.handler.judge = lambda cell: next(failures, None)
    await world.until(lambda: world.finished(0) == 600)
    first, *others = world.handler.sizes
    assert first == 32
    assert others[:16] == [16] * 16
    assert max(others) > 16


@pytest.mark.parametrize("record_within_s", [0.0, 0.25])
async def test_a_call_that_is_cancelled_while_nothing_closes_is_one_that_failed(record_within_s):
    """Code in the same loop may cancel every task of it. The cells of the call come again (I10)."""
    world = World(together=False, record_within_s=record_within_s)
    world.log.grow(0, 20)
    world.handler.gates[0] = asyncio.Event()
    await world.until(lambda: world.handler.begun[0])
    await world.settle(2)
    for call in world.delivery.calls:
        call.cancel()
    await world.settle()
    world.handler.gates[0].set()
    await world.until(lambda: world.finished(0) == 20)
    assert world.delivery.counts.failures == 1


async def test_no_page_is_read_beside_a_call_of_a_shard_that_failed():
    """If that call fails too, the page was read for nothing, again and again."""
    world = World(together=False)
    world.log.grow(0, 200)
    failures = iter([StorageUnavailable("no answer")])
    world.handler.judge = lambda cell: next(failures, None)
    await world.until(lambda: world.delivery.counts.failures == 1)
    world.handler.gates[0] = asyncio.Event()
    begun = world.handler.begun[0]
    await world.until(lambda: world.handler.begun[0] > begun)
    reads = world.log.reads
    await world.settle()
    assert world.log.reads == reads
    world.handler.gates[0].set()
    await world.until(lambda: world.finished(0) == 200)


async def test_a_page_of_a_shard_that_was_given_away_while_it_was_read_takes_no_room():
    """What waits in the queues of a process is bounded, and nobody would ever take these cells out again."""
    world = World(together=False)
    world.log.table.put_cells([ShardCell(cell.key, b"body", 0) for cell in cells(0, 1, 10)])
    reading, answered, read = asyncio.Event(), asyncio.Event(), world.log.read

    async def slowly(wanted, limit):
        reading.set()
        await answered.wait()
        return await read(wanted, limit)

    world.log.read = slowly
    passes = asyncio.create_task(world.settle(5))
    await reading.wait()
    queued = world.delivery._shared.queued
    world.delivery.release([0])
    answered.set()
    await passes
    assert queued.total == 0
    assert world.handler.begun[0] == 0
