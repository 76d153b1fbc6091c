"""The audit on real servers: every kind of damage is made, and must be named."""

import json
import os
import uuid

import pytest
from confluent_kafka import Producer
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.audit.index_audit import IndexAudit
from schemaless.audit.report import FindingKind, Findings
from schemaless.audit.run import audit
from schemaless.bus.partition_log import PartitionLog
from schemaless.bus.topics import ensure_topics
from schemaless.cell import CellKey, row_key_text
from schemaless.codec import encode_body, encode_record
from schemaless.errors import NotFound
from schemaless.index.definition import parse_definition
from schemaless.index.transition import IndexWrite, index_writes
from schemaless.location import Location
from schemaless.position import Position
from schemaless.sharding import shard_of
from schemaless.storage import buffer_table, checkpoint_table, index_definition_table, index_table, shard_log
from schemaless.storage.buffer_table import BufferRow
from schemaless.storage.checkpoint_table import Move
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.shard_log import LogRange
from tests.log_harness import new_cell, put, run_sql

pytestmark = pytest.mark.storage

CELLS = 6


@pytest.fixture
def datastore(make_datastore, kafka, storage):
    """Two shards of one partition, with six cells each."""
    made = make_datastore(shards=2, partitions=1)
    ensure_topics(kafka, made)
    put(storage, made, [new_cell(made, {"n": n}, shard) for n in range(CELLS) for shard in (0, 1)])
    return made


@pytest.fixture
def stored(storage, datastore):
    """Cells of a shard as MySQL holds them."""

    def read(shard):
        node = storage.master(datastore.home(shard))
        return node.run(shard_log.read, datastore, [LogRange(shard, 0, 100)], 1 << 20)[0]

    return read


@pytest.fixture
def publish(kafka, datastore, stored):
    """Publishes all cells, shard 0 as `change` makes it."""

    def run(change=lambda cells: cells):
        log = PartitionLog(kafka, datastore, 0, transaction_timeout_s=20)
        log.open()
        for cells in (change(stored(0)), stored(1)):
            log.publish(cells)
        log.close()

    return run


@pytest.fixture
def audited(running, kafka, datastore):
    def run(stall_s=0.5):
        return audit(running.topology, kafka, datastore, stall_s=stall_s)

    return run


def found(report):
    return [(finding.kind, finding.shard, finding.detail) for finding in report.findings.named]


def test_a_whole_datastore_is_clean(audited, publish):
    """Nothing found; every cell counted on both sides."""
    publish()
    report = audited()
    assert (found(report), report.warnings, report.clean) == ([], [], True)
    assert report.cells() == {"head": 12, "mysql": 12, "topic": 12, "matched": 12, "not_held": 0, "superseded": 0}


def test_a_deleted_row_is_named(audited, publish, storage, datastore):
    """Missing in MySQL, and its record in the topic belongs to nothing."""
    publish()
    run_sql(storage.master("a"), f"DELETE FROM {datastore.database(0)}.entity WHERE added_id = 3")
    assert found(audited()) == [
        (FindingKind.MYSQL_MISSING, 0, "cell 3"),
        (FindingKind.TOPIC_EXTRA, 0, "cell 3 is not in MySQL"),
    ]


def test_rows_deleted_at_the_end_are_named(audited, publish, storage, datastore):
    """The head tells how many there were."""
    publish()
    run_sql(storage.master("a"), f"DELETE FROM {datastore.database(0)}.entity WHERE added_id > 4")
    report = audited()
    assert (FindingKind.MYSQL_MISSING, 0, "cells 5 to 6") in found(report)
    assert report.findings.counts[FindingKind.MYSQL_MISSING] == 2


def test_an_altered_body_is_named(audited, publish, storage, datastore):
    """Another content under the same added_id."""
    publish()
    body = encode_body({"n": "altered"}).hex()
    run_sql(storage.master("a"), f"UPDATE {datastore.database(0)}.entity SET body = x'{body}' WHERE added_id = 2")
    assert found(audited()) == [(FindingKind.TOPIC_DIFFERS, 0, "cell 2 has another content than in MySQL")]


@pytest.mark.parametrize(
    ("damage", "detail"),
    [
        ("created_at = created_at - INTERVAL 1 DAY", "cell 4 was created before cell 3"),
        ("generation = 2", "cell 4 is of generation 2"),
    ],
)
def test_a_log_out_of_order_is_named(audited, publish, storage, datastore, damage, detail):
    """created_at never decreases (I4), a generation lasts until the next one starts (I13)."""
    run_sql(storage.master("a"), f"UPDATE {datastore.database(0)}.entity SET {damage} WHERE added_id = 4")
    publish(lambda cells: [c for c in cells if c.added_id < 4])
    assert (FindingKind.MYSQL_WRONG, 0, detail) in found(audited())


