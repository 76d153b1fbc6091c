"""Reads without a group: a partition between two offsets or until one record arrives, or several partitions for ever.

It checks nothing but that the topic can be read. Memory is bounded by the client's queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import msgspec
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemaless.bus.client import NOT_KNOWN_YET, REFUSALS, metadata_of, open_client, translate, translated
from schemaless.cell import StoredCell, row_key_text
from schemaless.codec import decode_cell
from schemaless.errors import BusUnavailable, Corrupt, NotFound
from schemaless.location import ADDED_ID_MAX
from schemaless.names import KIND_CELL
from schemaless.position import Position, cell_digest
from schemaless.record import Announcement, Record, decoded
from schemaless.topology import Datastore

_BATCH = 1000
_POLL_S = 0.02  # consume() waits for a full batch or for this long
_ARRIVAL_POLL_S = 0.1  # poll() returns a record as soon as there is one
_QUEUE_KBYTES = 16 << 10
_STREAM_BATCH = 500
_STREAM_POLL_S = 0.05
_LOOK_S = 2.0
"""How often `follow_topics` looks for new topics."""
_FOLLOW_WAIT_MS = 200
"""After so long it is told that a partition ends behind a marker. At rest, each is a request to each broker."""


class Span(msgspec.Struct, frozen=True):
    """Offsets of a partition, from `low` up to, not including, `high`."""

    low: int
    high: int


class PartitionReader:
    """A consumer that belongs to no group. One thread at a time. With `committed=False` it reads aborted and open
    transactions, too.
    """

    def __init__(self, bootstrap: str, *, timeout_s: float = 10.0, committed: bool = True) -> None:
        self._bootstrap = bootstrap
        self._timeout_s = timeout_s
        self._consumer = _consumer(bootstrap, "read_committed" if committed else "read_uncommitted")

    def span(self, topic: str, partition: int) -> Span:
        """Returns the span up to the high watermark, which includes open transactions."""
        consumer = _consumer(self._bootstrap, "read_uncommitted")
        try:
            return self._span(consumer, topic, partition)
        finally:
            consumer.close()

    def committed_span(self, topic: str, partition: int) -> Span:
        """Returns the span up to the last stable offset, which is what committed readers can read now."""
        return self._span(self._consumer, topic, partition)

    def read(self, topic: str, partition: int, span: Span) -> Iterator[list[Record]]:
        """Yields the records of the span in order, at most a thousand at a time.

        Raises BusUnavailable when none arrives for `timeout_s`: the broker is unreachable, or a transaction stays open.
        """
        if span.low >= span.high:
            return
        with translated(f"reading {topic} [{partition}]"):
            self._consumer.list_topics(topic, self._timeout_s)  # an unknown leader would be looked for a second later
            self._consumer.assign([TopicPartition(topic, partition, span.low)])
        deadline = time.monotonic() + self._timeout_s
        position = span.low
        while position < span.high:
            with translated(f"reading {topic} [{partition}]"):
                messages = self._consumer.consume(_BATCH, _POLL_S)
            if messages:
                position = _position(messages[-1])
                deadline = time.monotonic() + self._timeout_s
                if records := [record_of(m) for m in messages if not m.error() and offset_of(m) < span.high]:
                    yield records
            elif time.monotonic() > deadline:
                raise BusUnavailable(
                    f"{topic} [{partition}] can't be read past offset {position}: the broker is unreachable, or a"
                    " transaction stays open"
                )
        self._consumer.unassign()

    def close(self) -> None:
        self._consumer.close()

    def __enter__(self) -> PartitionReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _span(self, consumer: Consumer, topic: str, partition: int) -> Span:
        deadline = time.monotonic() + self._timeout_s
        asked = TopicPartition(topic, partition)
        while True:
            try:
                return Span(*consumer.get_watermark_offsets(asked, timeout=self._timeout_s))
            except KafkaException as error:  # a leader that was chosen just now may not know its end yet
                if error.args[0].code() not in NOT_KNOWN_YET or time.monotonic() > deadline:
                    raise translate(error.args[0], f"asking for the offsets of {topic} [{partition}]") from error
            time.sleep(_POLL_S)


def follow_topics(
    bootstrap: str, is_wanted: Callable[[str], bool]
) -> Generator[tuple[list[Record], dict[tuple[str, int], int]], None, None]:
    """Yields the committed records of topics from their beginning for ever, those of new topics, too. Beside them, the
    offsets up to which partitions are read with them.

    Raises what Kafka says of a partition, as when its topic is made anew.
    """
    consumer = _consumer(bootstrap, "read_committed", {"fetch.wait.max.ms": _FOLLOW_WAIT_MS})
    assigned: set[tuple[str, int]] = set()
    looks_at = 0.0
    try:
        while True:
            if time.monotonic() >= looks_at:
                with translated("asking Kafka for its topics"):
                    found = consumer.list_topics(timeout=_LOOK_S).topics
                places = {(topic, number) for topic in found if is_wanted(topic) for number in found[topic].partitions}
                if new := places - assigned:
                    consumer.incremental_assign([TopicPartition(*place, OFFSET_BEGINNING) for place in new])
                    assigned |= new
                looks_at = time.monotonic() + _LOOK_S
            with translated("reading topics"):
                messages = consumer.consume(_BATCH, _STREAM_POLL_S)
            reached = {(message.topic() or "", partition_of(message)): _position(message) for message in messages}
            yield [record_of(message) for message in messages if not message.error()], reached
    finally:
        consumer.close()


class TopicStream:
    """Reads the committed records of several partitions of a topic from given offsets. One thread at a time."""

    def __init__(self, bootstrap: str, topic: str, *, timeout_s: float = 10.0) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._timeout_s = timeout_s
        # The caller notices the hole that retention made while it read, and reads what is left.
        self._consumer = _consumer(
            bootstrap, "read_committed", {"auto.offset.reset": "earliest", "fetch.wait.max.ms": 100}
        )

    def partitions(self) -> range:
        """Returns the partitions of the topic. Raises NotFound when it doesn't exist, BusUnavailable."""
        return partitions_of(self._consumer, self._bootstrap, self._topic, self._timeout_s)

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
            messages = self._consumer.consume(_STREAM_BATCH, _STREAM_POLL_S)
        for message in messages:
            error = message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise translate(error, f"reading {message.topic()} [{message.partition()}]")
        return messages


