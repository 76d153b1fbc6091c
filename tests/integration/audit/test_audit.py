"""The audit on real servers: every kind of damage is made, and must be named."""

import itertools
import json
import os
import re
import uuid
from contextlib import contextmanager

import msgspec
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.audit.consumer_audit import RESTART_S
from schemaless.audit.report import POLL_S, FindingKind, Findings, Patience
from schemaless.audit.run import IndexAudit, audit
from schemaless.bus.partition_log import PartitionLog
from schemaless.bus.topics import ensure_topics
from schemaless.cell import CellKey, row_key_text
from schemaless.codec import encode_body, encode_record
from schemaless.consume.parked_rows import head_of
from schemaless.errors import NotFound
from schemaless.index.definition import parse_definition
from schemaless.index.transition import IndexWrite, index_writes
from schemaless.location import GenerationStart, Location
from schemaless.position import Position, position_of
from schemaless.sharding import shard_of
from schemaless.storage import (
    buffer_table,
    checkpoint_table,
    index_definition_table,
    index_table,
    parked_table,
    refusal_table,
    shard_head,
    shard_log,
    tailer_order_table,
    trigger_order_table,
    worker_table,
)
from schemaless.storage.buffer_table import BufferRow, Sizes
from schemaless.storage.checkpoint_table import CellCounts, Move
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.index_definition_table import IndexOrder, IndexStage, RunState, defined
from schemaless.storage.operation import query
from schemaless.storage.parked_table import Cause
from schemaless.storage.shard_log import LogRange
from schemaless.storage.tailer_order_table import TailerCommand
from schemaless.storage.trigger_order_table import ProgramFunctions, ProgramPause
from schemaless.storage.worker_table import WorkerReport
from tests.log_harness import LOCAL_WRITE, REPLICATED_WRITE, erased_at_home, new_cell, put, restore, run_sql
from tests.topic_harness import announce, delete_before
from tests.waiting import until

pytestmark = pytest.mark.storage

CELLS = 6
MISSING, WRONG = FindingKind.MYSQL_MISSING, FindingKind.MYSQL_WRONG
UNPUBLISHED, EXTRA, DIFFERS = FindingKind.TOPIC_MISSING, FindingKind.TOPIC_EXTRA, FindingKind.TOPIC_DIFFERS
PROGRESS, OTHER = FindingKind.PROGRESS_WRONG, FindingKind.OTHER_HISTORY
BEHIND, COUNT = FindingKind.CHECKPOINT_BEHIND, FindingKind.CHECKPOINT_COUNT
PARKED = FindingKind.PARKED_DIFFERS
BILLING = "trigger:billing"
SHARD_0_OF_BILLING = f"consumer = '{BILLING}' AND shard = 0"


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
    counts = {"head": 12, "mysql": 12, "topic": 12, "matched": 12, "not_held": 0, "waiting": 0, "superseded": 0}
    assert report.cells() == counts | {"erased": 0}


def test_erased_cells_are_no_finding(audited, publish, storage, datastore, stored):
    """The topic has the body of one that was published before, and the other one as it was published after that."""
    published = stored(0)[1]
    for cell in (published, stored(0)[3]):
        erased_at_home(storage, datastore, cell.row_key)
    publish(lambda cells: [published if cell.added_id == published.added_id else cell for cell in cells])
    report = audited()
    assert (found(report), report.warnings) == ([], [])
    cells = report.cells()
    assert (cells["matched"], cells["erased"]) == (14, 2)


def test_a_minion_that_lacks_a_cell_is_named(audited, publish, admin, datastore, stored):
    """What replication skipped once is in no setting, and the heads are right."""
    publish()
    minion, last = admin.minions(datastore.home(0))[0], stored(0)[-1]
    until(lambda: minion.run(shard_log.digests, datastore, {0: last.added_id})[0] is not None)
    table = f"{datastore.database(0)}.entity"
    run_sql(minion, f"{LOCAL_WRITE}; DELETE FROM {table} WHERE added_id = 3; {REPLICATED_WRITE}")
    why = f"{minion.node.name}: {table} lacks added_id 3, although the head is beyond it"
    assert found(audited()) == [(FindingKind.MINION_LACKS, 0, why)]


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
    assert report.warnings == ["1 foreign record in the topic"]


def test_a_foreign_progress_record_is_named(audited, publish, kafka, datastore):
    """Tailers leave its partition alone, so it is a finding of the audit."""
    publish()
    producer = Producer({"bootstrap.servers": kafka})
    producer.produce(datastore.progress_topic, b"no record", b"0", partition=0)
    assert producer.flush(10) == 0
    ((kind, shard, detail),) = found(audited())
    assert (kind, shard) == (PROGRESS, -1)
    assert detail.startswith(f"{datastore.progress_topic} [0] offset ")


