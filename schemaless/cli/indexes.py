"""`schemaless index …`: secondary indexes over the API, from their creation to their end."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schemaless.cell import parse_row_key
from schemaless.cli.calls import call_command
from schemaless.cli.output import add_group, print_error, print_json, print_notice, print_table, print_would
from schemaless.cli.targets import DatastoreOption, JsonOption, api_command, offering, open_client, recorded, servers
from schemaless.client.answers import EntriesPage, awaited_version, is_ready
from schemaless.client.client import Client
from schemaless.client.requests import INDEX_OPERATORS
from schemaless.contract import indexes
from schemaless.errors import Invalid, Malformed, NotFound, NotReady, StateConflict
from schemaless.index.comparison import FaultCounts
from schemaless.index.definition import IndexDefinition, load_definition, parse_index_name
from schemaless.quantity import noun_for, quantity
from schemaless.runtime.extras import Extra, needs
from schemaless.stack.plan import DEFAULT_DATASTORE
from schemaless.topology import Datastore

if TYPE_CHECKING:
    from schemaless.index.check import IndexCheck
    from schemaless.index.inspection import SweepSelection

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


@call_command(indexes.SWITCH)
def switch(document: dict[str, Any], name: Name) -> None:
    """Let the newest version of an index answer, or another one that is there."""
    _print_index(document)


@call_command(indexes.PAUSE)
def pause(document: dict[str, Any], name: Name) -> None:
    """Let no indexer work on an index. If it was complete, it goes on to answer with what it has."""
    _print_index(document)


@call_command(indexes.RESUME)
def resume(document: dict[str, Any], name: Name) -> None:
    """Let indexers work on an index again that was paused, or that has failed."""
    _print_index(document)


@call_command(indexes.THROTTLE)
def throttle(document: dict[str, Any], name: Name) -> None:
    """Bound what each indexer process takes of the servers for an index, while it runs. The rest stays as it is."""
    _print_index(document)


@api_command
def drop(
    client: Client,
    as_json: bool,
    name: Name,
    version: Annotated[
        int | None, typer.Option(min=1, help="drop this version only: a change that is given up, or one that is kept")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="seconds to wait until everything of it is deleted")] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what would be dropped")] = False,
) -> None:
    """Drop an index, in whatever state it is. What isn't deleted in time is deleted in the background."""
    index = client.index(parse_index_name(name))
    document = index.drop(version, dry_run=dry_run)
    if dry_run:
        return _print_index(document, as_json)
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
            *(cell and msgspec.json.encode(cell.body).decode() for cell in map(entry.cells.get, included)),
        )
        for entry in page
    ]
    print_table(("row key", *elements, *fields, *included), rows)
    if behind := page.freshness.behind_cells:
        seconds = f" ({page.freshness.behind_seconds} s)" if page.freshness.behind_seconds is not None else ""
        print_notice(f"the index is {quantity(behind, 'cell')}{seconds} behind: what was written since isn't shown")
    if page.dropped:
        print(f"{page.dropped} entries left out: the newest cells of their rows make others")
    for row_key in page.damaged:
        print(f"row {row_key} left out: an entry of it is damaged. It is compared and repaired soon on its master")
    for cell in page.unreadable:
        where = f"{cell['column_name']} {cell['ref_key']}"
        print(f"row {cell['row_key']} left out: its cell {where} can't be read: {cell['reason']}")
    if page.cursor is not None:
        print(f"more: cursor={page.cursor}")


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
    if "would" in document:
        print_would(document["would"])
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


# `schemaless index verify` and `index repair`: an index against its cells, read from the servers themselves.
#
# Exit status 1: there are differences, or some that weren't repaired. In the background, the indexers do it.

_WITHHELD = (
    "entries were not repaired: minion {node} has rows that its master lacks, or lacks some, so a repair would stop its"
    ' replication. Make it anew first (docs/indexes.md, "A damaged minion")'
)
MAKE_MINION_ANEW = 'is never written by a repair: make it anew from its master (docs/indexes.md, "A damaged minion")'


