"""GroupReader: reads the partitions of a topic that a group, or its caller, assigned to it, from any offset.

A partition that was just assigned is paused until `read_from` says where to begin. Memory is bounded by the client's
queue. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from schemaless.bus.client import client_settings, translated
from schemaless.bus.reader import Span, partitions_of, record_of
from schemaless.errors import SchemalessError
from schemaless.record import Record

READ_RECORDS_MAX = 500
_KEEP_PERIOD_S = 1.0
_TIMEOUT_S = 10.0
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
        settings: dict[str, Any] = {
            **client_settings(bootstrap),
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
        self._consumer = Consumer(settings)

    def partitions(self) -> range:
        """Returns the partitions of the topic. Raises NotFound when it doesn't exist, BusUnavailable."""
        return partitions_of(self._consumer, self._bootstrap, self._topic, _TIMEOUT_S)

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
