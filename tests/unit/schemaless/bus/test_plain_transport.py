"""PlainTransport without Kafka: what its receiver is told, when the member may call, and how it ends."""

import asyncio
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager
from queue import Empty, SimpleQueue

import pytest
from confluent_kafka import KafkaError, KafkaException

from schemaless.bus import plain_transport
from schemaless.bus.client import translated
from schemaless.bus.plain_transport import PlainTransport
from schemaless.bus.reader import Span
from schemaless.errors import BusUnavailable, Misconfigured
from schemaless.record import Record

SESSION_TIMEOUT_S = 10.0


class ScriptedReader:
    """A group reader without Kafka. Its polls return nothing until the test says what happens in the next one."""

    def __init__(self, bootstrap, topic, group, revoked, *, session_timeout_s):
        self.revoked = revoked
        self.fresh = []
        self.without_leader = set()
        self.is_member = True
        self.asked = []
        self.closed = threading.Event()
        self.in_span = lambda: None
        self._script = SimpleQueue()

    def in_poll(self, happens=lambda: None, records=()):
        """Lets this happen in the next poll, which returns these records. Returns a future of what came of it."""
        done = Future()
        self._script.put((happens, records, done))
        return asyncio.wrap_future(done)

    async def assign(self, *partitions):
        await self.in_poll(lambda: self.fresh.extend(partitions))

    def join(self, partitions):
        pass

    def consume(self, wait_s):
        try:
            happens, records, done = self._script.get(timeout=wait_s)
        except Empty:
            return []
        try:
            done.set_result(happens())
        except Misconfigured:
            done.set_result(None)
            raise
        return list(records)

    def span(self, partition):
        self.in_span()
        if partition in self.without_leader:
            raise BusUnavailable("no leader")
        return Span(0, 7)

    def read_from(self, partition, offset):
        self.fresh.remove(partition)

    def commit(self, partitions):
        self.asked.append(list(partitions))
        if not self.is_member:
            raise BusUnavailable("unknown member")

    def close(self):
        self.closed.set()


