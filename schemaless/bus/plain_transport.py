"""PlainTransport: a member of a group as a loop around confluent-kafka, in a thread of its own.

The thread reads and waits until the event loop has taken what it read. So records that come meanwhile are taken
together, and nothing piles up. A partition is heard from its end on, because history comes from MySQL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import structlog
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from schemaless.bus.client import AccountsHeard, open_client, refuses_account, translated
from schemaless.bus.reader import Span, partitions_of, record_of
from schemaless.bus.transport import Receiver, refused
from schemaless.errors import BusUnavailable, Misconfigured, SchemalessError
from schemaless.record import Record

log = structlog.get_logger()

_POLL_S = 0.1
_RETRY_PAUSE_S = 0.5
_LOOK_PAUSE_S = 1.0
_READ_PAUSE_S = 0.004  # between two reads, so that records which come soon after one another are taken together
STOP_TIMEOUT_S = 3.0  # what the receiver does at a stop is cut off after that

T = TypeVar("T")


class PlainTransport:
    """Connects one topic and one group with one receiver. `run` ends only by being cancelled or by raising."""

    def __init__(  # noqa: PLR0913  # half of them have defaults
        self,
        bootstrap: str,
        group: str,
        topic: str,
        receiver: Receiver,
        *,
        session_timeout_s: float = 10.0,
        read_pause_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._group = group
        self._topic = topic
        self._receiver = receiver
        self._session_timeout_s = session_timeout_s
        self._alive_s = session_timeout_s - heartbeat_interval_s(session_timeout_s)
        self._read_pause_s = _READ_PAUSE_S if read_pause_s is None else read_pause_s
        self._clock = clock
        self._sleep = sleep
        self._owned: set[int] = set()
        self._polled_at = self._looked_at = clock()
        self._kafka_answers = False
        self._confirmations: SimpleQueue[tuple[Collection[int], Future[None]]] = SimpleQueue()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader = GroupReader(bootstrap, topic, group, self._on_revoked, session_timeout_s=session_timeout_s)

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        reading = asyncio.ensure_future(asyncio.to_thread(self._read))
        try:
            await asyncio.shield(reading)
        except SchemalessError:
            raise
        except Exception as error:
            raise BusUnavailable(f"group {self._group}: reading stopped: {error!r}") from error
        finally:
            self._stopping = True
            await asyncio.wait({reading})
            owned, self._owned = sorted(self._owned), set()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._receiver.revoked(owned)
            except (TimeoutError, SchemalessError) as error:
                log.warning("calls in flight may come again", group=self._group, partitions=owned, why=repr(error))
            finally:
                await asyncio.to_thread(self._reader.close)

    def is_alive(self) -> bool:
        """librdkafka revokes everything when its heartbeats aren't answered for the session time-out.

        We learn of that only while we poll. A process that was halted, or whose thread waits for an answer, has to
        poll first. The last heartbeat may be older than the last poll by the time between heartbeats.
        """
        return bool(self._owned) and self._clock() - self._polled_at < self._alive_s

    @property
    def kafka_answers(self) -> bool:
        return self.is_alive() or self._kafka_answers

    @property
    def refusal(self) -> str | None:
        return self._reader.heard.refusal

    async def confirm(self, partitions: Collection[int]) -> None:
        answered: Future[None] = Future()
        self._confirmations.put((partitions, answered))
        try:
            async with asyncio.timeout(self._session_timeout_s):
                await asyncio.wrap_future(answered)
        except TimeoutError as error:
            raise BusUnavailable(f"group {self._group}: no answer within {self._session_timeout_s} s") from error

    def _read(self) -> None:
        """Reads until the transport stops. This is the thread."""
        self._reader.join(())
        while not self._stopping:
            try:
                records = self._reader.consume(_POLL_S)
                polled_at = self._clock()
                if records:  # before anything that may fail, because they don't come again
                    self._in_loop(self._hand_over(records))
                    if len(records) < READ_RECORDS_MAX:
                        self._sleep(self._read_pause_s)
                # After a long pause the group is asked whether we still own our partitions. librdkafka may not have
                # noticed yet that its time is over, so one poll alone says nothing.
                if self._owned and polled_at - self._polled_at >= self._alive_s:
                    self._reader.commit(sorted(self._owned))
                self._polled_at = polled_at
                self._begin_fresh()
                self._confirm()
                # librdkafka says nothing of a broker that is away.
                if not self._owned and polled_at - self._looked_at >= _LOOK_PAUSE_S:
                    self._looked_at = polled_at
                    self._kafka_answers = self._reader.kafka_answers()
            except (BusUnavailable, Misconfigured) as error:
                self._wait_after(error)

    def _wait_after(self, error: SchemalessError) -> None:
        """Waits after what passes while we read on: librdkafka connects again by itself, also with another account.

        Raises what doesn't pass.
        """
        cause = error.__cause__
        if isinstance(error, BusUnavailable) or refuses_account(error):
            log.warning("Kafka is unreachable", group=self._group, why=str(error))
            self._sleep(_RETRY_PAUSE_S)
        elif isinstance(cause, KafkaException) and cause.args[0].code() == KafkaError.INCONSISTENT_GROUP_PROTOCOL:
            raise refused(self._group, error) from error
        else:
            raise error

    def _confirm(self) -> None:
        """Answers `confirm`. This thread does it: calls of another one starve while this one polls (2.16.1)."""
        while not self._confirmations.empty():
            partitions, answered = self._confirmations.get()
            if not answered.set_running_or_notify_cancel():
                continue
            foreign = sorted(set(partitions) - self._owned)
            try:
                if foreign:
                    raise BusUnavailable(f"group {self._group}: partitions {foreign} aren't ours")
                self._reader.commit(partitions)
                answered.set_result(None)
            except SchemalessError as error:
                answered.set_exception(error)

    def _begin_fresh(self) -> None:
        """Begins to read what was assigned just now at its end. The receiver reads heads and checkpoints after that.

        It is told of the partitions that began, also when the next one can't be asked for its end.
        """
        kept = sorted(self._owned)
        try:
            for partition in list(self._reader.fresh):
                self._reader.read_from(partition, self._reader.span(partition).high)
                self._owned.add(partition)
        finally:
            if len(self._owned) > len(kept):
                self._in_loop(self._assigned(kept))

    def _on_revoked(self, partitions: Collection[int]) -> None:
        """Gives partitions away when their calls in flight have ended. The group waits for it."""
        gone = self._owned.intersection(partitions)
        self._owned -= gone
        if gone:
            self._in_loop(self._gave(sorted(gone)))

    async def _assigned(self, kept: list[int]) -> None:
        partitions = sorted(self._owned)
        log.info("partitions assigned", group=self._group, partitions=partitions, kept=len(kept))
        await self._receiver.assigned(partitions, kept)

    async def _gave(self, partitions: list[int]) -> None:
        await self._receiver.revoked(partitions)
        await self._receiver.assigned(sorted(self._owned), sorted(self._owned))

    async def _hand_over(self, records: list[Record]) -> None:
        by_partition: dict[int, list[Record]] = {}
        for record in records:
            by_partition.setdefault(record.partition, []).append(record)
        for partition, found in by_partition.items():
            self._receiver.take(partition, found)

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Waits in this thread until the event loop has done some work. From a stop on, it has a bounded time."""
        if self._loop is None or self._loop.is_closed():
            work.close()
            return None
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        stopping_s = 0.0
        while True:
            try:
                return done.result(timeout=_POLL_S)
            except TimeoutError:
                if done.done():
                    raise
                stopping_s += _POLL_S if self._stopping else 0.0
                if stopping_s >= STOP_TIMEOUT_S:
                    done.cancel()
            except FutureCancelled:
                return None