class ArrivalWatch:
    """Waits for one record that is about to be written. One thread at a time: `begin`, then `wait`."""

    def __init__(self, bootstrap: str, topic: str, *, timeout_s: float = 10.0) -> None:
        self._topic = topic
        self._timeout_s = timeout_s
        self._consumer = open_client(
            Consumer,
            bootstrap,
            {
                "group.id": "schemaless.arrival",  # the client wants one, but nothing joins or commits
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            },
        )

    def begin(self, partition: int) -> None:
        """Begins at the present end of the partition. Raises BusUnavailable."""
        place = TopicPartition(self._topic, partition)
        with translated(f"asking for the end of {self._topic} [{partition}]"):
            self._consumer.list_topics(self._topic, self._timeout_s)  # its leader must be known to fetch at once
            _low, end = self._consumer.get_watermark_offsets(place, timeout=self._timeout_s)
            self._consumer.assign([TopicPartition(self._topic, partition, end)])

    def wait(self, is_wanted: Callable[[Record], bool], timeout_s: float) -> bool:
        """Returns whether a wanted record was read in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with translated(f"reading {self._topic}"):
                message = self._consumer.poll(_ARRIVAL_POLL_S)
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


def partitions_of(consumer: Consumer, bootstrap: str, topic: str, timeout_s: float) -> range:
    """Returns the partitions of a topic. Raises NotFound when it doesn't exist, BusUnavailable."""
    found = metadata_of(consumer, bootstrap, f"asking for topic {topic}", timeout_s, topic).topics[topic]
    if found.error is not None and found.error.code() in REFUSALS:
        raise translate(found.error, f"asking for topic {topic}")
    if found.error is not None or not found.partitions:
        raise NotFound(f"there is no topic {topic}", hint="check the datastore's name: a tailer makes its topic")
    return range(len(found.partitions))


def _consumer(bootstrap: str, isolation_level: str, others: Mapping[str, Any] | None = None) -> Consumer:
    return open_client(
        Consumer,
        bootstrap,
        {
            "group.id": "schemaless.reader",  # the client wants one, but nothing joins or commits
            "enable.auto.commit": False,
            "auto.offset.reset": "error",  # an offset that is gone is never replaced by a guess
            "isolation.level": isolation_level,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end of the partition is reported after an empty fetch
            "queued.max.messages.kbytes": _QUEUE_KBYTES,
            **(others or {}),
        },
    )


def _position(message: Message) -> int:
    """Returns the offset to read next. The end of a partition is reported with the offset behind its last marker."""
    error = message.error()
    if error is None:
        return offset_of(message) + 1
    if error.code() == KafkaError._PARTITION_EOF:
        return offset_of(message)
    raise translate(error, f"reading {message.topic()} [{message.partition()}]")


