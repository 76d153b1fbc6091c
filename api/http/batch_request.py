"""Items of a batch, out of its bytes. What can't be parsed refuses the whole batch; what is only wrong, its item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from api.http.content import NDJSON, Format
from schemaless.cell import Cell, CellKey, ColumnName, RefKey, RowKey, parse_column_name, parse_ref_key, parse_row_key
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


class WantedCell(msgspec.Struct, frozen=True):
    """No ref_key: the newest version."""

    row_key: RowKey
    column_name: ColumnName
    ref_key: RefKey | None


def parse_puts(payload: bytes, form: Format) -> list[Cell | InvalidRequest]:
    """The items in order, each a cell or what is wrong with it. Raises Malformed, Invalid, TooLarge for the whole."""
    items = _items(payload, form, _PutItems, "cells")
    decoder = form.decoder(_PutItem)
    return [_put_item(item, form, decoder) for item in items]


def parse_gets(payload: bytes, form: Format) -> list[WantedCell]:
    """Raises Malformed, Invalid or TooLarge: an answer has no place for an item that is wrong."""
    items = _items(payload, form, _Gets, "keys")
    decoder = form.decoder(_GetItem)
    return [_get_item(item, form, decoder, f"keys[{position}]") for position, item in enumerate(items)]


def decode(raw: bytes | msgspec.Raw, decoder: Any, field: str) -> Any:
    """Raises Malformed for what is no JSON (or MessagePack), Invalid for what has another shape."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise Invalid(field, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise Malformed(f"the payload can't be parsed: {error}") from error


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
        body = _stored_body(bytes(item.body), form)
        return Cell(CellKey(parse_row_key(item.row_key), parse_column_name(item.column_name), _ref_key(item)), body)
    except Malformed:
        raise
    except InvalidRequest as error:
        return error


def _stored_body(raw: bytes, form: Format) -> bytes:
    if not raw:
        raise Invalid("body", "is missing")
    return form.parse_body(raw)


def _get_item(raw: bytes | msgspec.Raw, form: Format, decoder: Any, field: str) -> WantedCell:
    item = decode(raw, decoder, field)
    form.check([item.row_key, item.column_name, item.ref_key])
    try:
        ref_key = None if item.ref_key is None else _ref_key(item)
        return WantedCell(parse_row_key(item.row_key), parse_column_name(item.column_name), ref_key)
    except Invalid as error:
        raise Invalid(f"{field}.{error.field}", error.why) from None


def _ref_key(item: _PutItem | _GetItem) -> RefKey:
    """A number, not its text: only a path has texts."""
    if isinstance(item.ref_key, str):
        raise Invalid("ref_key", "must be an integer from 0 to 2^63-1")
    return parse_ref_key(item.ref_key)


def in_chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
