"""Cursors of index queries: they name the last entry of a page by its values, row key and element, so they are stable.

A cursor also has the digest of its query: with another query it would skip entries and show others twice. And it has
the number of the version of the index that answered. It is continued from that version, also after a switch (A22). It
carries the location of `after`, so that the next page includes that put, too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable
from typing import Any

import msgspec

from schemaless.cell import RowKey
from schemaless.errors import Invalid
from schemaless.index.definition import ELEMENTS_MAX, Field, IndexDefinition, dump_definition
from schemaless.index.values import Value, from_json, to_json
from schemaless.location import ShardLocation, parse_shard_location
from schemaless.storage.index_select import EntryCursor, Selection, Term
from schemaless.storage.index_table import FoundEntry

_CHARACTERS_MAX = 24 << 10  # the most that the values of a key take as text, and room
_DIGEST_BYTES = 8


def query_digest(
    definition: IndexDefinition,
    shard_values: Iterable[Value],
    terms: Iterable[Term],
    order: Field,
    *,
    descending: bool,
) -> str:
    """Names what decides which entries a query has, and in which order. The size of a page is no part of it."""
    named = [
        dump_definition(definition),
        sorted(map(repr, shard_values)),
        sorted(repr((term.field.name, str(term.op), term.values)) for term in terms),
        order.name,
        descending,
    ]
    return hashlib.sha256(json.dumps(named).encode()).digest()[:_DIGEST_BYTES].hex()


def cursor_of(
    definition: IndexDefinition, selection: Selection, digest: str, last: FoundEntry, after: ShardLocation | None = None
) -> str:
    """Returns the cursor of the page that begins behind an entry."""
    values = [to_json(field.type, last.entry.values[definition.fields.index(field)]) for field in selection.order]
    parts = [definition.number, digest, values, last.row_key.hex(), last.element, *([str(after)] if after else [])]
    return base64.urlsafe_b64encode(msgspec.json.encode(parts)).decode().rstrip("=")


class _Cursor(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    version: int
    digest: str
    values: list[Any]
    row_key: str
    element: int
    after: str | None = None


def cursor_version(text: str) -> int:
    """Returns the number of the version of the index that a cursor continues. Raises Invalid."""
    return _decoded(text).version


def read_cursor(text: str, order: tuple[Field, ...], digest: str) -> tuple[EntryCursor, ShardLocation | None]:
    """Returns where the page begins, and the put that it includes. Raises Invalid, also for another query's cursor."""
    cursor = _decoded(text)
    raw = bytes.fromhex(cursor.row_key)
    if cursor.digest != digest:
        raise Invalid("cursor", "belongs to another query or index: begin again without it")
    if len(cursor.values) != len(order) or len(raw) != 16 or not 0 <= cursor.element < ELEMENTS_MAX:
        raise _no_cursor()
    after = None if cursor.after is None else parse_shard_location(cursor.after, "cursor")
    return EntryCursor(tuple(map(_value, order, cursor.values)), RowKey(raw), cursor.element), after


def _decoded(text: str) -> _Cursor:
    try:
        if len(text) > _CHARACTERS_MAX:
            raise ValueError("too long")
        named = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        cursor = msgspec.convert(named, _Cursor)
        bytes.fromhex(cursor.row_key)
        # JSON can name half of a code point, which no field has.
        json.dumps(cursor.values, ensure_ascii=False).encode()
    except (ValueError, TypeError, binascii.Error, RecursionError, msgspec.ValidationError):
        raise _no_cursor() from None
    return cursor


def _no_cursor() -> Invalid:
    return Invalid("cursor", "is not a cursor of this API: begin again without it")


def _value(field: Field, shown: object) -> Value | None:
    value = None if shown is None else from_json(field.type, field.length, shown)
    if shown is not None and value is None:
        raise _no_cursor()
    return value
