"""`schemaless index verify` and `index repair`: an index against its cells, read from the servers themselves.

Exit status 1: there are differences, or some that weren't repaired. In the background, the indexers do it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schemaless.cell import parse_row_key
from schemaless.cli.actions import recorded
from schemaless.cli.output import print_json
from schemaless.cli.targets import DatastoreOption, JsonOption, api_command, open_client, servers
from schemaless.client.client import Client
from schemaless.errors import Invalid
from schemaless.index.comparison import FaultCounts
from schemaless.index.definition import IndexDefinition, parse_index_name
from schemaless.quantity import noun_for, quantity
from schemaless.runtime.extras import Extra, needs
from schemaless.stack.plan import DEFAULT_DATASTORE
from schemaless.topology import Datastore

if TYPE_CHECKING:
    from schemaless.index.check import IndexCheck
    from schemaless.index.sweep import SweepSelection

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

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        command(
            CheckArguments(**{name: value for name, value in arguments.items() if name in names}),
            **{name: value for name, value in arguments.items() if name not in names},
        )

    parameters = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in (*shared, *own)]
    del run.__wrapped__  # Typer would read the command's own signature
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


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
            print(_line(fault))
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
    from schemaless.index.sweep import SweepSelection, one_row

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
            print(_line(fault))
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


def _line(fault: dict[str, Any]) -> str:
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