def test_a_consumer_behind_is_named(audited, publish, storage, datastore):
    """Its checkpoint is behind a head, or stopped there with a reason."""
    publish()
    for shard in (0, 1):
        node = storage.master(datastore.home(shard))
        node.run(checkpoint_table.make, datastore.name, "billing", [Position(shard, 1, 0)])
    move = Move("billing", 0, Position(0, 1, 6), finished=6, counts=CellCounts(called=6))
    storage.master("a").run(checkpoint_table.move, datastore.name, [move])
    stop = Move("billing", 0, Position(1, 1, 2), finished=2, stop_reason="card refused", counts=CellCounts(2))
    storage.master("b").run(checkpoint_table.move, datastore.name, [stop])
    report = audited()
    assert found(report) == [
        (FindingKind.CHECKPOINT_BEHIND, 1, "billing has finished 2 of 6 on b, stopped: card refused")
    ]
    assert [(c.name, c.cells, c.finished) for c in report.consumers] == [("billing", 12, 8)]


def nobody_runs_it(datastore):
    return f"nobody runs it. `schemaless triggers remove billing -d {datastore.name}` retires it"


def test_why_a_program_is_behind_in_all_shards_is_said_once(audited, publish, storage, datastore):
    """Not a line for each shard: nobody runs it, or it is paused. What runs has its shards named."""
    publish()
    masters = [storage.master(cluster) for cluster in datastore.clusters]
    for shard in (0, 1):
        node = storage.master(datastore.home(shard))
        node.run(checkpoint_table.make, datastore.name, BILLING, [Position(shard, 1, 0)])
    behind = [(BEHIND, -1, f"{BILLING} is behind in 2 shards: {nobody_runs_it(datastore)}")]
    report, looks = audited_with(audited, lambda look: None)
    assert (found(report), report.findings.total, looks) == (behind, 2, RESTART_S / POLL_S)
    for master in masters:
        master.run(worker_table.put, datastore.name, BILLING, 7, WorkerReport())
    assert [(shard, detail) for _, shard, detail in found(audited())] == [
        (0, f"{BILLING} has finished 0 of 6 on a"),
        (1, f"{BILLING} has finished 0 of 6 on b"),
    ]
    pause = ProgramPause(paused=True, reason=None, changed_at=1)
    masters[0].run(trigger_order_table.put_program, datastore.name, BILLING, pause)
    until = f"`schemaless triggers resume billing -d {datastore.name}`"
    with no_waiting():
        report = audited()
    assert (report.clean, report.consumers[0].finished) == (True, 0)
    assert report.warnings == [f"{BILLING} is paused. As expected, that leaves 12 cells to work on, until {until}"]


def test_a_program_that_may_live_is_none_that_nobody_runs(audited, publish, storage, datastore):
    """It was killed, or MySQL refuses its account, and it calls functions. Who reads that nobody runs it removes it."""
    publish()
    masters = [storage.master(cluster) for cluster in datastore.clusters]
    for shard in (0, 1):
        node = storage.master(datastore.home(shard))
        node.run(checkpoint_table.make, datastore.name, BILLING, [Position(shard, 1, 0)])
    for master in masters:
        master.run(worker_table.put, datastore.name, BILLING, 7, WorkerReport(host="w1", pid=42))
        master.run(
            query,
            f"UPDATE schemaless.worker SET seen_at = seen_at - INTERVAL 1 HOUR WHERE datastore = '{datastore.name}'",
        )
    report, _ = audited_with(audited, lambda look: None)
    ((_, _, detail),) = found(report)
    assert detail.startswith(f"{BILLING} is behind in 2 shards: the process 42 at w1 was seen 36")
    assert detail.endswith("s ago and didn't end cleanly: it was killed, or it can't reach MySQL")


def test_a_program_that_is_started_again_is_waited_for(audited, publish, storage, datastore):
    """A supervisor takes its time. Who reads that nobody runs a program may remove it."""
    publish()
    masters = [storage.master(cluster) for cluster in datastore.clusters]
    for shard in (0, 1):
        node = storage.master(datastore.home(shard))
        node.run(checkpoint_table.make, datastore.name, BILLING, [Position(shard, 1, 0)])

    def start(look):
        if look == 40:
            masters[0].run(worker_table.put, datastore.name, BILLING, 7, WorkerReport())
        if look == 70:
            for shard in (0, 1):
                move = Move(BILLING, 0, Position(shard, 1, 6), finished=6, counts=CellCounts(called=6))
                storage.master(datastore.home(shard)).run(checkpoint_table.move, datastore.name, [move])

    report, looks = audited_with(audited, start)
    assert (found(report), looks) == ([], 70)


def audited_with(audited, at_look):
    """Returns the report of an audit, and how often it looked again. `at_look` is called before each look."""
    looks = itertools.count(1)

    def wait(patience):
        at_look(look := next(looks))
        return look < 300

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Patience, "wait", wait)
        return audited(), next(looks) - 1


