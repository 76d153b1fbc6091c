"""/batch: up to a thousand cells in one request.

Each item of a put succeeds or fails by itself. A payload that can't be parsed is refused as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from api.http.cell_json import all_views
from api.http.content import NDJSON, Format, decode
from api.http.parameters import READ_FROM
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.read.multi_get import WantedCell, read_many
from api.write.response import item_view
from schemaless.cell import Cell, CellKey, RefKey, parse_column_name, parse_ref_key, parse_row_key
from schemaless.errors import Invalid, InvalidRequest, Malformed, TooLarge

ITEMS_MAX = 1000


class _PutItems(msgspec.Struct, forbid_unknown_fields=True):
    cells: list[msgspec.Raw]


class _Gets(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[msgspec.Raw]


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
    items = parse_puts(await request.payload(request.state.settings.batch_bytes_max), form)
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
    wanted = parse_gets(await request.payload(request.state.settings.batch_bytes_max), form)
    bytes_max = request.state.settings.response_bytes_max
    cells, served = await read_many(request.state.reader, datastore, wanted, read_from, bytes_max)
    answer_form = request.response_format(batch=True)
    views = all_views(cells, answer_form, bytes_max)
    return ok_response(answer_form, views if answer_form is NDJSON else {"cells": views}, *served.headers)


def parse_puts(payload: bytes, form: Format) -> list[Cell | InvalidRequest]:
    """Returns the items in order, each a cell or its error. Raises Malformed, Invalid or TooLarge for the whole."""
    items = _items(payload, form, _PutItems, "cells")
    decoder = form.decoder(_PutItem)
    return [_put_item(item, form, decoder) for item in items]


def parse_gets(payload: bytes, form: Format) -> list[WantedCell]:
    """Raises Malformed, Invalid or TooLarge: the response has no place for the error of one item."""
    items = _items(payload, form, _Gets, "keys")
    decoder = form.decoder(_GetItem)
    return [_get_item(item, form, decoder, f"keys[{position}]") for position, item in enumerate(items)]


def _items(
    payload: bytes, form: Format, shape: type[_PutItems] | type[_Gets], field: str
) -> Sequence[bytes | msgspec.Raw]:
    items: Sequence[bytes | msgspec.Raw]
    if form is NDJSON:
        items = [line for line in payload.split(b"\n") if line.strip()]
    else:
        items = getattr(decode(payload, form.decoder(shape), field), field)
    if not items:
        raise Invalid(field, "needs at least one item")
    if len(items) > ITEMS_MAX:
        raise TooLarge(f"a batch has at most {ITEMS_MAX} items, this one {len(items)}")
    return items


def _put_item(raw: bytes | msgspec.Raw, form: Format, decoder: Any) -> Cell | InvalidRequest:
    try:
        item = decode(raw, decoder, "cell")
        form.check([item.row_key, item.column_name, item.ref_key])
        if not bytes(item.body):
            raise Invalid("body", "is missing")
        body = form.parse_body(bytes(item.body))
        return Cell(CellKey(parse_row_key(item.row_key), parse_column_name(item.column_name), _ref_key(item)), body)
    except Malformed:
        raise
    except InvalidRequest as error:
        return error


def _get_item(raw: bytes | msgspec.Raw, form: Format, decoder: Any, field: str) -> WantedCell:
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


def _list_of(member: str, item: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a payload that is one list."""
    items = {"type": "array", "minItems": 1, "maxItems": ITEMS_MAX, "items": item}
    return {"type": "object", "required": [member], "properties": {member: items}}


_KEY = {
    "row_key": {"type": "string", "format": "uuid"},
    "column_name": {"type": "string"},
    "ref_key": {"type": "integer", "format": "int64"},
}
_KEYS = _list_of("keys", {"type": "object", "required": ["row_key", "column_name"], "properties": _KEY})
_CELLS = _list_of(
    "cells", {"type": "object", "required": [*_KEY, "body"], "properties": {**_KEY, "body": {"type": "object"}}}
)

ROUTES = (
    Route("POST", "/batch/put", batch_put, payload=_CELLS, batch=True),
    Route("POST", "/batch/get", batch_get, (READ_FROM,), payload=_KEYS, batch=True),
)
