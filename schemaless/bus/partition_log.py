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
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from functools import lru_cache

import msgspec
from confluent_kafka import KafkaException, Producer

from schemaless.bus.client import client_settings, translate, translated
from schemaless.bus.hanging_transactions import hanging_transactions
from schemaless.bus.published_progress import (
    Progress,
    committed_progress,
    counts_unseen_cells,
    progress_key,
    progress_value,
    published_beyond,
    read_progress,
    seek_value,
)
from schemaless.bus.reader import PartitionReader
from schemaless.bus.topic_settings import MESSAGE_BYTES_MAX
from schemaless.bus.topics import topic_id
from schemaless.cell import StoredCell, row_key_text
from schemaless.codec import encode_record
from schemaless.errors import BusUnavailable, Fenced, Misconfigured
from schemaless.location import GenerationStart
from schemaless.names import (
    CAUSE_HEADER,
    COLUMN_HEADER,
    KIND_CELL,
    KIND_GENERATION,
    KIND_HEADER,
    KIND_SEEK,
    RECORD_VERSION,
    VERSION_HEADER,
    publisher_id,
)
from schemaless.position import Position, cell_digest
from schemaless.quantity import quantity
from schemaless.runtime.events import Event, emit
from schemaless.topology import Datastore

_SETTLING_S = 0.004
"""After Kafka acknowledged a commit, it still writes the markers. A transaction that begins meanwhile is delayed by
20 ms, librdkafka's fixed pause after CONCURRENT_TRANSACTIONS."""

_COLUMNS_MAX = 1000  # whose headers are kept: callers choose the names of columns
_QUEUE_KBYTES = 64 << 10  # far above a batch: our own bounds hold first
Headers = list[tuple[str, str | bytes | None]]
_VERSION = (VERSION_HEADER, RECORD_VERSION)
_GENERATION_HEADERS: Headers = [_VERSION, (KIND_HEADER, KIND_GENERATION)]
_SEEK_HEADERS: Headers = [_VERSION, (KIND_HEADER, KIND_SEEK)]


@lru_cache(_COLUMNS_MAX)
def _cell_headers(column_name: str) -> Headers:
    return [_VERSION, (KIND_HEADER, KIND_CELL), (COLUMN_HEADER, column_name.encode())]