@dataclass(frozen=True, slots=True)
class CheckArguments:
    """What is compared, and how."""

    name: Annotated[str, typer.Argument(help="name of the index")]
    datastore: DatastoreOption = DEFAULT_DATASTORE
    version: Annotated[
        int | None, typer.Option(min=1, help="number of a version; without it: the one that answers")
    ] = None
    shard: Annotated[
        list[int] | None, typer.Option(min=0, help="only the rows and entries of this shard; may be repeated")
    ] = None
    row: Annotated[str, typer.Option(help="only this row, with its entries in all shards")] = ""
    first: Annotated[str, typer.Option("--from", help="only row keys from this one on")] = ""
    last: Annotated[str, typer.Option("--to", help="only row keys up to this one")] = ""
    minions: Annotated[bool, typer.Option(help="whether minions are compared, too")] = True
    rows_per_s: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="rows and entries to compare a second; 0: no bound, as without it. With --background, without it 5,000"
            " in each process",
        ),
    ] = None
    background: Annotated[bool, typer.Option(help="let the indexers do it, as a job: `index job` shows it")] = False
    as_json: JsonOption = False


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the fields of CheckArguments as its options. It gets them as its first argument."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    shared = list(inspect.signature(CheckArguments, eval_str=True).parameters.values())
    names = {parameter.name for parameter in shared}

    def run(**arguments: Any) -> None:
        command(
            CheckArguments(**{name: value for name, value in arguments.items() if name in names}),
            **{name: value for name, value in arguments.items() if name not in names},
        )

    return offering([*shared, *own], run, command)


@needs("index verify", Extra.MYSQL)
@_with_options
def verify(options: CheckArguments) -> None:
    """Compare an index with its cells, and name each entry that is missing, stale or a ghost. It writes no entry."""
    _check(options, "verify")


@needs("index repair", Extra.MYSQL)
@recorded("index repair")
@_with_options
def repair(
    options: CheckArguments,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="name what would be repaired, and write nothing")] = False,
) -> None:
    """Bring entries on masters to what the cells say. What is wrong on a minion is only named."""
    _check(options, "verify" if dry_run else "repair")


@api_command
def job(client: Client, as_json: bool, job: Annotated[str, typer.Argument(help="what --background printed")]) -> None:
    """Show what came of a check that the indexers carry out. Exit status 1: it found something that isn't repaired."""
    document = client.document(f"/jobs/{job}")
    if as_json:
        print_json(document)
    else:
        for fault in document["faults"]:
            print(_fault_line(fault))
        print(f"{document['kind']} {document['state']}: {document['done']} of {quantity(document['matched'], 'shard')}")
        for role in ("masters", "minions"):
            print(f"{role}: {_summary(FaultCounts(**document[role]), document['kind'] == 'repair')}")
        _print_left_over(document["unreadable"], document["withheld"])
        if document["waits_for"] is not None:
            print(f"it waits: {document['waits_for']}")
    raise typer.Exit(0 if document["clean"] else 1)


def _check(options: CheckArguments, order: Literal["verify", "repair"]) -> None:
    if options.background:
        return _order(options, order)
    repairs = order == "repair"
    from schemaless.index.check import RowRate, check_index, complete_definition
    from schemaless.index.inspection import IndexInspector
    from schemaless.storage.asyncmy_driver import AsyncStorage

    reached = servers()
    datastore = reached.datastore(options.datastore)
    selection = _selection(datastore, options)

    async def run() -> tuple[IndexDefinition, IndexCheck]:
        async with AsyncStorage(reached.topology, connections_max=2) as storage:
            definition = await complete_definition(storage, datastore, parse_index_name(options.name), options.version)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(f"shards of {options.name} on masters", total=selection.steps)
                check = await check_index(
                    storage,
                    IndexInspector(storage, datastore, definition),
                    [selection],
                    repair=repairs,
                    minions=options.minions,
                    rate=RowRate(options.rows_per_s or None),
                    on_page=lambda role, page: bar.update(
                        task, description=f"shards of {options.name} on {role}s", advance=page.steps
                    ),
                )
        return definition, check

    with ThreadPoolExecutor(1) as thread:  # a program that calls a command may have an event loop of its own
        definition, check = thread.submit(lambda: asyncio.run(run())).result()
    result = check.result.document()
    if options.as_json:
        told = {"index": definition.name, "number": definition.number, **result, "faults": check.faults}
        print_json(told)
    else:
        _print_check(check, repairs)
    raise typer.Exit(0 if result["clean"] else 1)


