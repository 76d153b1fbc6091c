"""One partition of the cells topic as its only writer sees it: transactions of cells and progress (I7).

The transactional.id names the partition. Opening fences the predecessor and ends its transaction, and only then is
progress read; so whoever could open the log knows exactly what was published, and a process that lost the partition
can't publish any more, however late it wakes up.

A commit that Kafka took may stay unseen: a broker that dies at that moment can forget to write it into the partitions.
The next transaction decides about it, too. So nothing is published after an abort before the log was opened anew.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
from confluent_kafka import KafkaException, Producer

from schemaless.bus.client import client_settings
from schemaless.bus.hanging_transactions import records_that_stay_hidden
from schemaless.bus.progress import (
    Progress,
    committed_progress,
    counts_hidden_cells,
    progress_key,
    progress_value,
    published_beyond,
    read_progress,
    seek_value,
)
from schemaless.bus.reader import PartitionReader
from schemaless.bus.topic_identity import topic_id
from schemaless.bus.topic_settings import MESSAGE_BYTES_MAX
from schemaless.bus.translation import translate, translated
from schemaless.cell import StoredCell, row_key_text
from schemaless.codec import encode_record
from schemaless.errors import BusUnavailable, Misconfigured
from schemaless.location import GenerationStart, Location
from schemaless.names import (
    COLUMN_HEADER,
    KIND_CELL,
    KIND_GENERATION,
    KIND_HEADER,
    KIND_SEEK,
    RECORD_VERSION,
    VERSION_HEADER,
    publisher_id,
)
from schemaless.topology import Datastore

_SETTLING_S = 0.004
"""After a commit was answered, Kafka still writes its markers. A transaction that begins meanwhile is put off by 20 ms,
librdkafka's fixed pause after CONCURRENT_TRANSACTIONS."""

_QUEUE_KBYTES = 64 << 10  # far above a batch: our own bounds hold first
Headers = list[tuple[str, str | bytes | None]]
_VERSION = (VERSION_HEADER, RECORD_VERSION)
_GENERATION_HEADERS: Headers = [_VERSION, (KIND_HEADER, KIND_GENERATION)]
_SEEK_HEADERS: Headers = [_VERSION, (KIND_HEADER, KIND_SEEK)]


