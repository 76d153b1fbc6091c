"""The partition log on a real broker: one writer, transactions of cells and progress, fencing, rebuilding (I7)."""

import time
import uuid

import msgspec
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from schemaless.bus import partition_log
from schemaless.bus.partition_log import LogState, PartitionLog, beginning, progress_key, progress_value
from schemaless.bus.topics import ensure_topics, topic_id
from schemaless.cell import ColumnName, RefKey, RowKey, StoredCell, row_key_text
from schemaless.codec import decode_cell, encode_body
from schemaless.errors import BusUnavailable, Fenced, Misconfigured
from schemaless.location import GenerationStart, Location
from schemaless.position import Position, cell_digest
from schemaless.record import decoded
from schemaless.runtime.events import Event, observing
from schemaless.topology import Datastore
from tests.log_harness import wait_for_records

SHARD, NEIGHBOUR = 1, 3  # both in partition 1
BODY = encode_body({"n": 1})


@pytest.fixture
def datastore(kafka):
    made = Datastore(f"l{uuid.uuid4().hex[:8]}", 4, 2, ("a",))
    ensure_topics(kafka, made)
    return made


@pytest.fixture
def opened(kafka, datastore, monkeypatch):
    """Opens logs of partition 1, and closes them at the end. A transaction hangs soon."""
    monkeypatch.setattr(partition_log, "MARKERS_S", 0.5)
    logs = []

    def open_log():
        log = PartitionLog(kafka, datastore, 1, transaction_timeout_s=20)
        logs.append(log)
        return log, log.open()

    yield open_log
    for log in logs:
        log.close()


def cells(first, last, shard=SHARD, generation=1):
    return [
        StoredCell(
            row_key=RowKey(uuid.uuid4().bytes),
            column_name=ColumnName("BASE"),
            ref_key=RefKey(1),
            shard=shard,
            generation=generation,
            added_id=added_id,
            created_at=1_700_000_000_123_456 + added_id,
            body=BODY,
        )
        for added_id in range(first, last + 1)
    ]


def position_of(cell):
    return Position(cell.shard, cell.generation, cell.added_id, digest=cell_digest(cell))


def added_ids(kafka, datastore, count):
    """Of all cells in the topic, once there are so many: a commit is seen a moment after it was taken."""
    return [decode_cell(record.value).added_id for record in wait_for_records(kafka, datastore, count)]


def write_progress(kafka, datastore, position):
    """A record of progress without its cells."""
    producer = Producer({"bootstrap.servers": kafka})
    value = progress_value(position, topic_id(kafka, datastore.topic, timeout_s=10), "")
    producer.produce(datastore.progress_topic, value, progress_key(position.shard), 1)
    assert producer.flush(10) == 0


def delete_topic(kafka, topic):
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.delete_topics([topic])[topic].result()
    while topic in admin.list_topics(timeout=5).topics:
        time.sleep(0.05)


def cut(kafka, topic, before):
    """Drops the beginning of partition 1."""
    request = [TopicPartition(topic, 1, before)]
    admin = AdminClient({"bootstrap.servers": kafka})  # kept: a request dies with its client
    (done,) = admin.delete_records(request).values()
    done.result()


def test_cells_stand_in_the_topic_as_the_contract_says(kafka, datastore, opened):
    """Partition, key, value, headers and timestamp of a record."""
    log, _ = opened()
    (cell,) = cells(1, 1)
    log.publish([cell])
    (record,) = wait_for_records(kafka, datastore, 1)
    assert record.key == row_key_text(cell.row_key).encode()
    assert decode_cell(record.value) == cell
    assert record.headers == {"v": b"1", "kind": b"cell", "column": b"BASE"}
    assert record.timestamp_ms == cell.created_at // 1000


