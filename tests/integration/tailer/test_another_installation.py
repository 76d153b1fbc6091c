"""Topics that another installation has claimed: nothing of ours joins its groups or publishes (I20)."""

import dataclasses
import subprocess
import sys

import pytest
from confluent_kafka.admin import AdminClient

from schemaless import Client, Subscriber
from schemaless.bus.partition_log import LogState, PartitionLog
from schemaless.bus.topics import ensure_topics
from schemaless.errors import AnotherInstallation
from schemaless.names import indexer_group, tailer_group, trigger_group
from tests.consumer_harness import running_consumer, write_program
from tests.log_harness import new_cell, put, records, running_tailers, wait_for_records
from tests.topic_harness import stored_cell
from tests.waiting import until

OTHER = "0123456789abcdef"
PROGRAM = """
from schemaless import trigger

@trigger(column="BASE")
def called(cell):
    raise AssertionError("a cell of another installation")
"""


@pytest.fixture
def taken(kafka, storage, make_datastore):
    """A datastore with cells, whose name another installation gave to one of its own before."""
    made = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, dataclasses.replace(made, installation=OTHER))
    put(storage, made, [new_cell(made) for _ in range(20)])
    return made


def members(kafka, group):
    admin = AdminClient({"bootstrap.servers": kafka})
    return admin.describe_consumer_groups([group])[group].result().members


def test_no_process_of_ours_joins_or_publishes(running, kafka, taken, tmp_path):
    """The log of the other one stays open meanwhile: nobody has fenced it."""
    theirs = PartitionLog(kafka, dataclasses.replace(taken, installation=OTHER), 0, transaction_timeout_s=20)
    theirs.open()
    theirs.publish([stored_cell(0, 1)])
    program = write_program(tmp_path, "foreign", PROGRAM)
    settings = {"topology": running.path, "kafka": kafka, "metrics_port": 0, "datastores": taken.name}
    indexer, worker = (tmp_path / name for name in ("indexer.log", "worker.log"))
    with (
        running_tailers(1, running.path, kafka, taken, output=tmp_path / "tailer.log") as (tailer,),
        indexer.open("w") as indexing,
        worker.open("w") as working,
        running_consumer(["indexer"], settings, stdout=indexing) as indexes,
        running_consumer(["consumers", program, "--datastore", taken.name], settings, stdout=working) as calls,
    ):
        until(lambda: "another installation, 0123456789abcdef" in tailer.said(), tailer.said)
        assert until(indexes.process.poll) == until(calls.process.poll) == 1
        for log in (indexer, worker):
            assert "another installation, 0123456789abcdef" in log.read_text()
        groups = (tailer_group(taken.name), indexer_group(taken.name), trigger_group(taken.name, "foreign"))
        assert [members(kafka, group) for group in groups] == [[], [], []]
        theirs.publish([stored_cell(0, 2)])
        assert tailer.stop() == 0
    assert theirs.state is LogState.OPEN
    theirs.close()
    assert len(records(kafka, taken)) == 2


@pytest.mark.parametrize(
    "command",
    [
        ["tailer", "status", "DATASTORE"],
        ["tailer", "seek", "DATASTORE", "0"],
        ["tailer", "new-generation", "DATASTORE", "--shard", "0"],
        ["audit", "DATASTORE"],
    ],
    ids=lambda command: command[-1] if command[0] == "audit" else command[1],
)
def test_commands_refuse_it(running, kafka, taken, monkeypatch, command):
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", kafka)
    arguments = [taken.name if part == "DATASTORE" else part for part in command]
    done = subprocess.run(
        [sys.executable, "-m", "schemaless", *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, "belongs to another installation, 0123456789abcdef" in done.stderr) == (1, True), done
    assert "new-generation" not in done.stderr


def test_a_subscriber_refuses_it(api, kafka, taken):
    """It asks the hosts whose cells they have."""
    with Client([f"http://127.0.0.1:{api.port}"], datastore=taken.name) as client:
        assert client.document("/topology")["installation"] == taken.installation
        with pytest.raises(AnotherInstallation, match="another installation, 0123456789abcdef"):
            Subscriber(kafka, taken.name, client=client)


def test_it_goes_on_once_the_topics_are_gone(running, kafka, taken, tmp_path):
    """As where the other one is given another Kafka."""
    with running_tailers(1, running.path, kafka, taken, output=tmp_path / "tailer.log") as (tailer,):
        until(lambda: "another installation" in tailer.said(), tailer.said)
        admin = AdminClient({"bootstrap.servers": kafka})
        for deleted in admin.delete_topics([taken.topic, taken.progress_topic]).values():
            deleted.result()
        wait_for_records(kafka, taken, 20)
