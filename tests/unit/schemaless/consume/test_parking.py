"""Parking (I12): what fails waits or is parked, its row waits behind it, and everything else continues."""

import pytest

from schemaless import Park, Retry, RetryPolicy, Skip, trigger
from schemaless.position import position_of
from schemaless.storage.checkpoint_table import CellCounts
from schemaless.storage.parked_table import Ending
from tests.unit.schemaless.consume.parking_world import Order, Process, Server

ONCE = RetryPolicy(attempts=1)


class Program:
    """A function that notes what it was called for. `poison` are the refs of cells for which it fails."""

    def __init__(self, *poison, error=ValueError, is_async=False, **options):
        self.called, self.poison, self.error = [], set(poison), error

        def call(cell):
            self.called.append(cell.ref_key)
            if cell.ref_key in self.poison:
                raise self.error() if isinstance(self.error, type) else self.error

        async def acall(cell):
            call(cell)

        self.function = trigger(column="BASE", name="f", **options)(acall if is_async else call)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request):
    return request.param


@pytest.fixture(params=[1, 4], ids=["one lane", "lanes"])
def parallel(request):
    return request.param


def rows(server, *numbers):
    return [server.write(row) for row in numbers]


async def test_a_parked_cell_holds_its_row_and_no_other(is_async, parallel):
    """Its record is stored with the checkpoint that passes it, and what waits behind it is counted."""
    server, program = Server(), Program(1, is_async=is_async, retry=ONCE)
    rows(server, 1, 2, 1, 3, 1)
    process = Process(server, 1, [program.function], parallel=parallel)
    await process.pass_by(2)
    assert sorted(program.called) == [1, 2, 4]
    assert server.causes() == {1: "error"}
    assert server.parked[1].holds_row
    assert "ValueError" in server.parked[1].error
    assert server.position.added_id == 5
    assert server.counts == CellCounts(called=2, parked=1, waiting=2)


async def test_a_retry_replays_the_row_in_order_before_live_cells(is_async, parallel):
    server, program = Server(), Program(1, is_async=is_async, retry=ONCE)
    rows(server, 1, 2, 1, 1, 1, 1)
    process = Process(server, 1, [program.function], parallel=parallel)
    await process.pass_by(2)
    program.poison.clear()
    server.order(1, Order.RETRY)
    rows(server, 1, 1)
    await process.pass_by(2)
    assert [ref for ref in program.called if ref != 2] == [1, 1, 3, 4, 5, 6, 7, 8]
    assert server.parked == {}
    assert server.counts == CellCounts(called=8)


async def test_a_retry_that_fails_again_parks_again_with_the_new_error(is_async):
    server, program = Server(), Program(1, is_async=is_async, retry=ONCE)
    rows(server, 1, 1)
    process = Process(server, 1, [program.function])
    await process.pass_by(2)
    program.error = KeyError
    server.order(1, Order.RETRY)
    await process.pass_by(2)
    assert "KeyError" in server.parked[1].error
    assert (server.parked[1].ordered, len(server.parked[1].attempted_at)) == (None, 2)
    assert list(server.history) == [(1, Ending.FAILED)]
    assert server.counts == CellCounts(parked=1, waiting=1)


@pytest.mark.parametrize("order", Order)
async def test_what_became_of_a_parked_cell_is_kept(order, parallel):
    """Also where the retry asked for another call, so that its record only waited in the end."""
    server, program = Server(), Program(1, retry=ONCE, parallel=parallel)
    rows(server, 1, 1)
    process = Process(server, 1, [program.function])
    await process.pass_by(2)
    program.error = Retry(1)
    server.change(1, job=7)
    server.order(1, order)
    await process.pass_by(1)
    program.poison.clear()
    await process.pass_by(3)
    assert server.parked == {}
    assert list(server.history) == [(1, Ending.DISCARDED if order is Order.DISCARD else Ending.FINISHED)]


