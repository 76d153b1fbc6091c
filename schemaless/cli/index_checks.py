"""`schemaless index verify` and `index repair`: an index against its cells, read from the servers themselves.

Exit status 1: there are differences, or some that weren't repaired.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schemaless.cell import parse_row_key, row_key_text
from schemaless.cli.actions import recorded
from schemaless.cli.output import print_json
from schemaless.cli.targets import DatastoreOption, JsonOption, servers
from schemaless.errors import Invalid
from schemaless.index.comparison import FaultCounts
from schemaless.index.definition import IndexDefinition, parse_index_name
from schemaless.index.entry import IndexEntry
from schemaless.index.values import to_json
from schemaless.runtime.extras import Extra, needs
from schemaless.stack.plan import DEFAULT_DATASTORE
from schemaless.topology import Datastore

if TYPE_CHECKING:
    from schemaless.index.check import CheckedNodes, FoundFault, IndexCheck
    from schemaless.index.sweep import SweepSelection

MAKE_MINION_ANEW = 'is never written by a repair: make it anew from its master (docs/indexes.md, "A damaged minion")'


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What is compared, and how."""

    name: Annotated[str, typer.Argument(help="name of the index")]
    datastore: DatastoreOption = DEFAULT_DATASTORE
    shard: Annotated[
        list[int] | None, typer.Option(min=0, help="only the rows and entries of this shard; may be repeated")
    ] = None
    row: Annotated[str, typer.Option(help="only this row, with its entries in all shards")] = ""
    first: Annotated[str, typer.Option("--from", help="only row keys from this one on")] = ""
    last: Annotated[str, typer.Option("--to", help="only row keys up to this one")] = ""
    minions: Annotated[bool, typer.Option(help="whether minions are compared, too")] = True
    rows_per_s: Annotated[int, typer.Option(min=0, help="rows and entries to compare a second; 0: no bound")] = 0
    as_json: JsonOption = False


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the fields of CheckOptions as its options. It gets them as its first argument."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    shared = list(inspect.signature(CheckOptions, eval_str=True).parameters.values())
    names = {parameter.name for parameter in shared}

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        command(
            CheckOptions(**{name: value for name, value in arguments.items() if name in names}),
            **{name: value for name, value in arguments.items() if name not in names},
        )

    parameters = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in (*shared, *own)]
    del run.__wrapped__  # Typer would read the command's own signature
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@needs("index verify", Extra.MYSQL)
@_with_options
def verify(options: CheckOptions) -> None:
    """Compare an index with its cells, and name each entry that is missing, stale or a ghost. It writes nothing."""
    _check(options, repairs=False)


@needs("index repair", Extra.MYSQL)
@recorded("index repair")
@_with_options
def repair(
    options: CheckOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="name what would be repaired, and write nothing")] = False,
) -> None:
    """Bring entries on masters to what the cells say. What is wrong on a minion is only named."""
    _check(options, repairs=not dry_run)


def _check(options: CheckOptions, repairs: bool) -> None:
    from schemaless.index.check import RowRate, check_index, complete_definition
    from schemaless.index.inspection import IndexInspector
    from schemaless.storage.asyncmy_driver import AsyncStorage

    reached = servers()
    datastore = reached.datastore(options.datastore)
    selection = _selection(datastore, options)

    async def run() -> tuple[IndexDefinition, IndexCheck]:
        async with AsyncStorage(reached.topology, connections_max=2) as storage:
            definition = await complete_definition(storage, datastore, parse_index_name(options.name))
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(f"shards of {options.name} on masters", total=selection.steps)
                check = await check_index(
                    storage,
                    IndexInspector(storage, datastore, definition),
                    selection,
                    repair=repairs,
                    minions=options.minions,
                    rate=RowRate(options.rows_per_s or None),
                    on_page=lambda role, page: bar.update(
                        task, description=f"shards of {options.name} on {role}s", advance=int(page.ends_step)
                    ),
                )
        return definition, check

    with ThreadPoolExecutor(1) as thread:  # a program that calls a command may have an event loop of its own
        definition, check = thread.submit(lambda: asyncio.run(run())).result()
    if options.as_json:
        print_json(_document(definition, check))
    else:
        _print_check(definition, check, repairs)
    raise typer.Exit(0 if check.clean else 1)


def _selection(datastore: Datastore, options: CheckOptions) -> SweepSelection:
    from schemaless.index.inspection import FIRST_ROW, LAST_ROW
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


def _document(definition: IndexDefinition, check: IndexCheck) -> dict[str, Any]:
    """Returns a check as JSON. The counts of all nodes together are those of a job."""
    both = [check.masters.counts, check.minions.counts]
    return {
        "index": definition.name,
        "number": definition.number,
        "clean": check.clean,
        **{kind: sum(getattr(counts, kind) for counts in both) for kind in ("missing", "stale", "ghost", "repaired")},
        "masters": _counts_document(check.masters.counts),
        "minions": _counts_document(check.minions.counts),
        "unreached": check.unreached,
        "faults": [_fault_document(definition, found) for found in (*check.masters.faults, *check.minions.faults)],
    }


def _counts_document(counts: FaultCounts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in counts.__struct_fields__}


def _fault_document(definition: IndexDefinition, found: FoundFault) -> dict[str, Any]:
    fault = found.fault
    return {
        "kind": fault.kind,
        "node": found.node,
        "shard": fault.place.shard,
        "row_key": row_key_text(fault.place.row_key),
        "element": fault.place.element,
        "found": _fields(definition, fault.found),
        "expected": _fields(definition, fault.expected),
    }


def _fields(definition: IndexDefinition, entry: IndexEntry | None) -> dict[str, Any] | None:
    """Returns the values of an entry as JSON has them. One that no cell can make is shown as it is."""
    if entry is None:
        return None
    return {
        field.name: value if isinstance(value, str) else to_json(field.type, value)
        for field, value in zip(definition.fields, entry.values, strict=True)
    }


def _print_check(definition: IndexDefinition, check: IndexCheck, repairs: bool) -> None:
    for checked in (check.masters, check.minions):
        for found in checked.faults:
            print(_line(_fault_document(definition, found)))
        if unnamed := checked.counts.faults - len(checked.faults):
            print(f"and {unnamed} more")
    print(f"masters: {_summary(check.masters, repairs)}")
    if check.minions.counts.rows:
        print(f"minions: {_summary(check.minions, False)}")
    for node in check.faulty_minions:
        print(f"minion {node} {MAKE_MINION_ANEW}")
    for node, why in check.unreached.items():
        print(f"minion {node} was not compared: {why}")


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


def _summary(checked: CheckedNodes, repairs: bool) -> str:
    counts = checked.counts
    parts = [f"{counts.rows:,} rows and {counts.entries:,} entries compared"]
    parts += [f"{counts.missing:,} missing, {counts.stale:,} stale, {counts.ghost:,} ghosts"]
    if repairs:
        parts.append(f"{counts.repaired:,} repaired")
    if counts.unsettled:
        parts.append(f"{counts.unsettled:,} changed all the time and weren't judged")
    return "; ".join(parts) if counts.faults or counts.unsettled else f"{parts[0]}, clean"
