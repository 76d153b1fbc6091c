"""Somebody raises the partitions of a topic while all runs: nothing comes twice, and everybody says so (I7, I8)."""

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.audit.report import FindingKind
from schemaless.audit.run import audit
from tests.log_harness import new_cell, put, running_tailers, wait_for_cells
from tests.topic_harness import produce_foreign
from tests.waiting import until

RAISED = "has 4 partitions, and datastore"


@pytest.fixture
def raised(kafka, make_datastore, storage):
    """raised(*which): a datastore of two partitions, with cells in each shard, whose topics are raised to four."""

    def make(which):
        datastore = make_datastore(shards=4, partitions=2)
        put(storage, datastore, [new_cell(datastore, shard=shard) for shard in range(4)])
        admin = AdminClient({"bootstrap.servers": kafka})

        def raise_now():
            topics = [NewPartitions(getattr(datastore, name), 4) for name in which]
            for done in admin.create_partitions(topics).values():
                done.result()

        return datastore, raise_now

    return make


@pytest.mark.parametrize("which", [("topic", "progress_topic"), ("topic",), ("progress_topic",)])
def test_raised_partitions_get_nothing_and_are_named(raised, which, kafka, running, storage, tmp_path, monkeypatch):
    """The tailer names the topic within seconds, goes on with its own partitions and no others, and does the same when
    it is started again. Status and audit name the topic, too.
    """
    datastore, raise_now = raised(which)
    output = tmp_path / "tailer"
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", kafka)
    with running_tailers(1, running.path, kafka, datastore, output=output) as (tailer,):
        wait_for_cells(kafka, datastore, 4)
        raise_now()
        said_by(tailer, RAISED)
        put(storage, datastore, [new_cell(datastore, shard=shard) for shard in range(4)])
        wait_for_cells(kafka, datastore, 8)
        tailer.kill_and_restart()
        put(storage, datastore, [new_cell(datastore, shard=shard) for shard in range(4)])
        assert len(wait_for_cells(kafka, datastore, 12)) == 12
        status = CliRunner().invoke(app, ["tailer", "status", datastore.name])
        assert all(f"topic {getattr(datastore, name)} {RAISED}" in status.output for name in which), status.output
        report = audit(running.topology, kafka, datastore, stall_s=5)
    assert [found.kind for found in report.findings.named] == [FindingKind.TOPIC_PARTITIONS] * len(which)
    assert report.cells()["matched"] == 12


def test_what_somebody_wrote_beyond_the_count_is_found(raised, kafka, running, storage, tailing_cells):
    """Cells of a partition beyond the datastore's count: the audit names each, and `tail` ends with status 1."""
    datastore, raise_now = raised(("topic",))
    value = tailing_cells(datastore, 4)
    raise_now()
    produce_foreign(kafka, datastore, [value], partition=3)
    report = audit(running.topology, kafka, datastore, stall_s=5)
    assert report.findings.counts[FindingKind.TOPIC_EXTRA] == 1
    found = CliRunner().invoke(
        app, ["tail", datastore.name, "--from", "beginning", "--no-follow"], env={"SCHEMALESS_KAFKA": kafka}
    )
    assert found.exit_code == 1, found.output


@pytest.fixture
def tailing_cells(running, kafka):
    """tailing_cells(datastore, count): publishes all its cells, and returns the value of one of shard 3."""

    def publish(datastore, count):
        from schemaless.codec import encode_record

        with running_tailers(1, running.path, kafka, datastore):
            return next(encode_record(cell) for cell in wait_for_cells(kafka, datastore, count) if cell.shard == 3)

    return publish


def said_by(tailer, text):
    until(lambda: text in tailer.said(), tailer.said)