def test_a_shard_of_a_paused_program_that_stopped_is_a_finding(audited, publish, storage, datastore):
    """A resume of the program isn't enough for it."""
    publish()
    for shard in (0, 1):
        node = storage.master(datastore.home(shard))
        node.run(checkpoint_table.make, datastore.name, BILLING, [Position(shard, 1, 0)])
    stop = Move(BILLING, 0, Position(1, 1, 2), finished=2, stop_reason="why", counts=CellCounts(2))
    storage.master("b").run(checkpoint_table.move, datastore.name, [stop])
    pause = ProgramPause(paused=True, reason=None, changed_at=1)
    storage.master("a").run(trigger_order_table.put_program, datastore.name, BILLING, pause)
    assert found(audited()) == [(BEHIND, 1, f"{BILLING} has finished 2 of 6 on b, stopped: why")]


@contextmanager
def no_waiting():
    """Fails an audit that waits for something."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Patience, "wait", lambda patience: pytest.fail("it waits"))
        yield


@pytest.fixture
def pause_tailing(storage, datastore):
    def run():
        for cluster in datastore.clusters:
            storage.master(cluster).run(
                tailer_order_table.put, datastore.name, TailerCommand(paused=True, seeks=0, changed_at=1)
            )

    return run


def test_cells_that_wait_because_tailing_is_paused_are_no_finding(audited, pause_tailing, datastore):
    """Nothing was published yet. The audit says at once how much waits, that it is expected, and what ends it."""
    pause_tailing()
    with no_waiting():
        report = audited()
    assert (report.clean, report.cells()["waiting"], report.cells()["topic"]) == (True, 12, 0)
    (warning,) = report.warnings
    resume = f"`schemaless tailer resume {datastore.name}`"
    assert warning == f"tailing is paused. As expected, that leaves 12 cells to publish, until {resume}"


def test_while_tailing_is_paused_only_what_comes_after_the_progress_waits(
    audited, publish, pause_tailing, storage, datastore
):
    """A cell that was published and is missing is a finding, and so is one that differs."""
    publish(lambda cells: [cell for cell in cells if cell.added_id != 2])
    put(storage, datastore, [new_cell(datastore, {"n": 7}, 0)])
    pause_tailing()
    with no_waiting():
        report = audited()
    assert found(report) == [(UNPUBLISHED, 0, "cell 2")]
    assert report.cells()["waiting"] == 1


def test_a_program_that_did_all_that_was_published_is_not_behind_a_pause_of_tailing(
    audited, publish, pause_tailing, storage, datastore
):
    """The cells that wait for a resume reach no consumer before it."""
    publish()
    for shard in (0, 1):
        node = storage.master(datastore.home(shard))
        node.run(checkpoint_table.make, datastore.name, BILLING, [Position(shard, 1, 0)])
        move = Move(BILLING, 0, Position(shard, 1, 6), finished=6, counts=CellCounts(called=6))
        node.run(checkpoint_table.move, datastore.name, [move])
    put(storage, datastore, [new_cell(datastore, {"n": 7}, 0)])
    pause_tailing()
    with no_waiting():
        report = audited()
    assert (report.clean, report.cells()["waiting"]) == (True, 1)
    assert [(consumer.cells, consumer.finished) for consumer in report.consumers] == [(12, 12)]


def test_an_audit_waits_for_what_was_published_before_the_pause(
    audited, publish, pause_tailing, storage, kafka, datastore
):
    """A tailer that doesn't know of the pause yet publishes more. That is compared, and nothing of it is missing."""
    publish()
    put(storage, datastore, [new_cell(datastore, {"n": 7}, 1)])
    pause_tailing()
    log = PartitionLog(kafka, datastore, 0, transaction_timeout_s=20)
    log.open()
    log.publish(storage.master("b").run(shard_log.read, datastore, [LogRange(1, 6, 100)], 1 << 20)[0])
    log.close()
    report = audited()
    assert (report.clean, report.cells()["matched"], report.cells()["waiting"]) == (True, 13, 0)


def test_buffered_cells_are_a_warning(audited, publish, storage, datastore):
    """A cell that waits in a buffer breaks no promise."""
    publish()
    key = CellKey(uuid.uuid4().bytes, "BASE", 1)
    row = BufferRow(key, encode_body({}), 0, "a", int.from_bytes(os.urandom(7)))
    storage.master("b").run(buffer_table.insert, datastore, [row])
    report = audited()
    assert report.clean
    (warning,) = report.warnings
    assert re.fullmatch("1 cell in a buffer, the oldest for [0-9] s", warning)


def test_a_cell_that_its_home_refuses_is_a_warning_with_the_error(audited, publish, storage, datastore):
    """D10: the backlog's reason is seen, and not only its size. A minute later, because a restart takes less."""
    publish()
    row = BufferRow(CellKey(uuid.uuid4().bytes, "BASE", 1), encode_body({}), 0, "a", int.from_bytes(os.urandom(7)))
    here = storage.master("b")
    here.run(buffer_table.insert, datastore, [row])
    (seen,) = [one for one in here.run(all_rows) if one.key == row.key]
    here.run(refusal_table.note, {"a1: the table is gone": [seen]})
    assert len(audited().warnings) == 1
    here.run(query, "UPDATE schemaless.refusal SET refused_since = refused_since - INTERVAL 90 SECOND")
    report = audited()
    assert report.clean
    assert re.fullmatch("the home a refuses 1 buffered cell, for [0-9]+ s: a1: the table is gone", report.warnings[1])
    here.run(refusal_table.clear, [seen.buffer_id])


