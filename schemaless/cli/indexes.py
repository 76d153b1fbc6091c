"""`schemaless index …`: secondary indexes over the API, from their creation to their end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from schemaless.cli.index_checks import MAKE_MINION_ANEW, job, repair, verify
from schemaless.cli.output import add_group, print_error, print_json, print_table
from schemaless.cli.targets import api_command
from schemaless.client.answers import EntriesPage, awaited_version, is_ready
from schemaless.client.client import Client
from schemaless.client.requests import INDEX_OPERATORS
from schemaless.errors import Invalid, Malformed, NotFound, NotReady, StateConflict
from schemaless.index.definition import load_definition, parse_index_name
from schemaless.quantity import quantity

_POLL_S = 0.5
_LIMITS = {
    "cells_per_s": "at most {} cells a second and process",
    "build_lag_cells_max": "a build waits for minions that are {} cells behind",
    "build_commit_max_s": "a build rests when commits take {} s",
    "build_busy_share": "a build works {} of the time while cells come in",
}

Name = Annotated[str, typer.Argument(help="name of the index")]
Version = Annotated[
    int | None, typer.Option(min=1, help="number of a version; without it: the change, or else the one that answers")
]


def register(app: typer.Typer) -> None:
    commands: dict[str, Callable[..., None]] = {
        "create": create,
        "list": list_all,
        "status": status,
        "wait": wait,
        "query": query,
        "pause": pause,
        "resume": resume,
        "throttle": throttle,
        "problems": problems,
        "switch": switch,
        "drop": drop,
        "verify": verify,
        "repair": repair,
        "job": job,
    }
    add_group(app, "index", "Create, query and maintain secondary indexes.", commands)


@api_command
def create(
    client: Client,
    as_json: bool,
    file: Annotated[Path, typer.Argument(help="definition as YAML or JSON", exists=True, dir_okay=False)],
    change: Annotated[
        bool, typer.Option("--change", help="an index with another definition gets a new version, which then answers")
    ] = False,
    hold: Annotated[bool, typer.Option("--hold", help="the new version answers only after `index switch`")] = False,
    keep: Annotated[
        str | None, typer.Option(help="how long the version before is kept after the switch, like 30m, 12h or 0s")
    ] = None,
) -> None:
    """Create an index, or change it. It is built in the background from the cells that exist."""
    try:
        definition = load_definition(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise Malformed(f"{file} is no text in UTF-8: {error}") from None
    index = client.index(definition.name)
    document = index.define(definition.document(), change=change, hold=hold, keep=keep)
    _print_index(document, as_json)


@api_command
def list_all(client: Client, as_json: bool) -> None:
    """List the indexes of a datastore with their states."""
    indexes = client.indexes()
    if as_json:
        print_json({"indexes": indexes})
        return
    for index in indexes:
        _print_index(index)


@api_command
def status(client: Client, as_json: bool, name: Name) -> None:
    """Show the state of one index, and the progress of its build."""
    _print_index(client.document(f"/indexes/{parse_index_name(name)}"), as_json)


@api_command
def wait(
    client: Client,
    as_json: bool,
    name: Name,
    timeout: Annotated[float, typer.Option(min=0, help="seconds after which to give up with exit status 1")] = 3600.0,
) -> None:
    """Wait until an index is active, and its change, if there is one, answers or waits for the switch.

    Exit status 3: it doesn't come by itself, because it is dropped, paused, has failed or never was.
    """
    try:
        _print_index(_awaited(client, name, timeout), as_json)
    except (StateConflict, NotFound) as error:
        print_error(f"{error} ({error.hint})")
        raise typer.Exit(3) from None


def _awaited(client: Client, name: str, timeout: float) -> dict[str, Any]:
    """Returns the document of an index once it is active. Raises StateConflict, NotFound or NotReady."""
    deadline = time.monotonic() + timeout
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"building {name}", total=None)
        while True:
            document = client.document(f"/indexes/{parse_index_name(name)}")
            awaited = awaited_version(document)
            if is_ready(awaited):
                return document
            if time.monotonic() > deadline:
                line = _line({"name": name, **awaited})
                raise NotReady(f"index {line} after {timeout:.0f} s", hint=awaited.get("what_to_do"))
            progress = awaited.get("progress") or {}
            bar.update(task, completed=progress.get("done") or 0, total=progress.get("total"))
            time.sleep(_POLL_S)


@api_command
def switch(
    client: Client,
    as_json: bool,
    name: Name,
    back: Annotated[bool, typer.Option("--back", help="let the version before answer again, at once")] = False,
    version: Annotated[int | None, typer.Option(min=1, help="number of the version that shall answer")] = None,
    keep: Annotated[
        str | None, typer.Option(help="how long the version that answered until now is kept, like 30m, 12h or 0s")
    ] = None,
) -> None:
    """Let the newest version of an index answer, or another one that is there."""
    _print_index(client.index(parse_index_name(name)).switch(version, back=back, keep=keep), as_json)


@api_command
def pause(client: Client, as_json: bool, name: Name, version: Version = None) -> None:
    """Let no indexer work on an index. If it was complete, it goes on to answer with what it has."""
    _print_index(client.index(parse_index_name(name)).pause(version), as_json)


@api_command
def resume(client: Client, as_json: bool, name: Name, version: Version = None) -> None:
    """Let indexers work on an index again that was paused, or that has failed."""
    _print_index(client.index(parse_index_name(name)).resume(version), as_json)


@api_command
def throttle(  # noqa: PLR0913, PLR0917  # options of a command
    client: Client,
    as_json: bool,
    name: Name,
    cells_per_s: Annotated[
        int | None, typer.Option(min=0, help="cells a second that it delivers to the index; 0: no bound")
    ] = None,
    build_lag_cells_max: Annotated[
        int | None, typer.Option(min=0, help="a build waits while a minion is further behind; 0: it never waits")
    ] = None,
    build_commit_max_s: Annotated[
        float | None, typer.Option(help="a build rests while 1 of 100 of its commits takes longer")
    ] = None,
    build_busy_share: Annotated[
        float | None, typer.Option(help="share of the time that a build works while cells come in, up to 1")
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="take back what isn't given: the indexers' settings count again")
    ] = False,
    version: Version = None,
) -> None:
    """Bound what each indexer process takes of the servers for an index, while it runs. The rest stays as it is."""
    limits: dict[str, Any] = {
        "cells_per_s": cells_per_s,
        "build_lag_cells_max": build_lag_cells_max,
        "build_commit_max_s": build_commit_max_s,
        "build_busy_share": build_busy_share,
    }
    given = {limit: value for limit, value in limits.items() if reset or value is not None}
    _print_index(client.index(parse_index_name(name)).throttle(version=version, **given), as_json)


@api_command
def drop(
    client: Client,
    as_json: bool,
    name: Name,
    version: Annotated[
        int | None, typer.Option(min=1, help="drop this version only: a change that is given up, or one that is kept")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="seconds to wait until everything of it is deleted")] = 30.0,
) -> None:
    """Drop an index, in whatever state it is. What isn't deleted in time is deleted in the background."""
    index = client.index(parse_index_name(name))
    document = index.drop(version)
    going = {each["number"] for each in document["versions"] if version in (None, each["number"])}
    deadline = time.monotonic() + timeout
    while going & {each["number"] for each in document["versions"]} and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        try:
            document = index.status()
        except NotFound:
            document = document | {"state": "deleted", "problems": None, "what_to_do": None, "versions": []}
    _print_index(document, as_json)


