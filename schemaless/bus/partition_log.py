"""PartitionLog: one partition of the cells topic as its only writer sees it. It writes transactions of cells and
progress (I7).

The transactional.id names the partition. Opening the log fences the former owner and ends its transaction. Only then is
progress read. So the new owner knows exactly what was published, and a process that lost the partition can't publish
any more, however late it wakes up.

Kafka may acknowledge a commit and lose its markers when a broker dies. The next transaction then decides that commit,
too. So after an abort the log must be opened anew before anything is published.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from types import UnionType

import msgspec
import structlog
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, Message, Producer, ThrottleEvent, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from schemaless.bus.client import NOT_KNOWN_YET, metadata_of, open_client, translate, translated
from schemaless.bus.membership import members_of
from schemaless.bus.ownership import NO_SHARD, PROGRESS_FORMAT, require_ours, verify_owner
from schemaless.bus.reader import PartitionReader, Span
from schemaless.bus.topics import MESSAGE_BYTES_MAX, raised_topics, record_bytes_max, topic_id, topic_ids
from schemaless.cell import StoredCell, row_key_text
from schemaless.codec import encode_record
from schemaless.errors import BusUnavailable, Corrupt, Fenced, Misconfigured
from schemaless.location import BEGINNING, GenerationStart, Location
from schemaless.names import (
    COLUMN_HEADER,
    KIND_CELL,
    KIND_ERASED,
    KIND_GENERATION,
    KIND_HEADER,
    KIND_SEEK,
    RECORD_VERSION,
    VERSION_HEADER,
    publisher_id,
    tailer_group,
)
from schemaless.position import BEGINNING_DIGEST, Position, cell_digest
from schemaless.quantity import quantity
from schemaless.record import Announcement, DecodedRecord, Record, Seek, decoded, noted_headers
from schemaless.runtime import tracing
from schemaless.runtime.events import Event, emit
from schemaless.topology import Datastore

_SETTLING_S = 0.004
"""After Kafka acknowledged a commit, it still writes the markers. A transaction that begins meanwhile is delayed by
20 ms, librdkafka's fixed pause after CONCURRENT_TRANSACTIONS."""

_COLUMNS_MAX = 1000  # whose headers are kept: callers choose the names of columns
_BATCH_BYTES = 1_000_000  # as librdkafka has it
_THROTTLED_S = 15.0  # Kafka's quotas look back eleven seconds
_METADATA_AGE_MAX_MS = 30_000  # a tailer has a client for each partition, and TopicsWatch notices other topics
_QUEUE_KBYTES = 64 << 10  # far above a batch: our own bounds hold first
Headers = list[tuple[str, str | bytes | None]]
_VERSION = (VERSION_HEADER, RECORD_VERSION)
_GENERATION_HEADERS: Headers = [_VERSION, (KIND_HEADER, KIND_GENERATION)]
_SEEK_HEADERS: Headers = [_VERSION, (KIND_HEADER, KIND_SEEK)]


@lru_cache(_COLUMNS_MAX)
def _cell_headers(column_name: str, kind: bytes) -> Headers:
    return [_VERSION, (KIND_HEADER, kind), (COLUMN_HEADER, column_name.encode())]


def _headers_of(cell: StoredCell) -> Headers:
    headers = _cell_headers(cell.column_name, KIND_ERASED if cell.is_erased else KIND_CELL)
    return headers if cell.cause is None else [*headers, *noted_headers(cell)]


class LogState(Enum):
    """States of a partition's log. It publishes only while it is OPEN."""

    NEW = "new"  # the former owner isn't fenced
    OPENING = "opening"  # the former owner is fenced, and what it published is being read
    OPEN = "open"
    ABORTED = "aborted"  # the last transaction: this process may open the log anew
    UNKNOWN = "unknown"  # the last step may have succeeded or not: the group has to say who owns the partition
    FENCED = "fenced"  # another process opened the log
    CLOSED = "closed"


_PREDECESSORS = {
    LogState.OPENING: {LogState.NEW},
    LogState.OPEN: {LogState.OPENING},
    LogState.ABORTED: {LogState.OPENING, LogState.OPEN},
    LogState.UNKNOWN: {LogState.NEW, LogState.OPENING, LogState.OPEN},
    LogState.FENCED: {LogState.NEW, LogState.OPENING, LogState.OPEN},
    LogState.CLOSED: set(LogState) - {LogState.CLOSED},
}


