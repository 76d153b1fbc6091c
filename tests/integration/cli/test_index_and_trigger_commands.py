"""`schemaless index` and `schemaless triggers` on a running system, with the billing program of the source texts."""

import json
import os
import subprocess
import sys
import uuid

import pytest
import yaml
from typer.testing import CliRunner

from examples.card_processor import failures_of
from schemaless import Client
from schemaless.__main__ import app
from schemaless.bus.topics import ensure_topics
from schemaless.config import IndexerSettings
from schemaless.demo.programs import count_effects, read_calls
from schemaless.stack.plan import free_ports
from tests.consumer_harness import running_consumer
from tests.environment import environment_of
from tests.integration.api.api_harness import ROOT
from tests.log_harness import running_tailers
from tests.waiting import until

MAIN = "from schemaless.__main__ import main; main()"
CARRIERS = ("HA", "UA")
DEFINITION = {
    "name": "by_tail",
    "shard_field": "tailnum",
    "fields": [
        {"name": "tailnum", "column": "BASE", "path": "tailnum", "type": "string", "length": 16},
        {"name": "time_hour", "column": "BASE", "path": "time_hour", "type": "datetime"},
    ],
    "stored": [{"name": "result", "column": "STATUS", "path": "result", "type": "string", "length": 16}],
}


@pytest.fixture(scope="module")
def datastore(make_datastore, kafka):
    made = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, made)
    return made


@pytest.fixture(scope="module")
def settings(running, kafka, api, datastore):
    return {
        "topology": running.path,
        "kafka": kafka,
        "hosts": f"http://127.0.0.1:{api.port}",
        "datastores": datastore.name,
    }


@pytest.fixture(scope="module")
def environment(settings):
    return os.environ | environment_of(IndexerSettings, settings)


@pytest.fixture(scope="module", autouse=True)
def log_processes(running, kafka, datastore, settings):
    """A tailer and an indexer."""
    with running_tailers(1, running.path, kafka, datastore), running_consumer(["indexer"], settings):
        yield


@pytest.fixture
def command(environment, datastore):
    """Runs `schemaless …` and gives what it printed."""

    def run(*arguments, status=0):
        line = [sys.executable, "-c", MAIN, *arguments, "--datastore", datastore.name]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    return run


def flights(client, count):
    """Row keys by carrier; every second flight of each plane."""
    rows = {carrier: [] for carrier in CARRIERS}
    for n in range(count):
        row, carrier = uuid.uuid4(), CARRIERS[n % 2]
        base = {"carrier": carrier, "tailnum": f"N{n % 4}", "time_hour": f"2013-01-{n % 28 + 1:02}T05:00:00Z"}
        client.put_cells([(row, "BASE", 1, base), (row, "STATUS", 1, {"dep_delay": n})])
        rows[carrier].append(row)
    return rows


@pytest.fixture
def index(environment, datastore):
    """Runs `schemaless index COMMAND by_tail …` in this process, and gives what it printed or raised."""

    def run(name, *arguments, fails=False):
        line = ["index", name, "by_tail", *arguments, "--datastore", datastore.name]
        done = CliRunner().invoke(app, line, env=environment)
        assert (done.exit_code != 0) is fails, done.output
        return done.exception if fails else done.output

    return run