# GroupReader: reads the partitions of a topic that a group, or its caller, assigned to it, from any offset.
#
# A partition that was just assigned is paused until `read_from` says where to begin. Memory is bounded by the client's
# queue. One thread.

READ_RECORDS_MAX = 500
_KEEP_PERIOD_S = 1.0
_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 1.0
_QUEUE_KBYTES = 16 << 10
_SESSION_TIMEOUT_S = 10
_HEARTBEAT_MAX_S = 1.0  # how soon a member learns that partitions move
_POLL_INTERVAL_MAX_S = 600  # a program that works on a batch for longer loses its partitions to others of its group

Revoked = Callable[[Collection[int]], None]


def heartbeat_interval_s(session_timeout_s: float) -> float:
    """Returns the time between two heartbeats in seconds. At most a third of the session, so that one may be lost."""
    return min(_HEARTBEAT_MAX_S, session_timeout_s / 3)


class GroupReader:
    """`fresh` are the partitions that wait for `read_from`, `at_end` those that are read to their present end.

    `consume` and `keep` call `revoked` with the partitions that this reader has lost.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        group: str | None,
        revoked: Revoked,
        *,
        session_timeout_s: float = _SESSION_TIMEOUT_S,
    ) -> None:
        self.fresh: list[int] = []
        self.at_end: set[int] = set()
        self._bootstrap = bootstrap
        self._topic = topic
        self._group = group
        self._revoked = revoked
        self._paused: list[TopicPartition] = []
        self._begun: dict[int, int] = {}
        self._seen_at = time.monotonic()
        self._failure: SchemalessError | None = None  # met beside records
        self.heard = AccountsHeard(bootstrap)
        settings: dict[str, Any] = {
            "error_cb": self.heard.note,
            "group.id": group or "schemaless.subscriber",  # the client wants one. Without a group nothing joins
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",  # the caller notices the hole that retention made while it read
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "queued.max.messages.kbytes": _QUEUE_KBYTES,
        }
        if group is not None:
            settings |= {
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": round(session_timeout_s * 1000),
                "heartbeat.interval.ms": round(heartbeat_interval_s(session_timeout_s) * 1000),
                "max.poll.interval.ms": _POLL_INTERVAL_MAX_S * 1000,
            }
        self._consumer = open_client(Consumer, bootstrap, settings)

    def partitions(self) -> range:
        """Returns the partitions of the topic. Raises NotFound when it doesn't exist, BusUnavailable."""
        return partitions_of(self._consumer, self._bootstrap, self._topic, _TIMEOUT_S)

    def kafka_answers(self) -> bool:
        """Returns whether a broker answers now."""
        try:
            return bool(self._consumer.list_topics(self._topic, timeout=_ANSWER_TIMEOUT_S).brokers)
        except KafkaException:
            return False

    def join(self, partitions: Sequence[int]) -> None:
        """Joins the group or, without one, reads exactly these partitions."""
        with translated(f"joining the readers of {self._topic}"):
            if self._group is None:
                self._on_assign(self._consumer, [self._place(partition) for partition in partitions])
                return
            self._consumer.subscribe(
                [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke
            )

    def span(self, partition: int) -> Span:
        """Returns what can be read now, up to the last stable offset."""
        with translated(f"asking for the offsets of {self._topic} [{partition}]"):
            return Span(*self._consumer.get_watermark_offsets(self._place(partition), timeout=_TIMEOUT_S))

    def read_from(self, partition: int, offset: int) -> None:
        """Begins to read a fresh partition at an offset."""
        with translated(f"reading {self._topic} [{partition}]"):
            self._consumer.incremental_unassign([self._place(partition)])
            self._consumer.incremental_assign([self._place(partition, offset)])
            self._consumer.resume([self._place(partition)])
        self._begun[partition] = offset
        self.fresh.remove(partition)

    def consume(self, wait_s: float) -> list[Record]:
        """Returns the next records, as soon as there are some, or none after `wait_s`.

        An error that came between records is raised by the next call, because the records don't come again.
        """
        self._raise_failure()
        if self._paused:  # by `keep`. Partitions that wait for `read_from` stay paused
            with translated(f"reading {self._topic}"):
                self._consumer.resume([place for place in self._paused if place.partition not in self.fresh])
            self._paused = []
        self._seen_at = time.monotonic()
        with translated(f"reading {self._topic}"):
            first = self._consumer.poll(wait_s)
            messages = [] if first is None else [first, *self._consumer.consume(READ_RECORDS_MAX - 1, 0)]
        for message in messages:
            try:
                self._note(message.error(), message.partition())
            except SchemalessError as error:
                self._failure = self._failure or error
        records = [record_of(message) for message in messages if message.error() is None]
        if not records:
            self._raise_failure()
        return records

    def keep(self) -> None:
        """Keeps the membership, and pauses the topic, while the caller is busy with something else. Call it often."""
        if time.monotonic() - self._seen_at < _KEEP_PERIOD_S:
            return
        self._seen_at = time.monotonic()
        with translated(f"staying in the group of {self._topic}"):
            if not self._paused:
                self._paused = self._consumer.assignment()
                self._consumer.pause(self._paused)
            message = self._consumer.poll(0)
        if message is not None:
            self._note(message.error(), message.partition())

    def commit(self, partitions: Collection[int]) -> None:
        """Commits where reading began, which only a member of the group's present generation may.

        Nothing reads these offsets. Raises BusUnavailable.
        """
        with translated(f"asking the group whether partitions of {self._topic} are ours"):
            places = [self._place(partition, self._begun[partition]) for partition in partitions]
            committed = self._consumer.commit(offsets=places, asynchronous=False)
        for place in committed or []:
            if place.error is not None:
                with translated(f"asking the group for {self._topic} [{place.partition}]"):
                    raise KafkaException(place.error)

    def close(self) -> None:
        """Leaves the group, so that others take over at once."""
        self._consumer.close()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _note(self, error: KafkaError | None, partition: int | None) -> None:
        """Notes whether a partition is at its end. Raises other errors, unless they pass."""
        if error is None:
            self.at_end -= {partition}
        elif error.code() == KafkaError._PARTITION_EOF:
            self.at_end |= {partition} if partition is not None else set()
        elif error.code() != KafkaError._MAX_POLL_EXCEEDED:  # then the group lets us join again
            refused = error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
            doing = f"joining group {self._group}" if refused else f"reading {self._topic} [{partition}]"
            with translated(doing):  # keeps the error as the cause
                raise KafkaException(error)

    def _on_assign(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        """Pauses the partitions until `read_from`: finding the offset takes calls, which a callback must not make."""
        at_end = [self._place(place.partition) for place in places]
        consumer.incremental_assign(at_end)
        consumer.pause(at_end)
        self.fresh += [place.partition for place in places]

    def _on_revoke(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        gone = {place.partition for place in places}
        self._revoked(gone)
        self.at_end -= gone
        self.fresh = [partition for partition in self.fresh if partition not in gone]
        self._paused = [place for place in self._paused if place.partition not in gone]
        consumer.incremental_unassign(places)

    def _place(self, partition: int, offset: int = OFFSET_END) -> TopicPartition:
        return TopicPartition(self._topic, partition, offset)
