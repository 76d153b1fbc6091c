"""A master is restored from an older state and grows past what was published, while no tailer runs (I13, I16).

Real processes: tailer, API, a trigger worker, and a subscriber that has followed from the beginning. The numbers all
fit. Only the digest of the last published cell tells that the log has another history. It happens twice, and the second
backup is older than the generation that the first restore made necessary.
"""

import pytest
from typer.testing import CliRunner

from schemaless import Client, Subscriber
from schemaless.__main__ import app
from schemaless.audit.run import audit
from schemaless.bus.topics import ensure_topics
from tests.consumer_harness import running_consumer, wait_until_finished, write_program
from tests.integration.api.api_harness import production_api
from tests.integration.subscriber.test_subscriber import Kept
from tests.integration.tailer.test_new_generation import forget_generations
from tests.log_harness import new_cell, put, records, restore, running_tailers, wait_for_records
from tests.waiting import until

pytestmark = [pytest.mark.storage, pytest.mark.faults]

LOST, OTHER = 0, 1
PROGRAM = """
import pathlib
from schemaless import trigger

CALLS = (pathlib.Path(__file__).parent / "calls").open("a", buffering=1)

@trigger(column="BASE")
def note(cell):
    CALLS.write(f"{cell.location}\\n")
"""


def write(storage, datastore, shard, count):
    put(storage, datastore, [new_cell(datastore, shard=shard) for _ in range(count)])


def await_logged(output, text):
    until(lambda: text in output.read_text(), output.read_text)


def open_generation(datastore, expected):
    opened = CliRunner().invoke(app, ["tailer", "new-generation", datastore.name, "--shard", str(LOST)])
    assert opened.exit_code == 0, opened.output
    for text in expected:
        assert text in opened.output, opened.output


def test_a_restored_master_that_has_grown_again(running, kafka, storage, make_datastore, tmp_path, monkeypatch):
    """The tailer refuses the shard and publishes the other. The command ends it: the audit is clean and lists what was
    superseded, and a subscriber and a trigger program take the lost cells back and get all others. Then once more.
    """
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", kafka)
    datastore = make_datastore(shards=2, partitions=1, placement=("a",))
    master = storage.master("a")
    ensure_topics(kafka, datastore)
    program = ["consumers", write_program(tmp_path, "notes", PROGRAM), "--datastore", datastore.name]
    settings = {"topology": running.path, "kafka": kafka, "transport": "plain"}

    def tailing(output):
        return running_tailers(1, running.path, kafka, datastore, output=output)

    write(storage, datastore, LOST, 10)
    write(storage, datastore, OTHER, 2)
    with (
        production_api(running.path) as api,
        Client([f"http://127.0.0.1:{api.port}"], datastore=datastore.name) as client,
        Subscriber(kafka, datastore.name, client=client, look_pause_s=0.5) as subscriber,
        running_consumer(program, settings) as worker,
    ):
        with tailing(tmp_path / "first") as (tailer,):
            kept = Kept().follow(subscriber, {LOST: 10, OTHER: 2})
            wait_for_records(kafka, datastore, 12)  # a subscriber may have them from the log already
            wait_until_finished(storage, datastore, "trigger:notes")
            assert tailer.stop() == 0
        restore(master, datastore, LOST, kept=6)
        write(storage, datastore, LOST, 7)  # up to 13: past what was published
        with tailing(tmp_path / "second") as (tailer,):
            await_logged(tmp_path / "second", "MySQL has another history than the topic")
            write(storage, datastore, OTHER, 1)
            wait_for_records(kafka, datastore, 13)
            kept.follow(subscriber, {LOST: 10, OTHER: 3})
            assert len(records(kafka, datastore)) == 13
            open_generation(datastore, ["generation 2 begins at 7", "1:7 to 1:10, 4 cells"])
            write(storage, datastore, LOST, 1)
            kept.follow(subscriber, {LOST: 14, OTHER: 3})
            wait_for_records(kafka, datastore, 22)  # generation 2: its announcement and 8 cells
            wait_until_finished(storage, datastore, "trigger:notes")
            assert tailer.stop() == 0
        restore(master, datastore, LOST, kept=4)
        forget_generations(master, datastore)
        write(storage, datastore, LOST, 12)  # up to 16: past what was published
        with tailing(tmp_path / "third"):
            await_logged(tmp_path / "third", "MySQL has another history than the topic")
            open_generation(datastore, ["generation 3 begins at 5", "2:7 to 2:14, 8 cells", "1:5 to 1:6, 2 cells"])
            write(storage, datastore, LOST, 1)
            kept.follow(subscriber, {LOST: 17, OTHER: 3})
            wait_until_finished(storage, datastore, "trigger:notes")
            report = audit(running.topology, kafka, datastore, stall_s=10)
        assert worker.stop() == 0
    assert [change.superseded for change in kept.changes] == [4, 10]
    expected = [(1, n) for n in range(1, 5)] + [(3, n) for n in range(5, 18)]
    assert [(at.generation, at.added_id) for at in kept.locations[LOST]] == expected
    assert (report.findings.named, report.cells()["superseded"], report.cells()["matched"]) == ([], 15, 20)
    # 14 cells, and the announcement of generation 2, which the restored master doesn't know
    called = (tmp_path / "calls").read_text().split()
    histories = {1: range(1, 11), 2: range(7, 15), 3: range(5, 18)}
    assert {f"{LOST}:{generation}:{n}" for generation, ids in histories.items() for n in ids} <= set(called)
