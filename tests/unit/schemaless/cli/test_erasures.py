"""The commands on erasures, and how an erased cell is printed. The API is a transport in memory."""

import json

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from schemaless import Client, Limits
from schemaless.__main__ import app
from schemaless.cli import targets
from schemaless.errors import CellErased, Invalid

ROW = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11"
ID = "5a1c0ffee00c0ffe"
AT = "2026-01-31T00:00:00.000001Z"
BY = {"erasure": ID, "erased_at": AT}
ORDERED = {"erasure": ID, "matched": 3, "job": ID}
REPORT = {
    "erasure": ID, "state": "complete", "row_key": ROW, "column_name": "BASE", "ref_key": None,
    "reason": "request 4711", "who": "ada", "ordered_at": AT,
    "places": [
        {"place": "home", "found": 3, "removed": 3},
        {"place": "binary log of a1", "found": 3, "removed": 0, "remains_until": "2026-02-01T00:00:00.000000Z"},
    ],
}  # fmt: skip
STUB = {
    "row_key": ROW, "column_name": "BASE", "ref_key": 1, "shard": 7, "generation": 1, "added_id": 42,
    "created_at": AT, "erased": BY,
}  # fmt: skip


@pytest.fixture
def asked():
    return []


@pytest.fixture
def run(monkeypatch, asked):
    """Runs a command. `answers` are in turn what the API says."""

    def run(*words, answers=(), typed=None):
        left = list(answers)

        def respond(request):
            asked.append(request)
            status, document = left.pop(0)
            return httpx.Response(status, json=document)

        def client(hosts, datastore):
            return Client(["http://api"], datastore=datastore, transport=httpx.MockTransport(respond), limits=Limits())

        monkeypatch.setattr(targets, "open_client", client)
        return CliRunner().invoke(app, words, input=typed)

    return run


def sent(request):
    return msgspec.msgpack.decode(request.content)


@pytest.mark.parametrize("words", [("erase",), ("erase", "row")])
def test_a_row_is_erased_after_somebody_said_yes(run, asked, words):
    """The question has the count of a dry run. The command's word may be left out."""
    dry = {"erasure": None, "matched": 3, "job": None}
    command = (*words, ROW, "--column", "BASE", "--ref-key", "1", "--reason", "asked to")
    done = run(*command, answers=[(200, dry), (202, ORDERED)], typed="y\n")
    assert "erase 3 cells for good? [y/N]: y" in done.output
    assert f"3 cells to be erased, erasure {ID}" in done.output
    assert [sent(request)["dry_run"] for request in asked] == [True, False]
    assert sent(asked[1]) == {
        "row_key": ROW, "column_name": "BASE", "ref_key": 1, "reason": "asked to", "dry_run": False,
    }  # fmt: skip
    assert run(*command, answers=[(200, dry)], typed="n\n").exit_code == 1
    assert len(asked) == 3


def test_a_dry_run_orders_nothing(run, asked):
    """Options may stand before the row."""
    done = run("erase", "--dry-run", "--reason", "asked to", ROW, answers=[(200, ORDERED | {"erasure": None})])
    assert done.output == "3 cells would be erased (dry run)\n"
    assert [sent(request)["dry_run"] for request in asked] == [True]


def test_json_needs_an_answer_beforehand(run, asked):
    """Nobody can be asked then."""
    assert isinstance(run("erase", ROW, "--reason", "x", "--json").exception, Invalid)
    done = run("erase", ROW, "--reason", "x", "--json", "--yes", answers=[(202, ORDERED)])
    assert json.loads(done.output) == ORDERED
    assert len(asked) == 1


def test_a_report_is_waited_for(run, monkeypatch):
    """It is asked for again while it is running."""
    monkeypatch.setattr("schemaless.cli.erasures._POLL_S", 0)
    answers = [(202, ORDERED), (200, REPORT | {"state": "running"}), (200, REPORT)]
    done = run("erase", ROW, "--reason", "x", "--yes", "--wait", answers=answers)
    assert f"erasure {ID} of {ROW}/BASE is complete" in done.output
    assert "binary log of a1" in done.output
    assert "2026-02-01T00:00:00.000000Z" in done.output


def test_a_body_that_is_still_there_fails_a_verify(run, asked):
    """Exit status 1, and 0 where nothing is found."""
    assert run("erase", "status", ID, answers=[(200, REPORT)]).exit_code == 0
    assert run("erase", "verify", ID, answers=[(200, REPORT)]).exit_code == 1
    clean = REPORT | {"places": REPORT["places"][:1]}
    assert run("erase", "verify", ID, "--json", answers=[(200, clean)]).exit_code == 0
    assert [dict(request.url.params) for request in asked] == [{}, {"verify": "true"}, {"verify": "true"}]


def test_an_erased_cell_is_printed_without_a_body(run):
    """A line, or the API's JSON. An exact read fails with what erased it."""
    row = {"row_key": ROW, "cells": {"BASE": STUB}}
    assert run("row", ROW, answers=[(200, row)]).output == f"7:1:42 {ROW} BASE 1 erased by {ID}\n"
    assert json.loads(run("row", ROW, "--json", answers=[(200, row)]).output) == STUB
    gone = {"type": "urn:schemaless:problem:cell-erased", "status": 410, "detail": "gone", **BY}
    error = run("get", ROW, "BASE", "1", answers=[(410, gone)]).exception
    assert isinstance(error, CellErased)
    assert error.erasure == ID