async def test_a_later_cell_that_fails_in_a_replay_is_parked_in_its_place():
    server, program = Server(), Program(1, 3, retry=ONCE)
    rows(server, 1, 1, 1, 1)
    process = Process(server, 1, [program.function])
    await process.pass_by(2)
    program.poison = {3}
    server.order(1, Order.RETRY)
    await process.pass_by(2)
    assert server.causes() == {3: "error"}
    assert server.counts == CellCounts(called=2, parked=1, waiting=1)


async def test_a_discarded_cell_is_never_called_and_its_row_goes_on():
    server, program = Server(), Program(1, retry=ONCE)
    rows(server, 1, 1, 2)
    process = Process(server, 1, [program.function])
    await process.pass_by(2)
    server.order(1, Order.DISCARD)
    await process.pass_by(2)
    assert program.called == [1, 3, 2]
    assert (server.parked, server.counts) == ({}, CellCounts(called=2, skipped=1))


async def test_other_rows_go_on_while_a_row_waits_for_its_next_attempt(is_async, parallel):
    """The record of the row is stored meanwhile, and goes when the call succeeds."""
    server, program = Server(), Program(1, is_async=is_async)
    rows(server, 1, 2, 1, 3)
    process = Process(server, 1, [program.function], parallel=parallel)
    await process.pass_by(0.5)
    assert program.called == [1, 2, 4]
    assert server.causes() == {1: "waiting"}
    assert server.counts == CellCounts(called=2, waiting=2)
    program.poison.clear()
    await process.pass_by(2)
    assert program.called == [1, 2, 4, 1, 3]
    assert (server.parked, server.counts) == ({}, CellCounts(called=4))


async def test_after_the_last_attempt_of_the_policy_the_cell_is_parked(is_async):
    server, program = Server(), Program(1, is_async=is_async, retry=RetryPolicy(attempts=3, delay=1, backoff=1))
    rows(server, 1)
    process = Process(server, 1, [program.function])
    await process.pass_by(1.5)
    assert server.causes() == {1: "waiting"}
    await process.pass_by(3)
    assert program.called == [1, 1, 1]
    assert (server.causes(), server.parked[1].attempts) == ({1: "error"}, 3)


@pytest.mark.parametrize(
    ("error", "cause", "counts"),
    [
        (Park("no address"), "verdict", CellCounts(parked=1)),
        (Retry(3600), "waiting", CellCounts(waiting=1)),
        (Skip("test ride"), None, CellCounts(skipped=1)),
        (KeyError("not retried"), "error", CellCounts(parked=1)),
    ],
)
async def test_each_verdict_has_its_cause_and_count(error, cause, counts):
    server = Server()
    program = Program(1, error=error, retry=RetryPolicy(retry_on=(ValueError,)))
    rows(server, 1)
    process = Process(server, 1, [program.function])
    await process.pass_by(2)
    assert (server.causes().get(1), server.counts) == (cause, counts)


async def test_a_cell_parked_alone_lets_its_row_go_on(parallel):
    """It stays for people, and a retry calls it alone."""
    server, program = Server(), Program(1, retry=ONCE, park="cell")
    rows(server, 1, 1, 1)
    process = Process(server, 1, [program.function], parallel=parallel)
    await process.pass_by(2)
    assert program.called == [1, 2, 3]
    assert (server.causes(), server.parked[1].holds_row) == ({1: "error"}, False)
    assert server.counts == CellCounts(called=2, parked=1)
    program.poison.clear()
    server.order(1, Order.RETRY)
    await process.pass_by(2)
    assert (program.called, server.parked, server.counts) == ([1, 2, 3, 1], {}, CellCounts(called=3))


async def test_a_held_cell_owes_every_function_that_had_not_finished():
    """The functions before the one that failed aren't called again."""
    server, first, second = Server(), Program(), Program(1, retry=ONCE)

    @trigger(column="BASE", retry=ONCE)
    def g(cell):
        second.called.append(cell.ref_key)
        if cell.ref_key in second.poison:
            raise ValueError

    rows(server, 1)
    process = Process(server, 1, [first.function, g])
    await process.pass_by(2)
    second.poison.clear()
    server.order(1, Order.RETRY)
    await process.pass_by(2)
    assert (first.called, second.called, server.parked) == ([1], [1, 1], {})


