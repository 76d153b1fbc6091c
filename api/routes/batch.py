"""/batch: up to a thousand cells in one request.

Each item of a put succeeds or fails by itself. A payload that can't be parsed is refused as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from api.http.budget import Steps
from api.http.cell_json import all_views
from api.http.content import NDJSON, Format, decode, stored_body
from api.http.parameters import READ_FROM
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.openapi.cell_views import BatchGetRequest, BatchGetView, BatchPutRequest, BatchPutView
from api.read.multi_get import WantedCell, read_many
from api.routes.cells import CAUSE, cause_of
from api.write.response import item_view
from schemaless.access import Scope
from schemaless.cell import Cell, CellKey, RefKey, parse_column_name, parse_ref_key, parse_row_key
from schemaless.codec import BODY_BYTES_MAX
from schemaless.errors import Invalid, InvalidRequest, Malformed, TooLarge

ITEMS_MAX = 1000


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
    items = await parse_puts(await request.payload(request.state.settings.batch_bytes_max), form, cause)
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
    wanted = await parse_gets(await request.payload(request.state.settings.batch_bytes_max), form)
    settings = request.state.settings
    bytes_max = min(settings.response_bytes_max, len(wanted) * (settings.body_bytes_max + KEY_BYTES_MAX))
    cells, served = await request.read.read(
        bytes_max,
        lambda within: read_many(request.state.reader, datastore, wanted, read_from, within),
        cells=len(wanted),
    )
    answer_form = request.response_format(batch=True)
    views = await all_views(cells, answer_form, settings.response_bytes_max, request.read)
    return ok_response(answer_form, views if answer_form is NDJSON else {"cells": views}, *served.headers)


async def parse_puts(payload: bytes, form: Format, cause: str | None = None) -> list[Cell | InvalidRequest]:
    """Returns the items in order, each a cell or its error. Raises Malformed, Invalid or TooLarge for the whole."""
    decoder = form.decoder(_PutItem)
    steps = Steps()
    parsed = []
    items = split_puts(payload, form)
    await steps.after(len(payload))
    for item in items:
        parsed.append(await _put_item(item, form, decoder, cause))
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
        items = _lines(payload)
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


def _lines(payload: bytes) -> list[bytes]:
    """Returns the lines that aren't blank. Raises TooLarge as soon as there are too many."""
    lines: list[bytes] = []
    at = 0
    while (match := _BLANK.match(payload, at)) and match.end() < len(payload):
        if len(lines) == ITEMS_MAX:
            raise _too_many()
        end = payload.find(b"\n", match.end())
        at = len(payload) if end < 0 else end
        lines.append(payload[match.end() : at])
    return lines


async def _put_item(raw: bytes | msgspec.Raw, form: Format, decoder: Any, cause: str | None) -> Cell | InvalidRequest:
    try:
        size = len(bytes(raw))
        if size > BODY_BYTES_MAX + KEY_BYTES_MAX:
            raise TooLarge(f"a body has at most {BODY_BYTES_MAX} bytes, and what is beside it {KEY_BYTES_MAX}")
        item = decode(raw, decoder, "cell")
        raw_body = bytes(item.body)
        if size - len(raw_body) > KEY_BYTES_MAX:
            raise TooLarge(f"what is beside the body of an item has at most {KEY_BYTES_MAX} bytes")
        form.check([item.row_key, item.column_name, item.ref_key])
        if not raw_body:
            raise Invalid("body", "is missing")
        body = await stored_body(raw_body, form)
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


ROUTES = (
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
