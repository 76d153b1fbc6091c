"""`schemaless tailer seek`: what an operator says is what the next owner of the log goes on from."""

import asyncio

import pytest
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.bus.partition_log import PartitionLog
from schemaless.bus.topics import ensure_topics
from schemaless.errors import Invalid, Misconfigured
from schemaless.location import BEGINNING, Location
from schemaless.runtime.events import Event, observing
from tests.log_harness import new_cell, put, records, wait_for_records
from tests.topic_harness import publish, stored_cell


@pytest.fixture
def seek(running, kafka, monkeypatch):
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", kafka)
    return lambda *arguments: CliRunner().invoke(app, ["tailer", "seek", *arguments])


@pytest.fixture
def locations(kafka):
    def read(datastore):
        logs = [
            PartitionLog(kafka, datastore, partition, transaction_timeout_s=20)
            for partition in range(datastore.partitions)
        ]
        found = {shard: position.location for log in logs for shard, position in log.open().positions.items()}
        for log in logs:
            log.close()
        return found

    return read


def test_one_shard_or_all_go_on_where_told(seek, locations, kafka, storage, make_datastore):
    """A dry run writes nothing, and tells how many cells come again or never; a named shard moves alone; without a
    name all move.
    """
    datastore = make_datastore(shards=4, partitions=2)
    put(storage, datastore, [new_cell(datastore, shard=3) for _ in range(9)])
    ensure_topics(kafka, datastore)
    told = seek(datastore.name, "7", "--shard", "3", "--dry-run").output
    assert told == "shard 3: no progress → 1:7: 0 cells to come again, 7 never to come\n"
    assert locations(datastore) == dict.fromkeys(range(4), BEGINNING)
    assert seek(datastore.name, "7", "--shard", "3").exit_code == 0
    assert locations(datastore) == {0: BEGINNING, 1: BEGINNING, 2: BEGINNING, 3: Location(1, 7)}
    assert "shard 3: 1:7 → 1:0: 7 cells to come again, 0 never to come\n" in seek(datastore.name, "0").output
    assert locations(datastore) == dict.fromkeys(range(4), BEGINNING)


async def test_an_idle_tailer_goes_on_from_where_it_was_told(seek, kafka, new_datastore, storage, tailing):
    """Nothing new is written: the tailer hears of the seek all the same, and publishes again."""
    datastore = new_datastore(shards=2, partitions=1)
    put(storage, datastore, [new_cell(datastore, shard=1) for _ in range(3)])
    tailing(datastore)
    await asyncio.to_thread(wait_for_records, kafka, datastore, 3)
    await asyncio.to_thread(seek, datastore.name, "1", "--shard", "1", "--repeat")
    found = await asyncio.to_thread(wait_for_records, kafka, datastore, 6)
    assert [record.kind for record in found] == [b"cell"] * 3 + [b"seek"] + [b"cell"] * 2


async def test_what_the_topic_has_is_not_published_twice(seek, kafka, new_datastore, storage, tailing):
    """So a seek that was cut off in the middle can be given again: what it moved stays where it is by now."""
    datastore = new_datastore(shards=4, partitions=2)
    put(storage, datastore, [new_cell(datastore, shard=shard) for shard in range(3)])
    service = tailing(datastore)
    await asyncio.to_thread(wait_for_records, kafka, datastore, 3)
    service.stop()
    told = await asyncio.to_thread(seek, datastore.name, "0")
    assert isinstance(told.exception, Misconfigured)
    assert "the topic has cells of 3 shards already, of shard 0 up to 1:1" in str(told.exception)
    put(storage, datastore, [new_cell(datastore, shard=3)])
    told = await asyncio.to_thread(seek, datastore.name, "1")
    assert "shard 3: 1:0 → 1:1: 0 cells to come again, 1 never to come" in told.output, told.exception
    assert len(await asyncio.to_thread(wait_for_records, kafka, datastore, 4)) == 4


def test_a_seek_that_is_fenced_in_the_middle_goes_on(seek, locations, kafka, storage, make_datastore):
    """A tailer opened the log of a partition at that moment. Partitions that had moved don't move again."""
    datastore = make_datastore(shards=2, partitions=2)
    put(storage, datastore, [new_cell(datastore, shard=shard) for shard in range(2)])
    ensure_topics(kafka, datastore)
    opened = []

    def fence(event, fields):
        opened.append(fields["log"])
        if len(opened) == 2:
            log = PartitionLog(kafka, datastore, 1, transaction_timeout_s=20)
            log.open()
            log.close()

    with observing(fence, Event.TRANSACTION_BEGUN):
        assert seek(datastore.name, "1").exit_code == 0
    assert locations(datastore) == {0: Location(1, 1), 1: Location(1, 1)}
    assert len([record for record in records(kafka, datastore) if record.kind == b"seek"]) == 2


@pytest.mark.parametrize(("options", "reached"), [((), Location(1, 1)), (("--repeat",), BEGINNING)])
def test_what_a_tailer_publishes_until_it_is_fenced_stays(
    seek, locations, kafka, storage, make_datastore, options, reached
):
    """The seek was planned before: it looks again when nobody publishes any more."""
    datastore = make_datastore(shards=1, partitions=1)
    put(storage, datastore, [new_cell(datastore, shard=0)])
    ensure_topics(kafka, datastore)
    opened = []

    def tail(event, fields):
        opened.append(fields["log"])
        if len(opened) == 1:
            publish(kafka, datastore, [stored_cell(0, 1)])

    with observing(tail, Event.LOG_OPENING):
        assert seek(datastore.name, "0", *options).exit_code == 0
    assert locations(datastore) == {0: reached}


@pytest.mark.parametrize("arguments", [("0", "--shard", "4"), ("x",), ("1:x",), ("1", "--shard", "0"), ("2:0",)])
def test_a_wrong_place_is_refused(seek, make_datastore, arguments):
    """A shard out of range, a malformed location, one past the head: nothing is written."""
    datastore = make_datastore(shards=4, partitions=2)
    assert isinstance(seek(datastore.name, *arguments).exception, Invalid)
