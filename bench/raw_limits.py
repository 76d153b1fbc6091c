"""Raw limits of the servers, without our code: PyMySQL reads and writes rows, librdkafka produces the same records."""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pymysql
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from bench import plain_tier
from bench.servers import BenchStack
from schemaless.runtime.batching import chunks
from schemaless.storage.entity_table import ShardCell
from schemaless.topology import Datastore

Row = tuple[object, ...]
Batch = Sequence[ShardCell]

_ENTITY = "INSERT INTO {}.entity (added_id, generation, row_key, column_name, ref_key, body, created_at) VALUES "
_ENTITY_ROW = "(%s, 1, %s, %s, %s, %s, UTC_TIMESTAMP(6))"
_BUFFER = (
    "INSERT INTO schemaless.buffer"
    " (datastore, home, shard, row_key, column_name, ref_key, body, digest, size, owner, claim, buffered_at) VALUES "
)
_BUFFER_ROW = "(%s, %s, %s, %s, %s, %s, %s, %s, %s, 0, 0, UTC_TIMESTAMP(6))"
_READ = (
    "SELECT row_key, column_name, ref_key, generation, added_id, created_at, body FROM {}.entity"
    " WHERE added_id > %s ORDER BY added_id LIMIT 2000"
)


class RawWriter:
    """One thread's connections to the masters of a datastore of its own layout."""

    def __init__(self, stack: BenchStack, datastore: Datastore, added_ids: dict[int, Iterator[int]]) -> None:
        self._datastore = datastore
        self._added_ids = added_ids
        self._copies = stack.copies
        self._connections = {master.cluster: plain_tier.connect(master) for master in stack.masters()}

    def write(self, batch: Batch) -> None:
        """Durable on every master that our batch put is durable on: buffer rows first, then the shards."""
        homes: dict[str, list[ShardCell]] = defaultdict(list)
        for cell in batch:
            homes[self._datastore.home(cell.shard)].append(cell)
        if self._copies > 1:
            for home, cells in homes.items():
                self._write_buffer(self._other(home), home, cells)
        for home, cells in homes.items():
            self._write_shards(self._connections[home], cells)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _other(self, home: str) -> pymysql.Connection:
        return next(connection for cluster, connection in self._connections.items() if cluster != home)

    def _write_buffer(self, connection: pymysql.Connection, home: str, cells: Batch) -> None:
        name = self._datastore.name
        rows = [
            (name, home, cell.shard, *_key(cell), cell.body, hashlib.sha256(cell.body).digest(), len(cell.body))
            for cell in cells
        ]
        with connection.cursor() as cursor:
            insert(cursor, _BUFFER, _BUFFER_ROW, rows)
        connection.commit()

    def _write_shards(self, connection: pymysql.Connection, cells: Batch) -> None:
        """One transaction, one multi-row INSERT for each shard touched."""
        rows: dict[int, list[Row]] = defaultdict(list)
        for cell in cells:
            rows[cell.shard].append((next(self._added_ids[cell.shard]), *_key(cell), cell.body))
        with connection.cursor() as cursor:
            for shard in sorted(rows):
                insert(cursor, _ENTITY.format(self._datastore.database(shard)), _ENTITY_ROW, rows[shard])
        connection.commit()


def insert(cursor: pymysql.cursors.Cursor, head: str, row: str, rows: Sequence[Row]) -> None:
    cursor.execute(head + ",".join([row] * len(rows)), [value for values in rows for value in values])


def write_rate(
    stack: BenchStack, datastore: Datastore, batches: Sequence[Batch], *, writers: int, seconds: float
) -> float:
    """Rows a second of so many threads, each with its share of the batches, until time or batches are over."""
    added_ids: dict[int, Iterator[int]] = {
        shard: count(_rows(stack, datastore, shard) + 1) for shard in _shards(batches)
    }
    own = [RawWriter(stack, datastore, added_ids) for _ in range(writers)]
    started = time.perf_counter()

    def run(number: int) -> int:
        written = 0
        for batch in batches[number::writers]:
            if time.perf_counter() > started + seconds:
                break
            own[number].write(batch)
            written += len(batch)
        return written

    with ThreadPoolExecutor(writers) as pool:
        written = sum(pool.map(run, range(writers)))
    elapsed = time.perf_counter() - started
    for writer in own:
        writer.close()
    return written / elapsed


def read_rate(stack: BenchStack) -> float:
    """Cells a second: every row of every shard read once, in pages, and dropped."""
    started = time.perf_counter()
    read = 0
    for master in stack.masters():
        with plain_tier.connect(master, autocommit=True) as connection, connection.cursor() as cursor:
            for shard in range(stack.datastore.shards):
                if stack.datastore.home(shard) == master.cluster:
                    read += _read_shard(cursor, stack.datastore.database(shard))
    return read / (time.perf_counter() - started)


def _read_shard(cursor: pymysql.cursors.Cursor, database: str) -> int:
    read = after = 0
    while cursor.execute(_READ.format(database), (after,)):
        rows = cursor.fetchall()
        read += len(rows)
        after = rows[-1][4]
    return read


def _shards(batches: Sequence[Batch]) -> set[int]:
    return {cell.shard for batch in batches for cell in batch}


def _rows(stack: BenchStack, datastore: Datastore, shard: int) -> int:
    master = stack.topology.cluster(datastore.home(shard)).nodes[0]
    with plain_tier.connect(master) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT COALESCE(MAX(added_id), 0) FROM {datastore.database(shard)}.entity")
        ((highest,),) = cursor.fetchall()
    return int(highest)


def _key(cell: ShardCell) -> tuple[bytes, str, int]:
    return cell.key.row_key, cell.key.column_name, cell.key.ref_key


TRANSACTION_RECORDS = 2000
HEADERS: list[tuple[str, str | bytes | None]] = [("v", b"1"), ("kind", b"cell"), ("column", b"BASE")]
TIMEOUT_S = 30.0

Record = tuple[int, bytes, bytes, int]
"""Partition, key, value, timestamp in milliseconds."""


def create_topic(bootstrap: str, name: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (created,) = admin.create_topics([NewTopic(name, partitions, 1)]).values()
    created.result(TIMEOUT_S)


def produce_rate(bootstrap: str, topic: str, records: Sequence[Record]) -> float:
    """Records a second, in the order given."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": topic,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    producer.init_transactions(TIMEOUT_S)
    started = time.perf_counter()
    for part in chunks(records, count_max=TRANSACTION_RECORDS):
        producer.begin_transaction()
        for partition, key, value, timestamp in part:
            producer.produce(topic, value, key, partition, timestamp=timestamp, headers=HEADERS)
        producer.commit_transaction(TIMEOUT_S)
    return len(records) / (time.perf_counter() - started)
