"""A row has one call at a time in a process, whatever ends meanwhile: an outage, an assignment, or a time-out."""

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from schemaless import RetryPolicy, trigger
from tests.unit.schemaless.consume.parking_world import SHARD, Order, Process, Server
from tests.waiting import async_until

WAYS = ["async", "in a thread", "handed on", "in a pool"]


class Overlap:
    """A function whose calls for `slow` cells run until `end`, also if they are cancelled. Others fail in an outage.

    `most` is the highest number of calls of one row that ran at once.
    """

    def __init__(self, way, **options):
        self.begun, self.running, self.most = Counter(), Counter(), 0
        self.slow, self.failing, self.is_down = set(), set(), False
        self.ended, self.over = threading.Event(), asyncio.Event()
        self.lock, self.pool = threading.Lock(), ThreadPoolExecutor(2)

        def begin(cell):
            with self.lock:
                self.begun[cell.ref_key] += 1
                self.running[cell.row_key] += 1
                self.most = max(self.most, self.running[cell.row_key])

        def end(cell):
            with self.lock:
                self.running[cell.row_key] -= 1
            if cell.ref_key in self.failing:
                raise ValueError
            if self.is_down and cell.ref_key not in self.slow:
                raise ConnectionError

        def call(cell):
            begin(cell)
            if cell.ref_key in self.slow:
                self.ended.wait()
            end(cell)

        async def acall(cell):
            begin(cell)
            while cell.ref_key in self.slow and not self.over.is_set():
                with suppress(asyncio.CancelledError):  # as one that cleans up
                    await self.over.wait()
            end(cell)

        def hand_on(cell):
            return acall(cell)

        functions = {
            "async": acall,
            "in a thread": call,
            "handed on": hand_on,
            "in a pool": lambda cell: self.pool.submit(call, cell),
        }
        self.function = trigger(column="BASE", name="f", **options)(functions[way])

    def end(self):
        self.ended.set()
        self.over.set()

    async def finish(self, server, process):
        """Ends the calls, and lets everything be called that is left."""

        async def is_done():
            await process.pass_by(1)  # its clock runs ahead of a call that waits for a thread
            return not any(self.running.values()) and finished(server)

        self.end()
        await async_until(is_done)


@pytest.fixture(params=WAYS)
def program(request):
    program = Overlap(request.param, retry=RetryPolicy(attempts=100, delay=1, max_delay=1, jitter=0))
    yield program
    program.end()
    program.pool.shutdown()


async def with_one_that_runs(program, *, failed=False):
    """Returns a server and a worker in which the call of the first cell of row 0 outlasts its pass."""
    server = Server()
    slow = server.write(0)
    server.write(0)
    (program.failing if failed else program.slow).add(slow)
    process = Process(server, 1, [program.function], parallel=4)
    await process.pass_by(0.5)
    if failed:
        await async_until(lambda: program.begun[slow] == 1)
        program.failing.clear()
        program.slow.add(slow)
        await process.pass_by(1.5)
    await async_until(lambda: sum(program.running.values()) == 1)
    return server, process, program.begun[slow]


def finished(server):
    return server.position.added_id == len(server.cells) and server.parked == {}


@pytest.mark.parametrize("failed", [False, True], ids=["first attempt", "second attempt"])
async def test_the_end_of_an_outage_calls_nothing_that_runs(program, failed):
    server, process, begun = await with_one_that_runs(program, failed=failed)
    program.is_down = True
    for row in range(1, 15):
        server.write(row)
    await process.pass_by(3)
    assert process.handler.tripped
    program.is_down = False
    await process.pass_by(3)
    assert not process.handler.tripped
    assert (program.begun[1], program.begun[2], program.most) == (begun, 0, 1)
    await program.finish(server, process)
    assert program.begun[1] == begun


async def test_a_shard_that_comes_back_waits_for_calls_of_before(program):
    """Threads can't be cancelled, and what is cancelled may take its time. Other rows go on."""
    server, process, begun = await with_one_that_runs(program)
    for _ in range(2):
        await process.delivery.suspend([SHARD], 0.0)
        process.delivery.release([SHARD])
        process.delivery.gain([SHARD])
        other = server.write(1)
        await process.pass_by(5)
        assert program.begun[other] == 1
    assert (program.begun[1], program.begun[2], program.most) == (begun, 0, 1)
    await program.finish(server, process)
    assert program.most == 1


async def test_a_generation_that_takes_a_call_back_calls_its_row_after_that(program):
    server, process, begun = await with_one_that_runs(program)
    await process.handler.supersede(SHARD, 1, 2)
    await process.delivery.suspend([SHARD], 0.0)
    process.delivery.release([SHARD])
    process.delivery.gain([SHARD])
    await process.pass_by(5)
    assert (program.begun[1], program.begun[2], program.most) == (begun, 0, 1)
    await program.finish(server, process)
    assert (program.most, program.begun[2]) == (1, 1)


@pytest.mark.parametrize("failed", [False, True], ids=["first attempt", "second attempt"])
async def test_an_order_to_retry_calls_nothing_that_runs(program, failed):
    """Nor does a due time. People see it as one that waits."""
    server, process, begun = await with_one_that_runs(program, failed=failed)
    server.order(1, Order.RETRY)
    await process.pass_by(3)
    assert (program.begun[1], program.most) == (begun, 1)
    assert process.handler.failing()[0] == failed
    await program.finish(server, process)
    assert program.most == 1


@pytest.mark.parametrize("program", ["in a pool"], indirect=True)
async def test_a_call_that_timed_out_in_a_pool_is_repeated_after_its_end(program):
    """Its thread goes on, and nobody can cancel it."""
    server = Server()
    program.slow.add(server.write(0))
    process = Process(server, 1, [program.function], attempt_timeout_s=0.05, parallel=2)
    await process.pass_by(3)
    assert (program.begun[1], program.most, server.causes()) == (1, 1, {1: "waiting"})
    await program.finish(server, process)
    assert (program.begun[1], program.most) == (2, 1)
