"""Heartbeats: when a Faust app may still believe that its partitions are its own (I10). And how an app stops."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from faust.types import TP
from mode import Service

from schemaless.bus import faust_transport
from schemaless.bus.faust_transport import FaustTransport, Heartbeats, _ReadCommittedThread


class Coordinator:
    """aiokafka's, as far as heartbeats go. Sending one takes a second."""

    member_id, generation = "me", 7

    def __init__(self):
        self.now = 100.0
        self.answers = True

    async def _do_heartbeat(self):
        self.now += 1.0
        return self.answers


async def test_only_an_answered_heartbeat_counts_and_from_when_it_was_sent():
    coordinator = Coordinator()
    heartbeats = Heartbeats(coordinator, clock=lambda: coordinator.now)
    coordinator.now = 110.0
    assert heartbeats.age_s == 10.0
    assert await coordinator._do_heartbeat()
    assert heartbeats.age_s == 1.0
    coordinator.answers = False
    assert not await coordinator._do_heartbeat()
    assert heartbeats.age_s == 2.0


async def test_a_rebalance_is_an_answer():
    coordinator = Coordinator()
    heartbeats = Heartbeats(coordinator, clock=lambda: coordinator.now)
    coordinator.now = 110.0
    assert heartbeats.joined() == ("me", 7)
    assert heartbeats.age_s == 0.0


async def test_a_stop_that_swallows_its_cancellation_holds_nobody_up(monkeypatch):
    """As Faust's does: each of its parts goes on where it was cancelled."""
    monkeypatch.setattr(faust_transport, "_STOP_TIMEOUT_S", 0.01)
    transport = FaustTransport("127.0.0.1:1", "group", "topic", receiver=None)
    swallowed, released = [], asyncio.Event()

    async def stop():
        try:
            await released.wait()
        except asyncio.CancelledError:
            swallowed.append(1)

    monkeypatch.setattr(transport._app, "stop", stop)
    await transport._stop()
    released.set()
    assert not swallowed


async def test_the_loop_runs_while_the_thread_of_faust_ends(monkeypatch):
    """The thread may wait for the loop: both would wait for ever."""

    async def stop(self):
        pass

    monkeypatch.setattr(Service, "stop", stop)
    ended = threading.Event()
    worker, thread = _ReadCommittedThread.__new__(_ReadCommittedThread), threading.Thread(target=ended.wait, args=[5.0])
    thread.stop = thread.join
    worker._started, worker._thread = asyncio.Event(), thread
    worker._started.set()
    thread.start()
    asyncio.get_running_loop().call_soon(ended.set)
    await worker.stop()
    assert ended.is_set()


class Assignments:
    """A receiver that keeps which partitions nobody else had."""

    def __init__(self):
        self.kept = []

    async def assigned(self, partitions, kept=()):
        self.kept.append(list(kept))

    async def revoked(self, partitions):
        pass


@pytest.mark.parametrize(("joined", "kept"), [(("me", 8), [0]), (("me", 9), []), (("another", 8), []), (("me", 7), [])])
async def test_only_the_next_generation_of_the_same_member_keeps_partitions(monkeypatch, joined, kept):
    """Somebody else had them where a generation was missed, or the member was thrown out. So they are new."""
    answers = iter([("me", 7), joined])
    thread = SimpleNamespace(heartbeats=SimpleNamespace(joined=lambda: next(answers)))
    monkeypatch.setattr(FaustTransport, "_thread", thread)
    receiver = Assignments()
    transport = FaustTransport("127.0.0.1:1", "group", "topic", receiver)
    await transport._assigned(None, [TP("topic", 0)])
    await transport._revoked(None, [TP("topic", 0)])
    await transport._assigned(None, [TP("topic", 0), TP("topic", 1)])
    assert receiver.kept == [[], kept]
