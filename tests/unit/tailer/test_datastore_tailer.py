"""What a tailer does with its partitions when the group assigns them, loses sight of it, and is heard again."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from schemaless.errors import BusUnavailable
from schemaless.names import Stall
from schemaless.topology import Datastore
from tailer import datastore_tailer
from tailer.datastore_tailer import DatastoreTailer
from tests.unit.tailer.test_owned_partition import turns, until

DATASTORE = Datastore("trips", 4, 2, ("a",))
RAISED = {Stall.PARTITION_COUNT: "a topic has 4 partitions"}


class FakeMember:
    """A membership whose calls the test makes. Polls wait for a moment in the group's thread."""

    made = None
    asked = 0
    failure = None

    @property
    def stalls(self):
        return RAISED

    def __init__(self, settings, datastore, loop, *, assigned, revoked, lost):
        if FakeMember.failure is not None:
            raise FakeMember.failure
        self.assigned, self.revoked, self.lost = assigned, revoked, lost
        FakeMember.made = self
        self._left = threading.Event()

    def poll(self, tailed, challenges):
        self._left.wait(0.001)

    def close(self):
        self._left.set()


class FakePartition:
    """A partition that runs until it is stopped and its gate is open."""

    tailed = unconfirmed = False
    stall = None

    def held(self):
        return [] if self.stall is None else [(self.partition, *self.stall)]

    def __init__(self, datastore, partition, context):
        self.partition = partition
        self.is_lost = self.runs = self.ended = False
        self.gate = asyncio.Event()
        self.gate.set()
        self._stopped = asyncio.Event()

    async def run(self):
        self.runs = True
        await self._stopped.wait()
        await self.gate.wait()
        self.runs, self.ended = False, True

    def stop(self):
        self.is_lost = False
        self._stopped.set()

    def lose(self):
        self.is_lost = True

    def regain(self):
        self.is_lost = False


class Scene:
    """A tailer that runs, and its member."""

    def __init__(self, tailer, member):
        self.tailer, self.member = tailer, member

    def of(self, partition):
        """Those that hold a partition, in the order in which they were made."""
        return [owned for owned in self.tailer.partitions if owned.partition == partition]


class Context:
    settings = SimpleNamespace(kafka="")

    class metrics:
        @staticmethod
        def joined_anew(datastore, reason):
            pass

    @staticmethod
    async def prove(datastore):
        pass


@pytest.fixture
async def scene(monkeypatch):
    monkeypatch.setattr(datastore_tailer, "ensure_topics", lambda *_, **__: None)
    monkeypatch.setattr(datastore_tailer, "GroupMember", FakeMember)
    monkeypatch.setattr(datastore_tailer, "OwnedPartition", FakePartition)
    FakeMember.made = None
    tailer = DatastoreTailer(DATASTORE, Context)
    running = asyncio.create_task(tailer.run())
    while FakeMember.made is None:  # noqa: ASYNC110 (it is made in a thread)
        await asyncio.sleep(0)
    yield Scene(tailer, FakeMember.made)
    tailer.stop()
    await asyncio.wait_for(running, 10)


async def test_partitions_go_on_while_the_group_is_not_heard_and_those_that_are_assigned_again_stay(scene):
    """The others are somebody else's now, and stop."""
    scene.member.assigned([0, 1])
    (zero,), (one,) = scene.of(0), scene.of(1)
    await until(lambda: zero.runs and one.runs)
    scene.member.lost([0, 1])
    await turns()
    assert (zero.runs, one.runs) == (True, True)
    scene.member.assigned([1])
    await until(lambda: zero.ended)
    assert (scene.of(0), scene.of(1), one.is_lost, one.runs) == ([], [one], False, True)


async def test_a_partition_that_comes_back_runs_when_the_one_before_has_ended(scene):
    """It was somebody else's in between, and its last transaction is slow. Two would fence each other."""
    scene.member.assigned([0])
    (before,) = scene.of(0)
    await until(lambda: before.runs)
    before.gate.clear()
    scene.member.lost([0])
    scene.member.assigned([])
    await turns()
    scene.member.assigned([0])
    await turns()
    (after,) = [owned for owned in scene.of(0) if owned is not before]
    assert (before.runs, after.runs) == (True, False)
    before.gate.set()
    await until(lambda: after.runs)
    assert before.ended


async def test_assignments_one_right_after_the_other_leave_a_partition_with_somebody_who_tails_it(scene):
    """The one that is let go must not take its successor along."""
    scene.member.assigned([0])
    (before,) = scene.of(0)
    await until(lambda: before.runs)
    scene.member.lost([0])
    scene.member.assigned([])
    scene.member.assigned([0])
    (after,) = [owned for owned in scene.of(0) if owned is not before]
    await until(lambda: before.ended and after.runs)
    await turns()
    assert after.runs


async def test_one_partition_that_is_held_up_is_no_stall_of_the_process(scene):
    """It is named by its shards. Once none is published, the process says why, before what is wrong with the topic."""
    scene.member.assigned([0, 1])
    (zero,), (one,) = scene.of(0), scene.of(1)
    zero.stall = Stall.REFUSED, "a record is not ours"
    report = scene.tailer.report()
    assert (report.stall, report.failing_shards_count) == (Stall.PARTITION_COUNT, 1)
    one.stall = zero.stall
    assert (scene.tailer.report().stall, scene.tailer.report().stall_reason) == zero.stall


async def test_a_quota_that_delays_one_partition_delays_the_process(scene):
    """The others have nothing to publish now."""
    scene.member.assigned([0, 1])
    scene.of(0)[0].stall = Stall.QUOTA, "Kafka delays the tailers"
    assert scene.tailer.report().stall is Stall.QUOTA


async def test_a_process_that_has_just_joined_waits_for_its_partitions_in_peace(scene, monkeypatch):
    assert scene.tailer.report().stall is Stall.PARTITION_COUNT
    monkeypatch.setattr(datastore_tailer, "ASSIGNING_S", -1.0)
    assert scene.tailer.report().stall is Stall.NO_PARTITIONS


async def test_a_failure_to_join_is_over_once_the_group_is_joined(monkeypatch):
    monkeypatch.setattr(datastore_tailer, "ensure_topics", lambda *_, **__: None)
    monkeypatch.setattr(datastore_tailer, "GroupMember", FakeMember)
    monkeypatch.setattr(datastore_tailer, "REJOIN_S", 0.0)
    monkeypatch.setattr(FakeMember, "failure", BusUnavailable("no broker"))
    FakeMember.made = None
    tailer = DatastoreTailer(DATASTORE, Context)
    assert tailer.report().stall is None
    running = asyncio.create_task(tailer.run())
    while tailer.report().stall is not Stall.NO_KAFKA:  # noqa: ASYNC110 (in a thread)
        await asyncio.sleep(0)
    FakeMember.failure = None
    while FakeMember.made is None or not tailer.report().is_member:  # noqa: ASYNC110 (in a thread)
        await asyncio.sleep(0)
    tailer.progress_moved()
    while tailer.report().is_member:  # noqa: ASYNC110 (it leaves, to join anew)
        await asyncio.sleep(0)
    assert tailer.report().stall is None
    tailer.stop()
    await asyncio.wait_for(running, 10)
