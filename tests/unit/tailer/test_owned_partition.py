"""When a log is opened again after it failed: at once after an abort, else as soon as the group has confirmed it."""

import asyncio
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import pytest

from schemaless.bus.partition_log import LogState, Progress
from schemaless.errors import BusUnavailable, Fenced
from schemaless.topology import Datastore
from tailer import datastore_tailer
from tailer.datastore_tailer import OwnedPartition
from tailer.partition_tail import TailerSlots

DATASTORE = Datastore("trips", 2, 1, ("a",))


class FakeLog:
    """Opening it ends as the next line of the script says: with an error, if any, and in a state."""

    def __init__(self, script):
        self.state = LogState.NEW
        self.throttled_s = 0.0
        self.closed = False
        self._script = script

    def open(self):
        failure, self.state = self._script.pop(0)
        if failure is not None:
            raise failure
        return Progress({}, {}, set())

    def close(self):
        self.closed = True


@pytest.fixture
def logs(monkeypatch):
    """The logs that were opened, and the script of those to come; there is no pause after a failure."""
    made, script = [], []

    def make(*arguments, **settings):
        made.append(FakeLog(script))
        return made[-1]

    monkeypatch.setattr(datastore_tailer, "PartitionLog", make)
    monkeypatch.setattr(datastore_tailer, "RETRY_S", 0.0)
    monkeypatch.setattr(datastore_tailer, "FENCED_RETRY_S", 0.0)
    return SimpleNamespace(made=made, script=script)


@pytest.fixture
def owned(logs):
    context = SimpleNamespace(
        settings=SimpleNamespace(kafka="127.0.0.1:9", transaction_timeout_s=1.0),
        openings=TailerSlots(1),
        opening=AtOnce(),
        closing=AtOnce(),
        publishing=AtOnce(),
        heads=lambda name: {},
        paused=lambda name: False,
    )
    return OwnedPartition(DATASTORE, 0, context)


class AtOnce(Executor):
    """Runs a call where it is submitted."""

    def submit(self, call, *args):
        future = Future()
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)
        return future


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("it never came to that")


async def turns():
    """Many turns of the event loop, and no pause."""
    for _ in range(100):
        await asyncio.sleep(0)


async def run_until_open(owned):
    running = asyncio.ensure_future(owned.run())
    await until(lambda: owned.tailed or running.done())
    owned.stop()
    await running


async def test_after_an_abort_the_log_is_opened_anew_in_place(owned, logs):
    logs.script += [(BusUnavailable("slow"), LogState.ABORTED), (None, LogState.OPEN)]
    await run_until_open(owned)
    assert [log.closed for log in logs.made] == [True, True]


UNSURE = pytest.mark.parametrize(
    ("failure", "state"),
    [(BusUnavailable("outcome not known"), LogState.UNKNOWN), (Fenced("another's"), LogState.FENCED)],
    ids=["unknown", "fenced"],
)


@UNSURE
async def test_else_the_group_has_to_say_whose_it_is(owned, logs, failure, state):
    """Nothing is opened before it does. Then the log is opened in place, so other partitions aren't given away."""
    logs.script += [(failure, state), (None, LogState.OPEN)]
    running = asyncio.ensure_future(owned.run())
    await until(lambda: owned.unconfirmed)
    await turns()
    assert [log.closed for log in logs.made] == [True]
    owned.wait_for(2)
    owned.wait_for(3)  # the group is slow and asked again
    owned.confirm(1)  # asked before the failure
    assert owned.unconfirmed
    owned.confirm(2)
    await until(lambda: owned.tailed)
    owned.stop()
    await running


@UNSURE
async def test_a_partition_that_the_group_takes_away_is_not_opened_again(owned, logs, failure, state):
    logs.script += [(failure, state)]
    running = asyncio.ensure_future(owned.run())
    await until(lambda: owned.unconfirmed)
    owned.stop()
    await asyncio.wait_for(running, 5)
    assert len(logs.made) == 1


async def test_a_partition_that_is_taken_away_while_it_waits_for_a_slot_opens_nothing(owned, logs):
    """Slots may wait for a broker that hangs, and the group waits for the partition."""
    async with owned._context.openings.taken():
        running = asyncio.ensure_future(owned.run())
        await until(lambda: logs.made)
        owned.stop()
    await asyncio.wait_for(running, 5)
    assert [log.state for log in logs.made] == [LogState.NEW]


