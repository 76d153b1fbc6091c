"""How commands print documents and tables, and how a group of commands is added to `schemaless`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from schemaless.quantity import quantity

_PIPE_WIDTH = 10_000
_COLOURS = (
    dict.fromkeys(("running", "active", "tailed", "complete"), "green")
    | dict.fromkeys(
        ("paused", "building", "starting", "backoff", "held down", "no worker runs it", "deleting"), "yellow"
    )
    | dict.fromkeys(("stopped", "tripped", "failed", "fatal", "exited", "unknown"), "bold red")
)


def add_group(
    app: typer.Typer,
    name: str,
    text: str,
    commands: Mapping[str, Callable[..., None]],
    kind: type[TyperGroup] = TyperGroup,
) -> None:
    """Adds `schemaless NAME COMMAND` for each of the commands. `text` is the group's help."""
    group = typer.Typer(help=text, no_args_is_help=True, cls=kind)
    for command, function in commands.items():
        group.command(command)(function)
    app.add_typer(group, name=name)


def print_would(would: dict[str, Any]) -> None:
    """Prints what an order would touch, as a dry run answers."""
    versions = f"version {', '.join(map(str, would['versions']))}, " if "versions" in would else ""
    entries = f", and about {quantity(would['entries'], 'entry')} would go" if "entries" in would else ""
    limits = "".join(f", {name} {value}" for name, value in would.get("limits", {}).items())
    print(
        f"dry run, nothing was ordered: {versions}{quantity(would['shards'], 'shard')} would be {would['becomes']}"
        f"{limits}{entries}. {quantity(would['workers'], 'worker')} would obey"
    )


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints rows of any values. None is an empty field.

    Nothing is cut: a narrow terminal folds long values, and a pipe gets lines as long as they are.
    """
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else _coloured(str(value)) for value in row))
    console = Console()
    (console if console.is_terminal else Console(width=_PIPE_WIDTH)).print(table)


def print_notice(text: str) -> None:
    """Prints to standard error, because standard output holds only what was asked for."""
    print(text, file=sys.stderr, flush=True)


def print_error(text: str) -> None:
    """Prints the one line with which a command fails."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("error:", "bold red"), f" {text}"))


def _coloured(value: str) -> Text:
    """Returns a value in the colour of the state that it names, if it names one."""
    return Text(value, _COLOURS.get(value.split(",", maxsplit=1)[0], ""))
