"""FaustTransport: a member of a group receives the raw records of its partitions, in order.

`schemaless/bus/faust_app.py` corrects Faust's own reading and acknowledging. Here, the records of a partition that one
fetch brought are one event. The agent gives each to the receiver, which takes it at once. No exception leaves the
agent: CrashingSupervisor ends the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from typing import Any

import structlog
from aiokafka.errors import KafkaError
from faust.transport.utils import DefaultSchedulingStrategy
from faust.types import TP
from faust.types.tuples import ConsumerMessage
from mode.supervisors import CrashingSupervisor

from schemaless.bus.faust_app import (
    FETCH_PAUSE_S,
    SESSION_TIMEOUT_S,
    CorrectedApp,
    CorrectedConsumer,
    CorrectedTransport,
    settings_of,
)
from schemaless.bus.transport import Receiver
from schemaless.errors import BusUnavailable, SchemalessError
from schemaless.record import Record

log = structlog.get_logger()

_BUFFERED_EVENTS_MAX = 16  # in Faust's own queue: with a fetch's size, what bounds memory
_START_TIMEOUT_S = 60.0
_LOOK_PAUSE_S = 1.0
_STOP_TIMEOUT_S = 5.0


class _Batches(DefaultSchedulingStrategy):  # type: ignore[misc]  # Faust has no types for mypy
    """Yields all records that a fetch brought for a partition at once. Faust alternates between fetches."""

    def iterate(self, records: Mapping[TP, list[Any]]) -> Iterator[tuple[TP, list[Any]]]:
        return ((tp, found) for tp, found in records.items() if found)


class _BatchConsumer(CorrectedConsumer):
    def _to_message(self, tp: TP, record: Any) -> ConsumerMessage:
        """Makes one message of a batch, with the offset of its last record."""
        message = super()._to_message(tp, record[-1])
        message.key = None
        message.value = tuple([_record(found) for found in record])
        return message


class _BatchTransport(CorrectedTransport):
    Consumer = _BatchConsumer


class _App(CorrectedApp):
    def _new_transport(self) -> _BatchTransport:
        return _BatchTransport(self.conf.broker_consumer, self)

    def _create_directories(self) -> None:
        """Makes no directories: they are for tables, and there are none."""


class FaustTransport:
    """Connects one topic and one group with one receiver. `run` ends only by being cancelled or by raising."""

    def __init__(
        self,
        bootstrap: str,
        group: str,
        topic: str,
        receiver: Receiver,
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        read_pause_s: float | None = None,
    ) -> None:
        self._receiver = receiver
        self._session_timeout_s = session_timeout_s
        self._joined: tuple[str, int] | None = None
        self._revoked_partitions: set[int] = set()
        self._topic = topic
        self._app = _app(bootstrap, group, session_timeout_s)
        self._app.fetch_pause_s = FETCH_PAUSE_S if read_pause_s is None else read_pause_s
        channel = self._app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")
        self._app.agent(channel, concurrency=1, supervisor_strategy=CrashingSupervisor)(self._receive)
        self._app.on_partitions_assigned.connect(self._assigned, weak=False)
        self._app.on_partitions_revoked.connect(self._revoked, weak=False)

    async def run(self) -> None:
        """Runs until cancelled. Raises BusUnavailable when Faust gives up, which has to end the process."""
        self._app.finalize()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._until_done(self._app.maybe_start())
            await self._until_done(self._app.wait_until_stopped())
            reason = self._app.crash_reason
            if isinstance(reason, SchemalessError):  # why the group or Kafka refuses us
                raise reason
            raise BusUnavailable(f"Faust stopped: {reason!r}") from reason
        except TimeoutError as error:
            raise BusUnavailable(f"group {self._app.conf.id}: no start within {_START_TIMEOUT_S} s") from error
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._app.conf.stream_wait_empty = False  # what failed will never be acknowledged
            if isinstance(error, KafkaError):
                raise BusUnavailable(f"group {self._app.conf.id}: {error}") from error
            raise
        finally:
            await self._stop()

    async def _stop(self) -> None:
        """Leaves the group and commits. If that takes too long, the end of the process cuts it off.

        Faust swallows cancellations while it stops, so a timeout that cancels it would bound nothing.
        """
        stopping = asyncio.ensure_future(self._app.stop())
        await asyncio.wait({stopping}, timeout=_STOP_TIMEOUT_S)
        if stopping.done():
            stopping.result()
        else:
            log.warning("Faust did not stop in time", group=self._app.conf.id, seconds=_STOP_TIMEOUT_S)

    async def _until_done(self, waiting: Awaitable[None]) -> None:
        """Waits for Faust, and keeps its client alive."""
        task = asyncio.ensure_future(waiting)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LOOK_PAUSE_S)
                self._thread.revive()
            task.result()
        finally:
            task.cancel()

    def is_alive(self) -> bool:
        heartbeats = self._thread.heartbeats
        return heartbeats is not None and heartbeats.age_s < self._session_timeout_s

    async def confirm(self, partitions: Iterable[int]) -> None:
        try:
            async with asyncio.timeout(self._session_timeout_s):
                await self._thread.confirm([TP(self._topic, partition) for partition in partitions])
        except (KafkaError, TimeoutError) as error:
            raise BusUnavailable(f"group {self._app.conf.id}: {error!r}") from error

    @property
    def _thread(self) -> Any:
        return self._app.consumer._thread

    async def _receive(self, stream: Any) -> None:
        async for event in stream.noack().events():
            self._receiver.take(event.message.partition, event.value)
            event.ack()  # nothing rests on it: what was not finished is read from the log

    async def _assigned(self, app: Any, assigned: Iterable[TP], **_: Any) -> None:
        partitions = sorted(tp.partition for tp in assigned if tp.topic == self._topic)
        before, self._joined = self._joined, self._thread.heartbeats.joined() if self._thread.heartbeats else None
        # The next generation of the same member: between the two nobody else had the partition (eager assignment).
        directly_after = before and self._joined == (before[0], before[1] + 1)
        kept = sorted(self._revoked_partitions.intersection(partitions)) if directly_after else []
        self._revoked_partitions = set()
        log.info("partitions assigned", group=self._app.conf.id, partitions=partitions, kept=len(kept))
        await self._receiver.assigned(partitions, kept)

    async def _revoked(self, app: Any, revoked: Iterable[TP], **_: Any) -> None:
        partitions = {tp.partition for tp in revoked if tp.topic == self._topic}
        self._revoked_partitions |= partitions
        await self._receiver.revoked(partitions)


def _app(bootstrap: str, group: str, session_timeout_s: float) -> _App:
    ours = {
        "consumer_auto_offset_reset": "latest",  # history is read from MySQL, up to where reading the topic begins
        "ConsumerScheduler": _Batches,
        "stream_buffer_maxsize": _BUFFERED_EVENTS_MAX,
    }
    return _App(group, **(settings_of(bootstrap, session_timeout_s) | ours))


def _record(found: Any) -> Record:
    return Record(
        topic=found.topic,
        partition=found.partition,
        offset=found.offset,
        timestamp_ms=found.timestamp or 0,
        key=found.key,
        value=found.value or b"",
        headers={name: value or b"" for name, value in found.headers},
    )