async def test_an_open_log_is_tailed_on_while_the_group_is_not_heard(owned, logs):
    """The group can't be asked whose it is. Whoever got the partition fences the log."""
    logs.script += [(None, LogState.OPEN)]
    running = asyncio.ensure_future(owned.run())
    await until(lambda: owned.tailed)
    owned.lose()
    await turns()
    assert [log.closed for log in logs.made] == [False]
    assert (owned.tailed, owned.unconfirmed) == (True, False)
    owned.stop()
    await asyncio.wait_for(running, 5)


class Losing(Executor):
    """The group is lost sight of while a call runs."""

    def __init__(self, owned):
        self._owned = owned

    def submit(self, call, *args):
        self._owned.lose()
        return AtOnce().submit(call, *args)


@pytest.mark.parametrize("state", [LogState.ABORTED, LogState.UNKNOWN, LogState.FENCED])
async def test_no_log_is_opened_again_before_the_group_is_heard_and_assigns_the_partition(owned, logs, state):
    """Also after an abort: this process may be alone in its belief that the partition is its own."""
    logs.script += [(BusUnavailable("slow"), state), (None, LogState.OPEN)]
    at_once, owned._context.opening = owned._context.opening, Losing(owned)
    running = asyncio.ensure_future(owned.run())
    await until(lambda: logs.made and logs.made[0].closed)
    await turns()
    owned.wait_for(1)
    owned.confirm(9)
    await turns()
    assert len(logs.made) == 1
    owned._context.opening = at_once
    owned.regain()
    await until(lambda: owned.tailed)
    owned.stop()
    await running


async def test_a_partition_that_is_lost_while_it_waits_for_a_slot_opens_nothing_until_it_is_assigned_again(owned, logs):
    logs.script += [(None, LogState.OPEN)]
    async with owned._context.openings.taken():
        running = asyncio.ensure_future(owned.run())
        await until(lambda: logs.made)
        owned.lose()
    await until(lambda: logs.made[0].closed)
    await turns()
    assert [log.state for log in logs.made] == [LogState.NEW]
    owned.regain()
    await until(lambda: owned.tailed)
    owned.stop()
    await running


class Hanging(Executor):
    """Runs nothing: each of its threads waits for a broker that hangs."""

    def submit(self, call, *args):
        return Future()


async def test_a_log_is_closed_while_every_thread_that_opens_logs_hangs(owned, logs):
    """The group waits for a partition that it takes away, and then everybody in the group would wait for the broker."""
    logs.script += [(None, LogState.OPEN)]
    running = asyncio.ensure_future(owned.run())
    await until(lambda: owned.tailed)
    owned._context.opening = Hanging()
    owned.stop()
    await asyncio.wait_for(running, 5)
    assert [log.closed for log in logs.made] == [True]


async def test_a_stop_ends_the_pause_after_a_failure(owned, logs, monkeypatch):
    monkeypatch.setattr(datastore_tailer, "RETRY_S", 60.0)
    logs.script += [(BusUnavailable("slow"), LogState.ABORTED)]
    running = asyncio.ensure_future(owned.run())
    await until(lambda: logs.made and logs.made[0].closed)
    owned.stop()
    await asyncio.wait_for(running, 5)


async def test_a_partition_that_stops_can_not_be_lost(owned):
    """Otherwise the next assignment would take it for one that could come back."""
    owned.stop()
    owned.lose()
    assert not owned.is_lost


async def test_a_log_whose_opening_ends_while_the_group_is_not_heard_is_closed(owned, logs, monkeypatch):
    """It may have fenced a new owner, which opens the log again."""

    def open_and_lose(log):
        owned.lose()
        return Progress({}, {}, set())

    monkeypatch.setattr(FakeLog, "open", open_and_lose)
    running = asyncio.ensure_future(owned.run())
    await until(lambda: logs.made and logs.made[0].closed)
    await turns()
    assert (len(logs.made), owned.tailed) == (1, False)
    owned.stop()
    await running