def _order(options: CheckArguments, order: Literal["verify", "repair"]) -> None:
    with open_client("", options.datastore) as client:
        index = client.index(parse_index_name(options.name))
        ordered = (index.repair if order == "repair" else index.verify)(
            options.version,
            shards=options.shard,
            row_keys=[options.row] if options.row else None,
            from_=options.first or None,
            to=options.last or None,
            rows_per_s=options.rows_per_s,
            minions=options.minions,
        )
    if options.as_json:
        print_json(ordered)
    else:
        print(f"job {ordered['job']}: {quantity(ordered['matched'], 'shard')}")


def _selection(datastore: Datastore, options: CheckArguments) -> SweepSelection:
    from schemaless.index.comparison import FIRST_ROW, LAST_ROW
    from schemaless.index.inspection import SweepSelection, one_row

    shards = sorted(set(options.shard or range(datastore.shards)))
    if shards[-1] >= datastore.shards:
        raise Invalid("--shard", f"{shards[-1]}: {datastore.name} has shards 0 to {datastore.shards - 1}")
    if options.row:
        if options.shard or options.first or options.last:
            raise Invalid("--row", "can't be combined with --shard, --from and --to")
        return one_row(datastore, parse_row_key(options.row))
    first = parse_row_key(options.first) if options.first else FIRST_ROW
    last = parse_row_key(options.last) if options.last else LAST_ROW
    return SweepSelection(shards, shards, first, last)


def _print_check(check: IndexCheck, repairs: bool) -> None:
    for checked in (check.masters, check.minions):
        for fault in checked.faults:
            print(_fault_line(fault))
        if unnamed := checked.counts.faults - len(checked.faults):
            print(f"and {unnamed} more")
    print(f"masters: {_summary(check.masters.counts, repairs)}")
    if check.minions.counts.rows:
        print(f"minions: {_summary(check.minions.counts, False)}")
    for node in sorted({fault["node"] for fault in check.minions.faults}):
        print(f"minion {node} {MAKE_MINION_ANEW}")
    for node, why in check.unreached.items():
        print(f"minion {node} was not compared: {why}")
    _print_left_over(check.unreadable, check.withheld)


def _print_left_over(unreadable: Mapping[str, str], withheld: Mapping[str, int]) -> None:
    for why in unreadable.values():
        print(f"not compared: {why}")
    for node, entries in withheld.items():
        print(f"{entries} {_WITHHELD.format(node=node)}")


def _fault_line(fault: dict[str, Any]) -> str:
    """Returns a fault in one line, with the values in which both sides differ."""
    found, expected = fault["found"], fault["expected"]
    if found and expected:
        names = [name for name in found if found[name] != expected[name]]
        has = f"has {_shown(found, names)}, and the cells say {_shown(expected, names)}"
    elif expected:
        has = f"is missing: the cells say {_shown(expected, list(expected))}"
    else:
        has = f"has {_shown(found, list(found))}, and the cells say that nothing belongs there"
    element = f" element {fault['element']}" if fault["element"] else ""
    return f"{fault['kind']}: shard {fault['shard']} of {fault['node']}: row {fault['row_key']}{element} {has}"


def _shown(values: dict[str, Any], names: list[str]) -> str:
    return json.dumps({name: values[name] for name in names})


def _summary(counts: FaultCounts, repairs: bool) -> str:
    rows, entries = noun_for(counts.rows, "row"), noun_for(counts.entries, "entry")
    parts = [f"{counts.rows:,} {rows} and {counts.entries:,} {entries} compared"]
    parts += [f"{counts.missing:,} missing, {counts.stale:,} stale, {counts.ghost:,} {noun_for(counts.ghost, 'ghost')}"]
    if repairs:
        parts.append(f"{counts.repaired:,} repaired")
    if counts.unsettled:
        parts.append(f"{counts.unsettled:,} rows weren't judged: they changed all the time, or can't be read")
    return "; ".join(parts) if counts.faults or counts.unsettled else f"{parts[0]}, clean"
