"""/cells: one cell, one column, one row. Bytes become cells here: nothing invalid gets deeper."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from api.http.asgi import Route
from api.http.budget import Steps
from api.http.content import NDJSON, Format, decode, stored_body
from api.http.request import Request
from api.http.response import RESPONSE_BYTES_MAX, Header, Response, all_views, ok_response, views_within
from api.read.reader import Served, WantedCell, missing, said_by
from api.write.put import item_view, put_answer
from schemaless.access import Scope
from schemaless.cell import (
    Cell,
    CellKey,
    ColumnName,
    RefKey,
    RowKey,
    StoredCell,
    parse_cause,
    parse_column_name,
    parse_ref_key,
    parse_row_key,
    row_key_text,
    with_trace,
)
from schemaless.codec import BODY_BYTES_MAX, cell_view
from schemaless.contract.cells import (
    BatchGetRequest,
    BatchGetView,
    BatchPutRequest,
    BatchPutView,
    CellBody,
    CellView,
    PutView,
    RowView,
    VersionsView,
)
from schemaless.contract.parameters import DESCENDING, FROM, LIMIT, READ_FROM, TO, Parameter
from schemaless.errors import CellErased, Invalid, InvalidRequest, Malformed, TooLarge
from schemaless.ops.erasures import HTTP_CACHES_S
from schemaless.runtime import tracing
from schemaless.storage import entity_table
from schemaless.storage.buffer_table import BufferSelection

IDEMPOTENCY_KEY_CHARACTERS_MAX = 200
KEPT = (b"cache-control", b"public, max-age=%d" % HTTP_CACHES_S)
ASK_AGAIN = (b"cache-control", b"no-cache")
BUFFERED = (b"schemaless-buffered", b"true")


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
    try:
        key = request.header(b"idempotency-key").decode()
    except UnicodeDecodeError:
        raise Invalid("Idempotency-Key", "must be UTF-8") from None
    if len(key) > IDEMPOTENCY_KEY_CHARACTERS_MAX:
        raise Invalid("Idempotency-Key", f"has at most {IDEMPOTENCY_KEY_CHARACTERS_MAX} characters")
    idempotency_key = key or None
    request.repeatable = idempotency_key is not None
    datastore = await request.datastore()
    request.query()
    row_key, column_name = _column_of(request)
    cause = cause_of(request)
    body = await _stored_body(request)
    outcome = await request.state.writer.put_next(datastore, row_key, column_name, body, idempotency_key, cause)
    return put_answer(outcome, request.response_format())


async def get_cell(request: Request) -> Response:
    """One cell. It never changes, but it may be erased, so the answer may be kept for five minutes."""
    datastore = await request.datastore()
    read_from = READ_FROM.of(request.query(READ_FROM))
    key = CellKey(*_column_of(request), parse_ref_key(request.path["ref_key"]))
    cell, served = await request.state.cell_reader.exact(datastore, key, read_from)
    if cell is None:
        raise missing(f"there is no cell {key}", served, read_from)
    return _cell_answer(request, cell, served, KEPT)


async def get_latest(request: Request) -> Response:
    """The newest version of a column: the cell with the highest ref_key. Its ETag is that ref_key."""
    datastore = await request.datastore()
    read_from = READ_FROM.of(request.query(READ_FROM))
    row_key, column_name = _column_of(request)
    cell, served = await request.state.cell_reader.newest(datastore, row_key, column_name, read_from)
    if cell is None:
        what = f"row {request.path['row_key']} has no cell in column {column_name}"
        raise missing(what, served, read_from)
    return _cell_answer(request, cell, served, ASK_AGAIN)


async def get_versions(request: Request) -> Response:
    """Versions of a column, by ref_key. `next` is the next page's `from`, or its `to` when descending."""
    datastore = await request.datastore()
    query = request.query(FROM, TO, DESCENDING, LIMIT, READ_FROM)
    wanted = BufferSelection(*_column_of(request), FROM.of(query), TO.of(query))
    limit = LIMIT.of(query)
    bytes_max = min(RESPONSE_BYTES_MAX, limit * request.state.settings.body_bytes_max)

    async def read(within: int) -> tuple[entity_table.CellPage, Served]:
        page, served = await request.state.cell_reader.versions(
            datastore, wanted, DESCENDING.of(query), limit, within, READ_FROM.of(query)
        )
        if within < bytes_max and page.following is not None and len(page.cells) < limit:
            raise TooLarge(f"a page of {limit} versions has more than {within} bytes")
        return page, served

    page, served = await request.read.read(bytes_max, read, cells=limit)
    form = request.response_format()
    views = await views_within(page.cells, cell_view, form, RESPONSE_BYTES_MAX, request.read)
    following = page.cells[len(views)].ref_key if len(views) < len(page.cells) else page.following
    headers = _headers(page.cells[: len(views)], served)
    return ok_response(form, {"cells": views, "next": following}, ASK_AGAIN, *headers)


