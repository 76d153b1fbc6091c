"""What `schemaless up NAME` and `down NAME` say of the process that they started or held down."""

import json

import pytest

from schemaless.cli import stack
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
