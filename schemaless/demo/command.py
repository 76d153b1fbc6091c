"""`schemaless demo`. Its libraries are loaded when it runs, so the other commands don't need them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from schemaless.config import StackSettings
from schemaless.stack.supervision import checkout_folder

LOG_WIDTH = 140  # rich takes 80 where there is no terminal, too narrow for a report

RunningOption = Annotated[
    bool, typer.Option("--running", help="run on the stack of the environment, whose operator runs the programs")
]


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(running: RunningOption = False) -> None:
    """Load 336,776 real flights, wait until index and triggers have caught up, audit, and show some queries."""
    checkout_folder()  # before anything is loaded: the wheel alone has no services
    from schemaless.demo.run import embedded_site, run_demo, running_site

    site = running_site if running else embedded_site
    console = Console()
    if not console.is_terminal:
        console.width = LOG_WIDTH
    raise typer.Exit(0 if run_demo(StackSettings(), console, site) else 1)