async def get_row(request: Request) -> Response:
    """The newest version of every column of a row."""
    datastore = await request.datastore()
    read_from = READ_FROM.of(request.query(READ_FROM))
    row_key = parse_row_key(request.path["row_key"])
    cells, served = await request.read.read(
        RESPONSE_BYTES_MAX,
        lambda within: request.state.cell_reader.row(datastore, row_key, within, read_from),
    )
    if not cells:
        raise missing(f"there is no row {request.path['row_key']}", served, read_from)
    form = request.response_format()
    views = await all_views(cells, form, RESPONSE_BYTES_MAX, request.read)
    columns = {cell.column_name: view for cell, view in zip(cells, views, strict=True)}
    answer = {"row_key": row_key_text(row_key), "cells": columns}
    return ok_response(form, answer, ASK_AGAIN, *_headers(cells, served))


def cause_of(request: Request) -> str | None:
    """Returns the cause that all cells of a put have, and with it the trace of this request. Raises Invalid."""
    given = request.header(b"schemaless-cause")
    cause = parse_cause(given.decode("latin-1"), "Schemaless-Cause") if given else None
    trace = tracing.current_trace()
    return cause if trace is None else with_trace(cause, trace)


async def _stored_body(request: Request) -> bytes:
    form, bytes_max = request.request_format(), request.state.settings.body_bytes_max
    return await stored_body(await request.payload(bytes_max), form, bytes_max)


def _column_of(request: Request) -> tuple[RowKey, ColumnName]:
    return parse_row_key(request.path["row_key"]), parse_column_name(request.path["column"])


def _cell_answer(request: Request, cell: StoredCell, served: Served, caching: Header) -> Response:
    if cell.erased is not None:
        error = CellErased(f"the body of {cell.key} was erased", cell.erased.erasure_id, cell.erased.at)
        raise said_by(error, served)
    etag = b'"%d"' % cell.ref_key
    headers = ((b"etag", etag), ASK_AGAIN if cell.is_buffered else caching, *_headers([cell], served))
    known = [tag.strip().removeprefix(b"W/") for tag in request.header(b"if-none-match").split(b",")]
    if etag in known or b"*" in known:  # RFC 9110: weak comparison, and '*' for any
        return Response(304, b"", headers)
    return ok_response(request.response_format(), cell_view(cell), *headers)


def _headers(cells: Iterable[StoredCell | None], served: Served) -> tuple[Header, ...]:
    """Returns who answered, and whether any of the cells waits in a buffer."""
    return (*served.headers, BUFFERED) if any(cell and cell.is_buffered for cell in cells) else served.headers


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
        problems=(410,),
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
        problems=(410,),
    ),
)


# /batch: up to a thousand cells in one request.
#
# Each item of a put succeeds or fails by itself. A payload that can't be parsed is refused as a whole.

