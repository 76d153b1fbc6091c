"""Reads a datastore's topics as any committed reader would, to time what the tailer does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from bench.raw_limits import Record
from schemaless.bus.ownership import NO_SHARD
from schemaless.bus.topics import ensure_topics
from schemaless.topology import Datastore

TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Drain:
    """The work of a tailer, from the first progress to the last."""

    cells: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.cells / self.seconds


def renew_topics(bootstrap: str, datastore: Datastore) -> None:
    """Empties the log: with its progress gone a tailer begins at every shard's first cell."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    wanted = {datastore.topic, datastore.progress_topic}
    there = wanted & admin.list_topics(timeout=10).topics.keys()
    for deleted in admin.delete_topics(sorted(there)).values() if there else ():
        deleted.result(10)
    while wanted & admin.list_topics(timeout=10).topics.keys():
        time.sleep(0.1)
    ensure_topics(bootstrap, datastore)


def watch_drain(progress_reader: Consumer, cells: int) -> Drain:
    """Follows the progress topic until its shards add up to `cells`. Raises TimeoutError."""
    deadline = time.monotonic() + TIMEOUT_S
    reached: dict[int, int] = {}
    first: tuple[float, int] | None = None
    while time.monotonic() < deadline:
        message = progress_reader.poll(0.1)
        if message is None or message.error():
            continue
        if (progress := msgspec.msgpack.decode(message.value() or b""))["shard"] == NO_SHARD:
            continue  # whose topic it is, said before a tailer starts
        reached[progress["shard"]] = progress["added_id"]
        published = sum(reached.values())
        first = first or (time.monotonic(), published)
        if published >= cells:
            return Drain(published - first[1], time.monotonic() - first[0])
    raise TimeoutError(f"{sum(reached.values())} of {cells} cells were published in {TIMEOUT_S:.0f} s")


def read_records(bootstrap: str, datastore: Datastore, cells: int) -> list[Record]:
    """Every record of the cells topic. Raises AssertionError when there are more or fewer than `cells`."""
    records: list[Record] = []
    with committed_reader(bootstrap, [datastore.topic], datastore.partitions) as reader:
        while messages := reader.consume(10_000, 3.0):
            records += [(m.partition(), m.key(), m.value(), m.timestamp()[1]) for m in messages]  # type: ignore[misc]
    assert len(records) == cells, f"{cells} cells in MySQL, {len(records)} records in the topic"
    return records


def committed_reader(bootstrap: str, topics: Sequence[str], partitions: int) -> Consumer:
    """Reads all partitions of each topic from their beginning, committed records only."""
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "bench",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    reader.assign([TopicPartition(topic, n, OFFSET_BEGINNING) for topic in topics for n in range(partitions)])
    return reader


SETTLE_TIMEOUT_S = 60.0

KeyOf = Callable[[Message], str | None]
"""The row key that a record is of, as text."""


def key_of_cell(message: Message) -> str | None:
    key = message.key()
    return key.decode() if isinstance(key, bytes) else None


@contextmanager
def visible_records(
    bootstrap: str, topics: Sequence[str], partitions: int, key_of: KeyOf = key_of_cell
) -> Iterator[Mapping[str, float]]:
    """Moments of the machine's monotonic clock at which a committed reader got each record, by row key."""
    seen: dict[str, float] = {}
    stopping = threading.Event()

    def read() -> None:
        with committed_reader(bootstrap, topics, partitions) as reader:
            while not stopping.is_set():
                message = reader.poll(0.1)
                key = key_of(message) if message is not None and not message.error() else None
                if key:
                    seen.setdefault(key, time.monotonic())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen
    finally:
        stopping.set()
        thread.join()


def settled(moments: Callable[[], Mapping[str, float]], row_keys: Sequence[str]) -> Mapping[str, float]:
    """The moments once there is one for every row. Raises TimeoutError."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while missing := set(row_keys) - moments().keys():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(missing)} of {len(row_keys)} puts had no effect after {SETTLE_TIMEOUT_S:.0f} s")
        time.sleep(0.5)
    return moments()
