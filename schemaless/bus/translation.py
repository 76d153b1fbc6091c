"""confluent-kafka's errors become ours here (I15)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException

from schemaless.errors import BusUnavailable, Fenced, Misconfigured, SchemalessError, TopicMissing

_FENCED = {
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,  # idle so long that the broker forgot the producer
}
NOT_KNOWN_YET = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError._UNKNOWN_PARTITION,  # the client's own metadata was cut short: seen on a starved machine
}
"""Of a partition whose leader was chosen just now: it may be asked again."""

_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}
_FIT = {
    KafkaError._INVALID_ARG,
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.INVALID_TRANSACTION_TIMEOUT,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raises our error for whatever the client raises inside; `doing` says in its text what was attempted."""
    try:
        yield
    except KafkaException as error:
        raise translate(error.args[0], doing) from error
    except BufferError as error:
        raise BusUnavailable(f"{doing}: the producer's queue is full") from error


def translate(error: KafkaError, doing: str) -> SchemalessError:
    text = f"{doing}: {error.str()}"
    if error.code() in _FENCED:
        return Fenced(text)
    if error.code() in _FIT:
        return Misconfigured(text)
    if error.code() in _MISSING:
        return TopicMissing(text)
    return BusUnavailable(text)