ITEMS_MAX = 1000
BATCH_BYTES_MAX = 16 << 20


KEY_BYTES_MAX = 4096
"""What an item may have beside its body: far more than any key, and little to decode."""

_MISSING = msgspec.Raw()
_Items: Any = msgspec.defstruct(
    "_Items",
    [(f"item_{position}", msgspec.Raw, _MISSING) for position in range(ITEMS_MAX)],
    array_like=True,
    forbid_unknown_fields=True,
)
"""A list of raw items that the decoder gives up at one too many, and not when it has made millions."""


class _PutItems(msgspec.Struct, forbid_unknown_fields=True):
    cells: _Items


class _Gets(msgspec.Struct, forbid_unknown_fields=True):
    keys: _Items


class _PutItem(msgspec.Struct, forbid_unknown_fields=True):
    row_key: Any = None
    column_name: Any = None
    ref_key: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _GetItem(msgspec.Struct, forbid_unknown_fields=True):
    row_key: Any = None
    column_name: Any = None
    ref_key: Any = None


async def batch_put(request: Request) -> Response:
    """Puts cells. Each has a result, in order. A wrong item fails alone."""
    datastore = await request.datastore()
    request.query()
    form = request.request_format(batch=True)
    cause = cause_of(request)
    payload = await request.payload(BATCH_BYTES_MAX)
    items = await parse_puts(payload, form, request.state.settings.body_bytes_max, cause)
    cells = [item for item in items if isinstance(item, Cell)]
    put = iter(await request.state.writer.put(datastore, cells) if cells else [])
    results = [item_view(next(put) if isinstance(item, Cell) else item) for item in items]
    answer_form = request.response_format(batch=True)
    return ok_response(answer_form, results if answer_form is NDJSON else {"results": results})


async def batch_get(request: Request) -> Response:
    """The cells under the given keys, in order, null where there is none. A key without ref_key: the newest."""
    datastore = await request.datastore()
    read_from = READ_FROM.of(request.query(READ_FROM))
    form = request.request_format(batch=True)
    wanted = await parse_gets(await request.payload(BATCH_BYTES_MAX), form)
    bytes_max = min(RESPONSE_BYTES_MAX, len(wanted) * (request.state.settings.body_bytes_max + KEY_BYTES_MAX))
    cells, served = await request.read.read(
        bytes_max,
        lambda within: request.state.cell_reader.many(datastore, wanted, read_from, within),
        cells=len(wanted),
    )
    answer_form = request.response_format(batch=True)
    views = await all_views(cells, answer_form, RESPONSE_BYTES_MAX, request.read)
    answer = views if answer_form is NDJSON else {"cells": views}
    return ok_response(answer_form, answer, *_headers(cells, served))


async def parse_puts(
    payload: bytes, form: Format, body_bytes_max: int = BODY_BYTES_MAX, cause: str | None = None
) -> list[Cell | InvalidRequest]:
    """Returns the items in order, each a cell or its error. Raises Malformed, Invalid or TooLarge for the whole."""
    decoder = form.decoder(_PutItem)
    steps = Steps()
    parsed = []
    items = split_puts(payload, form)
    await steps.after(len(payload))
    for item in items:
        parsed.append(await _put_item(item, form, decoder, body_bytes_max, cause))
        await steps.after(len(bytes(item)))
    return parsed


def split_puts(payload: bytes, form: Format) -> Sequence[bytes | msgspec.Raw]:
    """Returns the items as they came. This is the only step that looks at a whole batch."""
    return _items(payload, form, _PutItems, "cells")


async def parse_gets(payload: bytes, form: Format) -> list[WantedCell]:
    """Raises Malformed, Invalid or TooLarge: the response has no place for the error of one item."""
    decoder = form.decoder(_GetItem)
    steps = Steps()
    wanted = []
    items = _items(payload, form, _Gets, "keys")
    await steps.after(len(payload))
    for position, item in enumerate(items):
        wanted.append(_get_item(item, form, decoder, f"keys[{position}]"))
        await steps.after(len(bytes(item)))
    return wanted