@pytest.mark.timeout(300)  # about thirty commands, and each is a process that imports everything
def test_an_index_from_a_file_is_awaited_listed_and_asked(tmp_path, command, index, datastore, settings):
    """create, wait, status, list and query, as text and as JSON; a mistake is one line and exit code 1."""
    file = tmp_path / "by_tail.yaml"
    file.write_text(yaml.safe_dump(DEFINITION))
    broken = tmp_path / "broken.yaml"
    broken.write_bytes(b"name: \xff")
    assert "UTF-8" in command("index", "create", str(broken), status=1)
    with Client([settings["hosts"]], datastore=datastore.name) as client:
        rows = flights(client, 8)
    assert "by_tail" in command("index", "create", str(file))
    assert "by_tail active" in command("index", "wait", "by_tail", "--timeout", "30")
    assert "by_tail active" in command("index", "list")
    assert json.loads(command("index", "status", "by_tail", "--json"))["definition"]["shard_field"] == "tailnum"
    found = until(
        lambda: json.loads(
            command("index", "query", "by_tail", "tailnum=N1", "time_hour.lt=2013-01-03T00:00:00Z", "--json")
        )["entries"]
    )
    assert [entry["row_key"] for entry in found] == [str(rows["UA"][0])]
    assert "N1" in command("index", "query", "by_tail", "tailnum=N1", "limit=1")
    assert "tailnum=N1, time_hour=2013-01-02T05:00:00.000000Z, result=None" in command("explain", str(rows["UA"][0]))
    assert "0 values don't fit" in command("index", "problems", "by_tail", "--limit", "5")
    assert json.loads(command("index", "problems", "by_tail", "--json"))["problems"] == []
    assert "shard field" in command("index", "query", "by_tail", "limit=1", status=1)
    both = ("tailnum=N1", "tailnum=N3", "order=time_hour", "explain=true", "--json")
    shown = json.loads(command("index", "query", "by_tail", *both))
    assert len(shown["entries"]) == 4
    assert shown["freshness"]["complete_until"]
    assert "index_by_tail" in shown["explain"][0]["sql"]
    assert "version 1, 4 shards would be paused" in index("pause", "--dry-run")
    assert "by_tail paused" in index("pause")
    assert "index resume by_tail" in index("status")
    assert "at most 500 cells" in index("throttle", "--cells-per-s", "500")
    slowed = index("throttle", "--build-busy-share", "0.05", "--build-commit-max-s", "0.5")
    assert "at most 500 cells" in slowed
    assert "works 0.05 of the time" in slowed
    assert "cells_per_s" in str(index("throttle", fails=True))
    assert "at most" not in index("throttle", "--reset")
    assert "is paused" in command("index", "wait", "by_tail", status=3)
    assert "by_tail active" in index("resume")
    assert "has 1\n" in index("problems", "--version", "7", fails=True).args[0] + "\n"
    assert "version 1, 4 shards would be deleted" in index("drop", "--dry-run")
    assert "by_tail active" in index("status")
    assert index("drop") == "by_tail deleted\n"
    assert "NotFound" in repr(index("drop", fails=True))
    assert "by_tail of" in (dropped := command("index", "wait", "by_tail", status=3))
    assert "was dropped" in dropped
    assert "there is no index 'never'" in command("index", "wait", "never", status=3)


def test_billing_bills_every_flight_of_its_carrier_once(tmp_path, command, environment, datastore, settings):
    """Two workers, a processor that fails for one card in four: each flight of HA ends completed, UA untouched."""
    (port,) = free_ports(1)
    charges = tmp_path / "charges"
    processor = ["examples.card_processor", "--port", str(port), "--charges", str(charges)]
    billing = environment | {
        "BILLING_CARRIER": "HA",
        "BILLING_DIR": str(tmp_path / "bills"),
        "CARD_PROCESSOR": f"http://127.0.0.1:{port}",
    }
    arguments = ["triggers", "run", "examples.billing", "--datastore", datastore.name, "--workers", "2"]
    line = [sys.executable, "-c", MAIN, *arguments]
    with (
        Client([settings["hosts"]], datastore=datastore.name) as client,
        running_consumer(processor, {}),
        subprocess.Popen(line, cwd=ROOT, env=billing) as workers,
    ):
        try:
            rows = flights(client, 40)
            until(lambda: all(client.get_cell_latest(row, "STATUS").is_completed for row in rows["HA"]))
            newest = [client.get_cell_latest(row, "STATUS") for row in rows["HA"]]
            assert {(cell.ref_key, cell.result, cell.dep_delay is not None) for cell in newest} == {
                (2, "SUCCESS", True)
            }
            assert {client.get_cell_latest(row, "STATUS").ref_key for row in rows["UA"]} == {1}
            assert "billing" in command("triggers", "list")
            until(lambda: "billing: running, 0 cells (" in command("triggers", "status", "billing"))
            assert "resumed: 0 stopped shards, 0 paused shards" in command("triggers", "resume", "billing")
            assert "shards would be paused. 2 workers would obey" in command(
                "triggers", "pause", "billing", "--dry-run"
            )
            command("triggers", "pause", "billing")
            assert "would be resumed: the whole program\n" in command("triggers", "resume", "billing", "--dry-run")
            assert "resumed: the whole program\n" in command("triggers", "resume", "billing")
            calls = read_calls(tmp_path)
            ways = "program billing: running, 2 workers"  # one that ended is counted for half a minute
            until(lambda: ways in command("explain", str(rows["HA"][0])))
            told = command("explain", str(rows["HA"][0]))
            assert "caused by billing/bill_rider@" in told
            assert "finished by the checkpoint" in told
            assert "it waits for nothing" in told
            entries = sum(2 + 2 * failures_of(trip) for trip in calls.charges)
            assert len(calls.bills) == len(calls.charges)
            assert count_effects(client, calls) == entries
        finally:
            workers.terminate()
            assert workers.wait(60) == 0
    charged = [line.split("\t") for path in charges.glob("*.tsv") for line in path.read_text().splitlines()]
    assert {trip for trip, _ in charged} >= set(map(str, rows["HA"]))  # the other test put some, too
    assert len({trip for trip, _ in charged}) == len({key for _, key in charged}) == len(charged)
