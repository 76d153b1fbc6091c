"""Arrival: when one record, which is about to be written, can be read by a committed reader."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from confluent_kafka import Consumer, KafkaError, TopicPartition

from schemaless.bus.client import client_settings
from schemaless.bus.reader import record_of
from schemaless.bus.translation import translate, translated
from schemaless.record import Record

_POLL_S = 0.1  # a record that is there is given at once


class ArrivalWatch:
    """One thread at a time: `begin`, then `wait`."""

    def __init__(self, bootstrap: str, topic: str, *, timeout_s: float = 10.0) -> None:
        self._topic = topic
        self._timeout_s = timeout_s
        self._consumer = Consumer(
            {
                **client_settings(bootstrap),
                "group.id": "schemaless.arrival",  # the client wants one; nothing joins or commits
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
        )

    def begin(self, partition: int) -> None:
        """What is written to the partition from now on can be waited for. Raises BusUnavailable."""
        place = TopicPartition(self._topic, partition)
        with translated(f"asking for the end of {self._topic} [{partition}]"):
            self._consumer.list_topics(self._topic, self._timeout_s)  # its leader must be known to fetch at once
            _low, end = self._consumer.get_watermark_offsets(place, timeout=self._timeout_s)
            self._consumer.assign([TopicPartition(self._topic, partition, end)])

    def wait(self, is_wanted: Callable[[Record], bool], timeout_s: float) -> bool:
        """Whether it came in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with translated(f"reading {self._topic}"):
                message = self._consumer.poll(_POLL_S)
            if message is None:
                continue
            error = message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise translate(error, f"reading {self._topic}")
            if error is None and is_wanted(record_of(message)):
                return True
        return False

    def close(self) -> None:
        self._consumer.close()

    def __enter__(self) -> ArrivalWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
