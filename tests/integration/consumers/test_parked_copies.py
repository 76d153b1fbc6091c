"""Copies of parked cells in Kafka: as KIP-1191 names what is in headers, after the park, and however often (I12)."""

import pytest

from schemaless.bus.parked_topic import ParkedTopic
from schemaless.bus.reader import PartitionReader
from schemaless.cell import row_key_text
from schemaless.codec import decode_cell
from schemaless.consume.parked_store import ParkedCopies
from schemaless.errors import BusUnavailable
from schemaless.record import decoded
from schemaless.storage import entity_table, parked_table
from schemaless.storage.parked_table import Cause, ParkedCell
from tests.log_harness import new_cell, put, run_sql

CONSUMER = "trigger:billing"


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=2, partitions=2)


@pytest.fixture
def park(storage, datastore):
    """Parks a new cell of a shard, as its owner does, and returns the cell."""

    def run(shard, cause=Cause.ERROR, cell=None, at=1_700_000_000_000_000):
        if cell is None:
            cell = new_cell(datastore, {"n": 1}, shard=shard)
            put(storage, datastore, [cell])
        master = storage.master(datastore.home(shard))
        (stored,) = master.run(entity_table.get, datastore, [(shard, cell.key)])
        record = ParkedCell(
            shard, 1, stored.added_id, cell.key.row_key, "BASE", cell.key.ref_key, "bill_rider", cause, True,
            "Traceback\nValueError: no card", 5, [], "v1", at,
        )  # fmt: skip
        run_sql(master, parked_table.put(datastore.name, CONSUMER, record))
        return stored

    return run


def copies_in(kafka, topic, datastore):
    with PartitionReader(kafka) as reader:
        return [
            record
            for partition in range(datastore.partitions)
            for batch in reader.read(topic, partition, reader.committed_span(topic, partition))
            for record in batch
        ]


async def test_a_parked_cell_is_copied_with_its_cause(kafka, async_storage, datastore, park):
    """Key, value and partition of the cell's own record. What only waits for its next attempt isn't copied."""
    cells = [park(0), park(1)]
    park(0, Cause.WAITING)
    topic = ParkedTopic(kafka, datastore, "billing")
    copies = ParkedCopies(async_storage, datastore, CONSUMER, topic.publish)
    assert await copies.step([0, 1]) == 2
    assert await copies.step([0, 1]) == 0
    found = copies_in(kafka, topic.name, datastore)
    assert [decoded(record) for record in found] == cells
    first = found[0]
    assert (first.key, decode_cell(first.value)) == (row_key_text(cells[0].row_key).encode(), cells[0])
    assert {name: value for name, value in first.headers.items() if name.startswith("__dlq")} == {
        "__dlq.errors.topic": datastore.topic.encode(),
        "__dlq.errors.partition": b"0",
        "__dlq.errors.group": f"schemaless.{datastore.name}.trigger.billing".encode(),
        "__dlq.errors.delivery.count": b"5",
        "__dlq.errors.message": b"bill_rider: error: ValueError: no card",
    }


async def test_a_cell_that_is_parked_anew_is_copied_again(kafka, async_storage, datastore, park):
    """Also where that happens between the copy and its note: a note is only for the park that was copied."""
    cell = park(0)
    topic = ParkedTopic(kafka, datastore, "billing")

    def publish(copies):
        topic.publish(copies)
        if copies[0].parked_at == 1_700_000_000_000_000:
            park(0, cell=cell, at=1_700_000_000_000_001)

    copies = ParkedCopies(async_storage, datastore, CONSUMER, publish)
    assert [await copies.step([0]) for _ in range(3)] == [1, 1, 0]
    assert len(copies_in(kafka, topic.name, datastore)) == 2


async def test_a_broker_that_is_away_costs_no_copy(kafka, async_storage, datastore, park):
    """The copy stays owed, in MySQL. Shards of other processes are left to them."""
    park(0), park(1)
    away = ParkedTopic("127.0.0.1:9", datastore, "billing", timeout_s=0.2)
    with pytest.raises(BusUnavailable):
        await ParkedCopies(async_storage, datastore, CONSUMER, away.publish).step([0, 1])
    there = ParkedCopies(async_storage, datastore, CONSUMER, ParkedTopic(kafka, datastore, "billing").publish)
    assert await there.step([1]) == 1
    assert await there.step([0, 1]) == 1
