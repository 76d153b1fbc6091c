"""Suspects: which cell is blamed when processes die, one after the other, while many cells are in flight (I10).

Processes are simulated: each is a delivery over checkpoints in memory, and dies by being cancelled without a word.
"""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemaless.cell import StoredCell
from schemaless.consume.delivery import Delivery
from schemaless.consume.ports import Effect, HungCall, Mark, Outcome, Predecessor, ShardCheckpoint, StatelessHandler
from schemaless.consume.shard_work import CAREFUL_CELLS, Care, MarkedCalls, ShardCaution
from schemaless.errors import StorageUnavailable
from schemaless.position import BEGINNING_DIGEST, Position, position_of
from tests.unit.schemaless.consume.test_delivery import MemoryLog

SHARDS = (0, 2)
KILLS_MAX = 3


def cell(n, column="BASE"):
    return StoredCell(bytes(16), column, n, 0, 1, n, 0, b"")


def is_called(found):
    return found.column_name == "BASE"


@pytest.mark.parametrize(
    ("predecessor", "kills", "care"),
    [
        (Predecessor.OURSELVES, 0, Care.NONE),
        (Predecessor.LEFT, 0, Care.CLAIM),
        (Predecessor.LEFT, 1, Care.SUSPECT),
        (Predecessor.DIED, 0, Care.MARK),
        (Predecessor.DIED, 1, Care.SUSPECT),
    ],
)
def test_who_had_a_shard_before_decides_what_its_next_call_needs(predecessor, kills, care):
    caution = ShardCaution()
    caution.begin(predecessor, kills)
    assert caution.care is care


def test_care_ends_after_so_many_cells_and_with_a_suspect_that_is_finished():
    caution = ShardCaution()
    caution.begin(Predecessor.DIED, 2)
    assert caution.mark() == Mark(begun=True, kills=2)
    caution.marked()
    caution.finished()
    assert caution.care is Care.MARK
    for _ in range(CAREFUL_CELLS - 1):
        caution.finished()
    assert caution.care is Care.NONE
    caution.let_go()
    assert (caution.care, caution.mark()) == (Care.CLAIM, Mark(begun=False))


def test_with_care_a_call_takes_one_cell_or_those_before_it_that_call_nothing():
    waiting = [cell(1, "OTHER"), cell(2, "OTHER"), cell(3), cell(4)]
    caution = ShardCaution()
    assert caution.cells_of_call(waiting, is_called, 10) == 10
    caution.begin(Predecessor.DIED, 0)
    assert caution.cells_of_call(waiting, is_called, 10) == 2
    assert caution.cells_of_call(waiting, is_called, 1) == 1
    assert caution.cells_of_call(waiting[2:], is_called, 10) == 1
    assert caution.cells_of_call(waiting[:2], is_called, 10) == 10


async def test_a_suspect_is_called_alone_and_those_that_come_later_wait_behind_it():
    calls, order, ended = MarkedCalls(), [], {name: asyncio.Event() for name in "abcde"}

    async def call(name, care):
        async with calls.turn(care):
            order.append(name)
            await ended[name].wait()

    async def settle():
        for _ in range(20):
            await asyncio.sleep(0)

    cares = {"a": Care.MARK, "b": Care.MARK, "c": Care.SUSPECT, "d": Care.MARK, "e": Care.NONE}
    tasks = [asyncio.create_task(call(name, care)) for name, care in cares.items()]
    await settle()
    assert order == ["a", "b", "e"]
    ended["a"].set()
    await settle()
    assert order == ["a", "b", "e"]
    ended["b"].set()
    await settle()
    assert order == ["a", "b", "e", "c"]
    ended["c"].set()
    await settle()
    assert order == ["a", "b", "e", "c", "d"]
    for event in ended.values():
        event.set()
    await asyncio.gather(*tasks)


class Row:
    def __init__(self, shard):
        self.position = Position(shard, 1, 0, digest=BEGINNING_DIGEST)
        self.version = self.kills = 0
        self.worker = self.stopped = None
        self.begun = False


