"""/batch: up to a thousand cells in one call. Items count in order, and each succeeds or fails by itself."""

from __future__ import annotations

from typing import Any

from api.http.batch_request import ITEMS_MAX, parse_gets, parse_puts
from api.http.cell_json import all_views
from api.http.content import NDJSON
from api.http.parameters import READ_FROM
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.read.multi_get import read_many
from api.write.response import item_view
from schemaless.cell import Cell


async def batch_put(request: Request) -> Response:
    """Puts cells; a result for each, in order. An item that is wrong fails alone."""
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
    bytes_max = request.state.settings.answer_bytes_max
    cells, served = await read_many(request.state.reader, datastore, wanted, read_from, bytes_max)
    answer_form = request.response_format(batch=True)
    views = all_views(cells, answer_form, bytes_max)
    return ok_response(answer_form, views if answer_form is NDJSON else {"cells": views}, *served.headers)


def _list_of(member: str, item: dict[str, Any]) -> dict[str, Any]:
    """Schema of a payload that is one list."""
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
