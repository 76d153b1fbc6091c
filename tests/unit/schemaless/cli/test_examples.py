"""The example at the end of each command's --help is a line that the command takes."""

import shlex

import pytest
import typer
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.cli.examples import EXAMPLES


def commands(group, *words):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *words, name)
        else:
            yield " ".join((*words, name)), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_each_command_has_an_example_and_no_other_has():
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_is_read_without_a_complaint(name, tmp_path, monkeypatch):
    (tmp_path / "driver_index.yaml").touch()
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(EXAMPLES[name])
    own = name.split()
    assert (program, words[: len(own)]) == ("schemaless", own)
    COMMANDS[name].make_context(name, words[len(own) :])


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_it_so_that_it_can_be_copied(name, columns):
    """Whole, however narrow the terminal is. A flag has no type, and a list that of its members."""
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": str(columns)}).stdout
    assert f" Example: {EXAMPLES[name]}\n" in shown
    assert "<bool>" not in shown
    assert "list[" not in shown
    assert columns < 80 or "…" not in shown.replace("limit=N, …", "")  # nothing is cut
