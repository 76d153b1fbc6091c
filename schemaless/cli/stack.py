"""`schemaless up`, `down` and `status`: the embedded stack, shown to people and with --json to programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from schemaless.cli.output import print_json, print_notice, print_table
from schemaless.cli.targets import JsonOption, servers
from schemaless.config import StackSettings
from schemaless.errors import SchemalessError
from schemaless.runtime.extras import Extra, needs
from schemaless.stack.plan import home_folder
from schemaless.stack.supervision import checkout_folder

ProcessName = Annotated[str | None, typer.Argument(help="name of one supervised process; default: the whole stack")]


def register(app: typer.Typer) -> None:
    for command in (up, down, status):
        app.command()(command)


def up(name: ProcessName = None, as_json: JsonOption = False) -> None:
    """Start the embedded stack and wait until it is ready, or let one process run again."""
    checkout_folder()  # before anything is made or loaded: the wheel alone can't start a stack
    from schemaless.stack import embedded
    from schemaless.stack.endpoints import refresh_endpoints

    settings = StackSettings()
    if name is None:
        try:
            endpoints = embedded.up(settings, say=print_notice)
        except KeyboardInterrupt:
            print_notice("what has started keeps running: `schemaless up` continues, `schemaless down` stops it")
            raise
        print_json(endpoints) if as_json else _print_endpoints(endpoints)
        return
    home = home_folder(settings)
    embedded.up_process(home, name)
    endpoints = refresh_endpoints(home)
    print_json(endpoints) if as_json else print_notice(f"{name} runs")


@needs("down", Extra.SERVER)
def down(name: ProcessName = None) -> None:
    """Stop the embedded stack in order, or hold one process down."""
    from schemaless.stack import embedded, supervision
    from schemaless.stack.endpoints import refresh_endpoints

    settings = StackSettings()
    if name is None:
        embedded.down(settings, say=print_notice)
        return
    home = home_folder(settings)
    supervision.stop(home, name)
    refresh_endpoints(home)
    print_notice(f"{name} is held down: `schemaless up {name}` lets it run again")


@needs("status", Extra.SERVER)
def status(as_json: JsonOption = False) -> None:
    """Show the processes of the embedded stack and its addresses."""
    from schemaless.stack.endpoints import refresh_endpoints
    from schemaless.stack.supervision import processes

    home = home_folder(StackSettings())
    running = processes(home)
    if as_json:
        documents = [
            {
                "name": process.name,
                "role": process.role,
                "state": process.state,
                "pid": process.pid,
                "uptime_s": process.uptime_s,
                "log": str(process.log),
            }
            for process in running
        ]
        print_json({"home": str(home), "processes": documents, "endpoints": refresh_endpoints(home)})
        return
    rows = []
    for process in running:
        state = "held down" if process.held_down else process.state.lower()
        hours, seconds = divmod(process.uptime_s, 3600)
        uptime = f"{hours}:{seconds // 60:02}:{seconds % 60:02}"
        rows.append((process.name, process.role, state, process.pid, uptime))
    print_table(("process", "role", "state", "pid", "up"), rows)
    endpoints = refresh_endpoints(home)
    _print_endpoints(endpoints)
    for line in _stall_lines(endpoints["api"]):
        print(line)
    print("what waits or fails: `schemaless tailer status DATASTORE`, `schemaless triggers list -d DATASTORE`")


def _stall_lines(api: Sequence[str]) -> Iterator[str]:
    """Yields what needs a hand in each datastore, and why. Nothing is known while no API answers."""
    from schemaless.client.client import Client

    with suppress(SchemalessError):
        for datastore in servers().datastores() if api else ():
            with Client(list(api), datastore=datastore.name) as client:
                found = client.document("/status")
            standing = [("tailing", found["tailing"], found["tailing_reason"])]
            standing += [(one["consumer"], one["stall"] or one["state"], one["reason"]) for one in found["consumers"]]
            for cluster in found["clusters"].values():
                for node in cluster["nodes"]:
                    why = node["why"] or "; ".join(node["setting_faults"])
                    standing.append((node["name"], node["stall"] or "running", why))
            for name, state, reason in standing:
                if state != "running" or reason:
                    yield f"{datastore.name}: {name}: {state}" + (f": {reason}" if reason else "")


def _print_endpoints(endpoints: dict[str, Any]) -> None:
    print(f"api        {'  '.join(endpoints['api'])}")
    print(f"kafka      {endpoints['kafka']}")
    for name, cluster in endpoints["clusters"].items():
        nodes = [cluster["master"], *cluster["minions"]]
        print(f"cluster {name}  " + "  ".join(f"{node['name']} {node['host']}:{node['port']}" for node in nodes))
    print(f"datastores {', '.join(endpoints['datastores']) or 'none'}")