def test_a_cell_of_another_shard_is_named(audited, publish, storage, datastore):
    """A row key has one shard for ever (I2)."""
    stray = new_cell(datastore, shard=1).key.row_key.hex()
    run_sql(storage.master("a"), f"UPDATE {datastore.database(0)}.entity SET row_key = x'{stray}' WHERE added_id = 1")
    publish()
    ((kind, shard, detail),) = found(audited())
    assert (kind, shard) == (FindingKind.MYSQL_WRONG, 0)
    assert detail.endswith("belongs to another shard")


def test_what_a_restored_head_leaves_is_named(audited, publish, storage, datastore):
    """MySQL lost its last cells, or only the head's last moves: nothing may lie beyond a head."""
    publish()
    behind = f"UPDATE schemaless.shard_head SET head = 4 WHERE datastore = '{datastore.name}' AND shard = 0"
    run_sql(storage.master("a"), behind)
    in_topic = (FindingKind.TOPIC_EXTRA, 0, "there are records up to 6, beyond the head 4")
    assert found(audited()) == [(FindingKind.MYSQL_WRONG, 0, "there are cells up to 6, beyond the head 4"), in_topic]
    run_sql(storage.master("a"), f"DELETE FROM {datastore.database(0)}.entity WHERE added_id > 4")
    assert found(audited()) == [in_topic]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda cells: cells[:2] + cells[3:], [(FindingKind.TOPIC_MISSING, 0, "cell 3")]),
        (lambda cells: cells[:3] + cells[2:], [(FindingKind.TOPIC_EXTRA, 0, "cell 3 comes again, or after cell 3")]),
        (lambda cells: cells[:-1], [(FindingKind.TOPIC_MISSING, 0, "cell 6")]),
    ],
    ids=["dropped", "repeated", "late"],
)
def test_a_topic_that_differs_is_named(audited, publish, change, expected):
    """A record dropped, repeated, or still missing after the time for waiting is over."""
    publish(change)
    assert found(audited()) == expected


def test_records_that_break_the_contract_are_named(audited, publish, stored, kafka, datastore):
    """Wrong key, headers and timestamp; bytes that are no record; foreign kinds are only counted."""
    (last, *_) = reversed(stored(0))
    publish(lambda cells: cells[:-1])
    producer = Producer({"bootstrap.servers": kafka})
    cell = [("v", b"1"), ("kind", b"cell")]
    producer.produce(datastore.topic, encode_record(last), b"wrong", partition=0, headers=cell)
    producer.produce(datastore.topic, b"no record", partition=0, headers=cell)
    producer.produce(datastore.topic, b"{}", partition=0, headers=[("kind", b"later")])
    assert producer.flush(10) == 0
    report = audited()
    details = [(kind, detail) for kind, _, detail in found(report)]
    assert details[0][0] == FindingKind.TOPIC_DIFFERS
    assert details[0][1].endswith("wrong key, timestamp, header column")
    assert details[1][0] == FindingKind.TOPIC_EXTRA
    assert "not a cell record" in details[1][1]
    assert report.warnings == ["1 records in the topic are not ours"]


def test_a_consumer_behind_is_named(audited, publish, storage, datastore):
    """Its checkpoint is behind a head, or stopped there with a reason."""
    publish()
    for shard in (0, 1):
        node = storage.master(datastore.home(shard))
        node.run(checkpoint_table.make, datastore.name, "billing", [Position(shard, 1, 0)])
    move = Move("billing", 0, Position(0, 1, 6), finished=6)
    storage.master("a").run(checkpoint_table.move, datastore.name, [move])
    stop = Move("billing", 0, Position(1, 1, 2), finished=2, stop_reason="card refused")
    storage.master("b").run(checkpoint_table.move, datastore.name, [stop])
    report = audited()
    assert found(report) == [
        (FindingKind.CHECKPOINT_BEHIND, 1, "billing has finished 2 of 6 on b, stopped: card refused")
    ]
    assert [(c.name, c.cells, c.finished) for c in report.consumers] == [("billing", 12, 8)]


def test_buffered_cells_are_a_warning(audited, publish, storage, datastore):
    """A cell that waits in a buffer breaks no promise."""
    publish()
    key = CellKey(uuid.uuid4().bytes, "BASE", 1)
    row = BufferRow(key, encode_body({}), 0, "a", int.from_bytes(os.urandom(7)))
    storage.master("b").run(buffer_table.insert, datastore, [row])
    report = audited()
    assert (report.clean, report.warnings) == (True, ["1 cells wait in buffers"])


