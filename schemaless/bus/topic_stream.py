"""TopicStream: reads the committed records of several partitions of a topic from given offsets, without a group.

It checks nothing but that the topic can be read. Memory is bounded by the client's queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from schemaless.bus.client import client_settings, translate, translated
from schemaless.bus.reader import Span, offset_of, partition_of, record_of
from schemaless.errors import BusUnavailable, NotFound
from schemaless.record import Record

_BATCH = 500
_POLL_S = 0.05  # consume() waits for a full batch or for this long
_QUEUE_KBYTES = 16 << 10


class TopicStream:
    """One thread at a time."""

    def __init__(self, bootstrap: str, topic: str, *, timeout_s: float = 10.0) -> None:
        self._topic = topic
        self._timeout_s = timeout_s
        self._consumer = Consumer(
            {
                **client_settings(bootstrap),
                "group.id": "schemaless.stream",  # the client wants one, but nothing joins or commits
                "enable.auto.commit": False,
                # The caller notices the hole that retention made while it read, and reads what is left.
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 100,
                "queued.max.messages.kbytes": _QUEUE_KBYTES,
            }
        )

    def partitions(self) -> range:
        """Returns the partitions of the topic. Raises NotFound when it doesn't exist, BusUnavailable."""
        with translated(f"asking for topic {self._topic}"):
            found = self._consumer.list_topics(self._topic, self._timeout_s).topics[self._topic]
        if found.error is not None or not found.partitions:
            raise NotFound(f"there is no topic {self._topic}")
        return range(len(found.partitions))

    def span(self, partition: int) -> Span:
        """Returns what can be read now, up to the last stable offset."""
        with translated(f"asking for the offsets of {self._topic} [{partition}]"):
            return Span(
                *self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), timeout=self._timeout_s)
            )

    def offsets_at(self, partitions: Sequence[int], timestamp_ms: int) -> dict[int, int]:
        """Returns the offset of each partition's first record whose timestamp isn't earlier, where there is one."""
        asked = [TopicPartition(self._topic, partition, timestamp_ms) for partition in partitions]
        with translated(f"asking for offsets of {self._topic} by time"):
            found = self._consumer.offsets_for_times(asked, timeout=self._timeout_s)
        return {place.partition: place.offset for place in found if place.offset >= 0}

    def follow(self, starts: Mapping[int, int]) -> Iterator[list[Record]]:
        """Yields records in the order of each partition for ever, and empty lists while there are none."""
        self._assign(starts)
        while True:
            yield [record_of(message) for message in self._consume() if message.error() is None]

    def read(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[list[Record]]:
        """Yields the records up to `ends` (offsets not included), in the order of each partition.

        Raises BusUnavailable when none arrives for `timeout_s`.
        """
        left = {partition: end for partition, end in ends.items() if starts[partition] < end}
        if left:
            self._assign({partition: starts[partition] for partition in left})
        deadline = time.monotonic() + self._timeout_s
        while left:
            messages = self._consume()
            found = [message for message in messages if message.error() is None]
            yield [record_of(message) for message in found if offset_of(message) < ends[partition_of(message)]]
            for message in messages:
                # The end of a partition is reported with the offset behind its last record or marker.
                reached = offset_of(message) + (message.error() is None)
                if reached >= left.get(partition_of(message), reached + 1):
                    del left[partition_of(message)]
            if messages:
                deadline = time.monotonic() + self._timeout_s
            elif time.monotonic() > deadline:
                raise BusUnavailable(f"{self._topic} can't be read to its end: nothing arrived for {self._timeout_s} s")

    def close(self) -> None:
        self._consumer.close()

    def __enter__(self) -> TopicStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _assign(self, starts: Mapping[int, int]) -> None:
        with translated(f"reading {self._topic}"):
            self._consumer.assign([TopicPartition(self._topic, *place) for place in starts.items()])

    def _consume(self) -> list[Message]:
        with translated(f"reading {self._topic}"):
            messages = self._consumer.consume(_BATCH, _POLL_S)
        for message in messages:
            error = message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise translate(error, f"reading {message.topic()} [{message.partition()}]")
        return messages
