"""`schemaless triggers remove`: a retired program leaves nothing behind, and one that runs stays."""

import json

import pytest
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.errors import InUse, Invalid, NotFound
from schemaless.position import Position
from schemaless.storage import checkpoint_table, worker_table
from schemaless.storage.worker_table import WorkerReport
from tests.log_harness import run_sql

pytestmark = pytest.mark.storage

PROGRAM, CONSUMER = "billing", "trigger:billing"


@pytest.fixture
def remove(running, kafka, monkeypatch):
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", kafka)

    def run(datastore, *options, answer=None):
        arguments = ["triggers", "remove", PROGRAM, "--datastore", datastore.name, *options]
        return CliRunner().invoke(app, arguments, input=answer)

    return run


@pytest.fixture
def datastore(make_datastore, storage):
    """Two clusters with a checkpoint each of the program, and of another one."""
    made = make_datastore(shards=2, partitions=1)
    for shard in (0, 1):
        for consumer in (CONSUMER, "trigger:other"):
            storage.master(made.home(shard)).run(
                checkpoint_table.make, made.name, consumer, [Position(shard, 1, 0)]
            )  # fmt: skip
    return made


def left(storage, datastore, consumer):
    rows = [storage.master(c).run(checkpoint_table.of_consumer, datastore.name, consumer) for c in datastore.clusters]
    return sum(map(len, rows))


def test_a_program_without_workers_is_removed_on_all_clusters(remove, storage, datastore):
    """Not before somebody agreed. Other programs stay."""
    assert json.loads(remove(datastore, "--dry-run", "--json").output) == {
        "program": PROGRAM, "checkpoints": 2, "finished": 0, "parked": 0, "workers": 0, "removed": False,
    }  # fmt: skip
    assert remove(datastore, answer="n\n").exit_code == 1
    assert isinstance(remove(datastore, "--json").exception, Invalid)
    assert left(storage, datastore, CONSUMER) == 2
    assert remove(datastore, answer="y\n").exit_code == 0
    assert (left(storage, datastore, CONSUMER), left(storage, datastore, "trigger:other")) == (0, 2)
    assert isinstance(remove(datastore, "--yes").exception, NotFound)


def test_a_program_with_workers_is_refused(remove, storage, datastore):
    """Also where only one cluster has seen them. A dead one's row goes with the program."""
    master = storage.master(datastore.home(1))
    master.run(worker_table.put, datastore.name, CONSUMER, 7, WorkerReport(host="here", pid=12))
    refused = remove(datastore, "--yes").exception
    assert isinstance(refused, InUse)
    assert "billing is run by 1 worker: here pid 12" in str(refused)
    assert "Stop that first" in remove(datastore, "--dry-run").output
    assert not master.run(checkpoint_table.remove, datastore.name, CONSUMER, 30.0)  # one that starts meanwhile
    assert left(storage, datastore, CONSUMER) == 2
    run_sql(master, f"UPDATE schemaless.worker SET seen_at = '2020-01-01' WHERE datastore = '{datastore.name}'")
    assert "removed" in remove(datastore, "--yes").output.splitlines()
    assert left(storage, datastore, CONSUMER) == 0
    assert master.run(worker_table.numbers_of, datastore.name, CONSUMER) == set()
