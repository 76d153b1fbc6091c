"""Names on the wire and in tables, each spelled once.

Processes of different versions meet there, so none of them ever changes. Functions take the name of a datastore.
"""

from __future__ import annotations

import re
from enum import StrEnum

INDEX_PREFIX = "index:"
TRIGGER_PREFIX = "trigger:"
INDEXER, TAILER = "indexer", "tailer"
"""The names under which an indexer and a tailer report what they do."""

VERSION_HEADER, KIND_HEADER, COLUMN_HEADER, CAUSE_HEADER = "v", "kind", "column", "cause"
TRACE_HEADER = "traceparent"
"""W3C's name, over HTTP and in Kafka."""
RECORD_VERSION = b"1"
DLQ_TOPIC_HEADER, DLQ_PARTITION_HEADER = "__dlq.errors.topic", "__dlq.errors.partition"
DLQ_GROUP_HEADER, DLQ_COUNT_HEADER = "__dlq.errors.group", "__dlq.errors.delivery.count"
DLQ_MESSAGE_HEADER = "__dlq.errors.message"
"""Headers of a copy of a parked cell, as KIP-1191 of Kafka names them."""

KIND_CELL, KIND_GENERATION, KIND_SEEK, KIND_ERASED = b"cell", b"generation", b"seek", b"erased"
ERASE_COLUMN = "$erase"
"""The column of the entries that name what an erasure removes. No caller can write it: it is no name of a column."""


class Stall(StrEnum):
    """Why something doesn't continue, in one word: the same in reports, /status, commands, metrics and logs."""

    NO_PARTITIONS = "no_partitions"  # the group gave this process none, or nobody has this one
    NO_KAFKA = "no_kafka"  # Kafka, or the group, doesn't answer
    MASTER_DOWN = "master_down"  # of the shard's home
    FILTER = "filter"  # a replication filter leaves out what a minion should have
    QUOTA = "quota"  # Kafka, or a server, takes less in a second than is offered
    BOUND = "bound"  # something is larger than a setting allows
    BLOCKED = "blocked"  # somebody holds a lock, or a transaction, that is needed
    PARTITION_COUNT = "partition_count"  # a topic has more partitions than its datastore
    REFUSED = "refused"  # a setting, a record or an account doesn't fit, and an operator has to act
    NOT_DENSE = "not_dense"  # a log has a hole, or shows something else that can't be
    OTHER_HISTORY = "other_history"  # MySQL lost cells that the topic has
    PROGRESS_LOST = "progress_lost"  # nothing tells how far a shard is published


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


def is_progress_topic(topic: str) -> bool:
    return re.fullmatch(r"schemaless\.[^.]+\.progress", topic) is not None


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
