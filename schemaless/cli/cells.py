"""`schemaless put`, `get`, `latest`, `row`, `versions`, `log` and `shard-of`: cells from the command line.

One cell a line as text, or JSON as the API has it with --json. An empty place is an error: exit code 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import typer

from schemaless.cell import row_key_of
from schemaless.cli.targets import DEFAULT_DATASTORE, DatastoreOption, HostsOption, JsonOption, open_client
from schemaless.client.answers import FoundCell, PutAnswer, ReadCell
from schemaless.client.client import CellIterator, Client
from schemaless.errors import CellMissing, Invalid, Malformed
from schemaless.sharding import shard_of

NEXT = "next"

RowKey = Annotated[str, typer.Argument(help="UUID")]
Column = Annotated[str, typer.Argument(help="column name")]
RefKey = Annotated[int, typer.Argument(min=0, help="version, or number in a list")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="cells of one page")]


def register(app: typer.Typer) -> None:
    for command in (put, get, latest, row, versions, log):
        app.command()(command)
    app.command("shard-of")(shard_of_row)


def put(
    row_key: RowKey,
    column: Column,
    ref_key: Annotated[str, typer.Argument(help=f"version, or '{NEXT}': the server gives it")],
    body: Annotated[str, typer.Argument(help="JSON object; - reads it from standard input")],
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    hosts: HostsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Write one cell; prints its status and location."""
    members = _json_object(sys.stdin.read() if body == "-" else body)
    with open_client(hosts, datastore) as client:
        answer = _put(client, row_key, column, ref_key, members)
    print(_json(answer) if as_json else f"{answer.status} {answer.location or 'in a buffer'} copies {answer.copies}")


def get(
    row_key: RowKey,
    column: Column,
    ref_key: RefKey,
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    hosts: HostsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Read one cell."""
    with open_client(hosts, datastore) as client:
        cell = _found(client.get_cell(row_key, column, ref_key), f"{row_key}/{column}/{ref_key}")
    _print_cells([cell], as_json)


def latest(
    row_key: RowKey,
    column: Column,
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    hosts: HostsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Read the newest version of a column."""
    with open_client(hosts, datastore) as client:
        cell = _found(client.get_cell_latest(row_key, column), f"{row_key}/{column}")
    _print_cells([cell], as_json)


def row(
    row_key: RowKey,
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    hosts: HostsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Read the newest version of every column."""
    with open_client(hosts, datastore) as client:
        cells = client.get_row(row_key)
    if not cells:
        raise CellMissing(f"there is no row {row_key}")
    _print_cells(cells.values(), as_json)


def versions(
    row_key: RowKey,
    column: Column,
    limit: Limit = 100,
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    hosts: HostsOption = "",
    as_json: JsonOption = False,
) -> None:
    """List versions of a column, newest first."""
    with open_client(hosts, datastore) as client:
        page = client.get_versions(row_key, column, order="desc", limit=limit)
    _print_cells(page, as_json)


def log(
    shard: Annotated[int, typer.Argument(min=0)],
    after: Annotated[str, typer.Option(help="ADDED_ID, GENERATION:ADDED_ID or end; default: the beginning")] = "0",
    limit: Limit = 100,
    follow: Annotated[bool, typer.Option(help="go on when the end is reached, until interrupted")] = False,
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    hosts: HostsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Read a shard's log after a location, in added_id order."""
    with open_client(hosts, datastore) as client:
        if follow:
            _follow(client.tail(shard, after, limit=limit), shard, as_json)
            return
        page = client.get_cells_for_shard(shard, after, limit)
    _print_cells(page, as_json)
    print(f"next {page.location}, {page.pending} pending", file=sys.stderr)


def _follow(tail: CellIterator, shard: int, as_json: bool) -> None:
    """Until interrupted; each cell is on its way when the next one is waited for."""
    try:
        for cell in tail:
            _print_cells([cell], as_json)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"next {tail.locations[shard]}", file=sys.stderr)


def shard_of_row(
    row_key: RowKey,
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    hosts: HostsOption = "",
    shards: Annotated[int | None, typer.Option(min=1, help="shard count; default: the datastore's")] = None,
) -> None:
    """Which shard a row lies in, for ever."""
    key = row_key_of(row_key)
    if shards is None:
        with open_client(hosts, datastore) as client:
            shards = len(client.document("/shards")["shards"])
    print(shard_of(key, shards))


def _put(client: Client, row_key: str, column: str, ref_key: str, members: dict[str, Any]) -> PutAnswer:
    if ref_key == NEXT:
        return client.put(row_key, column, members)
    if not ref_key.isdigit():
        raise Invalid("ref_key", f"must be a number or '{NEXT}'")
    return client.put_cell(row_key, column, int(ref_key), members)


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Malformed(f"the body is no JSON object: {error}") from error


def _found(cell: ReadCell, name: str) -> FoundCell:
    if not cell:
        raise CellMissing(f"there is no cell {name}")
    return cell


def _print_cells(cells: Iterable[FoundCell], as_json: bool) -> None:
    for cell in cells:
        print(_json(cell) if as_json else _line(cell))


def _line(cell: FoundCell) -> str:
    location = f"{cell.shard}:{cell.generation}:{cell.added_id}"
    return f"{location} {cell.row_key} {cell.column_name} {cell.ref_key} {_json(cell.body)}"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