def all_rows():
    return buffer_table.page("a", 0, 2**63, Sizes(), rows_max=1_000_000, bytes_max=1 << 40)


INDEX = parse_definition(
    {
        "name": "by_n",
        "shard_field": "n",
        "fields": [{"name": "n", "column": "BASE", "path": "n", "type": "int"}],
        "stored": [{"name": "label", "column": "BASE", "path": "label", "type": "string"}],
    }
)


def build_index(storage, datastore, stored):
    """An index over all cells, as its maintainer leaves it: its entries, by row key."""
    cells = {shard: stored(shard) for shard in (0, 1)}
    heads = [Position(shard, 1, CELLS) for shard in (0, 1)]
    for cluster in ("a", "b"):
        node = storage.master(cluster)
        node.run(index_definition_table.bring_to, datastore.name, defined(INDEX, IndexStage.BUILDING))
        node.run(checkpoint_table.make, datastore.name, f"index:{INDEX.name}", heads)
    for shard in (0, 1):
        storage.master(datastore.home(shard)).run(index_table.create, datastore, shard, INDEX)
    for write in [write for shard in (0, 1) for write in index_writes(INDEX, 2, {}, cells[shard]).writes]:
        run_sql(storage.master(datastore.home(write.shard)), index_table.upserts(datastore, INDEX, [write]))
    return {write.row_key: write for shard in (0, 1) for write in index_writes(INDEX, 2, {}, cells[shard]).writes}


@pytest.fixture
def indexed(storage, datastore, stored):
    return build_index(storage, datastore, stored)


def test_a_whole_index_is_clean(audited, publish, indexed):
    """Every row's entry, in the shard of its shard field."""
    publish()
    report = audited()
    assert found(report) == []
    (index,) = report.indexes
    assert (index.expected, index.found, index.matched) == (12, 12, 12)


def damage(storage, datastore, indexed):
    """Takes one entry away and moves the checkpoints back: what an index that runs may not look like."""
    gone = next(write for write in indexed.values() if write.shard == 0)
    table = f"{datastore.database(0)}.index_{INDEX.name}"
    run_sql(storage.master("a"), f"DELETE FROM {table} WHERE row_key = x'{gone.row_key.hex()}'")
    for cluster in ("a", "b"):
        behind = f"UPDATE schemaless.checkpoint SET added_id = 1, digest = NULL WHERE datastore = '{datastore.name}'"
        run_sql(storage.master(cluster), behind)


@pytest.mark.parametrize(
    ("row", "warnings"),
    [
        (defined(INDEX, order=IndexOrder(RunState.PAUSED, revision=1)), ["index by_n is paused: not compared"]),
        (defined(INDEX, IndexStage.DELETING), ["index by_n is deleting: not compared"]),
        (defined(INDEX, IndexStage.GONE), []),
    ],
)
def test_an_index_that_does_not_run_is_not_at_fault(audited, publish, indexed, storage, datastore, row, warnings):
    """It is behind because somebody wanted so, and what a dropped version left is nobody's. One master may know."""
    publish()
    damage(storage, datastore, indexed)
    storage.master("b").run(index_definition_table.bring_to, datastore.name, row)
    report = audited()
    assert (found(report), report.indexes, report.consumers) == ([], [], [])
    assert report.warnings == warnings


def test_an_index_that_has_failed_is_a_finding_with_its_reason(audited, publish, indexed, storage, datastore):
    """Nothing is waited for: it stays behind until somebody resumes it."""
    publish()
    damage(storage, datastore, indexed)
    order = IndexOrder(RunState.FAILED, "its table is lost", revision=1)
    storage.master("b").run(index_definition_table.bring_to, datastore.name, defined(INDEX, IndexStage.ACTIVE, order))
    report = audited()
    assert [(finding.kind, finding.detail) for finding in report.findings.named] == [
        (FindingKind.CHECKPOINT_BEHIND, "index:by_n has failed: its table is lost")
    ]


def test_an_index_that_is_behind_says_that_no_indexer_runs(audited, publish, indexed, storage, datastore):
    """Its shards are behind on each cluster, for one reason."""
    publish()
    for cluster in datastore.clusters:
        behind = f"UPDATE schemaless.checkpoint SET added_id = 1, digest = NULL WHERE datastore = '{datastore.name}'"
        run_sql(storage.master(cluster), behind)
    details = [detail for kind, _, detail in found(audited()) if kind == BEHIND]
    assert details == ["index:by_n is behind in 4 shards: no indexer runs"]


