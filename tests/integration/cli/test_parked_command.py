"""`schemaless parked` and the control of a program, with a worker that carries the orders out (I12)."""

import json
import os
import uuid

import pytest
from typer.testing import CliRunner

from schemaless import Client
from schemaless.__main__ import app
from schemaless.bus.topics import ensure_topics
from schemaless.config import ConsumerSettings
from tests.consumer_harness import running_consumer, write_program
from tests.environment import environment_of
from tests.log_harness import running_tailers
from tests.waiting import until

PROGRAM = """
import pathlib
from schemaless import RetryPolicy, trigger

HERE = pathlib.Path(__file__).parent

@trigger(column="BASE", retry=RetryPolicy(attempts=2, delay=0.05))
def charge(cell):
    if cell.body["card"] == "declined" and not (HERE / "repaired").exists():
        raise ValueError("the card was declined")
"""


@pytest.fixture
def datastore(make_datastore, kafka):
    made = make_datastore(shards=2, partitions=1)
    ensure_topics(kafka, made)
    return made


@pytest.fixture
def command(running, kafka, api, datastore):
    """Runs a command in this process, and returns what it printed."""
    settings = {"topology": running.path, "kafka": kafka, "hosts": f"http://127.0.0.1:{api.port}"}
    environment = os.environ | environment_of(ConsumerSettings, settings)

    def run(*arguments, status=0):
        done = CliRunner().invoke(app, [*arguments, "--datastore", datastore.name], env=environment)
        assert done.exit_code == status, (done.output, done.exception)
        return done.output

    return run


def test_people_find_what_is_parked_and_call_it_again(tmp_path, running, kafka, api, datastore, command):
    """A retry in order, a discard with its reason, a pause, and a seek that calls everything again."""
    program = ["consumers", write_program(tmp_path, "cards", PROGRAM), "--datastore", datastore.name]
    settings = {"topology": running.path, "kafka": kafka}
    bad, worse = uuid.uuid4(), uuid.uuid4()

    def counts():
        found = json.loads(command("triggers", "status", "cards", "--json"))
        return {name: number for name, number in found["counts"].items() if number}

    with (
        Client([f"http://127.0.0.1:{api.port}"], datastore=datastore.name) as client,
        running_tailers(1, running.path, kafka, datastore),
        running_consumer(program, settings),
    ):
        for row in (bad, worse):
            client.put_cell(row, "BASE", 1, {"card": "declined"})
            client.put_cell(row, "BASE", 2, {"card": "good"})
        client.put_cell(uuid.uuid4(), "BASE", 1, {"card": "good"})
        until(lambda: "cards" in command("triggers", "list"))
        until(lambda: "2 match" in command("parked", "list", "cards", "cause=error"))
        assert "ValueError: the card was declined" in command("parked", "show", "cards", str(bad))
        until(lambda: counts() == {"seen": 5, "called": 1, "parked": 2, "waiting": 2})
        assert "2 parked cells to be called again (dry run)" in command(
            "parked", "retry", "cards", "all", "--dry-run"
        )  # fmt: skip
        command("parked", "discard", "cards", f"row_key={worse}", "--reason", "a test ride", "--yes")
        (tmp_path / "repaired").touch()
        command("parked", "retry", "cards", f"row_key={bad}")
        until(lambda: counts() == {"seen": 5, "called": 4, "skipped": 1})
        command("triggers", "pause", "cards", "--reason", "a deploy")
        assert "a deploy" in command("triggers", "status", "cards")
        assert "5 cells to come again" in command("triggers", "seek", "cards", "beginning", "--yes")
        command("triggers", "resume", "cards")
        until(lambda: counts() == {"seen": 5, "called": 5})
        assert "0 match" in command("parked", "list", "cards")
