"""/cells: one cell, one column, one row. Bytes become cells here: nothing invalid gets deeper."""

from __future__ import annotations

from api.http.cell_json import all_views, views_within
from api.http.content import stored_body
from api.http.parameters import DESCENDING, FROM, LIMIT, READ_FROM, TO, Parameter
from api.http.request import Request
from api.http.response import Header, Response, ok_response
from api.http.route import Route
from api.openapi.cell_views import CellBody, CellView, PutView, RowView, VersionsView
from api.read.reader import Served, missing
from api.write.response import put_answer
from schemaless.access import Scope
from schemaless.cell import (
    Cell,
    CellKey,
    ColumnName,
    RowKey,
    StoredCell,
    parse_cause,
    parse_column_name,
    parse_ref_key,
    parse_row_key,
    row_key_text,
)
from schemaless.codec import cell_view
from schemaless.errors import Invalid, TooLarge
from schemaless.sharding import shard_of
from schemaless.storage import entity_table

IDEMPOTENCY_KEY_CHARACTERS_MAX = 200
IMMUTABLE = (b"cache-control", b"public, max-age=31536000, immutable")
ASK_AGAIN = (b"cache-control", b"no-cache")


async def put_cell(request: Request) -> Response:
    """Stores a cell under its key. The same body again changes nothing. Another body is a conflict."""
    datastore = await request.datastore()
    request.query()
    key = CellKey(*_column_of(request), parse_ref_key(request.path["ref_key"]))
    cause = cause_of(request)
    cell = Cell(key, await _stored_body(request), cause=cause)
    (result,) = await request.state.writer.put(datastore, [cell])
    return put_answer(result, request.response_format())


async def post_version(request: Request) -> Response:
    """Stores a body as the column's next version. The server gives the ref_key. Repeat it with an Idempotency-Key."""
    idempotency_key = _idempotency_key(request)
    request.repeatable = idempotency_key is not None
    datastore = await request.datastore()
    request.query()
    row_key, column_name = _column_of(request)
    cause = cause_of(request)
    body = await _stored_body(request)
    outcome = await request.state.writer.put_next(datastore, row_key, column_name, body, idempotency_key, cause)
    return put_answer(outcome, request.response_format())


async def get_cell(request: Request) -> Response:
    """One cell. It never changes, so the answer may be kept for ever."""
    datastore = await request.datastore()
    read_from = READ_FROM.of(request.query(READ_FROM))
    key = CellKey(*_column_of(request), parse_ref_key(request.path["ref_key"]))
    cell, served = await request.state.reader.exact(datastore, key, read_from)
    if cell is None:
        raise missing(f"there is no cell {key}", served, read_from)
    return _cell_answer(request, cell, served, IMMUTABLE)


async def get_latest(request: Request) -> Response:
    """The newest version of a column: the cell with the highest ref_key. Its ETag is that ref_key."""
    datastore = await request.datastore()
    read_from = READ_FROM.of(request.query(READ_FROM))
    row_key, column_name = _column_of(request)
    cell, served = await request.state.reader.newest(datastore, row_key, column_name, read_from)
    if cell is None:
        what = f"row {request.path['row_key']} has no cell in column {column_name}"
        raise missing(what, served, read_from)
    return _cell_answer(request, cell, served, ASK_AGAIN)


async def get_versions(request: Request) -> Response:
    """Versions of a column, by ref_key. `next` is the next page's `from`, or its `to` when descending."""
    datastore = await request.datastore()
    query = request.query(FROM, TO, DESCENDING, LIMIT, READ_FROM)
    column = _column_of(request)
    shard = shard_of(column[0], datastore.shards)
    limit = LIMIT.of(query)
    bytes_max = min(request.state.settings.response_bytes_max, limit * request.state.settings.body_bytes_max)

    async def read(within: int) -> tuple[entity_table.CellPage, Served]:
        page, served = await request.state.reader.read(
            datastore.home(shard),
            entity_table.versions,
            datastore,
            shard,
            column,
            (FROM.of(query), TO.of(query)),
            DESCENDING.of(query),
            limit,
            within,
            read_from=READ_FROM.of(query),
        )
        if within < bytes_max and page.following is not None and len(page.cells) < limit:
            raise TooLarge(f"a page of {limit} versions has more than {within} bytes")
        return page, served

    page, served = await request.read.read(bytes_max, read, cells=limit)
    form = request.response_format()
    views = await views_within(page.cells, cell_view, form, request.state.settings.response_bytes_max, request.read)
    following = page.cells[len(views)].ref_key if len(views) < len(page.cells) else page.following
    return ok_response(form, {"cells": views, "next": following}, ASK_AGAIN, *served.headers)