class Store:
    """The checkpoints as one process sees them."""

    consumer = "trigger:test"

    def __init__(self, world, number):
        self.world, self.number, self.known = world, number, {}

    async def read(self, shards):
        await asyncio.sleep(0)
        self.known.update({shard: self.world.rows[shard].version for shard in shards})
        return {shard: self._checkpoint(self.world.rows[shard]) for shard in shards}

    def _checkpoint(self, row):
        if row.worker == self.number:
            return ShardCheckpoint(row.position, row.stopped, (), Predecessor.OURSELVES, row.kills)
        died = row.worker in self.world.present
        predecessor = Predecessor.DIED if died else Predecessor.LEFT
        return ShardCheckpoint(row.position, row.stopped, (), predecessor, row.kills + (died and row.begun))

    async def move(self, advances, effects):
        await asyncio.sleep(0)
        lost = frozenset(shard for shard in advances if self.world.rows[shard].version != self.known[shard])
        for shard in advances.keys() - lost:
            row, advance = self.world.rows[shard], advances[shard]
            mark = advance.mark or Mark(begun=False)
            self.known[shard] = row.version = row.version + 1
            row.position, row.stopped, row.worker = advance.to, advance.stop_reason, self.number
            row.begun, row.kills = mark.begun, mark.kills
            self.world.kills_seen[shard] = max(self.world.kills_seen[shard], mark.kills)
        return lost

    async def give_away(self, shards):
        for shard in shards:
            if self.world.rows[shard].worker == self.number:
                self.world.rows[shard].worker, self.world.rows[shard].begun = None, False


class Calls(StatelessHandler):
    """A handler whose functions take a few turns of the event loop. One cell of shard 0 may kill the process."""

    together = False
    record_within_s = 0.25

    def __init__(self, world):
        self.world, self.foreign_code = world, self

    async def supersede(self, shard, starts_at, generation):
        return Effect([])

    def calls(self, found):
        return is_called(found)

    def judge_suspect(self, found, kills, death):
        return Outcome(0, stop_reason=f"{death.value} {kills}") if kills >= KILLS_MAX else None

    async def handle(self, runs):
        (run,) = runs
        for found in run.cells:
            self.world.running.add((found.shard, found.added_id))
            if (found.shard, found.added_id) == self.world.poison:
                self.world.dies.set()
            for _ in range(self.world.turns_of_a_call):
                await asyncio.sleep(0)
            self.world.running.discard((found.shard, found.added_id))
            self.world.called.append((found.shard, found.added_id))
        return Effect([Outcome(len(run.cells))])


class World:
    def __init__(self, head=40, poison=None, turns_of_a_call=3):
        self.log = MemoryLog()
        for shard in SHARDS:
            self.log.grow(shard, head)
        self.rows = {shard: Row(shard) for shard in SHARDS}
        self.kills_seen = dict.fromkeys(SHARDS, 0)
        self.present = set()
        self.poison, self.turns_of_a_call = poison, turns_of_a_call
        self.called, self.running = [], set()
        self.dies = asyncio.Event()
        self.processes = 0
        self.now = 0.0

    def start(self):
        self.processes += 1
        self.number = self.processes
        self.present.add(self.number)
        self.dies.clear()
        self.running.clear()
        self.delivery = Delivery(
            Calls(self), Store(self, self.number), self.log, batch_cells_max=8, clock=lambda: self.now
        )
        self.delivery.gain(SHARDS)
        self.delivery.look(self.log.heads())

    async def pass_by(self, passes):
        """Lets the process work. Returns whether it died."""
        for _ in range(passes):
            if self.dies.is_set():
                break
            self.now += min(0.05, await self.delivery.step())
            await asyncio.sleep(0)
        return self.dies.is_set()

    async def to_rest(self):
        """Lets the process work until all shards are finished or stopped, and a bit longer. Tells whether it died."""
        for _ in range(1000):
            if await self.pass_by(20):
                return True
            if all(row.stopped or self.at_head(shard) for shard, row in self.rows.items()):
                break
        return await self.pass_by(100)

    async def kill(self):
        """Ends the process without a word."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def stop(self):
        """Ends the process properly."""
        await self.delivery.suspend(SHARDS, 0.0)
        await self.delivery.close(0.0)
        self.present.discard(self.number)
        await self.kill()

    def at_head(self, shard):
        return self.rows[shard].position.added_id == self.log.heads()[shard].added_id


@pytest.mark.parametrize("turns_of_a_call", [0, 3, 200])
@pytest.mark.parametrize("at", [1, 17, 40])
async def test_a_cell_that_kills_its_process_is_stopped_after_its_attempts_and_no_other_cell_is(at, turns_of_a_call):
    """Also where the others' calls take so long that each death finds them in flight."""
    world = World(poison=(0, at), turns_of_a_call=turns_of_a_call)
    deaths = 0
    world.start()
    while await world.to_rest():
        deaths += 1
        assert deaths <= KILLS_MAX + 1, world.kills_seen
        await world.kill()
        world.start()
        if world.rows[0].stopped:
            break
    assert (world.rows[0].stopped, world.rows[0].position.added_id) == (f"killed {KILLS_MAX}", at - 1)
    assert world.rows[2].stopped is None
    assert world.at_head(2)
    assert world.kills_seen[2] <= 1  # it was in flight beside the suspect once, and after that alone
    await world.kill()


