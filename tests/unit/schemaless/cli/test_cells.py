"""The commands on cells and datastores: what they print, how an error is printed. The API is a transport in memory."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from schemaless import Client, Limits
from schemaless.__main__ import app
from schemaless.cli import cells, targets
from schemaless.cli.targets import open_client, servers
from schemaless.errors import CellMissing, Invalid, Malformed, Misconfigured

ROW = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11"
CELL = {
    "row_key": ROW,
    "column_name": "BASE",
    "ref_key": 1,
    "body": {"driver": "d-17"},
    "shard": 7,
    "generation": 1,
    "added_id": 42,
    "created_at": "2026-01-31T00:00:00.000001Z",
}
PUT = {name: value for name, value in CELL.items() if name != "body"} | {
    "status": "stored",
    "copies": 2,
    "location": "7:1:42",
}
LINE = f'7:1:42 {ROW} BASE 1 {{"driver":"d-17"}}\n'
MISSING = httpx.Response(404, json={"type": "urn:schemaless:problem:cell-missing", "status": 404, "detail": "none"})

Run = Callable[..., Result]


@pytest.fixture
def answers() -> dict[str, httpx.Response]:
    """By "METHOD path", what the API answers; nothing else may be asked."""
    return {}


@pytest.fixture
def asked() -> list[httpx.Request]:
    return []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, answers: dict[str, httpx.Response], asked: list[httpx.Request]) -> Run:
    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answers[f"{request.method} {request.url.path.removeprefix('/v1/mezzanine')}"]

    def client(hosts: str, datastore: str) -> Client:
        return Client(["http://api"], datastore=datastore, transport=httpx.MockTransport(respond), limits=Limits())

    monkeypatch.setattr(cells, "open_client", client)
    monkeypatch.setattr(targets, "open_client", client)

    def run(*arguments: str, given: str = "") -> Result:
        return CliRunner().invoke(app, arguments, input=given)

    return run


@pytest.mark.parametrize("first_answer", [True, False])
def test_a_follower_that_is_interrupted_early_names_a_place_from_which_nothing_is_missed(
    monkeypatch: pytest.MonkeyPatch, first_answer: bool
):
    """Never `end`: that has moved when somebody continues from it."""

    def respond(request: httpx.Request) -> httpx.Response:
        if request.method == "POST" or not first_answer:
            raise KeyboardInterrupt
        page = {"shard": 7, "cells": [], "next": {"generation": 1, "added_id": 42}, "head": 42, "pending": 0}
        return httpx.Response(200, json=page)

    def client(hosts: str, datastore: str) -> Client:
        return Client(["http://api"], datastore=datastore, transport=httpx.MockTransport(respond), limits=Limits())

    monkeypatch.setattr(targets, "open_client", client)
    ended = CliRunner().invoke(app, ["log", "7", "--after", "end", "--follow"])
    assert ended.exit_code == 0
    assert ended.output == (
        "next 1:42\n" if first_answer else "nothing was read yet, so there is no place to continue from\n"
    )


def test_a_cell_is_put_and_its_place_is_told(run: Run, answers: dict, asked: list):
    """Status, location and copies in one line."""
    answers[f"PUT /cells/{ROW}/BASE/1"] = httpx.Response(201, json=PUT)
    assert run("put", ROW, "BASE", "1", '{"driver": "d-17"}').output == "stored 7:1:42 copies 2\n"
    assert json.loads(run("put", ROW, "BASE", "1", "-", "--json", given='{"driver": "d-17"}').output)["copies"] == 2
    assert asked[0].content == asked[1].content


def test_the_next_version_is_left_to_the_server(run: Run, answers: dict):
    """`next` in place of a ref_key."""
    answers[f"POST /cells/{ROW}/BASE"] = httpx.Response(201, json=PUT)
    assert run("put", ROW, "BASE", "next", "{}").output.startswith("stored 7:1:42")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [(("BASE", "x", "{}"), Invalid), (("BASE", "1", "[1]"), Malformed), (("BASE", "1", "{"), Malformed)],
)
def test_a_wrong_put_is_refused(run: Run, arguments: tuple[str, ...], kind: type[Exception]):
    """A ref_key that is no number, or a body that is no object, is told before anything is sent."""
    assert isinstance(run("put", ROW, *arguments).exception, kind)


@pytest.mark.parametrize("command", [("get", ROW, "BASE", "1"), ("latest", ROW, "BASE")])
def test_a_cell_is_read_as_a_line_or_as_json(run: Run, answers: dict, command: tuple[str, ...]):
    """The line has the location first; JSON is the API's cell."""
    path = "/".join(command[1:])
    answers[f"GET /cells/{path}"] = httpx.Response(200, json=CELL)
    assert run(*command).output == LINE
    assert json.loads(run(*command, "--json").output) == CELL
    answers[f"GET /cells/{path}"] = MISSING
    assert isinstance(run(*command).exception, CellMissing)


def test_a_row_is_read_with_all_its_columns(run: Run, answers: dict):
    """The newest version of each; a row that isn't there is an error."""
    answers[f"GET /cells/{ROW}"] = httpx.Response(200, json={"row_key": ROW, "cells": {"BASE": CELL}})
    assert run("row", ROW).output == LINE
    answers[f"GET /cells/{ROW}"] = MISSING
    assert isinstance(run("row", ROW).exception, CellMissing)