def offset_of(message: Message) -> int:
    offset = message.offset()
    assert offset is not None, "a consumed message has an offset"
    return offset


def partition_of(message: Message) -> int:
    partition = message.partition()
    assert partition is not None, "a consumed message has a partition"
    return partition


def record_of(message: Message) -> Record:
    """Returns the record of a message that is no error."""
    topic = message.topic()
    assert topic is not None, "a consumed message has a topic"
    headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
    return Record(
        topic=topic,
        partition=partition_of(message),
        offset=offset_of(message),
        timestamp_ms=message.timestamp()[1],
        key=message.key(),
        value=message.value() or b"",
        headers={name: value or b"" for name, value in headers},
    )


# TopicHistory: what the cells topic holds of one shard's history, read backwards, to compare it with MySQL (I16).

WINDOW = 50_000
"""Offsets that are read at once. Of the shard's records in them only positions are kept (I14)."""


class TopicHistory:
    """Yields the positions of a shard's cells, the last ones first, in pieces that aren't empty.

    A cell that a later record superseded is left out: another cell has its added_id, or a lower one. Raises
    BusUnavailable.
    """

    def __init__(self, reader: PartitionReader, datastore: Datastore, shard: int, *, window: int = WINDOW) -> None:
        self._reader = reader
        self._datastore = datastore
        self._shard = shard
        self._window = window
        self._span = reader.committed_span(datastore.topic, datastore.partition(shard))

    @property
    def is_whole(self) -> bool:
        """True while the topic still has its first record."""
        return self._span.low == 0

    def __iter__(self) -> Iterator[list[Position]]:
        stop, visible_below = self._span.high, ADDED_ID_MAX + 1
        while stop > self._span.low:
            start = max(self._span.low, stop - self._window)
            piece = []
            for found in reversed(self._records(Span(start, stop))):
                if isinstance(found, Announcement):
                    visible_below = min(visible_below, found.starts_at)
                elif found.added_id < visible_below:
                    visible_below = found.added_id
                    piece.append(found)
            if piece:
                yield piece
            stop = start

    def _records(self, span: Span) -> list[Position | Announcement]:
        kept: list[Position | Announcement] = []
        for records in self._reader.read(self._datastore.topic, self._datastore.partition(self._shard), span):
            for found in map(decoded, records):
                if isinstance(found, StoredCell) and found.shard == self._shard:
                    digest = cell_digest(found)
                    kept.append(Position(found.shard, found.generation, found.added_id, digest=digest))
                elif isinstance(found, Announcement) and found.shard == self._shard:
                    kept.append(found)
        return kept


# Where a topic has the records of cells: what a report of an erasure names (I19).

_RECORDS_S = 3.0
_RECORDS_MAX = 20_000
"""Records that are read behind the one at a cell's time. Those of other shards may be published in between."""


class RecordOffsets(msgspec.Struct, frozen=True):
    """The offsets of records that have a body, by added_id, without cells of which none was met in time."""

    partition: int
    offsets: Mapping[int, int]


def record_offsets(
    bootstrap: str, datastore: Datastore, shard: int, row_key: bytes, cells: Mapping[int, int], *, timeout_s: float
) -> RecordOffsets:
    """Looks for records of cells of one row: their added_ids, and when each was stored, in microseconds.

    Raises BusUnavailable, NotFound.
    """
    partition = datastore.partition(shard)
    found: dict[int, int] = {}
    key = row_key_text(row_key).encode()
    deadline = time.monotonic() + _RECORDS_S
    with TopicStream(bootstrap, datastore.topic, timeout_s=timeout_s) as stream:
        end = stream.span(partition).high
        for added_id, created_at in sorted(cells.items()):
            if added_id in found or time.monotonic() > deadline:
                continue
            start = stream.offsets_at([partition], created_at // 1000).get(partition, end)
            for records in stream.read({partition: start}, {partition: min(end, start + _RECORDS_MAX)}):
                for record in records:
                    if record.key == key and (met := _added_id(record, shard)) in cells:
                        found.setdefault(met, record.offset)
                if added_id in found or time.monotonic() > deadline:
                    break
    return RecordOffsets(partition, found)


def _added_id(record: Record, shard: int) -> int:
    """Returns that of a record with a body, else 0."""
    if record.kind != KIND_CELL:
        return 0
    try:
        cell = decode_cell(record.value)
    except Corrupt:
        return 0
    return cell.added_id if cell.shard == shard and cell.body else 0