def _headers_of(cell: StoredCell) -> Headers:
    headers = _cell_headers(cell.column_name)
    return headers if cell.cause is None else [*headers, (CAUSE_HEADER, cell.cause.encode())]


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
        self._name = f"{datastore.topic} [{partition}]"
        self._producer = Producer(
            {
                **client_settings(bootstrap),
                "transactional.id": publisher_id(datastore.name, partition),
                "transaction.timeout.ms": round(transaction_timeout_s * 1000),
                "enable.idempotence": True,
                "linger.ms": 0,
                "message.max.bytes": MESSAGE_BYTES_MAX,
                "queue.buffering.max.kbytes": _QUEUE_KBYTES,
                "delivery.report.only.error": True,
            }
        )

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
        with self._transaction():
            for cell in cells:
                produce(
                    topic,
                    encode_record(cell),
                    row_key_text(cell.row_key),
                    self._partition,
                    timestamp=cell.created_at // 1000,
                    headers=_headers_of(cell),
                )
            emit(Event.CELLS_PRODUCED, log=self._name, cells=len(cells))
            self._produce_progress(reached.values())
        return reached

    def announce(self, shard: int, start: GenerationStart, digest: int | None) -> Position:
        """Announces that a generation of a shard begins (I13). Progress moves with it, so it is announced once.

        `digest` is that of the cell before its first one. Returns the progress.
        """
        reached = Position(shard, start.generation, start.starts_at - 1, digest=digest)
        opening = {"shard": shard, "generation": start.generation, "starts_at": start.starts_at}
        with self._transaction():
            self._produce_notice(msgspec.msgpack.encode(opening), _GENERATION_HEADERS)
            self._produce_progress([reached])
        return reached

    def seek(self, positions: Collection[Position]) -> None:
        """Sets progress by hand, instead of `open`. It fences the tailer of the partition, which then reads it.

        A record of kind `seek` in the cells topic keeps the trace. Raises BusUnavailable, Fenced, or Misconfigured
        when a transaction hangs.
        """
        with self._failing():
            self._fence()
            self._end_hanging_transactions()
            with self._transaction():
                for position in positions:
                    self._produce_notice(seek_value(position), _SEEK_HEADERS)
                self._produce_progress(positions)
            self._enter(LogState.OPEN)
            if hanging := self._hanging_transactions():  # it would be aborted later, and nobody would seek again
                raise BusUnavailable(self._hangs(hanging, "which only the next owner of the log may end"))

    def close(self) -> None:
        """Frees the client. An open transaction is left to the next owner, who ends it."""
        self._enter(LogState.CLOSED)
        self._producer.purge()
        del self._producer

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
            # Connects: a client that has no broker yet looks for its coordinator only half a second later.
            self._producer.list_topics(self._datastore.topic, self._timeout_s)
            self._producer.init_transactions(self._timeout_s * 2)  # the former owner's may have to run out first
        self._topic_id = topic_id(self._bootstrap, self._datastore.topic, timeout_s=self._timeout_s)
        self._enter(LogState.OPENING)
        emit(Event.LOG_FENCED, log=self._name)

    def _end_hanging_transactions(self) -> None:
        """Ends what the former owner left open. Cells that nobody has seen are aborted, and will be published again.
        Where the cells are seen and only their progress isn't, the progress is committed.

        Raises Misconfigured where progress counts unseen cells, and where the transaction isn't this log's.
        """
        hanging = self._hanging_transactions()
        if not hanging:
            return
        first = hanging.get(self._datastore.topic)
        with PartitionReader(self._bootstrap) as reader:
            seen = committed_progress(reader, self._datastore, self._partition, self._topic_id)
            beyond = {} if first is not None else published_beyond(reader, self._datastore, self._partition, seen)
        if first is not None and counts_unseen_cells(self._bootstrap, self._datastore, self._partition, first, seen):
            raise Misconfigured(self._hangs(hanging, "and progress counts cells behind it as published"))
        if beyond:
            self._record(beyond.values())
        else:
            self._abort_over(hanging)
        if hanging := self._hanging_transactions():
            raise Misconfigured(self._hangs(hanging, "that isn't this log's"))
        emit(Event.HANGING_TRANSACTION_ENDED, log=self._name)

    def _abort_over(self, topics: Collection[str]) -> None:
        """Aborts a transaction over these topics. Its markers end what this transactional.id has open there."""
        with translated(f"ending what stayed open of {self._name}"):
            self._producer.begin_transaction()
            # Progress first: a crash between the two must leave no progress that counts cells which were aborted.
            for topic in (self._datastore.progress_topic, self._datastore.topic):
                if topic in topics:
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
                self._producer.begin_transaction()
                emit(Event.TRANSACTION_BEGUN, log=self._name)
                began = time.monotonic()
                try:
                    yield
                finally:  # also before an abort: Kafka refuses to end what has not begun there yet, and that is fatal
                    produced_at = time.monotonic()
                    self._flush()
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
        self.stages_s = {
            "produce": produced_at - began,
            "flush": flushed_at - produced_at,
            "commit": committed_at - flushed_at,
        }
        emit(Event.COMMITTED, log=self._name)

    def _flush(self) -> None:
        if left := self._producer.flush(self._timeout_s):
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
        self._producer.produce(self._datastore.topic, value, partition=self._partition, headers=headers)

    def _produce_progress(self, positions: Collection[Position]) -> None:
        for position in positions:
            self._producer.produce(
                self._datastore.progress_topic,
                progress_value(position, self._topic_id),
                progress_key(position.shard),
                self._partition,
            )
        emit(Event.PROGRESS_PRODUCED, log=self._name, shards=len(positions))