INDEX = parse_definition(
    {
        "name": "by_n",
        "shard_field": "n",
        "fields": [{"name": "n", "column": "BASE", "path": "n", "type": "int"}],
    }
)


@pytest.fixture
def indexed(storage, datastore, stored):
    """An index over all cells, as its maintainer leaves it."""
    cells = {shard: stored(shard) for shard in (0, 1)}
    heads = [Position(shard, 1, CELLS) for shard in (0, 1)]
    for cluster in ("a", "b"):
        node = storage.master(cluster)
        node.run(index_definition_table.insert, datastore.name, INDEX)
        node.run(index_definition_table.begin_build, datastore.name, INDEX.name, {})
        node.run(checkpoint_table.make, datastore.name, f"index:{INDEX.name}", heads)
    for shard in (0, 1):
        storage.master(datastore.home(shard)).run(index_table.create, datastore, shard, INDEX)
    for write in [write for shard in (0, 1) for write in index_writes(INDEX, 2, {}, cells[shard])]:
        run_sql(storage.master(datastore.home(write.shard)), index_table.upserts(datastore, INDEX, [write]))
    return {write.row_key: write for shard in (0, 1) for write in index_writes(INDEX, 2, {}, cells[shard])}


def test_a_whole_index_is_clean(audited, publish, indexed):
    """Every row's entry, in the shard of its shard field."""
    publish()
    report = audited()
    assert found(report) == []
    (index,) = report.indexes
    assert (index.expected, index.found, index.matched) == (12, 12, 12)


def test_damages_of_an_index_are_named(audited, publish, indexed, storage, datastore):
    """An entry missing, one altered, one where its row has none."""
    publish()
    gone, altered, moved = [write for write in indexed.values() if write.shard == 0][:3]
    node, table = storage.master("a"), f"{datastore.database(0)}.index_{INDEX.name}"
    run_sql(node, f"DELETE FROM {table} WHERE row_key = x'{gone.row_key.hex()}'")
    run_sql(node, f"UPDATE {table} SET n = n + 1000 WHERE row_key = x'{altered.row_key.hex()}'")
    stray = IndexWrite(1, moved.row_key, moved.version, moved.entry)
    run_sql(storage.master("b"), index_table.upserts(datastore, INDEX, [stray]))

    def row(write):
        return f"index by_n: row {row_key_text(write.row_key)}"

    assert set(found(audited())) == {
        (FindingKind.INDEX_MISSING, 0, row(gone)),
        (FindingKind.INDEX_DIFFERS, 0, row(altered)),
        (FindingKind.INDEX_EXTRA, 1, row(moved)),
    }


def test_a_row_that_went_on_hides_no_extra_entry(indexed, storage, datastore):
    """One entry left a shard since the heads were fixed, another stands there wrongly: the counts are as expected."""
    (left, *_), (stray, *_) = [[write for write in indexed.values() if write.shard == shard] for shard in (0, 1)]
    source = shard_of(left.row_key, datastore.shards)
    put(storage, datastore, [ShardCell(CellKey(left.row_key, "BASE", 2), encode_body({}), source)])
    gone = IndexWrite(0, left.row_key, Location(1, CELLS + 1), None)
    wrong = IndexWrite(0, stray.row_key, stray.version, stray.entry)
    run_sql(storage.master("a"), index_table.upserts(datastore, INDEX, [gone, wrong]))
    findings = Findings()
    report = IndexAudit(storage, datastore, INDEX, {0: CELLS, 1: CELLS}, findings).run()
    assert [(f.kind, f.shard) for f in findings.named] == [(FindingKind.INDEX_EXTRA, 0)]
    assert report.moved_on == 1


def test_the_command_tells_and_exits_as_the_audit_found(running, kafka, datastore, publish, monkeypatch):
    """Status 0 and JSON when clean; status 1 and the missing cell when not; an unknown datastore is an error."""
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", kafka)
    publish(lambda cells: cells[:-1])
    runner = CliRunner()
    told = runner.invoke(app, ["audit", datastore.name, "--wait", "0.2"])
    assert told.exit_code == 1
    assert "missing in the topic: shard 0: cell 6" in told.output
    publish(lambda cells: cells[-1:])
    document = runner.invoke(app, ["audit", datastore.name, "--json", "--wait", "0.2"])
    assert document.exit_code == 1  # shard 1 was published twice
    assert json.loads(document.output)["datastores"][0]["findings_by_kind"] == {"extra in the topic": 6}
    assert isinstance(runner.invoke(app, ["audit", "nowhere"]).exception, NotFound)
