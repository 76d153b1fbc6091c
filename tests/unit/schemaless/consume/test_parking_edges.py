"""Parking (I12) where it is hard: odd errors, calls that hang, poison in a heap, kills and moves at a bad moment."""

import asyncio
import threading

import pytest

from schemaless import Park, Retry, RetryPolicy, Stop, trigger
from schemaless.consume.ports import Predecessor, Run, ShardCheckpoint
from schemaless.consume.trigger_worker import OrdersSeen
from schemaless.errors import StorageUnavailable
from schemaless.location import Location
from schemaless.position import position_of
from schemaless.storage.checkpoint_table import CellCounts
from schemaless.storage.trigger_order_table import SeekOrder
from schemaless.testing.memory_program import MemoryParkedStore
from tests.unit.schemaless.consume.parking_world import SHARD, Order, Process, Server
from tests.unit.schemaless.consume.test_parking import ONCE, Program, rows

SOON = RetryPolicy(attempts=5, delay=0.5, backoff=1, jitter=0)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request):
    return request.param


@pytest.fixture(params=[1, 4], ids=["one lane", "lanes"])
def parallel(request):
    return request.param


def resume(server):
    """A person lets the shard run again."""
    row = server.checkpoints[SHARD]
    row.stopped, row.version = None, row.version + 1


class Crash(BaseException):
    """What a user's code may raise, although it should not."""


class Raising(type):
    """Makes a class whose call raises or returns an error, as `raise` in a program would."""

    def __new__(cls, make):
        return type.__new__(cls, "Raised", (), {"make": staticmethod(make)})

    def __init__(cls, make):
        pass

    def __call__(cls):
        return cls.make()


class Unprintable(Exception):
    def __str__(self):
        raise Crash

    __repr__ = __str__


class Bare(Park):
    """A verdict of the program's own that doesn't call the one that it derives from."""

    def __init__(self):
        pass


class BareStop(Stop):
    __init__ = Bare.__init__


class BareRetry(Retry):
    __init__ = Bare.__init__


@pytest.mark.parametrize(
    "error",
    [
        lambda: ValueError("\udcff is no character"), lambda: Crash("out"), Unprintable, lambda: Park(3),
        lambda: Park("\udcff"), lambda: Retry(float("nan")), lambda: Retry("soon"), lambda: Retry(10**400), Bare,
    ],
    ids=["surrogate", "BaseException", "unprintable", "number", "park", "nan", "text", "large", "bare"],
)  # fmt: skip
async def test_whatever_a_function_raises_its_cell_is_parked_and_others_go_on(error, is_async, parallel):
    """Otherwise the shard calls the same cell for ever, or forgets it."""
    server, program = Server(), Program(1, error=Raising(error), is_async=is_async, retry=ONCE)
    rows(server, 1, 2, 1)
    process = Process(server, 1, [program.function], parallel=parallel)
    await process.pass_by(5)
    assert program.called == [1, 2]
    assert (list(server.causes()), server.counts) == ([1], CellCounts(called=1, parked=1, waiting=1))
    program.poison.clear()
    server.order(1, Order.RETRY)
    await process.pass_by(2)
    assert (server.parked, server.counts) == ({}, CellCounts(called=3))


@pytest.mark.parametrize(("stop", "reason"), [(Stop("\udcff"), "\\udcff"), (BareStop(), ": ")])
async def test_a_stop_with_an_odd_reason_stops(is_async, stop, reason):
    server, program = Server(), Program(1, error=stop, is_async=is_async)
    rows(server, 1)
    await Process(server, 1, [program.function]).pass_by(2)
    assert server.stopped.endswith(reason)


async def test_a_retry_that_says_no_delay_is_made_after_a_second(is_async):
    server, program = Server(), Program(1, error=BareRetry(), is_async=is_async)
    rows(server, 1)
    process = Process(server, 1, [program.function])
    await process.pass_by(0.5)
    program.poison.clear()
    await process.pass_by(1)
    assert server.counts == CellCounts(called=1)


async def test_poison_rows_in_a_heap_are_parked_and_the_others_called(is_async, parallel):
    """They look like an outage at first, and a probe of them alone would never see its end."""
    server, program = Server(), Program(*range(1, 31), is_async=is_async, retry=SOON)
    rows(server, *range(1, 101))
    process = Process(server, 1, [program.function], parallel=parallel)
    await process.pass_by(120)
    assert process.handler.tripped is None
    assert (len(server.parked), server.counts) == (30, CellCounts(called=70, parked=30))


