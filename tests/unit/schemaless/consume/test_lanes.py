"""Lanes: how many rows of a shard are called at once, when functions say so and when only the setting does."""

import asyncio
import threading

import pytest

from schemaless import RetryPolicy, trigger
from schemaless.storage.checkpoint_table import CellCounts
from tests.unit.schemaless.consume.parking_world import Order, Process, Server


class Together:
    """A function that notes how many calls of it run at once. A call ends once no more than `expected` can begin."""

    def __init__(self, name, expected, column="BASE", *, is_async=True, **options):
        self.running = self.most = 0
        self.called, self.lock = [], threading.Lock()
        self.all_here = asyncio.Event() if is_async else threading.Barrier(expected)

        def begin(cell):
            with self.lock:
                self.running += 1
                self.most = max(self.most, self.running)
                self.called.append(cell.ref_key)

        def end():
            with self.lock:
                self.running -= 1

        async def acall(cell):
            begin(cell)
            if self.most == expected:
                self.all_here.set()
            await self.all_here.wait()
            await asyncio.sleep(0)
            end()

        def call(cell):
            begin(cell)
            if self.most <= expected and len(self.called) <= expected:
                self.all_here.wait(5)
            end()

        self.function = trigger(column=column, name=name, **options)(acall if is_async else call)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_a_function_that_says_so_is_called_for_so_many_rows_at_once(is_async):
    """Its own number counts, and not the setting."""
    server, together = Server(), Together("f", 3, is_async=is_async, parallel=3)
    for row in range(1, 10):
        server.write(row)
    await Process(server, 1, [together.function], parallel=1).pass_by(2)
    assert (sorted(together.called), together.most) == (list(range(1, 10)), 3)
    assert server.position.added_id == 9


async def test_a_function_that_says_one_is_called_alone_whatever_the_setting():
    """In the order of the log, because one row follows the other."""
    server, together = Server(), Together("f", 1, parallel=1)
    for row in range(1, 10):
        server.write(row)
    await Process(server, 1, [together.function], parallel=8).pass_by(2)
    assert (together.called, together.most) == (list(range(1, 10)), 1)


async def test_functions_that_differ_each_have_their_own_limit():
    """The largest decides how many rows are called at once. One function's limit doesn't bound the other's."""
    server = Server()
    wide, narrow, plain = Together("wide", 6, parallel=6), Together("narrow", 2, "B", parallel=2), Together("g", 1, "C")
    for row in range(1, 13):
        for column in ("BASE", "B", "C"):
            server.write(100 * ord(column[-1]) + row, column)
    await Process(server, 1, [wide.function, narrow.function, plain.function], parallel=1).pass_by(3)
    assert [(len(one.called), one.most) for one in (wide, narrow, plain)] == [(12, 6), (12, 2), (12, 1)]
    assert (server.position.added_id, server.parked) == (36, {})


async def test_a_shard_shows_how_many_calls_each_function_makes_at_once():
    """In the worker's report: what the function says, or the setting."""
    f, g = Together("f", 1, parallel=4), Together("g", 1)
    handler = Process(Server(), 1, [f.function, g.function], parallel=2).handler
    assert handler.parallel == {"f": 4, "g": 2}


class Slow:
    """A function that fails for `poison`, and whose calls for `slow` wait until `ended`. Its cells are those of f."""

    def __init__(self, *, poison=(), slow=(), **options):
        self.called, self.poison, self.slow = [], set(poison), set(slow)
        self.ended = asyncio.Event()

        async def call(cell):
            self.called.append(cell.ref_key)
            if cell.ref_key in self.slow:
                await self.ended.wait()
            if cell.ref_key in self.poison:
                raise ValueError

        self.function = trigger(column="BASE", name="f", **options)(call)


def write(server, *numbers):
    return [server.write(row) for row in numbers]


async def test_a_second_attempt_that_takes_long_holds_no_other_row():
    """Also the first attempts of rows that come while it runs. Its own row waits for it, and goes on in order."""
    server, program = Server(), Slow(poison=[1])
    write(server, 1, 1)
    process = Process(server, 1, [program.function], parallel=2)
    await process.pass_by(0.5)
    program.poison, program.slow = set(), {1}
    await process.pass_by(2)
    write(server, 2, 3)
    await process.pass_by(2)
    assert program.called == [1, 1, 3, 4]
    assert (server.causes(), server.position.added_id) == ({1: "waiting"}, 4)
    assert server.counts == CellCounts(called=2, waiting=2)
    program.ended.set()
    await process.pass_by(2)
    assert program.called == [1, 1, 3, 4, 2]
    assert (server.parked, server.counts) == ({}, CellCounts(called=4))


async def test_a_retry_of_a_parked_row_that_takes_long_holds_no_other_row():
    """Here it is a cell that waited behind the parked one. The record names it then, so the head isn't called again."""
    server, program = Server(), Slow(poison=[1], retry=RetryPolicy(attempts=1))
    write(server, 1, 1, 1)
    process = Process(server, 1, [program.function], parallel=2)
    await process.pass_by(1)
    program.poison, program.slow = set(), {2}
    server.order(1, Order.RETRY)
    await process.pass_by(1)
    write(server, 2, 1)
    await process.pass_by(2)
    assert program.called == [1, 1, 2, 4]
    assert (server.causes(), server.counts) == ({2: "waiting"}, CellCounts(called=2, waiting=3))
    program.ended.set()
    await process.pass_by(2)
    assert program.called == [1, 1, 2, 4, 3, 5]
    assert (server.parked, server.counts) == ({}, CellCounts(called=5))


