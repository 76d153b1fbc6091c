"""FaustTransport: a member of a group receives the raw records of its partitions, in order.

`schemaless/bus/faust_app.py` corrects Faust's own reading and acknowledging. Here, the records of a partition that one
fetch brought are one event. The agent only puts events into the partition's lane, which processes those that arrived
meanwhile in one batch. No exception leaves the agent: CrashingSupervisor ends the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import structlog
from faust.transport.utils import DefaultSchedulingStrategy
from faust.types import TP
from faust.types.tuples import ConsumerMessage
from mode.supervisors import CrashingSupervisor

from schemaless.bus.faust_app import (
    SESSION_TIMEOUT_S,
    CorrectedApp,
    CorrectedConsumer,
    CorrectedTransport,
    settings_of,
)
from schemaless.errors import BusUnavailable
from schemaless.record import Record

log = structlog.get_logger()

_LANE_BATCHES_MAX = 4  # of a partition in flight at once: a batch waits only for those that share a shard with it
_LANE_EVENTS_MAX = 4  # fetched events of a partition that wait; then the agent waits
_LANE_RECORDS_MAX = 1000  # of several fetches in one batch; a single fetch may bring more
_BUFFERED_EVENTS_MAX = 16  # in Faust's own queue: with the one above and a fetch's size, what bounds memory
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0


class Receiver(Protocol):
    """`schemaless.consume.host.ConsumerHost`."""

    async def assigned(self, partitions: Iterable[int]) -> None: ...

    async def revoked(self, partitions: Iterable[int]) -> None: ...

    async def take(self, partition: int, records: Sequence[Record]) -> None:
        """Processes records. Calls begin in the order of the records. The next may begin before one returns."""


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


class _PartitionLane:
    """Processes the events of one partition in order, a few batches at a time. A slow batch delays others only when all
    are in flight and the lane is full.
    """

    def __init__(self, partition: int, receiver: Receiver) -> None:
        self._partition = partition
        self._receiver = receiver
        self._events: asyncio.Queue[Any] = asyncio.Queue(_LANE_EVENTS_MAX)
        self.tasks = [asyncio.create_task(self._run()) for _ in range(_LANE_BATCHES_MAX)]

    async def put(self, event: Any) -> None:
        await self._events.put(event)

    async def _run(self) -> None:
        while True:
            events = await self._next()
            await self._receiver.take(self._partition, [record for event in events for record in event.value])
            for event in events:  # nothing may follow: an acknowledged record is finished, or will be read from the log
                event.ack()

    async def _next(self) -> list[Any]:
        """Returns the next event and those that arrived meanwhile, up to about _LANE_RECORDS_MAX records."""
        events = [await self._events.get()]
        records = len(events[0].value)
        while not self._events.empty() and records < _LANE_RECORDS_MAX:
            events.append(self._events.get_nowait())
            records += len(events[-1].value)
        return events


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
    ) -> None:
        self._receiver = receiver
        self._lanes: dict[int, _PartitionLane] = {}
        self._topic = topic
        self._app = _app(bootstrap, group, session_timeout_s)
        channel = self._app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")
        self._app.agent(channel, concurrency=1, supervisor_strategy=CrashingSupervisor)(self._receive)
        self._app.on_partitions_assigned.connect(self._assigned, weak=False)
        self._app.on_partitions_revoked.connect(self._revoked, weak=False)

    async def run(self) -> None:
        """Runs until cancelled. Raises BusUnavailable when Faust gives up, which has to end the process."""
        self._app.finalize()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._app.maybe_start()
            await self._watch()
        except TimeoutError as error:
            raise BusUnavailable(f"group {self._app.conf.id}: no start within {_START_TIMEOUT_S} s") from error
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._app.conf.stream_wait_empty = False  # what failed will never be acknowledged
            raise
        finally:
            await self._stop()

    async def _stop(self) -> None:
        """Leaves the group and commits. If that takes too long, the end of the process cuts it off."""
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._app.stop()
        except TimeoutError:
            log.warning("Faust did not stop in time", group=self._app.conf.id, seconds=_STOP_TIMEOUT_S)
        for task in self._lane_tasks():
            task.cancel()

    async def _watch(self) -> None:
        crashed = asyncio.ensure_future(self._app.wait_until_stopped())
        while not crashed.done():
            watched = {crashed, *self._lane_tasks()}
            await asyncio.wait(watched, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for task in self._lane_tasks():
                if task.done():
                    task.result()
        raise BusUnavailable(f"Faust stopped: {self._app.crash_reason!r}")

    def _lane_tasks(self) -> list[asyncio.Task[None]]:
        return [task for lane in self._lanes.values() for task in lane.tasks]

    async def _receive(self, stream: Any) -> None:
        async for event in stream.noack().events():
            partition = event.message.partition
            lane = self._lanes.get(partition)
            if lane is None:
                lane = self._lanes[partition] = _PartitionLane(partition, self._receiver)
            await lane.put(event)

    async def _assigned(self, app: Any, assigned: Iterable[TP], **_: Any) -> None:
        partitions = sorted(tp.partition for tp in assigned if tp.topic == self._topic)
        log.info("partitions assigned", group=self._app.conf.id, partitions=partitions)
        await self._receiver.assigned(partitions)

    async def _revoked(self, app: Any, revoked: Iterable[TP], **_: Any) -> None:
        await self._receiver.revoked([tp.partition for tp in revoked if tp.topic == self._topic])


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
