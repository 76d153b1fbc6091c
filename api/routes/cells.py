"""/cells: one cell, one column, one row. Where bytes become cells: nothing invalid gets deeper."""

from __future__ import annotations

from api.http.cell_json import all_views, cell_view, views_within
from api.http.parameters import DESCENDING, FROM, LIMIT, READ_FROM, TO
from api.http.request import Call, home_of
from api.http.response import Answer, Header, good_answer
from api.http.route import Route
from api.read.reader import Served
from api.write.response import put_answer
from schemaless.cell import (
    Cell,
    CellKey,
    ColumnName,
    RowKey,
    StoredCell,
    parse_column_name,
    parse_ref_key,
    parse_row_key,
    row_key_text,
)
from schemaless.errors import CellMissing, Invalid
from schemaless.storage import entity_table

IDEMPOTENCY_KEY_CHARACTERS_MAX = 200
IMMUTABLE = (b"cache-control", b"public, max-age=31536000, immutable")
ASK_AGAIN = (b"cache-control", b"no-cache")


async def put_cell(call: Call) -> Answer:
    """Stores a cell under its key. The same body again changes nothing; another body is a conflict."""
    datastore = await call.datastore()
    call.query()
    key = CellKey(*_column_of(call), parse_ref_key(call.path["ref_key"]))
    (result,) = await call.services.writer.put(datastore, [Cell(key, await _stored_body(call))])
    return put_answer(result, call.answer_format())


async def post_version(call: Call) -> Answer:
    """Stores a body as the column's next version; the server gives the ref_key. Repeat it with an Idempotency-Key."""
    datastore = await call.datastore()
    call.query()
    row_key, column_name = _column_of(call)
    body = await _stored_body(call)
    outcome = await call.services.writer.put_next(datastore, row_key, column_name, body, _idempotency_key(call))
    return put_answer(outcome, call.answer_format())


async def get_cell(call: Call) -> Answer:
    """One cell. It never changes, so the answer may be kept for ever."""
    datastore = await call.datastore()
    wish = READ_FROM.of(call.query(READ_FROM))
    key = CellKey(*_column_of(call), parse_ref_key(call.path["ref_key"]))
    cell, served = await call.services.reader.exact(datastore, key, wish)
    if cell is None:
        raise CellMissing(f"there is no cell {key}")
    return _cell_answer(call, cell, served, IMMUTABLE)


async def get_latest(call: Call) -> Answer:
    """The newest version of a column: the cell with the highest ref_key. Its ETag is that ref_key."""
    datastore = await call.datastore()
    wish = READ_FROM.of(call.query(READ_FROM))
    row_key, column_name = _column_of(call)
    cell, served = await call.services.reader.newest(datastore, row_key, column_name, wish)
    if cell is None:
        raise CellMissing(f"row {call.path['row_key']} has no cell in column {column_name}")
    return _cell_answer(call, cell, served, ASK_AGAIN)


async def get_versions(call: Call) -> Answer:
    """Versions of a column, by ref_key. `next` is the next page's `from`, or its `to` when descending."""
    datastore = await call.datastore()
    query = call.query(FROM, TO, DESCENDING, LIMIT, READ_FROM)
    column = _column_of(call)
    shard, cluster = home_of(datastore, column[0])
    limit = LIMIT.of(query)
    cells, served = await call.services.reader.read(
        cluster,
        entity_table.versions,
        datastore,
        shard,
        column,
        (FROM.of(query), TO.of(query)),
        DESCENDING.of(query),
        limit + 1,
        wish=READ_FROM.of(query),
    )
    form = call.answer_format()
    views = views_within(map(cell_view, cells[:limit]), form, call.services.settings.answer_bytes_max)
    following = cells[len(views)].ref_key if len(views) < len(cells) else None
    return good_answer(form, {"cells": views, "next": following}, ASK_AGAIN, *served.headers)


async def get_row(call: Call) -> Answer:
    """The newest version of every column of a row."""
    datastore = await call.datastore()
    wish = READ_FROM.of(call.query(READ_FROM))
    row_key = parse_row_key(call.path["row_key"])
    shard, cluster = home_of(datastore, row_key)
    cells, served = await call.services.reader.read(cluster, entity_table.row, datastore, shard, row_key, wish=wish)
    if not cells:
        raise CellMissing(f"there is no row {call.path['row_key']}")
    form = call.answer_format()
    views = all_views(cells, form, call.services.settings.answer_bytes_max)
    columns = {cell.column_name: view for cell, view in zip(cells, views, strict=True)}
    return good_answer(form, {"row_key": row_key_text(row_key), "cells": columns}, ASK_AGAIN, *served.headers)


async def _stored_body(call: Call) -> bytes:
    form = call.request_format()
    return form.parse_body(await call.payload(call.services.settings.body_bytes_max))


def _idempotency_key(call: Call) -> str | None:
    raw = call.header(b"idempotency-key")
    try:
        key = raw.decode()
    except UnicodeDecodeError:
        raise Invalid("Idempotency-Key", "must be UTF-8") from None
    if len(key) > IDEMPOTENCY_KEY_CHARACTERS_MAX:
        raise Invalid("Idempotency-Key", f"has at most {IDEMPOTENCY_KEY_CHARACTERS_MAX} characters")
    return key or None


def _column_of(call: Call) -> tuple[RowKey, ColumnName]:
    return parse_row_key(call.path["row_key"]), parse_column_name(call.path["column"])


def _cell_answer(call: Call, cell: StoredCell, served: Served, caching: Header) -> Answer:
    etag = b'"%d"' % cell.ref_key
    headers = ((b"etag", etag), caching, *served.headers)
    if _is_known(call.header(b"if-none-match"), etag):
        return Answer(304, b"", headers)
    return good_answer(call.answer_format(), cell_view(cell), *headers)


def _is_known(if_none_match: bytes, etag: bytes) -> bool:
    """RFC 9110: weak comparison, and '*' for any."""
    if not if_none_match:
        return False
    tags = [tag.strip().removeprefix(b"W/") for tag in if_none_match.split(b",")]
    return etag in tags or b"*" in tags


_BODY = {"type": "object", "description": "The cell's body: any JSON object."}

ROUTES = (
    Route("PUT", "/cells/{row_key}/{column}/{ref_key}", put_cell, payload=_BODY, answers=(201, 200, 202)),
    Route("POST", "/cells/{row_key}/{column}", post_version, payload=_BODY, answers=(201,)),
    Route("GET", "/cells/{row_key}", get_row, (READ_FROM,)),
    Route("GET", "/cells/{row_key}/{column}", get_latest, (READ_FROM,), answers=(200, 304)),
    Route("GET", "/cells/{row_key}/{column}/versions", get_versions, (FROM, TO, DESCENDING, LIMIT, READ_FROM)),
    Route("GET", "/cells/{row_key}/{column}/{ref_key}", get_cell, (READ_FROM,), answers=(200, 304)),
)