async def test_a_call_that_hangs_beyond_its_pass_is_blamed_and_no_other_cell():
    """Its row has a record by then, and what the pass counted is counted once."""
    server, ended = Server(), asyncio.Event()
    rows(server, 1, 2, 3)

    @trigger(column="BASE", name="f")
    async def hang(cell):
        if cell.ref_key == 1:
            await ended.wait()

    for kills in (1, 2, 3):
        process = Process(server, kills, [hang], parallel=4, call_limit_s=5.0, kills_max=3)
        await process.pass_by(0, steps=5)
        process.now += 10
        hung = process.handler.hung_call()
        await process.delivery.blame(hung)
        assert (hung.cell.ref_key, server.kills, server.parked[1].kills) == (1, 0, kills)
        await process.kill()
        server.present.clear()
    assert (server.causes(), server.counts) == ({1: "hung"}, CellCounts(called=2, parked=1))


async def test_a_call_that_hangs_in_a_shard_that_was_given_away_blames_nobody():
    server, ended = Server(), threading.Event()
    rows(server, 1)

    @trigger(column="BASE", name="f")
    def hang(cell):
        ended.wait()

    process = Process(server, 1, [hang], parallel=4, call_limit_s=5.0)
    await process.pass_by(2)
    process.delivery.release([SHARD])
    process.now += 10
    version = server.version
    await process.delivery.blame(process.handler.hung_call())
    assert server.version == version
    ended.set()
    await process.kill()


@pytest.mark.parametrize("waits", ["tripped", "stopped"])
async def test_orders_that_can_not_be_carried_out_yet_take_no_more_memory_from_look_to_look(waits):
    server = Server()
    program = Program(*range(1, 200), retry=SOON, park="row")
    rows(server, *range(1, 41))
    options = {"breaker": "stop"} if waits == "stopped" else {}
    process = Process(server, 1, [program.function], **options)
    await process.pass_by(3)
    assert process.handler.tripped
    assert (server.stopped is None) is (waits == "tripped")
    for n in server.causes():
        server.order(n, Order.RETRY)
    for _ in range(5):
        process.handler.order(server.due())
    assert len(process.handler._shards[SHARD].orders) == len(server.parked)


async def take_over_a_begun_retry(server, number, **options):
    """A process takes over a record whose call was begun before, and stores what that means."""
    server.run_script(MemoryParkedStore(server).begin(server.parked[1]))  # as a marked call does
    process = Process(server, number, [Program().function], **options)
    await process.handler.take_over(await process.delivery._checkpoints.read([SHARD]))
    effect = await process.handler.handle([Run(SHARD, server.position.location, [], careful=True)])
    server.run_script(effect.outcomes[0].script)
    await process.kill()


@pytest.mark.parametrize("died", [True, False])
async def test_a_retry_whose_process_ended_is_called_again(died):
    """A kill counts against the cell. A clean stop doesn't. The cell's error stays."""
    server, program = Server(), Program(1, retry=ONCE)
    rows(server, 1, 1)
    await Process(server, 1, [program.function]).pass_by(2)
    server.order(1, Order.RETRY)
    if not died:
        server.present.clear()
    await take_over_a_begun_retry(server, 2)
    record = server.parked[1]
    assert (record.kills, record.begun, record.ordered) == (died, False, Order.RETRY)
    assert "ValueError" in record.error
    program.poison.clear()
    server.present.clear()
    await Process(server, 3, [program.function]).pass_by(4)
    assert (server.parked, server.counts) == ({}, CellCounts(called=2))


async def test_a_retry_that_kills_its_process_again_and_again_is_given_up():
    server, program = Server(), Program(1, retry=ONCE)
    rows(server, 1, 1)
    await Process(server, 1, [program.function]).pass_by(2)
    server.order(1, Order.RETRY)
    for number in (2, 3, 4):
        await take_over_a_begun_retry(server, number, kills_max=3)
    record = server.parked[1]
    assert (record.cause.value, record.kills, record.ordered) == ("killed", 3, None)
    assert program.called == [1]