def test_a_cell_with_a_cause_has_it_in_a_header(kafka, datastore, opened):
    """A15: the value is that of a cell without one, and readers of records find it."""
    log, _ = opened()
    (cell,) = cells(1, 1)
    caused = msgspec.structs.replace(cell, cause="billing/bill_rider@7:1:1000")
    log.publish([caused])
    (record,) = wait_for_records(kafka, datastore, 1)
    assert record.headers == {"v": b"1", "kind": b"cell", "column": b"BASE", "cause": b"billing/bill_rider@7:1:1000"}
    assert decode_cell(record.value) == cell
    assert decoded(record) == caused


def test_a_new_log_has_published_nothing(opened):
    """Every shard begins at the beginning, and that is written down: a record that is missing later was lost."""
    _, progress = opened()
    nothing = {SHARD: beginning(SHARD), NEIGHBOUR: beginning(NEIGHBOUR)}
    assert progress.unrecorded == progress.positions == nothing
    _, progress = opened()
    assert (progress.unrecorded, progress.positions) == ({}, nothing)


def test_who_opens_the_log_knows_what_was_published(opened):
    """Progress comes with the cells, shard by shard, and names the cell that it stands on."""
    log, _ = opened()
    first, second, neighbours = cells(1, 5), cells(6, 7), cells(1, 2, NEIGHBOUR)
    reached = log.publish([*first, *neighbours])
    assert reached == {SHARD: position_of(first[-1]), NEIGHBOUR: position_of(neighbours[-1])}
    log.publish(second)
    _, progress = opened()
    assert progress.positions == {SHARD: position_of(second[-1]), NEIGHBOUR: position_of(neighbours[-1])}


def test_a_stale_owner_is_refused(kafka, datastore, opened):
    """After another one opened the log, the former owner can neither publish nor go on with this log."""
    stale, _ = opened()
    stale.publish(cells(1, 2))
    fresh, _ = opened()
    with pytest.raises(Fenced):
        stale.publish(cells(3, 4))
    assert stale.state is LogState.FENCED
    fresh.publish(cells(3, 3))
    assert added_ids(kafka, datastore, 3) == [1, 2, 3]


@pytest.mark.parametrize("moment", [Event.TRANSACTION_BEGUN, Event.PROGRESS_PRODUCED, Event.FLUSHED])
def test_a_transaction_in_flight_dies_with_its_owner(kafka, datastore, opened, moment):
    """Taken over between begin, produce, flush and commit: the transaction is not seen, and its commit is refused."""
    stale, _ = opened()
    taken_over = []

    def take_over(event, fields):
        if not taken_over:  # the new owner's own transactions pass the same moment
            taken_over.append(event)
            fresh, progress = opened()
            assert progress.position(SHARD, head=3) == beginning(SHARD)
            fresh.publish(cells(1, 2))

    with observing(take_over, moment), pytest.raises(Fenced):
        stale.publish(cells(1, 3))
    assert taken_over == [moment]
    assert added_ids(kafka, datastore, 2) == [1, 2]
    assert opened()[1].position(SHARD, head=2).location == Location(1, 2)


def test_a_failed_batch_leaves_nothing_and_the_log_is_opened_anew(kafka, datastore, opened):
    """A record beyond the topic's limit fails its whole transaction. What came before may have gone with it, if Kafka
    had not written its end yet: so this log doesn't go on. The next one does.
    """
    log, _ = opened()
    large = cells(2, 2)[0]
    with pytest.raises(Misconfigured):
        log.publish([*cells(1, 1), StoredCell(large.row_key, "BASE", 1, SHARD, 1, 2, large.created_at, bytes(5 << 20))])
    assert log.state is LogState.ABORTED
    opened()[0].publish(cells(1, 1))
    assert added_ids(kafka, datastore, 1) == [1]


