"""Topics filled by hand: records as a tailer writes them, or not at all as it would."""

import os
import uuid
from collections.abc import Iterable, Sequence

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from schemaless.bus.partition_log import PartitionLog
from schemaless.bus.topics import ensure_topics
from schemaless.cell import StoredCell
from schemaless.codec import encode_body
from schemaless.location import GenerationStart
from schemaless.topology import Datastore


def new_topic(kafka: str, shards: int = 2, partitions: int = 1, placement: tuple[str, ...] = ("a",)) -> Datastore:
    """A datastore that only Kafka knows."""
    datastore = Datastore(f"t{uuid.uuid4().hex[:12]}", shards, partitions, placement)
    ensure_topics(kafka, datastore)
    return datastore


def stored_cell(shard: int, added_id: int, generation: int = 1, column: str = "BASE") -> StoredCell:
    """`created_at` is the added_id in seconds."""
    place = {"shard": shard, "generation": generation, "added_id": added_id, "created_at": added_id * 1_000_000}
    return StoredCell(os.urandom(16), column, 1, body=encode_body({"n": added_id}), **place)


def publish(kafka: str, datastore: Datastore, cells: Sequence[StoredCell]) -> None:
    """In transactions, as a tailer does, dense or not."""
    for partition in sorted({datastore.partition(cell.shard) for cell in cells}):
        log = PartitionLog(kafka, datastore, partition)
        log.open()
        log.publish([cell for cell in cells if datastore.partition(cell.shard) == partition])
        log.close()


def announce(kafka: str, datastore: Datastore, shard: int, start: GenerationStart) -> None:
    log = PartitionLog(kafka, datastore, datastore.partition(shard))
    log.open()
    log.announce([(shard, start, None)])
    log.close()


def produce_foreign(kafka: str, datastore: Datastore, values: Iterable[bytes], partition: int = 0) -> list[int]:
    """Records that look like cells from outside. Returns their offsets.

    A broker may write the marker of a transaction that was committed before behind them.
    """
    producer = Producer({"bootstrap.servers": kafka})
    offsets: list[int] = []
    for value in values:
        producer.produce(
            datastore.topic,
            value,
            partition=partition,
            headers=[("v", b"1"), ("kind", b"cell")],
            on_delivery=lambda error, record: offsets.append(record.offset()),
        )
    assert producer.flush(10) == 0
    return offsets


def delete_before(kafka: str, datastore: Datastore, offset: int, partition: int = 0) -> None:
    """The beginning of a partition is cut off, as retention would; OFFSET_END: nothing is left."""
    admin = AdminClient({"bootstrap.servers": kafka})
    (cut,) = admin.delete_records([TopicPartition(datastore.topic, partition, offset)]).values()
    assert cut.result(10).low_watermark >= max(0, offset)
