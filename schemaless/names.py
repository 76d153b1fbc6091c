"""Names on the wire and in tables, each spelled once.

Processes of different versions meet there, so none of them ever changes. Functions take the name of a datastore.
"""

from __future__ import annotations

INDEX_PREFIX = "index:"
TRIGGER_PREFIX = "trigger:"
INDEXER = "indexer"
"""The name under which an indexer reports what it does."""

VERSION_HEADER, KIND_HEADER, COLUMN_HEADER, CAUSE_HEADER = "v", "kind", "column", "cause"
RECORD_VERSION = b"1"
DLQ_TOPIC_HEADER, DLQ_PARTITION_HEADER = "__dlq.errors.topic", "__dlq.errors.partition"
DLQ_GROUP_HEADER, DLQ_COUNT_HEADER = "__dlq.errors.group", "__dlq.errors.delivery.count"
DLQ_MESSAGE_HEADER = "__dlq.errors.message"
"""Headers of a copy of a parked cell, as KIP-1191 of Kafka names them."""

KIND_CELL, KIND_GENERATION, KIND_SEEK = b"cell", b"generation", b"seek"


def index_consumer(index: str, number: int = 1) -> str:
    """Returns the consumer that maintains a version of an index. Its checkpoints are stored under this name."""
    return f"{INDEX_PREFIX}{index}" if number == 1 else f"{INDEX_PREFIX}{index}:{number}"


def index_of_consumer(consumer: str) -> tuple[str, int]:
    """Returns the name and the number of the version that a consumer maintains."""
    name, _, number = consumer.removeprefix(INDEX_PREFIX).partition(":")
    return name, int(number or 1)


def index_table_name(index: str, number: int = 1) -> str:
    """Returns the table that holds the entries of a version of an index, in each shard, in at most 64 characters."""
    return f"index_{index}" if number == 1 else f"index_{index}${number}"


def trigger_consumer(program: str) -> str:
    """Returns the consumer of a trigger program. Its checkpoints are stored under this name."""
    return TRIGGER_PREFIX + program


def cells_topic_name(datastore: str) -> str:
    """Returns the topic that holds every cell of a datastore."""
    return f"schemaless.{datastore}.cells"


def parked_topic_name(datastore: str, program: str) -> str:
    """Returns the topic that holds copies of a program's parked cells, where that is wanted."""
    return f"schemaless.{datastore}.{program}.parked"


def progress_topic_name(datastore: str) -> str:
    """Returns the topic in which tailers record how far they have published."""
    return f"schemaless.{datastore}.progress"


def publisher_id(datastore: str, partition: int) -> str:
    """Returns the transactional.id under which a partition of the cells topic is written. It fences stale writers."""
    return f"{cells_topic_name(datastore)}.{partition}"


def tailer_group(datastore: str) -> str:
    """Returns the Kafka group that decides which tailer owns which partition."""
    return f"schemaless.{datastore}.tailer"


def indexer_group(datastore: str) -> str:
    """Returns the Kafka group of the processes that maintain a datastore's indexes."""
    return f"schemaless.{datastore}.indexer"


def trigger_group(datastore: str, program: str) -> str:
    """Returns the Kafka group of the workers of a trigger program."""
    return f"schemaless.{datastore}.trigger.{program}"