async def get_row(request: Request) -> Response:
    """The newest version of every column of a row."""
    datastore = await request.datastore()
    read_from = READ_FROM.of(request.query(READ_FROM))
    row_key = parse_row_key(request.path["row_key"])
    shard = shard_of(row_key, datastore.shards)
    cells, served = await request.read.read(
        request.state.settings.response_bytes_max,
        lambda within: request.state.reader.read(
            datastore.home(shard), entity_table.row, datastore, shard, row_key, within, read_from=read_from
        ),
    )
    if not cells:
        raise missing(f"there is no row {request.path['row_key']}", served, read_from)
    form = request.response_format()
    views = await all_views(cells, form, request.state.settings.response_bytes_max, request.read)
    columns = {cell.column_name: view for cell, view in zip(cells, views, strict=True)}
    return ok_response(form, {"row_key": row_key_text(row_key), "cells": columns}, ASK_AGAIN, *served.headers)


def cause_of(request: Request) -> str | None:
    """Returns the cause that all cells of a put have. Raises Invalid."""
    given = request.header(b"schemaless-cause")
    return parse_cause(given.decode("latin-1"), "Schemaless-Cause") if given else None


async def _stored_body(request: Request) -> bytes:
    form = request.request_format()
    return await stored_body(await request.payload(request.state.settings.body_bytes_max), form)


def _idempotency_key(request: Request) -> str | None:
    try:
        key = request.header(b"idempotency-key").decode()
    except UnicodeDecodeError:
        raise Invalid("Idempotency-Key", "must be UTF-8") from None
    if len(key) > IDEMPOTENCY_KEY_CHARACTERS_MAX:
        raise Invalid("Idempotency-Key", f"has at most {IDEMPOTENCY_KEY_CHARACTERS_MAX} characters")
    return key or None


def _column_of(request: Request) -> tuple[RowKey, ColumnName]:
    return parse_row_key(request.path["row_key"]), parse_column_name(request.path["column"])


def _cell_answer(request: Request, cell: StoredCell, served: Served, caching: Header) -> Response:
    etag = b'"%d"' % cell.ref_key
    headers = ((b"etag", etag), caching, *served.headers)
    known = [tag.strip().removeprefix(b"W/") for tag in request.header(b"if-none-match").split(b",")]
    if etag in known or b"*" in known:  # RFC 9110: weak comparison, and '*' for any
        return Response(304, b"", headers)
    return ok_response(request.response_format(), cell_view(cell), *headers)


CAUSE: Parameter[str] = Parameter(
    "Schemaless-Cause", parse_cause, "", "WRITER@SHARD:GENERATION:ADDED_ID: who wrote the cell, and for which one."
)
_IDEMPOTENCY_KEY: Parameter[str] = Parameter(
    "Idempotency-Key",
    lambda text, field: text,
    "",
    "With it the same POST may be sent again.",
    {"type": "string", "maxLength": IDEMPOTENCY_KEY_CHARACTERS_MAX},
)
_IF_NONE_MATCH: Parameter[str] = Parameter(
    "If-None-Match", lambda text, field: text, "", "An ETag that the caller has: 304 if it is still the one."
)
_CELL = {200: CellView, 304: None}

ROUTES = (
    Route(
        "PUT",
        "/cells/{row_key}/{column}/{ref_key}",
        put_cell,
        Scope.WRITE,
        payload=CellBody,
        answers={201: PutView, 200: PutView, 202: PutView},
        headers=(CAUSE,),
        problems=(409,),
    ),
    Route(
        "POST",
        "/cells/{row_key}/{column}",
        post_version,
        Scope.WRITE,
        payload=CellBody,
        answers={201: PutView, 200: PutView},
        headers=(_IDEMPOTENCY_KEY, CAUSE),
        problems=(409,),
    ),
    Route("GET", "/cells/{row_key}", get_row, Scope.READ, (READ_FROM,), answers={200: RowView}, problems=(413,)),
    Route(
        "GET",
        "/cells/{row_key}/{column}",
        get_latest,
        Scope.READ,
        (READ_FROM,),
        answers=_CELL,
        headers=(_IF_NONE_MATCH,),
    ),
    Route(
        "GET",
        "/cells/{row_key}/{column}/versions",
        get_versions,
        Scope.READ,
        (FROM, TO, DESCENDING, LIMIT, READ_FROM),
        answers={200: VersionsView},
        problems=(413,),
    ),
    Route(
        "GET",
        "/cells/{row_key}/{column}/{ref_key}",
        get_cell,
        Scope.READ,
        (READ_FROM,),
        answers=_CELL,
        headers=(_IF_NONE_MATCH,),
    ),
)