def _items(
    payload: bytes, form: Format, shape: type[_PutItems] | type[_Gets], field: str
) -> Sequence[bytes | msgspec.Raw]:
    items: Sequence[bytes | msgspec.Raw]
    if form is NDJSON:
        lines: list[bytes] = []
        at = 0
        while (match := _BLANK.match(payload, at)) and match.end() < len(payload):
            if len(lines) == ITEMS_MAX:
                raise _too_many()
            end = payload.find(b"\n", match.end())
            at = len(payload) if end < 0 else end
            lines.append(payload[match.end() : at])
        items = lines
    else:
        try:
            found = msgspec.structs.astuple(getattr(decode(payload, form.decoder(shape), field), field))
        except Invalid as error:
            if _TOO_LONG in error.why:
                raise _too_many() from None
            raise
        items = [item for item in found if item is not _MISSING]
    if not items:
        raise Invalid(field, "needs at least one item")
    return items


_TOO_LONG = f"at most length {ITEMS_MAX}"  # msgspec's words
_BLANK = re.compile(rb"[ \t\r\n]*")


def _too_many() -> TooLarge:
    return TooLarge(f"a batch has at most {ITEMS_MAX} items")


async def _put_item(
    raw: bytes | msgspec.Raw, form: Format, decoder: Any, body_bytes_max: int, cause: str | None
) -> Cell | InvalidRequest:
    try:
        size = len(bytes(raw))
        if size > body_bytes_max + KEY_BYTES_MAX:
            raise TooLarge(f"a body has at most {body_bytes_max} bytes, and what is beside it {KEY_BYTES_MAX}")
        item = decode(raw, decoder, "cell")
        raw_body = bytes(item.body)
        if size - len(raw_body) > KEY_BYTES_MAX:
            raise TooLarge(f"what is beside the body of an item has at most {KEY_BYTES_MAX} bytes")
        form.check([item.row_key, item.column_name, item.ref_key])
        if not raw_body:
            raise Invalid("body", "is missing")
        body = await stored_body(raw_body, form, body_bytes_max)
        key = CellKey(parse_row_key(item.row_key), parse_column_name(item.column_name), _ref_key(item))
        return Cell(key, body, cause=cause)
    except Malformed:
        raise
    except InvalidRequest as error:
        # Its frames hold the payload, and lead back to the list of items: a cycle, which the collector frees late.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return error


def _get_item(raw: bytes | msgspec.Raw, form: Format, decoder: Any, field: str) -> WantedCell:
    if len(bytes(raw)) > KEY_BYTES_MAX:
        raise TooLarge(f"{field}: a key has at most {KEY_BYTES_MAX} bytes")
    item = decode(raw, decoder, field)
    form.check([item.row_key, item.column_name, item.ref_key])
    try:
        ref_key = None if item.ref_key is None else _ref_key(item)
        return WantedCell(parse_row_key(item.row_key), parse_column_name(item.column_name), ref_key)
    except Invalid as error:
        raise Invalid(f"{field}.{error.field}", error.why) from None


def _ref_key(item: _PutItem | _GetItem) -> RefKey:
    """Takes a number, not its text: only a path has texts."""
    if isinstance(item.ref_key, str):
        raise Invalid("ref_key", "must be an integer from 0 to 2^63-1")
    return parse_ref_key(item.ref_key)


BATCH_ROUTES = (
    Route(
        "POST",
        "/batch/put",
        batch_put,
        Scope.WRITE,
        payload=BatchPutRequest,
        answers={200: BatchPutView},
        headers=(CAUSE,),
    ),
    Route(
        "POST", "/batch/get", batch_get, Scope.READ, (READ_FROM,), payload=BatchGetRequest, answers={200: BatchGetView}
    ),
)
