"""`schemaless up`, `down` and `status`. Owns how a stack is shown to people and, with --json, to programs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from schemaless.config import StackSettings
from schemaless.extras import Extra, needs
from schemaless.stack.plan import home_folder
from schemaless.stack.services import checkout_folder

if TYPE_CHECKING:
    from schemaless.stack.supervision import ProcessStatus

RUNNING_TIMEOUT_S = 60.0

ProcessName = Annotated[str | None, typer.Argument(help="one supervised process instead of the whole stack")]
AsJson = Annotated[bool, typer.Option("--json", help="for programs")]


def register(app: typer.Typer) -> None:
    app.command()(up)
    app.command()(down)
    app.command()(status)


def up(name: ProcessName = None) -> None:
    """Start the embedded stack and wait until it is ready, or let one process run again."""
    checkout_folder()  # before anything is made or loaded: the wheel alone can't start a stack
    from schemaless.stack import embedded, supervision
    from schemaless.stack.endpoints import refresh_endpoints

    settings = StackSettings()
    if name is None:
        _print_endpoints(embedded.up(settings, say=_say))
        return
    home = home_folder(settings)
    supervision.start(home, name)
    supervision.wait_for(home, [name], {supervision.ProcessState.RUNNING}, timeout_s=RUNNING_TIMEOUT_S)
    refresh_endpoints(home)


@needs("down", Extra.SERVER)
def down(name: ProcessName = None) -> None:
    """Stop the embedded stack in order, or hold one process down."""
    from schemaless.stack import embedded, supervision
    from schemaless.stack.endpoints import refresh_endpoints

    settings = StackSettings()
    if name is None:
        embedded.down(settings, say=_say)
        return
    home = home_folder(settings)
    supervision.stop(home, name)
    refresh_endpoints(home)


@needs("status", Extra.SERVER)
def status(as_json: AsJson = False) -> None:
    """Processes of the embedded stack, and where it can be reached."""
    from schemaless.stack.endpoints import refresh_endpoints
    from schemaless.stack.supervision import processes

    home = home_folder(StackSettings())
    running = processes(home)
    if as_json:
        print(json.dumps({"home": str(home), "processes": [_process(process) for process in running]}, indent=2))
        return
    console = Console()
    console.print(_table(running))
    _print_endpoints(refresh_endpoints(home))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _process(process: ProcessStatus) -> dict[str, Any]:
    return {
        "name": process.name,
        "role": process.role,
        "state": process.state,
        "pid": process.pid,
        "uptime_s": process.uptime_s,
        "log": str(process.log),
    }


def _table(running: list[ProcessStatus]) -> Table:
    table = Table("process", "role", "state", "pid", "up")
    for process in running:
        state = "held down" if process.held_down else process.state.lower()
        table.add_row(process.name, process.role, state, str(process.pid or ""), _duration(process.uptime_s))
    return table


def _duration(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _print_endpoints(endpoints: dict[str, Any]) -> None:
    print(f"api        {'  '.join(endpoints['api'])}")
    print(f"kafka      {endpoints['kafka']}")
    for name, cluster in endpoints["clusters"].items():
        nodes = [cluster["master"], *cluster["minions"]]
        print(f"cluster {name}  " + "  ".join(f"{node['name']} {node['host']}:{node['port']}" for node in nodes))
    print(f"datastores {', '.join(endpoints['datastores']) or 'none'}")