async def test_a_generation_that_supersedes_a_record_leaves_nothing_of_it_to_store():
    """What taking over found of it would make the record anew, and hold its row for ever."""
    server, program = Server(), Program(2, retry=ONCE)
    rows(server, 1, 2)
    await Process(server, 1, [program.function]).pass_by(2)
    server.run_script(MemoryParkedStore(server).begin(server.parked[2]))
    process = Process(server, 2, [program.function])
    checkpoint = ShardCheckpoint(server.position, None, (), Predecessor.DIED)
    await process.handler.take_over({SHARD: checkpoint})
    await process.handler.supersede(SHARD, 2, 2)
    effect = await process.handler.handle([Run(SHARD, Location(1, 1), [])])
    assert (effect.outcomes[0].script, effect.outcomes[0].counts) == ("", CellCounts())
    await process.kill()


async def test_attempts_of_this_process_count_after_the_shard_began_anew():
    """It has seen them fail itself. Only those of another process may have failed in an outage."""
    server, program = Server(), Program(1, retry=RetryPolicy(attempts=2, delay=1, backoff=1, jitter=0))
    rows(server, 1)
    process = Process(server, 1, [program.function], breaker="off")
    await process.pass_by(0.5)
    assert (server.causes(), program.called) == ({1: "waiting"}, [1])
    await process.handler.take_over({SHARD: ShardCheckpoint(server.position, None, ())})
    await process.pass_by(5)
    assert (server.causes(), program.called) == ({1: "error"}, [1, 1])


async def test_live_cells_of_other_rows_share_the_time_with_a_mass_retry(parallel):
    """Each call takes a tenth of a second here. A pass has time for both."""
    server, program = Server(), Program(*range(1, 101), retry=ONCE)
    rows(server, *range(1, 101))
    process = Process(server, 1, [program.function], breaker="off", parallel=parallel)
    await process.pass_by(4)
    program.poison.clear()
    for n in server.causes():
        server.order(n, Order.RETRY)
    live = rows(server, *range(1001, 1101))
    program.called.clear()

    class Called(list):
        def append(self, ref):
            process.now += 0.1
            super().append(ref)

    program.called = Called()
    await process.pass_by(8, steps=4)
    replayed = [n for n in program.called if n <= 100]
    called_live = [n for n in program.called if n in set(live)]
    assert len(called_live) >= 0.3 * len(program.called)
    assert len(replayed) >= 0.3 * len(program.called)


async def test_what_a_pass_has_to_store_fits_a_packet():
    """A thousand errors with long texts are stored in several transactions, and the shard waits for each."""
    server = Server()
    program = Program(*range(1, 101), error=ValueError("x" * 20_000), retry=RetryPolicy(attempts=3, delay=50.0))
    rows(server, *range(1, 101))
    process = Process(server, 1, [program.function], breaker="off")
    process.delivery._batch_cells_max = 1000
    sizes, checkpoints = [], process.delivery._checkpoints

    async def measured(advances, effects, move=checkpoints.move):
        sizes.append(len(advances[SHARD].effect))
        return await move(advances, effects)

    checkpoints.move = measured
    await process.pass_by(40, steps=5)
    assert len(server.parked) == 100
    assert max(sizes) < 3 << 19


async def test_a_shard_whose_home_is_away_does_not_run_ahead_of_its_checkpoint():
    """Or a kill would repeat all that was called meanwhile, and what waits to be stored would grow without end."""
    server, program = Server(), Program()
    rows(server, 1)
    process = Process(server, 1, [program.function])
    await process.pass_by(1)
    server.is_away = True
    for _ in range(20):
        rows(server, 2, 3)
        process.delivery.take(SHARD, server.cells[-2:])  # the topic still brings them
        await process.pass_by(1)
    assert len(program.called) < 10
    server.is_away = False
    await process.pass_by(4)
    assert server.counts == CellCounts(called=41)


async def test_a_seek_over_a_cell_that_stops_its_shard_is_carried_out_before_the_cell_is_called_again():
    """Nothing is called while a seek waits, also after the shard was resumed, or it would stop there for ever."""
    server, program = Server(), Program(1, error=Stop("out of cards"))
    rows(server, 1, 2)
    process = Process(server, 1, [program.function])
    await process.pass_by(2)
    assert server.stopped
    over = position_of(server.cells[0])
    seen = OrdersSeen(seeks={SHARD: SeekOrder(over, 1)})
    process.delivery.pause(seen.is_paused)
    await process.delivery.seek(over, "")
    resume(server)
    await process.pass_by(2)
    await process.delivery.seek(over, "")
    process.delivery.pause(OrdersSeen().is_paused)
    await process.pass_by(2)
    assert (program.called, server.stopped, server.counts) == ([1, 2], None, CellCounts(called=1))


