"""What was lost around a tailer: its group, its progress, the beginning of its topic, or all of its topic (I7)."""

from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.audit.report import FindingKind
from schemaless.audit.run import audit
from schemaless.codec import decode_cell
from schemaless.errors import Misconfigured
from schemaless.names import tailer_group
from tests.log_harness import new_cell, put, records, running_tailers, wait_for_records
from tests.waiting import until

ONE, OTHER = 0, 1


class Case:
    """One datastore with one partition, its tailer process, and an administrator of the broker."""

    def __init__(self, running, kafka, storage, make_datastore, output: Path) -> None:
        self.running, self.kafka, self.storage, self.output = running, kafka, storage, output
        self.admin = AdminClient({"bootstrap.servers": kafka})
        self.datastore = make_datastore(shards=2, partitions=1)

    def tailing(self, **settings):
        return running_tailers(1, self.running.path, self.kafka, self.datastore, output=self.output, **settings)

    def write(self, shard, count):
        put(self.storage, self.datastore, [new_cell(self.datastore, shard=shard) for _ in range(count)])

    def await_published(self, count):
        return wait_for_records(self.kafka, self.datastore, count)

    def await_logged(self, text, times=1):
        until(lambda: self.output.read_text().count(text) >= times, self.output.read_text)

    def cells(self):
        """All cells that the topic shows now."""
        found = records(self.kafka, self.datastore)
        return [decode_cell(record.value) for record in found if record.kind == b"cell"]

    def delete_topic(self, topic):
        self.admin.delete_topics([topic])[topic].result()

    def cut(self, before):
        (done,) = self.admin.delete_records([TopicPartition(self.datastore.topic, 0, before)]).values()
        done.result()

    def seek(self, *arguments):
        environment = {"SCHEMALESS_TOPOLOGY": str(self.running.path), "SCHEMALESS_KAFKA": self.kafka}
        result = CliRunner().invoke(app, ["tailer", "seek", self.datastore.name, *arguments], env=environment)
        if isinstance(result.exception, Misconfigured):
            raise result.exception
        assert result.exit_code == 0, result.output

    def audit(self, stall_s=5):
        return audit(self.running.topology, self.kafka, self.datastore, stall_s=stall_s)


@pytest.fixture
def case(running, kafka, storage, make_datastore, tmp_path):
    return Case(running, kafka, storage, make_datastore, tmp_path / "tailer")


def test_progress_outlives_the_group(case):
    """The group is deleted, with all that the broker kept for it: nothing is repeated or left out."""
    case.write(ONE, 5)
    with case.tailing() as (tailer,):
        case.await_published(5)
        assert tailer.stop() == 0
    group = tailer_group(case.datastore.name)
    case.admin.delete_consumer_groups([group])[group].result()
    case.write(ONE, 2)
    with case.tailing():
        case.await_published(7)
    report = case.audit()
    assert (report.findings.named, report.cells()["matched"]) == ([], 7)


def test_what_nothing_tells_waits_for_a_seek(case):
    """No progress, and a topic whose beginning is gone: a shard without a record left is not tailed, and the seek
    that it needs is named; the other one goes on; after the seek so does this one, by itself. The audit names the
    shard and its cell that was never published, until it is.
    """
    case.write(OTHER, 3)
    with case.tailing() as (tailer,):
        case.await_published(3)
        case.write(ONE, 2)
        end = case.await_published(5)[-1].offset + 1
        assert tailer.stop() == 0
    case.cut(before=end - 2)
    case.delete_topic(case.datastore.progress_topic)
    with case.tailing():
        case.write(ONE, 1)
        case.write(OTHER, 1)
        case.await_published(3)
        case.await_logged("tailer seek DATASTORE LOCATION --shard 1")
        case.write(ONE, 1)  # published after the other shard was passed over
        case.await_published(4)
        assert {cell.shard for cell in case.cells()} == {ONE}
        found = [(finding.kind, finding.shard) for finding in case.audit(stall_s=0.5).findings.named]
        assert found == [(FindingKind.TOPIC_MISSING, OTHER), (FindingKind.PROGRESS_WRONG, OTHER)]
        case.seek("3", "--shard", "1")
        case.await_published(6)
        assert case.audit().findings.named == []
    found = sorted((cell.shard, cell.added_id) for cell in case.cells())
    assert found == [(ONE, 1), (ONE, 2), (ONE, 3), (ONE, 4), (OTHER, 4)]


def test_topics_deleted_under_a_tailer_are_made_anew_and_wait_for_a_seek(case):
    """Noticed without any cell to publish; made as the contract says; what stood there comes again only on demand."""
    case.write(ONE, 5)
    with case.tailing():
        case.await_published(5)
        case.delete_topic(case.datastore.topic)
        case.await_logged("was created again, and 1 shards")
        case.write(ONE, 2)
        refusals = case.output.read_text().count("was created again")
        case.await_logged("was created again", times=refusals + 2)  # the one in progress, and one with the new cells
        assert records(case.kafka, case.datastore) == []
        case.seek("0")
        case.await_published(8)
        with pytest.raises(Misconfigured, match="nothing is moved"):
            case.seek("0")
        report = case.audit()
    assert (report.findings.named, report.cells()["matched"]) == ([], 7)


def test_a_hanging_transaction_is_noticed_without_any_cell_to_publish(case):
    """Another program leaves a transaction open in the topic: the tailer logs what has to be done, and continues by
    itself once it was ended.
    """
    case.write(ONE, 1)
    with case.tailing(transaction_timeout_s=1.0):
        case.await_published(1)
        foreign = Producer({"bootstrap.servers": case.kafka, "transactional.id": case.datastore.name, "log_level": 0})
        foreign.init_transactions(10)
        foreign.begin_transaction()
        foreign.produce(case.datastore.topic, b"", partition=0)
        foreign.flush(10)
        case.await_logged("partitions have a hanging transaction")
        case.await_logged("that isn't this log's")
        case.write(ONE, 1)
        foreign.abort_transaction(10)
        case.await_published(2)