@api_command
def query(
    client: Client,
    as_json: bool,
    name: Name,
    terms: Annotated[list[str], typer.Argument(help="FIELD=VALUE, FIELD.gte=VALUE, order=FIELD, limit=N, …")],
) -> None:
    """Query an index, and print its entries as a table or as JSON."""
    page = client.index(parse_index_name(name)).query(**_parse_terms(terms))
    if as_json:
        print_json(_page_view(page))
    else:
        _print_page(page)


@api_command
def problems(
    client: Client,
    as_json: bool,
    name: Name,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="how many are listed")] = 100,
    cursor: Annotated[str | None, typer.Option(help="of the page before: where this one begins")] = None,
    version: Version = None,
) -> None:
    """List the values that don't fit the types of an index, and are null there."""
    page = client.index(parse_index_name(name)).problems(version, limit=limit, cursor=cursor)
    if as_json:
        print_json(page)
        return
    columns = ("row_key", "column_name", "field", "value", "reason", "values")
    print_table(columns, [tuple(map(problem.get, columns)) for problem in page["problems"]])
    print(f"{page['count']} values don't fit")
    if page["cursor"] is not None:
        print(f"more: --cursor {page['cursor']}")


_OF_PAGE = ("dropped", "damaged", "unreadable", "overlay", "waited", "explain")
"""Members of a page that are shown where they say something."""


def _page_view(page: EntriesPage) -> dict[str, Any]:
    """Returns a page of entries as JSON, with all that it says."""
    told: dict[str, Any] = msgspec.to_builtins(page)
    for entry in told["entries"]:
        for name in [name for name in ("cells", "element") if entry[name] in ({}, None)]:
            del entry[name]
    return {name: value for name, value in told.items() if name not in _OF_PAGE or value not in (0, None, [])}