@pytest.mark.parametrize("topic", ["topic", "progress_topic"])
def test_a_transaction_of_others_without_an_end_waits_for_a_person(kafka, datastore, opened, topic):
    """Another program's: nothing is published, not even progress alone, until it was ended."""
    log, _ = opened()
    log.publish(cells(1, 1))
    added_ids(kafka, datastore, 1)
    foreign = Producer({"bootstrap.servers": kafka, "transactional.id": datastore.name, "log_level": 0})
    foreign.init_transactions(10)
    foreign.begin_transaction()
    foreign.produce(getattr(datastore, topic), b"", b"foreign", 1)
    foreign.flush(10)
    with pytest.raises(Misconfigured, match=rf"{getattr(datastore, topic)} \[1\] has a hanging.*docs/exactly-once.md"):
        opened()
    foreign.abort_transaction(10)
    fresh, progress = opened()
    assert progress.positions[SHARD].location == Location(1, 1)
    fresh.publish(cells(2, 2))
    assert added_ids(kafka, datastore, 2) == [1, 2]


def test_a_topic_that_lost_its_end_gets_it_again(kafka, datastore, opened):
    """A power cut took the last cells, and left the progress that counts them: it goes back to what the topic holds."""
    log, _ = opened()
    kept, neighbours, lost = cells(1, 2), cells(1, 1, NEIGHBOUR), cells(3, 4)
    log.publish([*kept, *neighbours])
    write_progress(kafka, datastore, position_of(lost[-1]))
    fresh, progress = opened()
    assert progress.positions == {SHARD: position_of(kept[-1]), NEIGHBOUR: position_of(neighbours[-1])}
    assert list(progress.unrecorded) == [SHARD, NEIGHBOUR]  # the newest record names the topic's last one
    fresh.publish(lost)
    assert sorted(added_ids(kafka, datastore, 5)) == [1, 1, 2, 3, 4]
    assert opened()[1].unrecorded == {}


def test_a_cell_of_another_history_is_not_the_one_that_progress_names(kafka, datastore, opened):
    """The number is there, and its digest is another one (I16)."""
    log, _ = opened()
    published = cells(1, 2)
    log.publish(published)
    write_progress(kafka, datastore, position_of(cells(2, 2)[0]))
    assert opened()[1].positions[SHARD] == position_of(published[-1])


def test_progress_that_lost_its_end_follows_the_cells(kafka, datastore, opened, monkeypatch):
    """The cells of a commit are seen, its progress is not: they aren't published again."""
    log, _ = opened()
    log.publish(cells(1, 1))
    second, neighbour = cells(2, 2), cells(1, 1, NEIGHBOUR)
    monkeypatch.setattr(log, "_produce_progress", lambda positions: None)
    log.publish([*second, *neighbour])
    fresh, progress = opened()
    expected = {SHARD: position_of(second[0]), NEIGHBOUR: position_of(neighbour[0])}
    assert progress.positions == progress.unrecorded == expected
    fresh.publish(cells(3, 3))
    assert sorted(added_ids(kafka, datastore, 4)) == [1, 1, 2, 3]


@pytest.mark.parametrize("topic", ["topic", "progress_topic"])
def test_a_running_log_notices_that_a_topic_lost_its_end(datastore, opened, topic):
    """Offsets come a second time: the transaction is aborted, and the log is opened anew."""
    log, _ = opened()
    log.publish(cells(1, 1))
    log._ends[getattr(datastore, topic)] += 2  # as if one more transaction had been there
    with pytest.raises(BusUnavailable, match="lost its end"):
        log.publish(cells(2, 2))
    assert log.state is LogState.ABORTED
    assert opened()[1].positions[SHARD].added_id == 1


def test_a_generation_is_announced_once(kafka, datastore, opened):
    """The record carries no key; progress moves with it, so whoever opens the log next doesn't announce it again."""
    log, _ = opened()
    kept = cells(1, 5)
    log.publish(kept)
    third = cell_digest(kept[2])
    assert log.announce([(SHARD, GenerationStart(2, 4), third)]) == [Position(SHARD, 2, 3, digest=third)]
    log.publish(cells(4, 4, generation=2))
    announcement = wait_for_records(kafka, datastore, 7)[5]
    assert (announcement.key, announcement.kind) == (None, b"generation")
    assert opened()[1].position(SHARD, head=4).location == Location(2, 4)


