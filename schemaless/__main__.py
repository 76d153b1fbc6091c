"""The command `schemaless`: the list of its parts, and how an error ends it, with one line and exit code 1."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import structlog
import typer

from schemaless.cli import (
    audit,
    cells,
    datastores,
    erasures,
    indexes,
    parked,
    stack,
    tail,
    tailer,
    targets,
    tokens,
    topology,
    triggers,
)
from schemaless.cli.examples import add_examples
from schemaless.cli.output import print_error
from schemaless.client.transport import CHOSEN_PROFILE
from schemaless.config import program_version
from schemaless.demo import command as demo
from schemaless.errors import SchemalessError

PARTS = [
    stack,
    cells,
    erasures,
    datastores,
    topology,
    indexes,
    triggers,
    parked,
    audit,
    tail,
    tailer,
    tokens,
    targets,
    demo,
]
"""Modules that add their commands with `register(app)`."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Examples: `schemaless put ROW BASE 1 '{\"fare\": 12.5}'`, `schemaless log 62 --follow`,"
    " `schemaless triggers run billing.py`, `schemaless audit mezzanine`. `schemaless --install-completion` completes"
    " commands and options in your shell.",
)


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"schemaless {program_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="print the version, and end")
    ] = False,
    profile: Annotated[
        str, typer.Option(help="hosts and token of this name in ~/.config/schemaless/profiles.toml")
    ] = "",
) -> None:
    """An append-only store of immutable JSON cells, and its log."""
    if profile:
        CHOSEN_PROFILE.set(profile)


for part in PARTS:
    part.register(app)
add_examples(app)


def main() -> None:
    # Standard output belongs to the result, and a retry that succeeded is no news.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        app()
    except SchemalessError as error:
        hint = f" ({error.hint})" if error.hint else ""
        print_error(f"{error}{hint}")
        sys.exit(1)


if __name__ == "__main__":
    main()