async def test_another_process_knows_the_rows_that_are_held():
    server, program = Server(), Program(1, retry=ONCE)
    rows(server, 1, 2)
    await Process(server, 1, [program.function]).pass_by(2)
    server.present.clear()
    rows(server, 1, 2)
    process = Process(server, 2, [program.function])
    await process.pass_by(2)
    assert program.called == [1, 2, 4]
    assert server.counts == CellCounts(called=2, parked=1, waiting=1)


async def test_what_waited_in_a_process_that_ended_is_called_by_the_next_one():
    """When its time has come."""
    server, program = Server(), Program(1, retry=RetryPolicy(delay=60, max_delay=60))
    rows(server, 1, 1)
    await Process(server, 1, [program.function]).pass_by(2)
    server.present.clear()
    program.poison.clear()
    await Process(server, 2, [program.function]).pass_by(65)
    assert (program.called, server.parked, server.counts) == ([1, 1, 2], {}, CellCounts(called=2))


async def test_a_shard_waits_while_it_can_not_store_a_parked_cell():
    """Nothing is lost, and nothing of the row is called twice when the server is back."""
    server, called = Server(), []

    @trigger(column="BASE", retry=ONCE)
    def fails_with_the_server(cell):
        called.append(cell.ref_key)
        if cell.ref_key == 1:
            server.is_away = True
            raise ValueError

    rows(server, 1, 2, 1)
    process = Process(server, 1, [fails_with_the_server])
    await process.pass_by(3)
    assert server.parked == {}
    server.is_away = False
    await process.pass_by(3)
    assert (called, server.causes()) == ([1, 2], {1: "error"})
    assert server.counts == CellCounts(called=1, parked=1, waiting=1)


async def test_a_record_has_the_version_of_the_code_that_failed_last():
    """Two versions run beside each other, or after each other. A retry is made with the code of its worker."""
    server, program = Server(), Program(1, retry=RetryPolicy(attempts=3, delay=1))
    rows(server, 1)
    before = Process(server, 1, [program.function], version="v1")
    await before.pass_by(0.5)
    assert server.parked[1].version == "v1"
    await before.kill()
    server.present.clear()
    repaired = Program(retry=RetryPolicy(attempts=3, delay=1))
    failing = Process(server, 2, [program.function], version="v2")
    await failing.pass_by(6)
    assert (server.causes(), server.parked[1].version) == ({1: "error"}, "v2")
    await failing.kill()
    server.present.clear()
    server.order(1, Order.RETRY)
    await Process(server, 3, [repaired.function], version="v1").pass_by(2)
    assert (repaired.called, server.parked) == ([1], {})


async def test_a_retry_of_a_function_that_is_gone_says_so():
    server, program = Server(), Program(1, retry=ONCE)
    rows(server, 1)
    await Process(server, 1, [program.function]).pass_by(2)
    server.present.clear()
    renamed = trigger(column="BASE", name="renamed")(program.function)
    vars(renamed)["__schemaless_triggers__"] = vars(renamed)["__schemaless_triggers__"][1:]
    process = Process(server, 2, [renamed])
    server.order(1, Order.RETRY)
    await process.pass_by(2)
    assert server.parked[1].error == "version v1 of the program has no function f"
    assert (program.called, server.parked[1].ordered) == ([1], None)