def test_an_index_that_no_indexer_has_begun_is_waited_for(audited, publish, indexed, storage, datastore):
    """A version is defined before an indexer makes its checkpoints. Its entries are only on their way."""
    publish()
    for cluster in datastore.clusters:
        run_sql(storage.master(cluster), f"DELETE FROM schemaless.checkpoint WHERE datastore = '{datastore.name}'")
    details = [detail for kind, _, detail in found(audited()) if kind == BEHIND]
    no = "index:by_n has no checkpoint on {}, the head is 6: no indexer runs"
    assert sorted(details) == sorted(no.format(datastore.home(shard)) for shard in (0, 1))


def test_an_index_that_is_dropped_meanwhile_is_not_compared(audited, publish, indexed, storage, datastore):
    """Its tables go while the audit waits for another shard."""
    publish()
    away = f"{{}} schemaless.checkpoint SET shard = {{}} WHERE shard = {{}} AND datastore = '{datastore.name}'"
    run_sql(storage.master("a"), away.format("UPDATE", 9, 0))

    def drop(look):
        run_sql(storage.master("a"), away.format("UPDATE IGNORE", 0, 9))
        for cluster in datastore.clusters:
            dropped = defined(INDEX, IndexStage.DELETING)
            storage.master(cluster).run(index_definition_table.bring_to, datastore.name, dropped)
        storage.master(datastore.home(1)).run(index_table.drop, datastore, [1], INDEX.table)

    report, looks = audited_with(audited, drop)
    assert (found(report), report.indexes, looks) == ([], [], 1)
    assert report.warnings == ["index by_n, version 1, was dropped meanwhile: not compared"]


class Site:
    """A published datastore, ready to be damaged. `entity` and `index` are tables of shard 0, on cluster a."""

    def __init__(self, kafka, storage, datastore, stored, publish) -> None:
        self.kafka, self.storage, self.datastore = kafka, storage, datastore
        self.stored, self.publish = stored, publish
        self.entity = f"{datastore.database(0)}.entity"
        self.index = f"{datastore.database(0)}.index_{INDEX.name}"

    def sql(self, text, cluster="a"):
        run_sql(self.storage.master(cluster), text)

    def indexed_in(self, shard):
        """Builds the index, and returns an entry of a shard's table."""
        entries = build_index(self.storage, self.datastore, self.stored)
        return next(write for write in entries.values() if write.shard == shard)

    def make_checkpoints(self, consumer, **other):
        """Makes checkpoints at the heads of both shards, with their digests. `other` changes the one of shard 0."""
        for shard in (0, 1):
            at = msgspec.structs.replace(position_of(self.stored(shard)[-1]), **({} if shard else other))
            node = self.storage.master(self.datastore.home(shard))
            node.run(checkpoint_table.make, self.datastore.name, consumer, [at])

    def open_generation(self, starts_at):
        """Opens generation 2 of shard 0, as an operator does after a restore."""
        node = self.storage.master(self.datastore.home(0))
        node.run(shard_head.open_generation, self.datastore, 0, GenerationStart(2, starts_at))

    def announce(self, starts_at, generation=2):
        announce(self.kafka, self.datastore, 0, GenerationStart(generation, starts_at))

    def publish_again(self, cells):
        log = PartitionLog(self.kafka, self.datastore, 0, transaction_timeout_s=20)
        log.open()
        log.publish(cells)
        log.close()

    def lose_progress_and_beginning(self):
        """Shard 0's records are cut off, and with them the progress of both shards."""
        admin = AdminClient({"bootstrap.servers": self.kafka})
        delete_before(self.kafka, self.datastore, CELLS + 1)  # the marker of the first transaction, too
        admin.delete_topics([self.datastore.progress_topic])[self.datastore.progress_topic].result()


@pytest.fixture
def site(kafka, storage, datastore, stored, publish):
    return Site(kafka, storage, datastore, stored, publish)


def delete_a_row(site):
    site.publish()
    site.sql(f"DELETE FROM {site.entity} WHERE added_id = 3")
    return [(MISSING, "cell 3"), (EXTRA, "cell 3 is not in MySQL")]


def delete_the_last_rows(site):
    site.publish()
    site.sql(f"DELETE FROM {site.entity} WHERE added_id > 4")
    lost = [(EXTRA, "cell 5 is not in MySQL"), (EXTRA, "cell 6 is not in MySQL"), (MISSING, "cells 5 to 6")]
    return [*lost, (OTHER, "progress is at 1:6, where MySQL has no cell")]


def change_a_body(site):
    site.publish()
    site.sql(f"UPDATE {site.entity} SET body = x'{encode_body({'n': 'altered'}).hex()}' WHERE added_id = 2")
    return [(DIFFERS, "cell 2 has another content than in MySQL")]


