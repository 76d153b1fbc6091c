"""Raw limit of librdkafka: the very same records, ready-made, produced in transactions by one process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from bench.filling import chunks

TRANSACTION_RECORDS = 2000
HEADERS: list[tuple[str, str | bytes | None]] = [("v", b"1"), ("kind", b"cell"), ("column", b"BASE")]
TIMEOUT_S = 30.0

Record = tuple[int, bytes, bytes, int]
"""Partition, key, value, timestamp in milliseconds."""


def create_topic(bootstrap: str, name: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (created,) = admin.create_topics([NewTopic(name, partitions, 1)]).values()
    created.result(TIMEOUT_S)


def produce_rate(bootstrap: str, topic: str, records: Sequence[Record]) -> float:
    """Records a second, in the order given."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": topic,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    producer.init_transactions(TIMEOUT_S)
    started = time.perf_counter()
    for part in chunks(records, TRANSACTION_RECORDS):
        producer.begin_transaction()
        for partition, key, value, timestamp in part:
            producer.produce(topic, value, key, partition, timestamp=timestamp, headers=HEADERS)
        producer.commit_transaction(TIMEOUT_S)
    return len(records) / (time.perf_counter() - started)
