"""A master is restored from an older state and grows past what was published, while no tailer runs (I13, I16).

Real processes: tailer, API, and a subscriber that has followed from the beginning. The numbers all fit. Only the digest
of the last published cell tells that the log has another history.
"""

import time

import pytest
from typer.testing import CliRunner

from schemaless import Client, Subscriber
from schemaless.__main__ import app
from schemaless.audit.run import audit
from schemaless.bus.topics import ensure_topics
from tests.integration.api.api_harness import api_process
from tests.integration.subscriber.test_subscriber import Kept
from tests.log_harness import new_cell, put, records, restore, running_tailers, wait_for_records

pytestmark = [pytest.mark.storage, pytest.mark.faults]

LOST, OTHER = 0, 1


def write(storage, datastore, shard, count):
    put(storage, datastore, [new_cell(datastore, shard=shard) for _ in range(count)])


def await_logged(output, text, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while text not in output.read_text():
        assert time.monotonic() < deadline, f"not logged: {text}"
        time.sleep(0.05)


def test_a_restored_master_that_has_grown_again(running, kafka, storage, make_datastore, tmp_path, monkeypatch):
    """The tailer refuses the shard and publishes the other. The command ends it: the audit is clean and lists what was
    superseded, and a subscriber takes the lost cells back and gets all others.
    """
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", kafka)
    datastore = make_datastore(shards=2, partitions=1, placement=("a",))
    ensure_topics(kafka, datastore)
    output = tmp_path / "tailer"
    write(storage, datastore, LOST, 10)
    write(storage, datastore, OTHER, 2)
    with (
        api_process(running.path) as api,
        Client([f"http://127.0.0.1:{api.port}"], datastore=datastore.name) as client,
        Subscriber(kafka, datastore.name, client=client, look_pause_s=0.5) as subscriber,
    ):
        with running_tailers(1, running.path, kafka, datastore) as (tailer,):
            kept = Kept().follow(subscriber, {LOST: 10, OTHER: 2})
            wait_for_records(kafka, datastore, 12)  # a subscriber may have them from the log already
            assert tailer.stop() == 0
        restore(storage.master("a"), datastore, LOST, kept=6)
        write(storage, datastore, LOST, 7)  # up to 13: past what was published
        with running_tailers(1, running.path, kafka, datastore, output=output):
            await_logged(output, "MySQL has another history than the topic")
            write(storage, datastore, OTHER, 1)
            wait_for_records(kafka, datastore, 13)
            kept.follow(subscriber, {LOST: 10, OTHER: 3})
            assert len(records(kafka, datastore)) == 13
            arguments = ["tailer", "new-generation", datastore.name, "--shard", str(LOST)]
            opened = CliRunner().invoke(app, arguments)
            assert (opened.exit_code, "1:7 to 1:10, 4 cells" in opened.output) == (0, True), opened.output
            write(storage, datastore, LOST, 1)
            kept.follow(subscriber, {LOST: 14, OTHER: 3})
            assert [change.superseded for change in kept.changes] == [4]
            expected = [(1, n) for n in range(1, 7)] + [(2, n) for n in range(7, 15)]
            assert [(at.generation, at.added_id) for at in kept.locations[LOST]] == expected
            report = audit(running.topology, kafka, datastore, stall_s=10)
    assert (report.findings.named, report.cells()["superseded"], report.cells()["matched"]) == ([], 4, 17)