def test_lost_progress_is_rebuilt_from_the_topic(kafka, datastore, opened):
    """The progress topic was deleted: the last records of each shard tell, and are written down again."""
    log, _ = opened()
    published = cells(1, 5)
    log.publish([*published, *cells(1, 2, NEIGHBOUR)])
    log.announce([(NEIGHBOUR, GenerationStart(2, 3), None)])
    delete_topic(kafka, datastore.progress_topic)
    ensure_topics(kafka, datastore)
    expected = {SHARD: position_of(published[-1]), NEIGHBOUR: Position(NEIGHBOUR, 2, 2)}
    _, rebuilt = opened()
    assert rebuilt.unrecorded == rebuilt.positions == expected
    _, read = opened()
    assert (read.unrecorded, read.positions) == ({}, expected)


def test_what_nothing_tells_is_not_guessed(kafka, datastore, opened):
    """No progress, and a topic whose beginning was cut: a shard with cells that left no record needs a seek."""
    log, _ = opened()
    log.publish(cells(1, 5, NEIGHBOUR))
    log.publish(cells(1, 5))
    cut(kafka, datastore.topic, before=7)
    delete_topic(kafka, datastore.progress_topic)
    ensure_topics(kafka, datastore)
    for _ in range(2):  # what was found is written down, what wasn't stays unknown
        log, progress = opened()
        assert progress.position(SHARD, head=5).location == Location(1, 5)
        assert progress.position(NEIGHBOUR, head=0) == beginning(NEIGHBOUR)
        with pytest.raises(Misconfigured, match="tailer seek DATASTORE LOCATION --shard 3"):
            progress.position(NEIGHBOUR, head=5)
    PartitionLog(kafka, datastore, 1, transaction_timeout_s=20).seek([Position(NEIGHBOUR, 1, 4, digest=7)])
    with pytest.raises(Fenced):
        log.publish(cells(6, 6))
    assert opened()[1].position(NEIGHBOUR, head=5) == Position(NEIGHBOUR, 1, 4, digest=7)


def test_a_cells_topic_made_anew_is_refused(kafka, datastore, opened):
    """Cells would be missing for good, so somebody has to decide, for every shard that had cells.

    The former owner publishes nothing to it, because offsets come a second time.
    """
    log, _ = opened()
    log.publish([*cells(1, 5), *cells(1, 1, NEIGHBOUR)])
    delete_topic(kafka, datastore.topic)
    ensure_topics(kafka, datastore)
    with pytest.raises(BusUnavailable, match="lost its end"):
        log.publish(cells(6, 6))
    for shards in ("2 shards of this partition, 1", "1 shards of this partition, 3"):
        with pytest.raises(Misconfigured, match=f"created again, and {shards} is the first.*seek"):
            opened()
        PartitionLog(kafka, datastore, 1, transaction_timeout_s=20).seek([Position(SHARD, 1, 6)])
    PartitionLog(kafka, datastore, 1, transaction_timeout_s=20).seek([beginning(NEIGHBOUR)])
    assert opened()[1].positions == {SHARD: Position(SHARD, 1, 6), NEIGHBOUR: beginning(NEIGHBOUR)}


def test_topics_with_other_counts_are_refused(kafka, datastore):
    """Both numbers are told."""
    ensure_topics(kafka, datastore)
    with pytest.raises(Misconfigured, match=r"has 2 partitions.* needs 4"):
        ensure_topics(kafka, Datastore(datastore.name, 4, 4, ("a",)))


def test_an_absent_broker_is_told_in_time(datastore):
    """Neither making topics nor opening a log waits for ever."""
    nowhere = "127.0.0.1:1"
    with pytest.raises(BusUnavailable):
        ensure_topics(nowhere, datastore, timeout_s=0.5)
    log = PartitionLog(nowhere, datastore, 1, transaction_timeout_s=1.0)
    with pytest.raises(BusUnavailable):
        log.open()
    assert log.state is LogState.UNKNOWN
    log.close()