def insert_a_row_twice(site):
    """Under the next added_id, published like any other, with a head that counts it."""
    columns = "generation, row_key, column_name, ref_key, body"
    site.sql(f"ALTER TABLE {site.entity} DROP KEY cell")
    site.sql(
        f"INSERT INTO {site.entity} (added_id, {columns}, created_at)"
        f" SELECT 7, {columns}, UTC_TIMESTAMP(6) FROM {site.entity} WHERE added_id = 3"
    )
    site.sql(f"UPDATE schemaless.shard_head SET head = 7 WHERE datastore = '{site.datastore.name}' AND shard = 0")
    site.publish()
    return [(WRONG, "the unique key is gone, so a cell may be there twice")]


def insert_a_row_by_hand(site):
    site.publish()
    site.sql(
        f"INSERT INTO {site.entity} SELECT 7, generation, row_key, column_name, 2, body, created_at, cause,"
        " erased, erased_at"
        f" FROM {site.entity} WHERE added_id = 3"
    )
    return [(WRONG, "there are cells up to 7, beyond the head 6")]


def change_a_generation(site):
    site.publish()
    site.sql(f"UPDATE {site.entity} SET generation = 2 WHERE added_id = 4")
    return [(WRONG, "cell 4 is of generation 2"), (DIFFERS, "cell 4 has another content than in MySQL")]


def set_a_time_back(site):
    site.publish()
    site.sql(f"UPDATE {site.entity} SET created_at = created_at - INTERVAL 1 DAY WHERE added_id = 4")
    return [(WRONG, "cell 4 was created before cell 3"), (DIFFERS, "cell 4 has another content than in MySQL")]


def move_a_row_to_another_shard(site):
    stray = new_cell(site.datastore, shard=1).key
    site.sql(f"UPDATE {site.entity} SET row_key = x'{stray.row_key.hex()}' WHERE added_id = 6")
    site.publish()
    return [(WRONG, f"cell 6 ({row_key_text(stray.row_key)}/BASE/1) belongs to another shard")]


def restore_a_head(site):
    site.publish()
    site.sql(f"UPDATE schemaless.shard_head SET head = 4 WHERE datastore = '{site.datastore.name}' AND shard = 0")
    beyond = "beyond the head 4"
    return [(WRONG, f"there are cells up to 6, {beyond}"), (EXTRA, f"there are records up to 6, {beyond}")]


def leave_a_hole_in_the_topic(site):
    site.publish(lambda cells: cells[:2] + cells[3:])
    return [(UNPUBLISHED, "cell 3")]


def repeat_a_record(site):
    site.publish(lambda cells: cells[:3] + cells[2:])
    return [(EXTRA, "cell 3 comes again, or after cell 3")]


def publish_all_but_the_last(site):
    site.publish(lambda cells: cells[:-1])
    return [(UNPUBLISHED, "cell 6")]


def publish_a_cell_that_mysql_lacks(site):
    site.publish()
    last = site.stored(0)[-1]
    site.publish_again([msgspec.structs.replace(last, added_id=7)])
    beyond = (EXTRA, "there are records up to 7, beyond the head 6")
    return [beyond, (OTHER, "progress is at 1:7, where MySQL has no cell")]


def move_a_checkpoint_beyond_the_head(site):
    site.publish()
    site.make_checkpoints(BILLING)
    site.sql(f"UPDATE schemaless.checkpoint SET added_id = 9, finished = 3, called = 3 WHERE {SHARD_0_OF_BILLING}")
    return [(OTHER, "the checkpoint of trigger:billing on a is at 1:9, where MySQL has no cell")]


def skip_a_cell(site):
    """A checkpoint at the head, of a program that finished one cell less."""
    site.publish()
    site.make_checkpoints(BILLING)
    site.sql(f"UPDATE schemaless.checkpoint SET counted_from = 2, finished = 3 WHERE {SHARD_0_OF_BILLING}")
    return [(COUNT, "trigger:billing went from 2 to 6 on a and finished 3 cells")]


def lose_a_count(site):
    site.publish()
    site.make_checkpoints(BILLING)
    site.sql(f"UPDATE schemaless.checkpoint SET finished = NULL WHERE {SHARD_0_OF_BILLING}")
    return [(COUNT, "trigger:billing went from 6 to 6 on a without a count of finished cells")]


def park_two_rows(site):
    """Two parked cells of shard 0, one of which holds its row with a cell behind it. One more waits for an attempt."""
    row = site.stored(0)[0].row_key
    later = ShardCell(CellKey(row, "BASE", 2), encode_body({}), 0)
    put(site.storage, site.datastore, [later])
    site.publish()
    site.make_checkpoints(BILLING)
    for cluster in site.datastore.clusters:
        functions = ProgramFunctions({"BASE": ["bill"]}, "v1")
        site.storage.master(cluster).run(trigger_order_table.claim, site.datastore.name, BILLING, functions)
    causes = {1: Cause.ERROR, 2: Cause.KILLED, 3: Cause.WAITING}
    for cell in site.stored(0)[:3]:
        record = head_of(cell, "bill", causes[cell.added_id], "ValueError", 1_700_000_000_000_000, "v1")
        site.sql(parked_table.put(site.datastore.name, BILLING, record))
    site.sql(
        "UPDATE schemaless.checkpoint SET counted_from = 0, finished = 7, called = 3, parked = 2, waiting = 2"
        f" WHERE {SHARD_0_OF_BILLING}"
    )