class PartitionLog:
    """Publishes to one partition. One thread at a time.

    After an error in a transaction the log isn't `usable`: it must be opened anew. `aborted` tells that this
    transaction surely was; else its outcome isn't known, or the partition is another's: the group has to say whose.
    """

    def __init__(
        self, bootstrap: str, datastore: Datastore, partition: int, *, transaction_timeout_s: float = 5.0
    ) -> None:
        self.usable = True
        self.aborted = False
        self._bootstrap = bootstrap
        self._datastore = datastore
        self._partition = partition
        self._timeout_s = transaction_timeout_s
        self._topic_id = ""
        self._settled_at = 0.0
        self._headers: dict[str, Headers] = {}
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
        """For so long the next transaction will wait: who has nothing to publish yet may gather cells meanwhile."""
        return max(0.0, self._settled_at - time.monotonic())

    def open(self) -> Progress:
        """Fences the predecessor, ends what Kafka left open of it, then reads how far it came.

        Raises BusUnavailable, Fenced, or Misconfigured when progress can't be told, or records stay hidden.
        """
        try:
            self._fence()
            self._end_what_stayed_open()
            with PartitionReader(self._bootstrap) as reader:
                progress = read_progress(reader, self._datastore, self._partition, self._topic_id)
            self._record(progress.unrecorded)
        except BaseException:
            self.usable = False
            raise
        return progress

    def publish(self, cells: Sequence[StoredCell]) -> dict[int, Location]:
        """All of the cells, or none, with the progress they make: the locations returned.

        Raises BusUnavailable, Fenced, or Misconfigured for a record that the topic doesn't take.
        """
        last = {cell.shard: cell for cell in cells}
        reached = {shard: cell.location for shard, cell in last.items()}
        with self._transaction():
            self._produce(cells)
            self._produce_progress(reached)
        return reached

    def announce(self, shard: int, start: GenerationStart) -> Location:
        """A generation of a shard begins (I13). Progress moves with it, so it is announced once."""
        reached = Location(start.generation, start.starts_at - 1)
        opening = {"shard": shard, "generation": start.generation, "starts_at": start.starts_at}
        with self._transaction():
            self._produce_notice(msgspec.msgpack.encode(opening), _GENERATION_HEADERS)
            self._produce_progress({shard: reached})
        return reached

    def refuse(self, shard: int, published: Location, head: Location) -> None:
        """The master's head lies below what was published: whoever opens the log next knows it, too.

        Raises BusUnavailable or Fenced.
        """
        self._require_all_seen()  # the end of progress alone would tear it from the cells before it
        with self._transaction():
            value = progress_value(shard, published, self._topic_id, refused_at=head)
            self._producer.produce(self._datastore.progress_topic, value, progress_key(shard), self._partition)

    def seek(self, locations: Mapping[int, Location]) -> None:
        """An operator says where to go on, instead of `open`. A tailer that has the partition is fenced, and reads it.

        A record of kind `seek` in the cells topic keeps the trace. Raises BusUnavailable, Fenced, or Misconfigured
        when records stay hidden.
        """
        self._fence()
        self._end_what_stayed_open()
        with self._transaction():
            for shard, location in locations.items():
                self._produce_notice(seek_value(shard, location), _SEEK_HEADERS)
            self._produce_progress(locations)
        self._require_all_seen()  # what Kafka forgot to end would be aborted, and nobody would say it again

    def close(self) -> None:
        """Frees the client. An open transaction is left to the next owner, who ends it."""
        self.usable = False
        self._producer.purge()
        del self._producer

    def _fence(self) -> None:
        with translated(f"opening {self._name}"):
            # Connects: a client that has no broker yet looks for its coordinator only half a second later.
            self._producer.list_topics(self._datastore.topic, self._timeout_s)
            self._producer.init_transactions(self._timeout_s * 2)  # the predecessor's may have to run out first
        self._topic_id = topic_id(self._bootstrap, self._datastore.topic, timeout_s=self._timeout_s)

    def _end_what_stayed_open(self) -> None:
        """Cells that nobody has seen are aborted, and will be published again. Where cells are seen and only their
        progress isn't, it is committed.

        Raises Misconfigured where progress counts cells that are hidden, and where it isn't ours to end.
        """
        hidden = self._hidden_for_good()
        if not hidden:
            return
        seen = self._seen_progress()
        if self._datastore.topic in hidden:
            first = hidden[self._datastore.topic]
            if counts_hidden_cells(self._bootstrap, self._datastore, self._partition, first, seen):
                raise Misconfigured(self._stay_hidden(hidden, "and progress counts cells behind it as published"))
            self._abort_over(hidden)
        else:
            with PartitionReader(self._bootstrap) as reader:
                beyond = published_beyond(reader, self._datastore, self._partition, seen)
            if beyond:
                self._record(beyond)
            else:
                self._abort_over(hidden)
        if hidden := self._hidden_for_good():
            raise Misconfigured(self._stay_hidden(hidden, "that isn't this log's"))

    def _abort_over(self, topics: Collection[str]) -> None:
        """Its markers end whatever this transactional.id has open there. Progress first: a crash between the two must
        leave no progress that counts cells which were aborted.
        """
        progress_first = sorted(topics, key=[self._datastore.progress_topic, self._datastore.topic].index)
        with translated(f"ending what stayed open of {self._name}"):
            self._producer.begin_transaction()
            for topic in progress_first:
                self._producer.produce(topic, b"", b"aborted", self._partition)
                self._flush()
            self._producer.abort_transaction(self._timeout_s)

    def _require_all_seen(self) -> None:
        """Raises BusUnavailable when something stays hidden, or that can't be told."""
        self.usable = False
        if hidden := self._hidden_for_good():
            raise BusUnavailable(self._stay_hidden(hidden, "which only whoever opens the log may end"))
        self.usable = True

    def _hidden_for_good(self) -> dict[str, int]:
        """Topics that hide records of this partition, and from which offset."""
        places = [(self._datastore.topic, self._partition), (self._datastore.progress_topic, self._partition)]
        hidden = records_that_stay_hidden(self._bootstrap, places, timeout_s=self._timeout_s)
        return {topic: offset for (topic, _), offset in hidden.items()}

    def _stay_hidden(self, hidden: Collection[str], which: str) -> str:
        return (
            f"records of {' and '.join(sorted(hidden))} [{self._partition}] stay hidden behind a transaction without an"
            f" end, {which} (docs/exactly-once.md tells what to do)"
        )

    def _seen_progress(self) -> Progress:
        with PartitionReader(self._bootstrap) as reader:
            return committed_progress(reader, self._datastore, self._partition, self._topic_id)

    def _record(self, locations: Mapping[int, Location]) -> None:
        """Progress alone."""
        if locations:
            with self._transaction():
                self._produce_progress(locations)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Begins, flushes and commits. After any failure the log is not `usable`."""
        time.sleep(self.settling_s)
        try:
            with translated(f"publishing to {self._name}"):
                self._producer.begin_transaction()
                try:
                    yield
                finally:  # also before an abort: Kafka refuses to end what has not begun there yet, and that is fatal
                    self._flush()
        except BaseException:
            self._abort()
            raise
        self._commit()

    def _flush(self) -> None:
        if left := self._producer.flush(self._timeout_s):
            raise BusUnavailable(f"{left} records to {self._name} were not taken within {self._timeout_s} s")

    def _commit(self) -> None:
        try:
            self._producer.commit_transaction(self._timeout_s)
        except KafkaException as error:
            if error.args[0].txn_requires_abort():
                self._abort()
            self.usable = False  # else fenced, or nobody knows whether it was committed
            raise translate(error.args[0], f"committing to {self._name}") from error
        self._settled_at = time.monotonic() + _SETTLING_S

    def _abort(self) -> None:
        self.usable = False
        with contextlib.suppress(KafkaException):  # then the next owner ends it
            self._producer.abort_transaction(self._timeout_s)
            self.aborted = True

    def _produce(self, cells: Iterable[StoredCell]) -> None:
        produce, topic, partition = self._producer.produce, self._datastore.topic, self._partition
        headers = self._headers
        for cell in cells:
            name = cell.column_name
            if name not in headers:
                headers[name] = [_VERSION, (KIND_HEADER, KIND_CELL), (COLUMN_HEADER, name.encode())]
            produce(
                topic,
                encode_record(cell),
                row_key_text(cell.row_key),
                partition,
                timestamp=cell.created_at // 1000,
                headers=headers[name],
            )

    def _produce_notice(self, value: bytes, headers: Headers) -> None:
        self._producer.produce(self._datastore.topic, value, partition=self._partition, headers=headers)

    def _produce_progress(self, locations: Mapping[int, Location]) -> None:
        for shard, location in locations.items():
            self._producer.produce(
                self._datastore.progress_topic,
                progress_value(shard, location, self._topic_id),
                progress_key(shard),
                self._partition,
            )
