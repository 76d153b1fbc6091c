"""`schemaless put`, `get`, `latest`, `row`, `versions`, `log` and `shard-of`: cells from the command line.

A cell is printed as one line of text, or with --json as one line of the API's JSON. A missing cell is an error with
exit code 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import typer

from schemaless.cell import row_key_of, row_key_text
from schemaless.cli.output import print_json, print_notice
from schemaless.cli.targets import DatastoreOption, HostsOption, JsonOption, api_command, open_client
from schemaless.client.client import CellIterator, Client
from schemaless.errors import CellMissing, Invalid, Malformed
from schemaless.found_cell import FoundCell
from schemaless.sharding import shard_of
from schemaless.stack.plan import DEFAULT_DATASTORE

NEXT = "next"

RowKey = Annotated[str, typer.Argument(help="UUID of the row")]
Column = Annotated[str, typer.Argument(help="column name")]
RefKey = Annotated[int, typer.Argument(min=0, help="version of the cell, or its number in a list")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="how many cells a page holds at most")]


def register(app: typer.Typer) -> None:
    for command in (put, get, latest, row, versions, log):
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
    elif ref_key.isdigit():
        answer = client.put_cell(row_key, column, int(ref_key), members)
    else:
        raise Invalid("ref_key", f"must be a number or '{NEXT}'")
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
    try:
        # The end moves: who continues from it later would miss what came meanwhile. So it is made a position first.
        start = client.get_cells_for_shard(shard, after, 1).position if after == "end" else after
        tail = client.tail(shard, start, limit=limit)
        for cell in tail:
            _print_cells([cell], as_json)
            sys.stdout.flush()  # before the wait for the next cell
    except KeyboardInterrupt:
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
        print(_json(cell) if as_json else f"{named} {_json(cell.body)}")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