async def test_a_second_attempt_that_takes_long_and_fails_counts_as_one():
    """Its cell is parked after its last attempt, as if the pass had waited for it."""
    server, program = Server(), Slow(poison=[1], retry=RetryPolicy(attempts=2, delay=1, jitter=0))
    write(server, 1)
    process = Process(server, 1, [program.function], parallel=2)
    await process.pass_by(0.5)
    program.slow = {1}
    await process.pass_by(2)
    assert (program.called, server.causes()) == ([1, 1], {1: "waiting"})
    program.ended.set()
    await process.pass_by(1)
    assert (program.called, server.parked[1].attempts) == ([1, 1], 2)
    assert (server.causes(), server.counts) == ({1: "error"}, CellCounts(parked=1))


async def test_a_retry_that_takes_long_comes_again_after_a_kill():
    server, program = Server(), Slow(poison=[1], retry=RetryPolicy(attempts=1))
    write(server, 1, 1)
    process = Process(server, 1, [program.function], parallel=2)
    await process.pass_by(1)
    program.poison, program.slow = set(), {1}
    server.order(1, Order.RETRY)
    await process.pass_by(2)
    assert program.called == [1, 1]
    await process.kill()
    program.slow = set()
    await Process(server, 2, [program.function], parallel=2).pass_by(3)
    assert program.called == [1, 1, 1, 2]
    assert (server.parked, server.counts) == ({}, CellCounts(called=2))


async def test_a_cell_that_no_call_has_failed_for_is_taken_over_without_another_attempt():
    """Its call took long when its process died. One attempt is one failed call, whoever made the call before it."""
    server, program = Server(), Slow(slow=[1], poison=[1], retry=RetryPolicy(attempts=1))
    write(server, 1, 2)
    process = Process(server, 1, [program.function], parallel=2)
    await process.pass_by(15)
    assert server.causes() == {1: "waiting"}
    await process.kill()
    program.slow = set()
    await Process(server, 2, [program.function], parallel=2).pass_by(5)
    assert (program.called, server.causes()) == ([1, 2, 1], {1: "error"})


async def test_retries_that_take_long_are_no_more_than_the_lanes():
    """What is due beyond that waits for a lane, and is called when one is free."""
    server, program = Server(), Slow(poison=range(1, 7), retry=RetryPolicy(attempts=1))
    write(server, *range(1, 7))
    process = Process(server, 1, [program.function], parallel=2, breaker="off")
    await process.pass_by(1)
    program.poison, program.slow = set(), set(range(1, 7))
    program.called.clear()
    for n in server.causes():
        server.order(n, Order.RETRY)
    await process.pass_by(0, steps=3)
    assert len(program.called) == 2
    program.ended.set()
    await process.pass_by(2)
    assert (sorted(program.called), server.counts) == (list(range(1, 7)), CellCounts(called=6))


async def test_a_second_attempt_that_hangs_is_blamed_and_no_other_cell():
    server, program = Server(), Slow(poison=[1])
    write(server, 1, 2)
    process = Process(server, 1, [program.function], parallel=2, call_limit_s=5.0, kills_max=3)
    await process.pass_by(0.5)
    program.slow = {1}
    await process.pass_by(2)
    process.now += 10
    hung = process.handler.hung_call()
    await process.delivery.blame(hung)
    assert (hung.cell.ref_key, server.kills, server.parked[1].kills) == (1, 0, 1)
    assert server.counts == CellCounts(called=1, waiting=1)
    await process.kill()


async def test_each_function_of_a_column_has_its_own_attempts():
    """What the first one used up isn't counted against the second."""
    server, called, twice = Server(), [], RetryPolicy(attempts=2, delay=1, jitter=0)

    @trigger(column="BASE", name="f", retry=twice)
    def first(cell):
        called.append("f")
        if called.count("f") == 1:
            raise ValueError

    @trigger(column="BASE", name="g", retry=twice)
    def second(cell):
        called.append("g")
        if called.count("g") == 1:
            raise ValueError

    write(server, 1)
    await Process(server, 1, [first, second]).pass_by(5)
    assert called == ["f", "f", "g", "g"]
    assert (server.parked, server.counts) == ({}, CellCounts(called=1))


async def test_an_async_function_behind_a_plain_decorator_is_awaited_in_its_lane():
    """Otherwise it would never run, and count as finished."""
    server, called = Server(), []
    for row in (1, 2):
        server.write(row)

    async def note(cell):
        called.append(cell.ref_key)

    @trigger(column="BASE", name="f")
    def wrapped(cell):
        return note(cell)

    await Process(server, 1, [wrapped], parallel=4).pass_by(1)
    assert (sorted(called), server.counts) == ([1, 2], CellCounts(called=2))
