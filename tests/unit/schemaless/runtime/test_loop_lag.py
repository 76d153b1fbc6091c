"""Time-outs of a loop that is late: they judge no server (I15)."""

import asyncio

import pytest

from schemaless.runtime.loop_lag import TICK_S, Deadline, LiveTimeout, LoopLag


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lag(clock):
    found = LoopLag(clock)
    found.tick()
    return found


def passes(clock, lag, seconds):
    """The loop runs well for so long: its ticks are on time."""
    for _ in range(round(seconds / TICK_S)):
        clock.now += TICK_S
        lag.tick()


def test_a_loop_that_runs_well_is_never_late(clock, lag):
    passes(clock, lag, 10)
    assert (lag.late_s(), lag.longest_s) == (0.0, 0.0)
    clock.now += TICK_S + 0.005  # what uvloop's milliseconds make
    assert lag.late_s() == 0.0


def test_a_time_out_ends_by_live_time(clock, lag):
    """A server that hangs is found out in its time while the loop runs."""
    deadline = Deadline(1.25, lag)
    passes(clock, lag, 1.25)
    assert deadline.left_s() == pytest.approx(0, abs=1e-6)


def test_a_stall_counts_for_nobody(clock, lag):
    """S8: the loop stood still for 1.4 s; the answer lies in the socket, and the time-out fires first."""
    deadline = Deadline(1.25, lag)
    passes(clock, lag, 0.1)
    clock.now += 1.4
    assert deadline.left_s() > 1.0  # also before the tick that is due has run
    lag.tick()
    assert deadline.left_s() > 1.0
    passes(clock, lag, 1.25)
    assert deadline.left_s() < 0
    assert lag.longest_s == pytest.approx(1.35)


def test_a_time_out_is_stretched_three_times_at_most(clock, lag):
    """A loop that is late for ever doesn't let a caller wait for ever."""
    deadline = Deadline(1.0, lag)
    for _ in range(3):
        assert not deadline.is_stretched_out
        clock.now += 1.0
        lag.tick()
    assert deadline.left_s() > 0.5
    assert deadline.is_stretched_out


async def test_the_context_waits_for_the_answer_of_a_server_after_a_stall(clock):
    """The timer fires, sees that the loop was late, and gives the call more turns."""
    lag = LoopLag(clock)
    lag.tick()
    answered = asyncio.Event()
    async with LiveTimeout(0.1, lag):
        clock.now += 0.15  # the loop stands still, and the timer is due
        asyncio.get_running_loop().call_later(0.12, answered.set)
        await answered.wait()


async def test_the_context_ends_a_call_that_had_its_time():
    """And says that the server is to blame. With a loop that is late for ever it doesn't."""
    timeout = LiveTimeout(0.01, LoopLag())
    with pytest.raises(TimeoutError):
        async with timeout:
            await asyncio.Event().wait()
    assert timeout.server_had_its_time


async def test_a_call_that_a_late_loop_gives_up_blames_nobody(clock):
    """S8: nobody knows whether the server answered."""
    lag = LoopLag(clock)
    lag.tick()
    timeout = LiveTimeout(0.06, lag)
    asyncio.get_running_loop().call_soon(lambda: setattr(clock, "now", clock.now + 1.0))
    with pytest.raises(TimeoutError):
        async with timeout:
            await asyncio.Event().wait()
    assert not timeout.server_had_its_time


async def test_a_cancelled_call_stays_cancelled():
    """A client that hangs up, or a stop, is no time-out."""

    async def call():
        async with LiveTimeout(60, LoopLag()):
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