@pytest.mark.parametrize(
    ("command", "path"),
    [("get", f"{ROW}/BASE/1"), ("latest", f"{ROW}/BASE"), ("row", ROW), ("versions", f"{ROW}/BASE")],
)
def test_a_missing_cell_has_the_hint_of_the_api(run, answers, command, path):
    """It knows whether a put may wait in a buffer, because the home's master is away."""
    problem = {"type": "urn:schemaless:problem:cell-missing", "status": 404, "hint": "the master of a is away"}
    answers[f"GET /cells/{path}"] = httpx.Response(404, json=problem)
    answers[f"GET /cells/{path}/versions"] = httpx.Response(200, json={"cells": [], "next": None})
    error = run(command, *path.split("/")).exception
    assert isinstance(error, CellMissing)
    assert error.hint == "the master of a is away"


def test_versions_are_listed_newest_first(run: Run, answers: dict, asked: list):
    """Descending, one line each."""
    answers[f"GET /cells/{ROW}/BASE/versions"] = httpx.Response(200, json={"cells": [CELL, CELL], "next": None})
    assert run("versions", ROW, "BASE").output == LINE * 2
    assert asked[0].url.params["order"] == "desc"


def test_a_log_is_read_after_a_location(run: Run, answers: dict, asked: list):
    """The cells on standard output, where to go on on standard error."""
    page = {
        "cells": [CELL],
        "next": {"generation": 1, "added_id": 42, "digest": "00000000000000ff"},
        "head": 50,
        "pending": 8,
    }
    answers["GET /shards/7/cells"] = httpx.Response(200, json=page)
    result = run("log", "7", "--after", "1:41", "--limit", "1")
    assert (result.stdout, result.stderr) == (LINE, "next 1:42:00000000000000ff, 8 pending\n")
    assert dict(asked[0].url.params) == {"after": "1:41", "limit": "1"}


def test_the_shard_of_a_row_is_told(run: Run, answers: dict):
    """For the datastore's own shard count, or for one that is given."""
    assert run("shard-of", ROW, "--shards", "64").output == "62\n"
    answers["GET /shards"] = httpx.Response(200, json={"shards": [{}] * 64})
    assert run("shard-of", ROW).output == "62\n"


def test_a_program_gets_the_row_of_a_shard_as_it_gave_it(run: Run):
    """The text of a UUID, in lower case as the API answers it."""
    told = json.loads(run("shard-of", ROW.upper(), "--shards", "64", "--json").output)
    assert told == {"row_key": ROW, "shard": 62, "shards": 64}


def test_conflicts_are_listed(run: Run, answers: dict):
    """As a table, or as the API's document."""
    conflict = {"row_key": ROW, "column_name": "BASE", "ref_key": 1}
    answers["GET /conflicts"] = httpx.Response(200, json={"conflicts": [conflict]})
    assert ROW in run("conflicts", "list").output
    assert json.loads(run("conflicts", "list", "--json").output) == {"conflicts": [conflict]}
    answers["GET /conflicts"] = httpx.Response(200, json={"conflicts": []})
    assert "no conflicts" in run("conflicts", "list").output


def test_the_topology_is_shown_without_passwords(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Clusters, roles and addresses; a secret stays in its file."""
    node = {"name": "a1", "host": "127.0.0.1", "port": 3306, "user": "u", "password": "hidden-one"}
    document = {"version": 2, "clusters": {"a": [node, node | {"name": "a2"}]}}
    (tmp_path / "topology.json").write_text(json.dumps(document))
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(tmp_path / "topology.json"))
    monkeypatch.setenv("SCHEMALESS_KAFKA", "127.0.0.1:9092")
    shown = run("topology", "show").output
    listed = run("topology", "show", "--json").output
    assert "a2" in shown
    assert json.loads(listed)["clusters"]["a"]["master"] == {"name": "a1", "host": "127.0.0.1", "port": 3306}
    assert "hidden-one" not in shown + listed


def test_without_a_stack_a_command_says_what_to_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Neither hosts nor servers are guessed."""
    monkeypatch.setenv("SCHEMALESS_HOME", str(tmp_path))
    monkeypatch.delenv("SCHEMALESS_HOSTS", raising=False)
    monkeypatch.delenv("SCHEMALESS_TOPOLOGY", raising=False)
    with pytest.raises(Misconfigured, match="--hosts"):
        open_client("", "mezzanine")
    with pytest.raises(Misconfigured, match="SCHEMALESS_TOPOLOGY"):
        servers()


def test_hosts_of_a_command_go_before_those_of_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """--hosts first, then SCHEMALESS_HOSTS."""
    monkeypatch.setenv("SCHEMALESS_HOSTS", "http://environment")
    with open_client("http://one, http://two", "mezzanine") as given, open_client("", "mezzanine") as found:
        assert (len(given._hosts), len(found._hosts)) == (2, 1)


def test_an_error_is_one_line_on_standard_error():
    """No traceback; exit code 1."""
    command = [sys.executable, "-m", "schemaless", "get", "no-uuid", "BASE", "1", "--hosts", "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: row_key: must be a hyphenated UUID")
    assert done.stderr.count("\n") == 1