async def test_an_outage_trips_the_breaker_parks_nothing_and_ends_by_itself(is_async):
    """At most three calls a row before it trips, and everything is called once it is over."""
    server = Server()
    program = Program(*range(1, 200), is_async=is_async, retry=RetryPolicy(attempts=3, delay=0.5))
    rows(server, *range(1, 41))
    process = Process(server, 1, [program.function])
    await process.pass_by(20)
    assert process.handler.tripped
    assert "ValueError" in process.handler.tripped
    assert set(server.causes().values()) == {"waiting"}
    assert len(program.called) < 40
    program.poison.clear()
    await process.pass_by(5)
    assert process.handler.tripped is None
    assert (server.parked, server.counts) == ({}, CellCounts(called=40))


async def test_a_worker_that_starts_in_an_outage_parks_nothing(is_async, parallel):
    """It doesn't know of the outage yet, and cells that it takes over have used up all attempts but one."""
    server = Server()
    program = Program(*range(1, 200), is_async=is_async, retry=RetryPolicy(attempts=3, delay=0.5), parallel=parallel)
    rows(server, *range(1, 10))
    before = Process(server, 1, [program.function])
    while min((record.attempts for record in server.records()), default=0) < 2:
        await before.pass_by(0.1)
    await before.kill()
    server.present.clear()
    rows(server, *range(10, 15))
    after = Process(server, 2, [program.function])
    await after.pass_by(20)
    assert after.handler.tripped
    assert set(server.causes().values()) == {"waiting"}
    program.poison = {1}
    await after.pass_by(20)
    assert server.causes() == {1: "error"}


async def test_a_thousand_poison_rows_among_many_good_ones_are_parked_and_trip_nothing():
    server, program = Server(), Program(*range(1, 3001, 3), retry=ONCE)
    rows(server, *range(1, 3001))
    process = Process(server, 1, [program.function])
    await process.pass_by(30)
    assert process.handler.tripped is None
    assert (len(server.parked), server.counts) == (1000, CellCounts(called=2000, parked=1000))


async def test_a_breaker_that_stops_waits_for_a_person():
    server, program = Server(), Program(*range(1, 200))
    rows(server, *range(1, 41))
    process = Process(server, 1, [program.function], breaker="stop")
    await process.pass_by(5)
    assert "ValueError" in server.stopped
    calls = len(program.called)
    await process.pass_by(5)
    assert len(program.called) == calls


async def test_a_paused_shard_calls_nothing_until_it_is_resumed():
    server, program = Server(), Program()
    rows(server, 1, 2)
    process = Process(server, 1, [program.function])
    process.delivery.pause(lambda shard: True)
    await process.pass_by(2)
    assert program.called == []
    process.delivery.pause(lambda shard: False)
    await process.pass_by(2)
    assert program.called == [1, 2]


async def test_a_seek_back_drops_the_records_after_its_target():
    """Their cells are called again, and the counts begin at the target."""
    server, program = Server(), Program(3, retry=ONCE)
    rows(server, 1, 2, 3, 3)
    process = Process(server, 1, [program.function])
    await process.pass_by(2)
    program.poison.clear()
    target = position_of(server.cells[0])
    await process.delivery.seek(target, "delete_from 0 2 sought")
    await process.pass_by(2)
    assert (program.called, server.parked) == ([1, 2, 3, 2, 3, 4], {})
    assert (server.counted_from, server.counts) == (1, CellCounts(called=3))


async def test_a_retry_of_a_cell_that_is_parked_alone_never_holds_its_row():
    """Not while it waits for its next attempt, and not in the process after."""
    server, program = Server(), Program(1, retry=RetryPolicy(attempts=2, delay=5.0), park="cell")
    rows(server, 1, 1)
    await (process := Process(server, 1, [program.function])).pass_by(8)
    assert program.called == [1, 1, 2]
    server.order(1, Order.RETRY)
    await process.pass_by(0.8)
    assert (server.causes(), server.parked[1].holds_row) == ({1: "waiting"}, False)
    rows(server, 1)
    server.present.clear()
    program.poison.clear()
    await Process(server, 2, [program.function]).pass_by(7)
    assert program.called == [1, 1, 2, 1, 3, 1]
    assert (server.parked, server.counts) == ({}, CellCounts(called=3))
