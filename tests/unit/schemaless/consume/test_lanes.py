"""Lanes: how many rows of a shard are called at once, when functions say so and when only the setting does."""

import asyncio
import threading

import pytest

from schemaless import trigger
from tests.unit.schemaless.consume.parking_world import Process, Server


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
