"""The topic of parked cells: copies of what a trigger program parked, for programs that watch it (docs/parked.md).

MySQL has the parked cells, and this topic only tells of them. A copy may come twice. Key and value are those of the
cell's own record, and headers have the error, as Kafka's share groups write dead letters (KIP-1191).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient

from schemaless.bus.client import metadata_of, open_client, translate, translated
from schemaless.bus.topics import MESSAGE_BYTES_MAX, ensure_topic
from schemaless.cell import StoredCell, row_key_text
from schemaless.codec import encode_record
from schemaless.error_text import error_summary
from schemaless.errors import BusUnavailable
from schemaless.names import (
    COLUMN_HEADER,
    DLQ_COUNT_HEADER,
    DLQ_GROUP_HEADER,
    DLQ_MESSAGE_HEADER,
    DLQ_PARTITION_HEADER,
    DLQ_TOPIC_HEADER,
    KIND_CELL,
    KIND_HEADER,
    RECORD_VERSION,
    VERSION_HEADER,
    parked_topic_name,
    trigger_group,
)
from schemaless.quantity import quantity
from schemaless.record import noted_headers
from schemaless.topology import Datastore

MESSAGE_CHARACTERS_MAX = 500
"""Of the last line of an error, in a header. MySQL has the whole."""


def parked_topics(bootstrap: str, datastore: str, programs: Collection[str], *, timeout_s: float) -> list[str]:
    """Returns the topics of parked cells that exist. Raises BusUnavailable."""
    admin = open_client(AdminClient, bootstrap)
    topics = metadata_of(admin, bootstrap, "asking for the topics of parked cells", timeout_s).topics
    return sorted({parked_topic_name(datastore, program) for program in programs} & set(topics))


class ParkedCopy(msgspec.Struct, frozen=True, gc=False):
    """A parked cell: the function that failed, why, with which error, after how many calls, and when."""

    cell: StoredCell
    function_name: str
    cause: str
    error: str
    attempts: int
    parked_at: int


class ParkedTopic:
    """The topic of one program. It is made when it is first written to. One thread at a time."""

    def __init__(self, bootstrap: str, datastore: Datastore, program: str, *, timeout_s: float = 10.0) -> None:
        self.name = parked_topic_name(datastore.name, program)
        self._bootstrap = bootstrap
        self._datastore = datastore
        self._group = trigger_group(datastore.name, program)
        self._timeout_s = timeout_s
        self._producer: Producer | None = None

    def publish(self, copies: Sequence[ParkedCopy]) -> None:
        """Returns when Kafka has all copies. Raises BusUnavailable: then some may be there.

        A copy that is too large for a record is left out.
        """
        producer = self._opened()
        errors: list[KafkaError] = []

        def delivered(error: KafkaError | None, _message: Message) -> None:
            if error is not None and error.code() != KafkaError.MSG_SIZE_TOO_LARGE:
                errors.append(error)

        with translated(f"writing to topic {self.name}"):
            for copy in copies:
                producer.produce(
                    self.name,
                    encode_record(copy.cell),
                    row_key_text(copy.cell.row_key),
                    self._datastore.partition(copy.cell.shard),
                    timestamp=copy.parked_at // 1000,
                    headers=self._headers(copy),
                    on_delivery=delivered,
                )
            left = producer.flush(self._timeout_s)
        if left:
            producer.purge()
            self._producer = None
            raise BusUnavailable(
                f"topic {self.name}: no acknowledgement of {quantity(left, 'copy')} in {self._timeout_s:g} s"
            )
        if errors:
            raise translate(errors[0], f"writing to topic {self.name}")

    def _opened(self) -> Producer:
        if self._producer is None:
            ensure_topic(self._bootstrap, self.name, self._datastore.partitions, timeout_s=self._timeout_s)
            self._producer = open_client(
                Producer,
                self._bootstrap,
                {
                    "enable.idempotence": True,
                    "message.max.bytes": MESSAGE_BYTES_MAX,
                    "message.timeout.ms": round(self._timeout_s * 1000),
                },
            )
        return self._producer

    def _headers(self, copy: ParkedCopy) -> list[tuple[str, str | bytes | None]]:
        cell, why = copy.cell, error_summary(copy.error, MESSAGE_CHARACTERS_MAX)
        message = f"{copy.function_name}: {copy.cause}: {why}"
        headers: list[tuple[str, str | bytes | None]] = [
            (VERSION_HEADER, RECORD_VERSION),
            (KIND_HEADER, KIND_CELL),
            (COLUMN_HEADER, cell.column_name.encode()),
            (DLQ_TOPIC_HEADER, self._datastore.topic.encode()),
            (DLQ_PARTITION_HEADER, str(self._datastore.partition(cell.shard)).encode()),
            (DLQ_GROUP_HEADER, self._group.encode()),
            (DLQ_COUNT_HEADER, str(copy.attempts).encode()),
            (DLQ_MESSAGE_HEADER, message[:MESSAGE_CHARACTERS_MAX].encode(errors="replace")),
        ]
        return [*headers, *noted_headers(cell)]