class Told:
    """A receiver that keeps what it was told. `revoked` ends when the test lets it."""

    def __init__(self):
        self.told = []
        self.taken = []
        self.in_take = lambda: None
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._changed = asyncio.Event()

    async def assigned(self, partitions, kept=()):
        self._note("assigned", list(partitions), list(kept))

    async def revoked(self, partitions):
        self._note("revoked", list(partitions))
        await self.may_end.wait()
        self._note("calls ended", list(partitions))

    def take(self, partition, records):
        self.in_take()
        self.taken += [record.value for record in records]

    async def until(self, *told):
        while self.told[-len(told) :] != list(told):
            self._changed.clear()
            await self._changed.wait()

    def _note(self, *told):
        self.told.append(told)
        self._changed.set()


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s

    def advance(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def receiver():
    return Told()


@pytest.fixture
def transport(monkeypatch, receiver, clock):
    monkeypatch.setattr(plain_transport, "GroupReader", ScriptedReader)
    return PlainTransport(
        "nowhere", "g", "t", receiver, session_timeout_s=SESSION_TIMEOUT_S, clock=clock, sleep=lambda _: None
    )


async def test_reads_are_a_pause_apart_unless_more_waits(monkeypatch, receiver, clock):
    monkeypatch.setattr(plain_transport, "GroupReader", ScriptedReader)
    monkeypatch.setattr(plain_transport, "READ_RECORDS_MAX", 3)
    pauses = []
    transport = PlainTransport("nowhere", "g", "t", receiver, read_pause_s=0.05, clock=clock, sleep=pauses.append)
    async with running(transport):
        await transport._reader.assign(0)
        await transport._reader.in_poll(records=[record(0, b"")] * 3)
        await transport._reader.in_poll()
        assert pauses == []
        await transport._reader.in_poll(records=[record(0, b"")] * 2)
        await transport._reader.in_poll()
    assert pauses == [0.05]


@pytest.fixture
def reader(transport):
    return transport._reader


@asynccontextmanager
async def running(transport):
    task = asyncio.create_task(transport.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def record(partition, value):
    return Record("t", partition, 0, 0, b"", value, {})


async def test_a_partition_that_began_is_told_though_the_next_one_has_no_leader(transport, reader, receiver):
    """Otherwise it is read, but nobody works on it until the next rebalance."""
    async with running(transport):
        reader.without_leader = {1}
        await reader.assign(0, 1)
        await receiver.until(("assigned", [0], []))
        await reader.in_poll()
        reader.without_leader = set()
        await receiver.until(("assigned", [0], []), ("assigned", [0, 1], [0]))


async def test_records_are_handed_over_though_an_assigned_partition_has_no_leader(transport, reader, receiver):
    async with running(transport):
        await reader.assign(0)
        await receiver.until(("assigned", [0], []))
        reader.without_leader = {1}
        await reader.in_poll(lambda: reader.fresh.append(1), [record(0, b"first")])
        await reader.in_poll(records=[record(0, b"second")])
        await reader.in_poll()
        assert receiver.taken == [b"first", b"second"]


async def test_a_process_that_was_halted_asks_the_group_before_it_calls_again(transport, reader, receiver, clock):
    """I10: librdkafka says that partitions are lost some time after the process continues."""

    def halt():
        clock.advance(SESSION_TIMEOUT_S)
        return transport.is_alive()

    async with running(transport):
        await reader.assign(0, 1)
        await receiver.until(("assigned", [0, 1], []))
        reader.is_member = False
        assert not await reader.in_poll(halt)
        assert not await reader.in_poll(transport.is_alive)
        reader.is_member = True
        await reader.in_poll()
        assert await reader.in_poll(transport.is_alive)
        assert reader.asked[-1] == [0, 1]


async def test_a_member_that_polls_in_time_is_alive_and_asks_nothing(transport, reader, receiver, clock):
    async with running(transport):
        assert not await reader.in_poll(transport.is_alive)
        await reader.assign(0)
        await receiver.until(("assigned", [0], []))
        for _ in range(5):
            await reader.in_poll(lambda: clock.advance(SESSION_TIMEOUT_S / 2))
            assert await reader.in_poll(transport.is_alive)
        assert not reader.asked


async def test_a_member_whose_session_is_a_second_may_call(monkeypatch, receiver, clock):
    """As long as its polls return in time. Kafka allows no shorter session."""
    monkeypatch.setattr(plain_transport, "GroupReader", ScriptedReader)
    transport = PlainTransport("nowhere", "g", "t", receiver, session_timeout_s=1.0, clock=clock, sleep=lambda _: None)
    reader = transport._reader
    async with running(transport):
        await reader.assign(0)
        await receiver.until(("assigned", [0], []))
        await reader.in_poll(lambda: clock.advance(0.5))
        assert await reader.in_poll(transport.is_alive)
        assert not await reader.in_poll(lambda: clock.advance(1.0) or transport.is_alive())


async def test_a_member_isnt_alive_while_it_waits_for_an_answer_of_kafka(transport, reader, receiver, clock):
    """librdkafka's callbacks wait meanwhile."""
    found = []

    def answer_late():
        clock.advance(SESSION_TIMEOUT_S)
        found.append(transport.is_alive())

    async with running(transport):
        await reader.assign(0)
        await receiver.until(("assigned", [0], []))
        reader.in_span = answer_late
        await reader.assign(1)
        await receiver.until(("assigned", [0, 1], [0]))
        assert found == [False]


async def test_only_a_poll_counts_and_not_that_the_event_loop_is_free_again(transport, reader, receiver, clock):
    async with running(transport):
        await reader.assign(0)
        await receiver.until(("assigned", [0], []))
        receiver.in_take = lambda: clock.advance(SESSION_TIMEOUT_S)
        taken = reader.in_poll(records=[record(0, b"")])
        alive = [reader.in_poll(transport.is_alive) for _ in range(2)]
        assert await asyncio.gather(taken, *alive) == [None, False, True]
        assert reader.asked == [[0]]


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [(KafkaError.INCONSISTENT_GROUP_PROTOCOL, True), (KafkaError.TOPIC_AUTHORIZATION_FAILED, False)],
)
async def test_only_a_refusal_of_the_group_names_the_other_transport(transport, reader, code, is_refused):
    def fail():
        with translated("reading"):
            raise KafkaException(KafkaError(code))

    async with running(transport) as task:
        await reader.in_poll(fail)
        with pytest.raises(Misconfigured) as raised:
            await task
    assert ("the same transport" in str(raised.value)) == is_refused


@pytest.mark.parametrize("code", [KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED])
async def test_a_refused_account_ends_no_process_that_runs(transport, reader, receiver, code, monkeypatch):
    """One broker of several may refuse it, and its client takes up the account of the file once it is replaced."""
    monkeypatch.setattr(plain_transport, "_RETRY_PAUSE_S", 0.0)

    def fail():
        with translated("reading"):
            raise KafkaException(KafkaError(code))

    async with running(transport):
        await reader.in_poll(fail)
        await reader.assign(0)
        await receiver.until(("assigned", [0], []))


async def test_a_receiver_that_is_misconfigured_says_why_itself(transport, reader, receiver):
    async def fail(partitions, kept=()):
        raise Misconfigured("there is no table")

    receiver.assigned = fail
    async with running(transport) as task:
        await reader.assign(0)
        with pytest.raises(Misconfigured, match=r"^there is no table$"):
            await task


async def test_the_group_is_left_when_the_calls_in_flight_have_ended(transport, reader, receiver):
    """Otherwise the next owner makes the same calls at the same time."""
    async with running(transport) as task:
        await reader.assign(0, 1)
        await receiver.until(("assigned", [0, 1], []))
        receiver.may_end.clear()
        task.cancel()
        await receiver.until(("revoked", [0, 1]))
        assert not transport.is_alive()
        assert not reader.closed.is_set()
        receiver.may_end.set()
        await asyncio.wait({task})
        assert receiver.told[-1] == ("calls ended", [0, 1])
        assert reader.closed.is_set()


async def test_calls_that_do_not_end_keep_the_group_for_a_bounded_time(transport, reader, receiver, monkeypatch):
    monkeypatch.setattr(plain_transport, "STOP_TIMEOUT_S", 0.0)
    async with running(transport) as task:
        await reader.assign(0)
        await receiver.until(("assigned", [0], []))
        receiver.may_end.clear()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert receiver.told[-1] == ("revoked", [0])
        assert reader.closed.is_set()


async def test_a_partition_that_moves_during_the_stop_waits_for_its_calls_too(transport, reader, receiver):
    loop, polling, stopping = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    seen = []

    def move():
        loop.call_soon_threadsafe(polling.set)
        assert stopping.wait(10)
        reader.revoked([0])
        seen.extend(receiver.told)

    async with running(transport) as task:
        await reader.assign(0, 1)
        await receiver.until(("assigned", [0, 1], []))
        moved = reader.in_poll(move)
        await polling.wait()
        task.cancel()
        await asyncio.sleep(0)
        stopping.set()
        await moved
        assert ("calls ended", [0]) in seen
        await asyncio.wait({task})
        assert receiver.told[-1] == ("calls ended", [1])