async def test_a_clean_stop_blames_nobody_and_leaves_no_care_behind():
    world = World(turns_of_a_call=50)
    world.start()
    await world.pass_by(30)
    assert world.running
    await world.stop()
    assert {(row.begun, row.kills) for row in world.rows.values()} == {(False, 0)}
    world.start()
    await world.to_rest()
    assert all(map(world.at_head, SHARDS))
    assert set(world.kills_seen.values()) == {0}
    await world.kill()


async def test_a_shard_that_was_given_away_properly_is_called_as_before_while_the_process_lives_on():
    world = World()
    world.start()
    await world.pass_by(10)
    first = world.delivery
    await first.suspend([0], 5.0)
    first.release([0])
    world.start()
    await world.pass_by(5)
    cares = {shard: work.caution.care for shard, work in world.delivery._shards.items()}
    assert (cares[0], cares[2]) == (Care.NONE, Care.MARK)
    await world.kill()


@pytest.mark.parametrize(("is_away", "asked"), [(False, 1), (True, 0)])
async def test_a_rebalance_waits_once_for_a_cluster_that_is_away(is_away, asked):
    """For the checkpoints. What others would learn beside them only makes them call with care."""
    world = World(head=1)
    world.start()
    while len(world.called) < 2:
        await world.pass_by(1)
    await asyncio.sleep(0)  # the calls return
    store, gave_away = world.delivery._checkpoints, []

    async def away(advances, effects):
        raise StorageUnavailable("no answer")

    async def give_away(shards):
        gave_away.append(list(shards))

    store.give_away = give_away
    if is_away:
        store.move = away
    await world.delivery.suspend(SHARDS, 0.0)
    assert len(gave_away) == asked
    assert {work.caution.care for work in world.delivery._shards.values()} == {Care.CLAIM}
    await world.kill()


async def test_a_call_that_hangs_is_counted_and_the_next_process_calls_its_cell_alone():
    world = World(turns_of_a_call=10**6)
    for hangs in range(1, KILLS_MAX + 1):
        world.start()
        await world.pass_by(40)
        await world.delivery.blame(HungCall(world.log.cells(0)[0], Outcome(0), None, "f hangs"))
        await world.stop()
        row = world.rows[0]
        assert (row.begun, row.kills if hangs < KILLS_MAX else row.stopped) == (
            False, hangs if hangs < KILLS_MAX else f"hung {KILLS_MAX}",
        )  # fmt: skip
    assert world.rows[2].kills == 0


async def test_what_was_suspected_of_a_superseded_cell_is_not_suspected_of_the_one_in_its_place():
    world = World(head=6)
    world.rows[0].position, world.rows[0].kills = position_of(world.log.cells(0)[3]), KILLS_MAX
    world.log.table.open_generation(0, 3)
    world.log.grow(0, 6)
    world.start()
    await world.to_rest()
    assert (world.rows[0].stopped, world.at_head(0)) == (None, True)
    await world.kill()


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=KILLS_MAX),
    st.integers(0, 30),
)
async def test_kills_from_outside_blame_a_cell_at_most_once_each_and_lose_nothing(ends, turns_of_a_call):
    """Fewer kills than the last attempt stop nothing, wherever they fall. Clean stops don't count."""
    world = World(turns_of_a_call=turns_of_a_call)
    kills = 0
    for passes, is_clean in ends:
        world.start()
        await world.pass_by(passes)
        await (world.stop() if is_clean else world.kill())
        kills += not is_clean
    world.start()
    await world.to_rest()
    assert all(map(world.at_head, SHARDS))
    assert all(row.stopped is None for row in world.rows.values())
    assert max(world.kills_seen.values()) <= max(0, kills - 1)  # before the first one nothing was marked
    for shard in SHARDS:
        first_calls = list(dict.fromkeys(n for found, n in world.called if found == shard))
        assert first_calls == list(range(1, 41))
    await world.kill()