def _print_page(page: EntriesPage) -> None:
    """Prints a page of entries as a table, with what was left out of it and why."""
    first = page.entries[0] if page.entries else None
    fields, included = (list(first.fields), list(first.cells)) if first else ([], [])
    elements = ["element"] if first and first.element is not None else []
    rows = [
        (
            entry.row_key,
            *([entry.element] if elements else []),
            *map(entry.fields.get, fields),
            *(cell and _json(cell.body) for cell in map(entry.cells.get, included)),
        )
        for entry in page
    ]
    print_table(("row key", *elements, *fields, *included), rows)
    if page.dropped:
        print(f"{page.dropped} entries left out: the newest cells of their rows make others")
    for row_key in page.damaged:
        print(f"row {row_key} left out: an entry of it is damaged. It is compared and repaired soon on its master")
    for cell in page.unreadable:
        where = f"{cell['column_name']} {cell['ref_key']}"
        print(f"row {cell['row_key']} left out: its cell {where} can't be read: {cell['reason']}")
    if page.cursor is not None:
        print(f"more: cursor={page.cursor}")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _parse_terms(terms: list[str]) -> dict[str, str | list[str]]:
    """Returns the terms of a query as Python names them. One that is given several times has several values."""
    parsed: dict[str, str | list[str]] = {}
    several: dict[str, list[str]] = {}
    for text in terms:
        left, separator, value = text.partition("=")
        if not separator:
            raise Invalid(text, "must be FIELD=VALUE")
        field, dot, operator = left.rpartition(".")
        if not dot or operator not in INDEX_OPERATORS:
            several.setdefault(left, []).append(value)
        elif (term := f"{field}__{operator}") in parsed:
            raise Invalid(left, "is given twice")
        else:
            parsed[term] = value.split(",") if operator in ("in", "between") else value
    one = {left: values[0] for left, values in several.items() if len(values) == 1}
    more: dict[str, str | list[str]] = {f"{left}__in": values for left, values in several.items() if len(values) > 1}
    return {**one, **more, **parsed}


def _print_index(document: dict[str, Any], as_json: bool = False) -> None:
    if as_json:
        print_json(document)
        return
    print(_line(document))
    if cleaner := document.get("cleaner"):
        print(f"  {_cleaner_line(cleaner)}")
        for node, compared in cleaner["minions"].items():
            found = ", ".join(f"{compared[kind]} {kind}" for kind in ("missing", "stale", "ghost") if compared[kind])
            if found:
                print(f"  minion {node}: {found}. It {MAKE_MINION_ANEW}")
    _print_hints(document, "  ")
    for version in document["versions"]:
        if version["role"] != "answers" and version["number"] != document["number"]:
            print(f"  {_line({'name': version['role'], **version})}")
            _print_hints(version, "    ")


def _print_hints(document: dict[str, Any], indent: str) -> None:
    for text in (document.get("reason"), document.get("what_to_do")):
        if text is not None:
            print(f"{indent}{text}")
    for waiting in document.get("waiting_shards", ()):
        print(f"{indent}shard {waiting['shard']} waits: {waiting['reason']}")


def _cleaner_line(cleaner: dict[str, Any]) -> str:
    """Returns what the index cleaner found, in one line."""
    if cleaner["compared_since"] is None:
        return f"compared with its cells: {quantity(cleaner['ranges'], 'range')} of row keys so far"
    found = ", ".join(f"{cleaner['total'][kind]} {kind}" for kind in ("missing", "stale", "ghost", "repaired"))
    compared = f"{quantity(cleaner['rows'], 'row')} and {quantity(cleaner['entries'], 'entry')}"
    return f"compared with its cells since {cleaner['compared_since']}: {compared}, in all {found}"


def _line(document: dict[str, Any]) -> str:
    """Returns the state of an index in one line: how far it is, why it failed, and what to do."""
    parts = [f"{document['name']} {document['state']}"]
    if len(document.get("versions", "..")) > 1:
        parts.append(f"version {document['number']}")
    if document.get("kept_until") is not None:
        parts.append(f"until {document['kept_until']}")
    if (progress := document.get("progress")) and progress["done"] is not None:
        total = progress["total"]
        eta = f", about {progress['eta_s']:.0f} s left" if progress.get("eta_s") is not None else ""
        parts.append(f"{progress['done']} of {'? cells' if total is None else quantity(total, 'cell')}{eta}")
    if document.get("lag"):
        parts.append(f"{quantity(document['lag'], 'cell')} behind")
    if document.get("kept_writes") is not None:
        parts.append(f"{quantity(document['kept_writes'], 'entry')} written while kept")
    if document.get("problems"):
        parts.append(f"{document['problems']} values don't fit")
    parts += [text.format(document[limit]) for limit, text in _LIMITS.items() if document.get(limit) is not None]
    return ": ".join([parts[0], ", ".join(parts[1:])]) if parts[1:] else parts[0]