def lose_a_record(site):
    park_two_rows(site)
    site.sql("DELETE FROM schemaless.parked WHERE added_id = 1")
    return [
        (PARKED, "trigger:billing counts 2 parked cells and has records of 1"),
        (PARKED, "trigger:billing counts 2 waiting cells, and 1 wait"),
    ]


def lose_all_records(site):
    park_two_rows(site)
    site.sql("DELETE FROM schemaless.parked")
    return [
        (PARKED, "trigger:billing counts 2 parked cells and has records of 0"),
        (PARKED, "trigger:billing counts 2 waiting cells, and 0 wait"),
    ]


def let_go_of_a_row_by_hand(site):
    park_two_rows(site)
    site.sql("UPDATE schemaless.parked SET holds_row = 0 WHERE added_id = 1")
    return [(PARKED, "trigger:billing counts 2 waiting cells, and 1 wait")]


def leave_a_record_beyond_the_checkpoint(site):
    park_two_rows(site)
    site.sql("UPDATE schemaless.parked SET added_id = 9 WHERE added_id = 2")
    return [
        (PARKED, "trigger:billing has 1 record beyond its checkpoint"),
        (PARKED, "trigger:billing has 1 record of cells that MySQL lacks, the first of cell 9"),
    ]


def leave_a_record_of_another_cell(site):
    park_two_rows(site)
    site.sql("UPDATE schemaless.parked SET ref_key = 99 WHERE added_id = 2")
    return [(PARKED, "trigger:billing has 1 record of cells that MySQL lacks, the first of cell 2")]


def lose_the_checkpoint_of_a_record(site):
    park_two_rows(site)
    site.sql(f"DELETE FROM schemaless.checkpoint WHERE {SHARD_0_OF_BILLING}")
    return [
        (BEHIND, f"trigger:billing has no checkpoint on a, the head is 7: {nobody_runs_it(site.datastore)}"),
        (PARKED, "trigger:billing has records, and no checkpoint"),
    ]


def count_a_cell_that_is_nothing(site):
    park_two_rows(site)
    site.sql(f"UPDATE schemaless.checkpoint SET called = 4 WHERE {SHARD_0_OF_BILLING}")
    return [(COUNT, "trigger:billing went from 0 to 7 on a, finished 7 cells and says what became of 8")]


def finish_another_cell(site):
    """A checkpoint at the head, behind another cell than the one that MySQL has there."""
    site.publish()
    site.make_checkpoints(BILLING, digest=1)
    at = "the checkpoint of trigger:billing on a is at 1:6"
    return [(OTHER, f"{at} of another history: MySQL has another cell there")]


def restore_a_master(site):
    """Two cells are lost, and three others have taken their place: the head is beyond all that anybody knew."""
    site.publish()
    site.make_checkpoints(BILLING)
    restore(site.storage.master("a"), site.datastore, 0, kept=4)
    put(site.storage, site.datastore, [new_cell(site.datastore, shard=0) for _ in range(3)])
    other = "of another history: MySQL has another cell there"
    return [
        (DIFFERS, "cell 5 has another content than in MySQL"),
        (DIFFERS, "cell 6 has another content than in MySQL"),
        (UNPUBLISHED, "cell 7"),
        (BEHIND, f"trigger:billing has finished 6 of 7 on a: {nobody_runs_it(site.datastore)}"),
        (OTHER, f"progress is at 1:6 {other}"),
        (OTHER, f"the checkpoint of trigger:billing on a is at 1:6 {other}"),
    ]


def leave_a_checkpoint_in_a_former_generation(site):
    """At 1:9, with generation 2 from 5: two cells were not finished, although 6 is below 9."""
    site.publish()
    site.make_checkpoints(BILLING, added_id=9)
    site.open_generation(5)
    site.announce(5)
    site.publish_again(site.stored(0)[4:])
    cause = nobody_runs_it(site.datastore)
    return [(BEHIND, f"trigger:billing has finished 4 of 6 on a, 1:9 is superseded: {cause}")]


def publish_a_superseded_cell(site):
    """It comes after the announcement of the generation that superseded it."""
    site.publish()
    late = site.stored(0)[-1]
    site.open_generation(5)
    site.announce(5)
    site.publish_again([late, *site.stored(0)[4:]])
    offset = 2 * CELLS + 2 + 2  # behind two transactions, the announcement, and a marker of each
    return [(EXTRA, f"offset {offset}: cell 1:6 comes after the generation that superseded it")]


def announce_no_generation(site):
    site.publish()
    site.open_generation(5)
    site.publish_again(site.stored(0)[4:])
    return [(UNPUBLISHED, "announcement of generation 2")]


