"""What all commands share: JSON for programs, tables that cut nothing, the version, and completion."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.cli.output import print_table
from schemaless.config import program_version

ROW = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11"
WITHOUT_JSON = {"down", "demo", "triggers run"}
"""They print how far they are, until they end."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_command_prints_json_for_programs() -> None:
    found = dict(commands(typer.main.get_command(app)))
    assert len(found) > 50
    missing = {name for name, each in found.items() if not any("--json" in option.opts for option in each.params)}
    assert missing == WITHOUT_JSON


def test_a_table_in_a_pipe_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A row key that is cut can't be copied."""
    print_table([f"column {number}" for number in range(8)], [[ROW] * 8])
    assert capsys.readouterr().out.count(ROW) == 8


def test_the_command_says_its_version_and_offers_completion() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output == f"schemaless {program_version()}\n"
    shown = runner.invoke(app, ["--help"]).output
    assert "--install-completion" in shown
    assert "schemaless triggers run" in " ".join(shown.split())


def test_status_without_an_embedded_stack_says_where_else_processes_are_shown(tmp_path, monkeypatch) -> None:
    """In a container of compose, `schemaless up` would be the wrong advice alone."""
    monkeypatch.setenv("SCHEMALESS_HOME", str(tmp_path))
    error = CliRunner().invoke(app, ["status"]).exception
    assert "no embedded stack" in str(error)
    assert "docker compose ps" in getattr(error, "hint", "")
