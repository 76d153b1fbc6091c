"""How commands print documents and tables, and how a group of commands is added to `schemaless`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table


def add_group(app: typer.Typer, name: str, text: str, commands: Mapping[str, Callable[..., None]]) -> None:
    """Adds `schemaless NAME COMMAND` for each of the commands. `text` is the group's help."""
    group = typer.Typer(help=text, no_args_is_help=True)
    for command, function in commands.items():
        group.command(command)(function)
    app.add_typer(group, name=name)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints rows of any values. None is an empty field."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row))
    Console().print(table)


def print_notice(text: str) -> None:
    """Prints to standard error, because standard output holds only what was asked for."""
    print(text, file=sys.stderr, flush=True)
