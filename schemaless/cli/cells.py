"""`schemaless put`, `get`, `latest`, `row`, `versions`, `log` and `shard-of`: cells from the command line.

A cell is printed as one line of text, or with --json as one line of the API's JSON. A missing cell is an error with
exit code 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
import typer

from schemaless.cell import parse_ref_key, row_key_of, row_key_text
from schemaless.cli.interrupts import until_interrupted
from schemaless.cli.output import print_json, print_notice
from schemaless.cli.targets import DatastoreOption, HostsOption, JsonOption, api_command, open_client
from schemaless.client.client import CellIterator, Client
from schemaless.error_text import error_summary
from schemaless.errors import CellMissing, Malformed
from schemaless.found_cell import FoundCell
from schemaless.quantity import quantity
from schemaless.sharding import shard_of
from schemaless.stack.plan import DEFAULT_DATASTORE

NEXT = "next"

RowKey = Annotated[str, typer.Argument(help="UUID of the row")]
Column = Annotated[str, typer.Argument(help="column name")]
RefKey = Annotated[int, typer.Argument(min=0, help="version of the cell, or its number in a list")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="how many cells a page holds at most")]


def register(app: typer.Typer) -> None:
    for command in (put, get, latest, row, versions, log, explain):
        app.command()(command)
    app.command("shard-of")(shard_of_row)


@api_command
def put(
    client: Client,
    as_json: bool,
    row_key: RowKey,
    column: Column,
    ref_key: Annotated[str, typer.Argument(help=f"version of the cell, or '{NEXT}' for one that the server chooses")],
    body: Annotated[str, typer.Argument(help="JSON object; - reads it from standard input")],
) -> None:
    """Write one cell, and print its status and location."""
    try:
        members = msgspec.json.decode(sys.stdin.read() if body == "-" else body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Malformed(f"the body is not a JSON object: {error}") from error
    if ref_key == NEXT:
        answer = client.put(row_key, column, members)
    else:
        answer = client.put_cell(row_key, column, parse_ref_key(ref_key), members)
    print(_json(answer) if as_json else f"{answer.status} {answer.location or 'in a buffer'} copies {answer.copies}")


@api_command
def get(client: Client, as_json: bool, row_key: RowKey, column: Column, ref_key: RefKey) -> None:
    """Read one cell."""
    cell = client.get_cell(row_key, column, ref_key)
    if not cell:
        raise CellMissing(f"there is no cell {row_key}/{column}/{ref_key}", hint=cell._hint)
    _print_cells([cell], as_json)


@api_command
def latest(client: Client, as_json: bool, row_key: RowKey, column: Column) -> None:
    """Read the newest version of a column."""
    cell = client.get_cell_latest(row_key, column)
    if not cell:
        raise CellMissing(f"there is no cell {row_key}/{column}", hint=cell._hint)
    _print_cells([cell], as_json)


@api_command
def row(client: Client, as_json: bool, row_key: RowKey) -> None:
    """Read the newest version of every column."""
    cells = client.get_row(row_key)
    if not cells:
        client.document(f"/cells/{row_key}")  # raises what the API says of it: a minion may have answered
    _print_cells(cells.values(), as_json)


@api_command
def versions(client: Client, as_json: bool, row_key: RowKey, column: Column, limit: Limit = 100) -> None:
    """List the versions of a column, newest first."""
    page = client.get_versions(row_key, column, order="desc", limit=limit)
    if not page.cells and not as_json:
        client.document(f"/cells/{row_key}/{column}")  # raises what the API says of it
    _print_cells(page, as_json)


@api_command
def log(
    client: Client,
    as_json: bool,
    shard: Annotated[int, typer.Argument(min=0, help="number of the shard")],
    after: Annotated[
        str, typer.Option(help="ADDED_ID, GENERATION:ADDED_ID with or without :DIGEST, or end; default: the beginning")
    ] = "0",
    limit: Limit = 100,
    follow: Annotated[bool, typer.Option(help="wait for new cells at the end, until interrupted")] = False,
) -> None:
    """Read a shard's log after a location, in added_id order."""
    if not follow:
        page = client.get_cells_for_shard(shard, after, limit)
        _print_cells(page, as_json)
        print_notice(f"next {page.position}, {page.pending} pending")
        return
    tail: CellIterator | None = None
    with until_interrupted():
        # The end moves: who continues from it later would miss what came meanwhile. So it is made a position first.
        start = client.get_cells_for_shard(shard, after, 1).position if after == "end" else after
        tail = client.tail(shard, start, limit=limit)
        for cell in tail:
            _print_cells([cell], as_json)
            sys.stdout.flush()  # before the wait for the next cell
    if tail is None:
        print_notice("nothing was read yet, so there is no place to continue from")
    else:
        print_notice(f"next {tail.locations[shard]}")