async def test_a_stop_within_a_replay_leaves_what_it_finished_behind():
    """Or the cells before it would be called and counted again when the shard is resumed."""
    server, program = Server(), Program(1, retry=ONCE)
    rows(server, 1, 1, 1)
    process = Process(server, 1, [program.function])
    await process.pass_by(2)
    program.poison, program.error = {2}, Stop("out of cards")
    server.order(1, Order.RETRY)
    await process.pass_by(2)
    assert (program.called, server.causes()) == ([1, 1, 2], {2: "waiting"})
    program.poison.clear()
    resume(server)
    await process.pass_by(2)
    assert (program.called, server.parked, server.counts) == ([1, 1, 2, 2, 3], {}, CellCounts(called=3))


@pytest.mark.parametrize("order", [Order.RETRY, Order.DISCARD])
async def test_a_replay_that_can_not_read_on_counts_nothing_twice(order):
    """What it finished isn't recorded then, so it comes again as a whole."""
    server, program = Server(), Program(1, retry=ONCE)
    rows(server, 1, 1, 1)
    process = Process(server, 1, [program.function])
    await process.pass_by(2)
    program.poison.clear()
    parked = process.handler._replays.parked
    read = parked.of_row

    async def read_only_heads(shard, row_key, columns, after, until):
        if after:
            raise StorageUnavailable("the entity table doesn't answer")
        return (await read(shard, row_key, columns, after, until))[:1]

    parked.of_row = read_only_heads
    server.order(1, order)
    await process.pass_by(3)
    await process.kill()
    await Process(server, 2, [program.function]).pass_by(4)
    is_retry = order is Order.RETRY
    assert (server.parked, server.counts) == ({}, CellCounts(called=2 + is_retry, skipped=1 - is_retry))


@pytest.mark.parametrize("is_retried", [False, True], ids=["first calls", "retries"])
async def test_a_stop_in_one_lane_leaves_what_another_finished_meanwhile_finished(is_retried):
    """Or that cell would be called and counted again when the shard is resumed."""
    server, called, begun = Server(), [], asyncio.Event()
    verdicts = {1: ValueError(), 2: ValueError()} if is_retried else {1: Stop("out of cards")}

    @trigger(column="BASE", name="f", retry=ONCE)
    async def function(cell):
        called.append(cell.ref_key)
        if cell.ref_key == 1:
            await begun.wait()
        begun.set()
        for _ in range(0 if cell.ref_key == 1 else 5):
            await asyncio.sleep(0)
        if error := verdicts.get(cell.ref_key):
            raise error

    rows(server, 1, 2)
    process = Process(server, 1, [function], parallel=2)
    await process.pass_by(1)
    if is_retried:
        assert server.causes() == {1: "error", 2: "error"}
        verdicts, called[:] = {1: Stop("out of cards")}, []
        begun.clear()
        server.order(1, Order.RETRY)
        server.order(2, Order.RETRY)
        await process.pass_by(1)
    assert (sorted(called), bool(server.stopped)) == ([1, 2], True)
    verdicts = {}
    resume(server)
    await process.pass_by(2)
    assert sorted(called) == [1, 1, 2]
    assert (server.parked, server.counts) == ({}, CellCounts(called=2))


async def test_a_breaker_that_stops_within_replays_loses_none_of_their_cells(parallel):
    """Here heads succeed and what waits behind them fails, so that the breaker trips in the middle of rows."""
    server, program = Server(), Program(*range(1, 101), retry=ONCE)
    rows(server, *range(1, 31), *range(1, 31))
    process = Process(server, 1, [program.function], breaker="off", parallel=parallel)
    await process.pass_by(3)
    await process.kill()
    server.present.clear()
    assert server.counts == CellCounts(parked=30, waiting=30)
    program.poison = set(range(31, 61))
    process = Process(server, 2, [program.function], breaker="stop", parallel=parallel)
    process.now += 100
    for n in server.causes():
        server.order(n, Order.RETRY)
    await process.pass_by(3)
    assert server.stopped
    program.poison.clear()
    resume(server)
    for n in server.causes():
        server.order(n, Order.RETRY)
    await process.pass_by(5)
    assert set(program.called) == set(range(1, 61))
    assert (server.parked, server.counts) == ({}, CellCounts(called=60))