def announce_a_generation_twice(site):
    site.publish()
    site.open_generation(5)
    site.announce(5)
    site.announce(5)
    site.publish_again(site.stored(0)[4:])
    return [(EXTRA, "generation 2 is announced 2 times")]


def lose_progress_and_the_beginning(site):
    """All that is left are the records of shard 1. A cell that was written later was never published."""
    site.publish()
    site.lose_progress_and_beginning()
    put(site.storage, site.datastore, [new_cell(site.datastore, shard=0)])
    nothing = "nothing shows how much was published: the topic's beginning and the progress record are gone"
    return [(PROGRESS, nothing), (UNPUBLISHED, "cell 7")]


def delete_an_entry(site):
    site.publish()
    gone = site.indexed_in(0).row_key
    site.sql(f"DELETE FROM {site.index} WHERE row_key = x'{gone.hex()}'")
    return [(FindingKind.INDEX_MISSING, f"index by_n: row {row_key_text(gone)}")]


def make_an_entry_stale(site):
    site.publish()
    stale = site.indexed_in(0).row_key
    site.sql(f"UPDATE {site.index} SET n = n + 1000 WHERE row_key = x'{stale.hex()}'")
    return [(FindingKind.INDEX_DIFFERS, f"index by_n: row {row_key_text(stale)}")]


def damage_a_text(site):
    """It is no UTF-8 any more."""
    site.publish()
    damaged = site.indexed_in(0).row_key
    site.sql(f"UPDATE {site.index} SET label = x'ff' WHERE row_key = x'{damaged.hex()}'")
    return [(FindingKind.INDEX_DIFFERS, f"index by_n: row {row_key_text(damaged)}")]


def write_a_ghost(site):
    """An entry of a row that belongs into the table of the other shard."""
    site.publish()
    ghost = site.indexed_in(1)
    stray = IndexWrite(0, ghost.row_key, ghost.version, ghost.entry)
    site.sql(index_table.upserts(site.datastore, INDEX, [stray]))
    return [(FindingKind.INDEX_EXTRA, f"index by_n: row {row_key_text(ghost.row_key)}")]


@pytest.mark.parametrize(
    "plant",
    [
        delete_a_row,
        delete_the_last_rows,
        change_a_body,
        insert_a_row_twice,
        insert_a_row_by_hand,
        change_a_generation,
        set_a_time_back,
        move_a_row_to_another_shard,
        restore_a_head,
        leave_a_hole_in_the_topic,
        repeat_a_record,
        publish_all_but_the_last,
        publish_a_cell_that_mysql_lacks,
        move_a_checkpoint_beyond_the_head,
        skip_a_cell,
        lose_a_count,
        lose_a_record,
        lose_all_records,
        let_go_of_a_row_by_hand,
        leave_a_record_beyond_the_checkpoint,
        leave_a_record_of_another_cell,
        lose_the_checkpoint_of_a_record,
        count_a_cell_that_is_nothing,
        finish_another_cell,
        restore_a_master,
        leave_a_checkpoint_in_a_former_generation,
        publish_a_superseded_cell,
        announce_no_generation,
        announce_a_generation_twice,
        lose_progress_and_the_beginning,
        delete_an_entry,
        make_an_entry_stale,
        damage_a_text,
        write_a_ghost,
    ],
)
def test_planted_damage_is_named(site, audited, plant):
    """Each kind of damage is found in shard 0, by its cell or row, and nothing else is."""
    expected = plant(site)
    assert sorted(found(audited())) == sorted((kind, 0, detail) for kind, detail in expected)


def test_parked_cells_are_a_warning_with_the_command_that_lists_them(site, audited):
    """They break no promise. A cell of a version whose columns nobody knows any longer is no fault either."""
    park_two_rows(site)
    for _ in range(2):
        report = audited()
        assert found(report) == []
        (warning,) = report.warnings
        listed = f"schemaless parked list billing --datastore {site.datastore.name}"
        assert re.fullmatch(f"trigger:billing has 2 parked cells, the oldest for [0-9]+ s: {listed}", warning)
        (billing,) = report.document()["consumers"]
        assert (billing["parked"], billing["waiting"]) == (2, 2)
        site.sql("UPDATE schemaless.parked SET version = 'v0'")
        site.sql("UPDATE schemaless.trigger_program SET functions = '{}'")


def test_progress_beyond_what_the_topic_lost_is_named(site, audited):
    """One cell of shard 0 was published and is cut off. Progress that was moved to its head covers no more than that,
    and the marker behind it.
    """
    site.publish(lambda cells: cells[:1])
    delete_before(site.kafka, site.datastore, 2)
    log = PartitionLog(site.kafka, site.datastore, 0, transaction_timeout_s=20)
    log.seek([position_of(site.stored(0)[-1])])
    log.close()
    name = f"{site.datastore.topic} [0]"
    detail = f"progress counts {CELLS} cells that {name} doesn't hold, and the topic has lost 2 offsets"
    report = audited()
    assert (found(report), report.findings.total) == ([(UNPUBLISHED, -1, detail)], 4)


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