def shard_of_row(
    row_key: RowKey,
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    hosts: HostsOption = "",
    shards: Annotated[int | None, typer.Option(min=1, help="shard count; default: the datastore's")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the shard of a row. It never changes."""
    key = row_key_of(row_key)
    if shards is None:
        with open_client(hosts, datastore) as client:
            shards = len(client.document("/shards")["shards"])
    shard = shard_of(key, shards)
    if as_json:
        print_json({"row_key": row_key_text(key), "shard": shard, "shards": shards})
    else:
        print(shard)


def _print_cells(cells: Iterable[FoundCell], as_json: bool) -> None:
    for cell in cells:
        location = f"{cell.shard}:{cell.generation}:{cell.added_id}"
        named = f"{location} {cell.row_key} {cell.column_name} {cell.ref_key}"
        told = _json(cell.body) if cell.erased is None else f"erased by {cell.erased.erasure}"
        print(_json_of_cell(cell) if as_json else f"{named} {told}")


def _json_of_cell(cell: FoundCell) -> str:
    members = msgspec.to_builtins(cell)
    if cell.is_erased:
        del members["body"]
    return _json(members)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# `schemaless explain ROW|LOCATION`: what happened to a row, and what it waits for.

Document = Mapping[str, Any]
_KINDS = {"failed_call": "failed call", "retry_ordered": "retry ordered", "discard_ordered": "discard ordered"}

_ENDINGS = {
    "finished": "called again and finished",
    "discarded": "discarded",
    "erased": "its body was erased",
    "sought": "a seek let it come again",
    "superseded": "a new generation superseded it",
}


@api_command
def explain(
    client: Client,
    as_json: bool,
    row: Annotated[str, typer.Argument(help="row key, or the location of one of its cells: SHARD:GENERATION:ADDED_ID")],
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="at most so many cells: the last, or around LOCATION")
    ] = 100,
) -> None:
    """Tell what happened to a row: cells, failed calls, parked cells, index entries. And what it waits for now."""
    document = client.explain(row, limit=limit)
    if as_json:
        print_json(document)
        return
    for line in explanation_lines(document):
        print(line)


def explanation_lines(document: Document) -> Iterator[str]:
    """Yields the explanation as people read it: the timeline, then programs, indexes, and what the row waits for."""
    yield f"row {document['row_key']}: shard {document['shard']} on cluster {document['cluster']}"
    yield ""
    yield from _timeline_lines(document)
    for program in document["programs"]:
        yield ""
        yield from _program_lines(program)
    for index in document["indexes"]:
        yield ""
        yield from _index_lines(index)
    yield ""
    if not document["waits"]:
        yield "it waits for nothing"
    for wait in document["waits"]:
        yield f"it waits for {wait['for']} at {wait['cell']}: {wait['why']}"
    for cluster, why in document["unknown"].items():
        yield f"cluster {cluster} couldn't be asked: {why}"


def _timeline_lines(document: Document) -> Iterator[str]:
    told = [event for event in document["events"] if not event.get("at_home")]
    if document["earlier"]:
        yield "  (earlier cells are left out)"
    for event in told:
        yield f"  {event['at']}  {_KINDS.get(event['kind'], event['kind']):<15}  {_event_text(event)}".rstrip()
    if document["later"]:
        yield "  (later cells are left out)"
    if copies := len(document["events"]) - len(told):
        yield f"  {copies} of these cells {'is' if copies == 1 else 'are'} also in a buffer until a minion shows them"


def _event_text(event: Document) -> str:
    match event["kind"]:
        case "cell":
            cause = f"  caused by {event['cause']}" if "cause" in event else ""
            erased = f"  erased by {event['erased']['erasure']}" if "erased" in event else ""
            return f"{event['location']}  {event['column_name']} {event['ref_key']}{cause}{erased}"
        case "erasure":
            return f"{event['location']}  {event['erasure']} erased {quantity(event['cells'], 'cell')}"
        case "buffered":
            refused = f", refused by its home: {event['refused']}" if event["refused"] else ""
            return f"{event['column_name']} {event['ref_key']} on cluster {event['cluster']}{refused}"
        case "diverged":
            where = f"at {event['location']}" if event["location"] else "in its buffer"
            again = f"{event['outcome'].replace('_', ' ')} at {event['stored_at']}" if event["outcome"] else "it waits"
            return (
                f"{event['column_name']} {event['ref_key']} was written by {event['server']} {where} in epoch"
                f" {event['epoch']}, and never reached its minions; put again: {again}"
            )
        case "failed_call":
            return f"{_called(event)}, attempt {event['attempt']}"
        case "parked":
            attempts = quantity(event["attempts"], "attempt")
            return f"{_called(event)}, {event['cause']} after {attempts}: {error_summary(event['error'], 200)}"
        case "waiting":
            return f"{_called(event)} for its next attempt: {error_summary(event['error'], 200)}"
        case "unparked":
            return f"{_called(event)}, {_ENDINGS[event['ending']]}"
        case _:
            reason = f": {event['reason']}" if event.get("reason") else ""
            return f"{_called(event)} by {event.get('who')}, job {event.get('job')}{reason}"


def _called(event: Document) -> str:
    return f"{event['location']}  {event['program']}/{event['trigger']}"


def _program_lines(program: Document) -> Iterator[str]:
    reason = f" ({program['reason']})" if program["reason"] else ""
    workers = f"{program['workers']} worker" + ("" if program["workers"] == 1 else "s")
    yield f"program {program['program']}: {program['state']}{reason}, {workers}"
    checkpoint = program["checkpoint"]
    if checkpoint is None:
        yield "  it has no checkpoint in this shard"
    elif program["finished"]:
        cells = f"{program['finished']} cell" + ("" if program["finished"] == 1 else "s")
        yield f"  {cells} finished by the checkpoint {checkpoint['location']} of {checkpoint['at']}"
    for cell in program["unfinished"]:
        state = cell["state"].replace("_", " ")
        yield f"  {cell['location']} {cell['column_name']} {cell['ref_key']} {state}: {cell['why']}"
    if (left := program["unfinished_count"] - len(program["unfinished"])) > 0:
        yield f"  and {quantity(left, 'more unfinished cell')}"


def _index_lines(index: Document) -> Iterator[str]:
    checkpoint = index["checkpoint"]
    reached = "" if checkpoint is None else f", at {checkpoint['location']}"
    yield f"index {index['name']}: {index['state']}{reached}"
    for entry in index["entries"]:
        fields = ", ".join(f"{name}={value}" for name, value in entry["fields"].items())
        yield f"  entry in shard {entry['shard']}: {fields}"
    if index["why"]:
        yield f"  {'note' if index['entries'] else 'no entry'}: {index['why']}"
