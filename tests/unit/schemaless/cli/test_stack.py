"""What `schemaless up NAME` and `down NAME` say of the process that they started or held down."""

import json
from types import SimpleNamespace

import pytest

from schemaless.cli import stack
from schemaless.client import client
from schemaless.stack import embedded, endpoints, supervision


@pytest.fixture(autouse=True)
def no_supervisor(monkeypatch):
    for name in ("start", "stop", "wait_for"):
        monkeypatch.setattr(supervision, name, lambda *_, **__: None)
    monkeypatch.setattr(embedded, "up_process", lambda home, name: None)
    monkeypatch.setattr(endpoints, "refresh_endpoints", lambda home: {"api": []})
    monkeypatch.setattr(stack, "home_folder", lambda settings: settings.home)


def test_a_process_that_is_held_down_is_named_with_the_way_back(capsys):
    """Silence leaves the operator to ask `status`."""
    stack.down("kafka")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "kafka is held down: `schemaless up kafka` lets it run again\n")


def test_a_process_that_runs_again_is_named(capsys):
    stack.up("kafka")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "kafka runs\n")


def test_a_program_gets_the_endpoints_alone(capsys):
    stack.up("kafka", as_json=True)
    said = capsys.readouterr()
    assert (json.loads(said.out), said.err) == ({"api": []}, "")


class Answering:
    """A client of a datastore whose status is `status`."""

    status: dict

    def __init__(self, hosts, datastore):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def document(self, path):
        return self.status


def test_what_stands_is_named_with_its_datastore_and_why(monkeypatch):
    """What runs isn't, unless it has something to say."""
    consumer = {"stall": None, "state": "running", "reason": None}
    node = {"stall": None, "why": None, "setting_faults": []}
    Answering.status = {
        "tailing": "running",
        "tailing_reason": None,
        "consumers": [
            consumer | {"consumer": "trigger:bill", "stall": "master_down", "reason": "a is away"},
            consumer | {"consumer": "trigger:mail", "state": "stopped", "reason": "it gave up"},
            consumer | {"consumer": "index:fares"},
        ],
        "clusters": {
            "a": {
                "nodes": [
                    node | {"name": "a1"},
                    node | {"name": "a2", "stall": "filter", "setting_faults": ["x is 1, and must be 2"]},
                    node | {"name": "a3", "stall": "blocked", "why": "replication stands"},
                ]
            }
        },
    }
    monkeypatch.setattr(client, "Client", Answering)
    monkeypatch.setattr(stack, "servers", lambda: SimpleNamespace(datastores=lambda: [SimpleNamespace(name="trips")]))
    assert list(stack._stall_lines(["127.0.0.1:1"])) == [
        "trips: trigger:bill: master_down: a is away",
        "trips: trigger:mail: stopped: it gave up",
        "trips: a2: filter: x is 1, and must be 2",
        "trips: a3: blocked: replication stands",
    ]
    assert list(stack._stall_lines([])) == []
