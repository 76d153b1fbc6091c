"""`schemaless index create|list|status|wait|query`: indexes over the API, shown to people or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from schemaless.cli.targets import DEFAULT_DATASTORE, DatastoreOption, HostsOption, JsonOption, open_client
from schemaless.client.client import Client
from schemaless.client.index_query import OPERATORS
from schemaless.errors import Invalid, NotReady
from schemaless.index.definition import load_definition, parse_index_name

ACTIVE = "active"
_POLL_S = 0.5

Name = Annotated[str, typer.Argument(help="of the index")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Make secondary indexes and ask them.", no_args_is_help=True)
    commands: dict[str, Callable[..., None]] = {
        "create": create,
        "list": list_all,
        "status": status,
        "wait": wait,
        "query": query,
    }
    for name, function in commands.items():
        group.command(name)(function)
    app.add_typer(group, name="index")


def create(
    file: Annotated[Path, typer.Argument(help="definition, YAML or JSON", exists=True, dir_okay=False)],
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    hosts: HostsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make an index; it is built in the background from the cells that are there."""
    definition = load_definition(file.read_text())
    with open_client(hosts, datastore) as client:
        document = client.index(definition.name).define(definition.document())
    _print_json(document) if as_json else print(_line(document))


def list_all(
    datastore: DatastoreOption = DEFAULT_DATASTORE, hosts: HostsOption = "", as_json: JsonOption = False
) -> None:
    """Indexes of a datastore with their states."""
    with open_client(hosts, datastore) as client:
        document = client.document("/indexes")
    if as_json:
        _print_json(document)
        return
    for index in document["indexes"]:
        print(_line(index))


def status(
    name: Name, datastore: DatastoreOption = DEFAULT_DATASTORE, hosts: HostsOption = "", as_json: JsonOption = False
) -> None:
    """State of one index; while it is building, how far it is."""
    with open_client(hosts, datastore) as client:
        document = _status(client, name)
    _print_json(document) if as_json else print(_line(document))


def wait(
    name: Name,
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    hosts: HostsOption = "",
    timeout: Annotated[float, typer.Option(min=0, help="seconds; then exit code 1")] = 3600.0,
) -> None:
    """Wait until an index is active."""
    deadline = time.monotonic() + timeout
    with (
        open_client(hosts, datastore) as client,
        Progress(console=Console(stderr=True), transient=True) as bar,
    ):
        task = bar.add_task(f"building {name}", total=None)
        while (document := _status(client, name))["state"] != ACTIVE:
            if time.monotonic() > deadline:
                raise NotReady(f"index {_line(document)} after {timeout:.0f} s")
            progress = document.get("progress") or {}
            bar.update(task, completed=progress.get("done", 0), total=progress.get("total"))
            time.sleep(_POLL_S)
    print(_line(document))


def query(
    name: Name,
    terms: Annotated[list[str], typer.Argument(help="FIELD=VALUE, FIELD.gte=VALUE, order=FIELD, limit=N, …")],
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    hosts: HostsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Ask an index: entries as a table, or as JSON."""
    with open_client(hosts, datastore) as client:
        page = client.index(parse_index_name(name)).query(**dict(map(_term, terms)))
    if as_json:
        entries = [{"row_key": str(entry.row_key), "fields": entry.fields} for entry in page]
        _print_json({"entries": entries, "cursor": page.cursor})
        return
    fields = list(page.entries[0].fields) if page.entries else []
    table = Table("row key", *fields)
    for entry in page:
        table.add_row(str(entry.row_key), *(_text(entry.fields[field]) for field in fields))
    Console().print(table)
    if page.cursor is not None:
        print(f"more: cursor={page.cursor}")


def _status(client: Client, name: str) -> dict[str, Any]:
    return client.document(f"/indexes/{parse_index_name(name)}")


def _term(text: str) -> tuple[str, str]:
    left, separator, value = text.partition("=")
    if not separator:
        raise Invalid(text, "must be FIELD=VALUE")
    field, dot, operator = left.rpartition(".")
    return (f"{field}__{operator}" if dot and operator in OPERATORS else left), value


def _line(document: dict[str, Any]) -> str:
    progress = document.get("progress")
    if not progress:
        return f"{document['name']} {document['state']}"
    total = progress["total"] if progress["total"] is not None else "?"
    eta = f", about {progress['eta_s']:.0f} s left" if progress.get("eta_s") is not None else ""
    return f"{document['name']} {document['state']}: {progress['done']} of {total} cells{eta}"


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))
