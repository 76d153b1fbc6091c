"""PlainTransport: a member of a group as a loop around confluent-kafka, in a thread of its own.

The thread reads and waits until the event loop has taken what it read. So records that come meanwhile are taken
together, and nothing piles up. A partition is heard from its end on, because history comes from MySQL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import structlog
from confluent_kafka import KafkaError, KafkaException

from schemaless.bus.group_reader import READ_RECORDS_MAX, GroupReader, heartbeat_interval_s
from schemaless.bus.transport import Receiver, refused
from schemaless.errors import BusUnavailable, Misconfigured, SchemalessError
from schemaless.record import Record

log = structlog.get_logger()

_POLL_S = 0.1
_RETRY_PAUSE_S = 0.5
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
        self._polled_at = clock()
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
            await self._leave()

    def is_alive(self) -> bool:
        """librdkafka revokes everything when its heartbeats aren't answered for the session time-out.

        We learn of that only while we poll. A process that was halted, or whose thread waits for an answer, has to
        poll first. The last heartbeat may be older than the last poll by the time between heartbeats.
        """
        return bool(self._owned) and self._clock() - self._polled_at < self._alive_s

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
                self._note_poll(polled_at)
                self._begin_fresh()
                self._confirm()
            except BusUnavailable as error:  # librdkafka connects again by itself
                log.warning("Kafka is unreachable", group=self._group, why=str(error))
                self._sleep(_RETRY_PAUSE_S)
            except Misconfigured as error:
                cause = error.__cause__
                if isinstance(cause, KafkaException) and cause.args[0].code() == KafkaError.INCONSISTENT_GROUP_PROTOCOL:
                    raise refused(self._group, error) from error
                raise

    def _note_poll(self, polled_at: float) -> None:
        """Notes when a poll returned. After a long pause the group is asked whether we still own our partitions.

        librdkafka may not have noticed yet that its time is over, so one poll alone says nothing.
        """
        if self._owned and polled_at - self._polled_at >= self._alive_s:
            self._reader.commit(sorted(self._owned))
        self._polled_at = polled_at

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

    async def _leave(self) -> None:
        """Gives everything away and leaves the group when the calls in flight have ended. The thread has ended."""
        owned, self._owned = sorted(self._owned), set()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._receiver.revoked(owned)
        except (TimeoutError, SchemalessError) as error:
            log.warning("calls in flight may come again", group=self._group, partitions=owned, why=repr(error))
        finally:
            await asyncio.to_thread(self._reader.close)

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
