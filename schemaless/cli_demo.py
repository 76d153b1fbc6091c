"""`schemaless demo`: the whole system on real data, with an audited report. Exit code 1 when a line doesn't hold."""

from __future__ import annotations

import typer
from rich.console import Console

from schemaless.config import StackSettings


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo() -> None:
    """Load 336,776 real flights, wait until index and triggers have caught up, audit, and show some answers."""
    from schemaless.demo.run import run_demo

    raise typer.Exit(0 if run_demo(StackSettings(), Console()) else 1)