class PartitionLog:
    """Publishes to one partition. One thread at a time.

    A failure in a transaction ends the log: `state` says what its owner may do next.
    """

    def __init__(
        self, bootstrap: str, datastore: Datastore, partition: int, *, transaction_timeout_s: float = 5.0
    ) -> None:
        self.state = LogState.NEW
        self.stages_s: dict[str, float] = {}
        """How long the parts of the last transaction took: produce, flush and commit."""
        self._bootstrap = bootstrap
        self._datastore = datastore
        self._partition = partition
        self._timeout_s = transaction_timeout_s
        self._topic_id = ""
        self._settled_at = 0.0
        self._ends: dict[str, int] = {}  # by topic, the offset of the last record of the last transaction
        self._offsets: dict[str, list[int]] = {}  # of the first and the last record of this one
        self._name = f"{datastore.topic} [{partition}]"
        self.record_bytes_max = MESSAGE_BYTES_MAX
        """The largest record that the cells topic takes, as it said last."""
        self._batch_bytes_max = _BATCH_BYTES
        self._throttled: tuple[float, float] = -_THROTTLED_S, 0.0  # when Kafka said so last, and for how long
        self._opened: Producer | None = None

    @property
    def _producer(self) -> Producer:
        assert self._opened is not None, "the log is opened first"
        return self._opened

    def _new_producer(self) -> Producer:
        timeout_ms = round(self._timeout_s * 1000)
        return open_client(
            Producer,
            self._bootstrap,
            {
                "transactional.id": publisher_id(self._datastore.name, self._partition),
                "transaction.timeout.ms": timeout_ms,
                "socket.timeout.ms": timeout_ms,  # the client asks for no more
                "topic.metadata.refresh.interval.ms": _METADATA_AGE_MAX_MS,
                "enable.idempotence": True,
                "linger.ms": 0,
                "message.max.bytes": MESSAGE_BYTES_MAX,
                "batch.size": self._batch_bytes_max,
                "queue.buffering.max.kbytes": _QUEUE_KBYTES,
                "throttle_cb": self._note_throttle,
            },
        )

    def look_at_bound(self) -> None:
        """Asks again how large a record may be. Raises BusUnavailable, TopicMissing."""
        cells, progress = record_bytes_max(self._bootstrap, self._datastore, timeout_s=self._timeout_s)
        self.record_bytes_max = cells
        self._batch_bytes_max = min(_BATCH_BYTES, cells * 3 // 4, progress * 3 // 4)  # a topic's bound is for batches

    @property
    def throttled_s(self) -> float:
        """For how long Kafka delays this log's producer, because a quota is used up. 0.0 if it doesn't."""
        told_at, throttled_s = self._throttled
        return throttled_s if time.monotonic() - told_at < _THROTTLED_S else 0.0

    def _note_throttle(self, event: ThrottleEvent) -> None:
        self._throttled = time.monotonic(), event.throttle_time

    @property
    def settling_s(self) -> float:
        """Returns how long the next transaction has to wait. Its owner may gather cells meanwhile."""
        return max(0.0, self._settled_at - time.monotonic())

    def open(self) -> Progress:
        """Fences the former owner, ends its hanging transactions, and returns how far it published.

        Raises BusUnavailable, Fenced, or Misconfigured when progress is lost or a transaction hangs that isn't ours.
        """
        with self._failing():
            self._fence()
            self._end_hanging_transactions()
            with PartitionReader(self._bootstrap) as reader:
                progress = read_progress(reader, self._datastore, self._partition, self._topic_id)
            emit(Event.PROGRESS_READ, log=self._name)
            self._record(progress.unrecorded.values())
            self._enter(LogState.OPEN)
        return progress

    def publish(self, cells: Sequence[StoredCell]) -> dict[int, Position]:
        """Publishes all of the cells, or none, with the progress they make. Returns it: the last position by shard.

        Raises BusUnavailable, Fenced, or Misconfigured for a record that the topic refuses.
        """
        produce, topic = self._producer.produce, self._datastore.topic
        last = {cell.shard: cell for cell in cells}
        reached = {
            shard: Position(shard, cell.generation, cell.added_id, digest=cell_digest(cell))
            for shard, cell in last.items()
        }
        began_at = time.time()
        with self._transaction():
            for cell in cells:
                produce(
                    topic,
                    encode_record(cell),
                    row_key_text(cell.row_key),
                    self._partition,
                    on_delivery=self._note_offset if cell is cells[0] or cell is cells[-1] else None,
                    timestamp=cell.created_at // 1000,
                    headers=_headers_of(cell),
                )
            emit(Event.CELLS_PRODUCED, log=self._name, cells=len(cells))
            self._produce_progress(reached.values())
        tracing.sent(cells, topic, self._partition, began_at)
        return reached

    def announce(self, begun: Sequence[tuple[int, GenerationStart, int | None]]) -> list[Position]:
        """Announces that generations of shards begin, in one transaction (I13). Progress moves with it, so each is
        announced once.

        Each has its shard, where it begins, and the digest of the cell before that. Returns the progress.
        """
        reached = [Position(shard, one.generation, one.starts_at - 1, digest=digest) for shard, one, digest in begun]
        with self._transaction():
            for shard, one, _ in begun:
                opening = {"shard": shard, "generation": one.generation, "starts_at": one.starts_at}
                self._produce_notice(msgspec.msgpack.encode(opening), _GENERATION_HEADERS)
            self._produce_progress(reached)
        return reached

    def seek(self, positions: Collection[Position], *, repeat: bool = False) -> None:
        """Sets progress by hand, instead of `open`. It fences the tailer of the partition, which then reads it.

        Unless it shall `repeat`, a shard stays of which the topic has cells behind the position: a tailer may have
        published them until it was fenced. A record of kind `seek` in the cells topic keeps the trace. Raises
        BusUnavailable, Fenced, or Misconfigured when a transaction hangs.
        """
        with self._failing():
            self._fence()
            self._end_hanging_transactions()
            if not repeat:
                positions = self._without_held(positions)
            if positions:
                with self._transaction():
                    for position in positions:
                        self._produce_notice(seek_value(position), _SEEK_HEADERS)
                    self._produce_progress(positions)
            self._enter(LogState.OPEN)
            if hanging := self._hanging_transactions():  # it would be aborted later, and nobody would seek again
                raise BusUnavailable(self._hangs(hanging, "which only the next owner of the log may end"))

    def _without_held(self, positions: Collection[Position]) -> list[Position]:
        """Returns the positions behind which the topic has no cell of their shard."""
        with PartitionReader(self._bootstrap) as reader:
            held = topic_positions(reader, self._datastore, [position.shard for position in positions])
        return [at for at in positions if at.shard not in held or held[at.shard].location <= at.location]

    def close(self) -> None:
        """Frees the client. An open transaction is left to the next owner, who ends it."""
        self._enter(LogState.CLOSED)
        if self._opened is not None:
            self._opened.purge()
        self._opened = None

    def _enter(self, state: LogState) -> None:
        if self.state not in _PREDECESSORS[state]:
            raise AssertionError(f"the log of {self._name} can't become {state.value}: it is {self.state.value}")
        self.state = state

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Lets a failure end the log, unless a transaction inside has already said how."""
        try:
            yield
        except BaseException as error:
            if self.state in _PREDECESSORS[LogState.UNKNOWN]:
                self._enter(LogState.FENCED if isinstance(error, Fenced) else LogState.UNKNOWN)
            raise

    def _fence(self) -> None:
        emit(Event.LOG_OPENING, log=self._name)
        with translated(f"opening {self._name}"):
            self.look_at_bound()
            self._opened = self._new_producer()
            # Connects: a client that has no broker yet looks for its coordinator only half a second later.
            self._producer.list_topics(self._datastore.topic, self._timeout_s)
            self._producer.init_transactions(self._timeout_s * 2)  # the former owner's may have to run out first
        self._topic_id = topic_id(self._bootstrap, self._datastore.topic, timeout_s=self._timeout_s)
        self._enter(LogState.OPENING)
        emit(Event.LOG_FENCED, log=self._name)

    def _end_hanging_transactions(self) -> None:
        """Aborts what the former owner left open, in one topic or in both: nobody has seen it.

        What is read afterwards shows where progress and cells differ. Raises Misconfigured where the transaction isn't
        this log's.
        """
        hanging = self._hanging_transactions()
        if not hanging:
            return
        self._abort_over(hanging)
        if hanging := self._hanging_transactions():
            raise Misconfigured(self._hangs(hanging, "that isn't this log's"))
        emit(Event.HANGING_TRANSACTION_ENDED, log=self._name)

    def _abort_over(self, topics: Collection[str]) -> None:
        """Aborts a transaction over these topics. Its markers end what this transactional.id has open there."""
        with translated(f"ending what stayed open of {self._name}"):
            self._producer.begin_transaction()
            for topic in topics:
                self._producer.produce(topic, b"", b"aborted", self._partition)
            self._flush()
            self._producer.abort_transaction(self._timeout_s)

    def _hanging_transactions(self) -> dict[str, int]:
        """Returns the topics with a hanging transaction in this partition, and its first offset."""
        places = [(self._datastore.topic, self._partition), (self._datastore.progress_topic, self._partition)]
        found = hanging_transactions(self._bootstrap, places, timeout_s=self._timeout_s)
        return {topic: offset for (topic, _), offset in found.items()}

    def _hangs(self, topics: Collection[str], which: str) -> str:
        return (
            f"{' and '.join(sorted(topics))} [{self._partition}] has a hanging transaction, {which}: see"
            " docs/exactly-once.md"
        )

    def _record(self, positions: Collection[Position]) -> None:
        if positions:
            with self._transaction():
                self._produce_progress(positions)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Begins, flushes and commits a transaction. Any failure ends the log."""
        if self.state not in (LogState.OPENING, LogState.OPEN):
            raise AssertionError(f"nothing can be published: the log of {self._name} is {self.state.value}")
        time.sleep(self.settling_s)
        try:
            with translated(f"publishing to {self._name}"):
                self._offsets = {}
                self._producer.begin_transaction()
                emit(Event.TRANSACTION_BEGUN, log=self._name)
                began = time.monotonic()
                try:
                    yield
                finally:  # also before an abort: Kafka refuses to end what has not begun there yet, and that is fatal
                    produced_at = time.monotonic()
                    self._flush()
                self._verify_ends()
        except BaseException as error:
            self._abort(error)
            raise
        emit(Event.COMMITTING, log=self._name)
        flushed_at = time.monotonic()
        try:
            self._producer.commit_transaction(self._timeout_s)
        except KafkaException as error:
            failure = translate(error.args[0], f"committing to {self._name}")
            if error.args[0].txn_requires_abort():
                self._abort(failure)
            else:
                self._enter(LogState.FENCED if isinstance(failure, Fenced) else LogState.UNKNOWN)
            raise failure from error
        committed_at = time.monotonic()
        self._settled_at = committed_at + _SETTLING_S
        self._ends |= {topic: max(offsets) for topic, offsets in self._offsets.items()}
        self.stages_s = {
            "produce": produced_at - began,
            "flush": flushed_at - produced_at,
            "commit": committed_at - flushed_at,
        }
        emit(Event.COMMITTED, log=self._name)

    def _note_offset(self, error: KafkaError | None, record: Message) -> None:
        offset = record.offset()  # a batch that the broker has already is delivered without one
        if error is None and offset is not None:
            self._offsets.setdefault(str(record.topic()), []).append(offset)

    def _verify_ends(self) -> None:
        """Raises BusUnavailable if a topic has lost its end since the last transaction: offsets come a second time.

        Between two transactions there is the marker of the first one. What was lost is found when the log is opened.
        """
        for topic, offsets in self._offsets.items():
            if topic in self._ends and min(offsets) <= self._ends[topic] + 1:
                raise BusUnavailable(
                    f"{topic} [{self._partition}] lost its end: offset {min(offsets)} was given out before"
                )

    def _flush(self) -> None:
        try:
            left = self._producer.flush(self._timeout_s)
        except SystemError as error:  # a report was delivered beside a fatal error, which is the cause (2.16.1)
            raise error.__cause__ or error from None
        if left:
            raise BusUnavailable(f"{self._name} did not take {quantity(left, 'record')} within {self._timeout_s} s")
        emit(Event.FLUSHED, log=self._name)

    def _abort(self, failure: BaseException) -> None:
        try:
            self._producer.abort_transaction(self._timeout_s)
        except KafkaException:  # then the next owner aborts it
            self._enter(LogState.FENCED if isinstance(failure, Fenced) else LogState.UNKNOWN)
        else:
            self._enter(LogState.ABORTED)
            emit(Event.ABORTED, log=self._name)

    def _produce_notice(self, value: bytes, headers: Headers) -> None:
        self._producer.produce(
            self._datastore.topic, value, partition=self._partition, on_delivery=self._note_offset, headers=headers
        )

    def _produce_progress(self, positions: Collection[Position]) -> None:
        for position in positions:
            self._producer.produce(
                self._datastore.progress_topic,
                progress_value(position, self._topic_id, self._datastore.installation),
                progress_key(position.shard),
                self._partition,
                on_delivery=self._note_offset,
            )
        emit(Event.PROGRESS_PRODUCED, log=self._name, shards=len(positions))


# How far each shard of a partition has been published (I7): the records of the progress topic, and who publishes.
#
# Every shard has a record from the first time that its partition is opened, so a missing record means that progress
# was lost. Then the shard's last record in the cells topic is its progress. If that is gone, too, an operator has to
# seek. A record carries the digest of the cell that it stands on, so nobody continues on another history (I16).

_FIRST_WINDOW = 100_000
_TAIL_WINDOW = 16  # the last transaction mostly ends with the record that is looked for
log = structlog.get_logger()


class Progress(msgspec.Struct, frozen=True):
    """Progress of the shards of one partition. A shard that is in none of the mappings is unknown."""

    positions: Mapping[int, Position]
    """How far each shard was published, by shard. A position without a digest is taken by its number, once."""
    unrecorded: Mapping[int, Position]
    """Those of `positions` that were found in the cells topic, and have to be recorded, in its order."""
    elsewhere: AbstractSet[int]
    """Shards that were published to a former topic of the same name, which was deleted."""

    def position(self, shard: int, head: int) -> Position:
        """Returns how far a shard is published. Raises Misconfigured when that is lost and the shard has cells."""
        found = self.positions.get(shard)
        if found is not None:
            return found
        if head == 0:
            return beginning(shard)
        raise Misconfigured(
            f"shard {shard} has {head} cells, but neither the progress topic nor what is left of the cells topic shows"
            f" how many of them were published: run `schemaless tailer seek DATASTORE LOCATION --shard {shard}`"
        )


class ProgressEntry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Value of a progress record. `topic` is the id of the cells topic that was published to, not its name."""

    shard: int
    generation: int
    added_id: int
    topic: str = ""
    digest: int | None = None
    format: int = 1
    installation: str = ""

    @property
    def position(self) -> Position:
        return Position(self.shard, self.generation, self.added_id, digest=self.digest)


_decode_entry = msgspec.msgpack.Decoder(ProgressEntry).decode
_encode = msgspec.msgpack.Encoder().encode


def progress_key(shard: int) -> bytes:
    return str(shard).encode()


def progress_value(position: Position, topic_id: str, installation: str) -> bytes:
    at = position.location
    return _encode(
        ProgressEntry(
            position.shard, at.generation, at.added_id, topic_id, position.digest, PROGRESS_FORMAT, installation
        )
    )


def seek_value(position: Position) -> bytes:
    return _encode(Seek(position.shard, position.generation, position.added_id))


def beginning(shard: int) -> Position:
    """Returns the position of a shard of which nothing is published."""
    return Position(shard, BEGINNING.generation, BEGINNING.added_id, digest=BEGINNING_DIGEST)


def read_progress(reader: PartitionReader, datastore: Datastore, partition: int, topic_id: str) -> Progress:
    """Reads progress. Nobody may be publishing: the log of the partition was just fenced, and nothing hangs.

    A broker that lost power may have lost the end of either topic. The newest record of progress names the last record
    of the cells topic. Where that isn't so, what the topic holds is the progress: cells that it lost are published
    again, and those that progress forgot are not (I16).

    Raises Misconfigured when the cells topic was created again since something was published, or when the progress has
    another format.
    """
    recorded = committed_progress(reader, datastore, partition, topic_id)
    if recorded.elsewhere:  # going on in the new topic would silently leave out what the former one held
        raise Misconfigured(
            f"{datastore.topic} was created again, and {len(recorded.elsewhere)} shards of this partition,"
            f" {min(recorded.elsewhere)} is the first, were published to the topic that was deleted. Run"
            f" `schemaless tailer seek {datastore.name} LOCATION`, for all shards or with --shard, with the location"
            " behind which to publish again. 0 is the beginning"
        )
    cells = reader.committed_span(datastore.topic, partition)
    known = dict(recorded.positions)
    behind = _behind(reader, datastore, partition, cells, next(reversed(known.values()), None))
    if behind is None:
        log.error("the topic lost its end: what it lost is published again", topic=datastore.topic, partition=partition)
        known.clear()
    else:
        known |= behind
    missing = set(datastore.shards_of_partition(partition)) - known.keys()
    found = _from_cells(reader, datastore, partition, cells, missing) if missing else {}
    # In the topic's order, also those that stay where they were: the newest record names the topic's last one again.
    unrecorded = {**found, **(behind or {})}
    return msgspec.structs.replace(recorded, positions={**known, **found}, unrecorded=unrecorded)


def committed_progress(reader: PartitionReader, datastore: Datastore, partition: int, topic_id: str) -> Progress:
    """Reads the progress that committed readers see now. While somebody publishes, it is behind what was published.

    Raises Misconfigured when it has another format.
    """
    span = reader.committed_span(datastore.progress_topic, partition)
    return _recorded(reader, datastore, partition, span, topic_id)


def _behind(
    reader: PartitionReader, datastore: Datastore, partition: int, cells: Span, newest: Position | None
) -> dict[int, Position] | None:
    """Returns what the topic holds behind the record that the newest progress names, by shard, in the topic's order.

    None if the topic doesn't hold that record. A topic that expired as a whole holds none, and progress is believed.
    """
    behind: dict[int, Position] = {}
    stop, window = cells.high, _TAIL_WINDOW
    while newest is not None and stop > cells.low:
        start = max(cells.low, stop - window)
        span = Span(start, stop)
        read = [
            p for records in reader.read(datastore.topic, partition, span) for p in _positions(map(decoded, records))
        ]
        for position in reversed(read):
            if position.shard == newest.shard and position.location <= newest.location:
                is_same = position.location == newest.location and (
                    None in {position.digest, newest.digest} or position.digest == newest.digest
                )
                return dict(reversed(behind.items())) if is_same else None
            behind.setdefault(position.shard, position)
        stop, window = start, min(window * 8, _FIRST_WINDOW)
    if newest is None or not newest.added_id:  # nothing was published before
        return dict(reversed(behind.items()))
    return None if behind or not cells.low else {}


class Owner(msgspec.Struct, frozen=True):
    """A process that tails a partition: the client id that it chose, and its address."""

    client: str
    host: str


class PublishStatus(msgspec.Struct, frozen=True):
    positions: Mapping[int, Position]
    """How far each shard was published, by shard."""
    emptied: frozenset[int]
    """Partitions of a topic that was made anew after cells were published to them."""
    owners: Mapping[int, Owner]
    """The process that tails a partition, by partition."""
    exists: bool = True
    """Whether both topics exist."""
    raised: Sequence[str] = ()
    """Topics with more partitions than the datastore, and what that means."""

    @property
    def locations(self) -> dict[int, Location]:
        return {shard: position.location for shard, position in self.positions.items()}


def read_publish_status(bootstrap: str, datastore: Datastore, *, timeout_s: float = 10.0) -> PublishStatus:
    """Reads the status, which is empty while the topics don't exist. Raises BusUnavailable."""
    admin = open_client(AdminClient, bootstrap)
    topics = metadata_of(admin, bootstrap, "asking Kafka for its topics", timeout_s).topics
    group = tailer_group(datastore.name)
    members = members_of(admin, group, timeout_s=timeout_s)
    owners = {
        assigned.partition: Owner(member.client_id, member.host)
        for member in members
        for assigned in member.assignment.topic_partitions
    }
    if not {datastore.topic, datastore.progress_topic} <= topics.keys():
        return PublishStatus({}, frozenset(), owners, exists=False)
    require_ours(bootstrap, datastore, timeout_s=timeout_s)
    (topic_id,) = topic_ids(admin, bootstrap, [datastore.topic], timeout_s=timeout_s)
    positions: dict[int, Position] = {}
    emptied: set[int] = set()
    with PartitionReader(bootstrap, timeout_s=timeout_s) as reader:
        for partition in range(datastore.partitions):
            progress = committed_progress(reader, datastore, partition, topic_id)
            positions.update(progress.positions)
            if progress.elsewhere:
                emptied.add(partition)
    counts = {name: len(topic.partitions) for name, topic in topics.items()}
    return PublishStatus(positions, frozenset(emptied), owners, raised=raised_topics(counts, datastore))


def topic_positions(reader: PartitionReader, datastore: Datastore, shards: Iterable[int]) -> dict[int, Position]:
    """Returns the last cell of each shard that the cells topic has, or the beginning. One of which a cut topic has none
    is missing.
    """
    by_partition: dict[int, set[int]] = {}
    for shard in shards:
        by_partition.setdefault(datastore.partition(shard), set()).add(shard)
    found: dict[int, Position] = {}
    for partition, mine in sorted(by_partition.items()):
        cells = reader.committed_span(datastore.topic, partition)
        found |= _from_cells(reader, datastore, partition, cells, mine, StoredCell)
    return found


def _from_cells(
    reader: PartitionReader,
    datastore: Datastore,
    partition: int,
    cells: Span,
    missing: AbstractSet[int],
    kinds: type | UnionType = StoredCell | Announcement | Seek,
) -> dict[int, Position]:
    """Searches the cells topic backwards until every missing shard was seen or the beginning is reached.

    Returns positions in the topic's order. Records of other `kinds` don't count.
    """
    found: dict[int, Position] = {}
    stop, window = cells.high, _FIRST_WINDOW
    while stop > cells.low and missing - found.keys():
        start = max(cells.low, stop - window)
        earlier: dict[int, Position] = {}
        for records in reader.read(datastore.topic, partition, Span(start, stop)):
            for position in _positions(one for one in map(decoded, records) if isinstance(one, kinds)):
                earlier.pop(position.shard, None)
                if position.shard in missing - found.keys():
                    earlier[position.shard] = position
        found = earlier | found
        stop, window = start, window * 2
    # The topic is whole: what isn't in it was not published.
    none = {shard: beginning(shard) for shard in sorted(missing - found.keys())} if cells.low == 0 else {}
    return none | found


def progress_entry(record: Record) -> ProgressEntry:
    """Returns what a record of progress says. Raises Corrupt for a record that isn't ours."""
    try:
        return _decode_entry(record.value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"record at offset {record.offset} is not ours: {error}") from error


def _recorded(reader: PartitionReader, datastore: Datastore, partition: int, span: Span, topic_id: str) -> Progress:
    """Returns the progress of each shard by its last record in the span."""
    last: dict[int, ProgressEntry] = {}
    for records in reader.read(datastore.progress_topic, partition, span):
        for record in records:
            entry = progress_entry(record)
            last.pop(entry.shard, None)  # in the order of their last records
            last[entry.shard] = entry
    last.pop(NO_SHARD, None)
    for entry in last.values():
        if entry.format != PROGRESS_FORMAT:
            raise Misconfigured(
                f"{datastore.progress_topic} has a record of format {entry.format}, of shard {entry.shard}, and this"
                f" program knows format {PROGRESS_FORMAT}: "
                + (
                    "delete that topic. Tailers make it again, and rebuild progress from the cells topic"
                    if entry.format < PROGRESS_FORMAT
                    else "run the newer program that wrote it"
                )
            )
        verify_owner(datastore, entry.installation)
    return Progress(
        positions={shard: entry.position for shard, entry in last.items()},
        unrecorded={},
        elsewhere={shard for shard, entry in last.items() if entry.added_id and entry.topic not in ("", topic_id)},
    )


def _positions(records: Iterable[DecodedRecord]) -> Iterator[Position]:
    """Yields the position to which each record of the cells topic brings its shard."""
    for found in records:
        if isinstance(found, StoredCell):
            yield Position(found.shard, found.generation, found.added_id, digest=cell_digest(found))
        elif isinstance(found, Announcement):
            yield Position(found.shard, found.generation, found.starts_at - 1)
        elif isinstance(found, Seek):
            yield Position(found.shard, found.generation, found.added_id)


# Hanging transactions (KIP-664): ones without an end, which readers of committed records don't pass.
#
# Every transaction is open for a moment. One that stays open has lost its end, and somebody has to end it:
# docs/exactly-once.md.

Place = tuple[str, int]
"""Topic and partition."""

MARKERS_S = 2.0
"""The markers that end a transaction take milliseconds. One that is open for longer than this hangs."""

_POLL_S = 0.05
_LEADERS_S = 0.5


class OpenTransactions(msgspec.Struct, frozen=True):
    """What brokers said of some partitions: `first` is the offset of the first record of an open transaction.

    `errors` has the partitions of which nothing is known.
    """

    first: Mapping[Place, int]
    errors: Mapping[Place, KafkaError]


def open_transactions(admin: AdminClient, places: Collection[Place], *, timeout_s: float) -> OpenTransactions:
    """Asks the brokers that lead these partitions. One of them that is away hides nothing of the others.

    The client learns first who leads them. librdkafka 2.16 may miss the answer to a question of its own about that, and
    asks again three seconds later (docs/experiments.md).
    """
    for topic in {topic for topic, _ in places}:
        with suppress(KafkaException):  # the broker that was asked may be away, and the leaders not
            admin.list_topics(topic, min(timeout_s, _LEADERS_S))
    ends, errors = ends_of(admin, places, IsolationLevel.READ_UNCOMMITTED, timeout_s)
    # Asked later, so it may be further, and never behind.
    stable, more_errors = ends_of(admin, ends, IsolationLevel.READ_COMMITTED, timeout_s)
    return OpenTransactions(
        {place: stable[place] for place in stable if stable[place] < ends[place]}, errors | more_errors
    )


def hanging_transactions(bootstrap: str, places: Collection[Place], *, timeout_s: float) -> dict[Place, int]:
    """Returns the open transactions that are still there after `MARKERS_S`, and the offsets of their first records.

    `timeout_s` bounds each question. Raises BusUnavailable or TopicMissing where one of the partitions isn't known.
    """
    admin = open_client(AdminClient, bootstrap)
    deadline = time.monotonic() + MARKERS_S
    while True:
        found = open_transactions(admin, places, timeout_s=timeout_s)
        for (topic, partition), error in found.errors.items():
            raise translate(error, f"asking where {topic} [{partition}] ends")
        if not found.first or time.monotonic() > deadline:
            return dict(found.first)
        time.sleep(_POLL_S)


class HangingTransactionsWatch:
    """Finds partitions of a topic in which one transaction is open for longer than `patience_s`.

    One thread at a time.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        every_s: float,
        patience_s: float,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admin = open_client(AdminClient, bootstrap)
        self._topic = topic
        self._every_s = every_s
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked_at = clock()
        self._open_since: dict[tuple[Place, int], float] = {}

    def hanging(self, partitions: Collection[int]) -> list[int]:
        """Returns those of the partitions that have a hanging transaction, as far as their brokers answer.

        Call it often: it asks the broker once in `every_s`.
        """
        now = self._clock()
        if now - self._asked_at < self._every_s:
            return []
        self._asked_at = now
        found = open_transactions(self._admin, [(self._topic, p) for p in partitions], timeout_s=self._timeout_s)
        # A broker that doesn't answer ends nothing: what was open there counts from its beginning.
        known = {first: since for first, since in self._open_since.items() if first[0] in found.errors}
        self._open_since = known | {first: self._open_since.get(first, now) for first in found.first.items()}
        return sorted(
            place[1] for place, first in found.first.items() if now - self._open_since[place, first] >= self._patience_s
        )


def ends_of(
    admin: AdminClient, places: Collection[Place], isolation: IsolationLevel, timeout_s: float
) -> tuple[dict[Place, int], dict[Place, KafkaError]]:
    """Returns where partitions end, and the errors of those whose brokers don't say it."""
    deadline = time.monotonic() + timeout_s
    ends, errors = _ask(admin, [places], isolation, timeout_s)
    alone = len(places) == 1
    # A leader that was chosen just now may not know its end yet. One that is missing may fail the question for all, and
    # take all its time. So each partition is asked alone at least once.
    while errors:
        if alone and (time.monotonic() >= deadline or all(e.code() not in NOT_KNOWN_YET for e in errors.values())):
            break
        alone = True
        time.sleep(_POLL_S)
        more, errors = _ask(admin, [[place] for place in errors], isolation, timeout_s)
        ends |= more
    return ends, errors


def _ask(
    admin: AdminClient, questions: Sequence[Collection[Place]], isolation: IsolationLevel, timeout_s: float
) -> tuple[dict[Place, int], dict[Place, KafkaError]]:
    """Asks all questions at once. Returns the ends of partitions, and the errors of the others."""
    answers = [
        admin.list_offsets(
            {TopicPartition(*place): OffsetSpec.latest() for place in question},  # type: ignore[no-untyped-call]
            isolation_level=isolation,
            request_timeout=timeout_s,
        )
        for question in questions
        if question
    ]
    ends: dict[Place, int] = {}
    errors: dict[Place, KafkaError] = {}
    for asked, answer in [pair for found in answers for pair in found.items()]:
        place = (asked.topic, asked.partition)
        try:
            offset = answer.result().offset
        except KafkaException as error:
            errors[place] = error.args[0]
            continue
        if offset < 0:  # librdkafka 2.16.1 gives no error for a broker that doesn't answer in time
            errors[place] = KafkaError(KafkaError._TIMED_OUT)
        else:
            ends[place] = offset
    return ends, errors
