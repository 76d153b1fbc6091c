"""A small installation that the page shows: trips with versions, an index, and a program that parks some of them."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from schemaless.ops.datastores import create_datastore
from schemaless.stack.local import RunningTopology, running_broker, running_topology
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.consumer_harness import running_consumer, wait_until_finished, write_program
from tests.integration.api.api_harness import ROOT, ApiProcess, Caller, api_process
from tests.log_harness import running_tailers

INDEX = {
    "shard_field": "driver",
    "fields": [
        {"name": "driver", "column": "BASE", "path": "driver", "type": "string", "length": 40},
        {"name": "created", "column": "BASE", "path": "created", "type": "datetime"},
    ],
    "stored": [{"name": "fare", "column": "BASE", "path": "fare.amount", "type": "float"}],
}
PROGRAM = """
from schemaless import trigger

@trigger(column="BASE")
def bill_rider(cell):
    if cell.body.get("card") == "blocked":
        raise ValueError(f"the card of {cell.body['rider']} is blocked")
"""
DRIVERS = ("ada", "grace", "edsger", "barbara")
TRIPS = 40
BLOCKED = 5


def trip(number: int) -> dict:
    return {
        "driver": DRIVERS[number % len(DRIVERS)],
        "rider": f"rider {number}",
        "created": f"2026-11-{1 + number % 26:02}T08:{number % 60:02}:00Z",
        "fare": {"amount": 10.5 + number, "currency": "EUR"},
        "card": "blocked" if number < BLOCKED else "4711",
    }


def row_of(number: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"trip {number}"))


@dataclass(frozen=True)
class Installation:
    running: RunningTopology
    kafka: str
    datastore: Datastore
    storage: SyncStorage
    api: ApiProcess
    tokens: Mapping[str, str]

    @property
    def call(self) -> Caller:
        return self.api.at(self.datastore)


@contextmanager
def installation(folder: Path, shards: int = 64) -> Iterator[Installation]:
    """Servers, Kafka, all services, the program, and an API. All of it is this one's own."""
    for part in ("mysql", "kafka"):
        (folder / part).mkdir()
    with (
        running_topology(folder / "mysql", flavour=FLAVOUR, options=SMALL_REDO_LOGS) as running,
        running_broker(folder / "kafka") as kafka,
        SyncStorage(running.topology) as storage,
    ):
        administrators = running.administrators
        datastore = create_datastore(running.topology, kafka, "trips", shards, 4, administrators=administrators)
        settings = {"topology": running.path, "kafka": kafka, "attempts_max": 2, "retry_delay_s": 0.05}
        program = write_program(folder, "billing", PROGRAM)
        indexer = {"topology": running.path, "kafka": kafka, "datastores": "trips"}
        with (
            running_tailers(1, running.path, kafka, datastore),
            _cleaning(running.path, kafka),
            running_consumer(["indexer"], indexer),
            running_consumer(["consumers", program, "--datastore", "trips"], settings),
            api_process(running.path) as api,
        ):
            made = Installation(running, kafka, datastore, storage, api, {})
            _fill(made)
            yield replace(made, tokens=_tokens(made))


@contextmanager
def _cleaning(topology: Path, kafka: str) -> Iterator[None]:
    environment = os.environ | {"SCHEMALESS_TOPOLOGY": str(topology), "SCHEMALESS_KAFKA": kafka}
    process = subprocess.Popen([sys.executable, "-m", "cleaner"], cwd=ROOT, env=environment)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _tokens(made: Installation) -> Mapping[str, str]:
    """One of each scope. From now on every request needs one, and the harness's client has the administrator's."""

    def issue(name: str) -> str:
        answer = made.call.post("/tokens", json={"name": name, "scope": name, "datastores": ["*"]})
        assert answer.status_code == 201, answer.text
        secret: str = answer.json()["token"]
        made.api.client.headers.setdefault("authorization", f"Bearer {secret}")
        return secret

    return {name: issue(name) for name in ("admin", "read")}


def _fill(made: Installation) -> None:
    assert made.call("PUT", "/indexes/by_driver", json=INDEX).status_code == 201
    for number in range(TRIPS):
        row = row_of(number)
        made.call.put(row, 1, trip(number))
        made.call.put(row, 1, {"state": "started"}, "STATUS")
        made.call.put(row, 2, {"state": "completed", "minutes": 10 + number}, "STATUS")
    for consumer in ("index:by_driver", "trigger:billing"):
        wait_until_finished(made.storage, made.datastore, consumer)
