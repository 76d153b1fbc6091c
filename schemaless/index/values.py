"""Field values: the types of docs/indexes.md, and each type's forms.

A value that came from a cell is converted to its type or becomes null (None); it never fails. Values that a person
wrote, in a definition or in a query, raise Invalid instead.

    type      in Python                            in JSON
    uuid      bytes (16)                           canonical text
    string    str, at most `length` code points    text
    int       int, signed 64 bits                  number
    float     float (an int is taken too)          number
    decimal   Decimal, 29 digits before the point, 9 after it, from text or a number   text
    bool      bool                                 true, false
    datetime  int, microseconds since the epoch    RFC 3339, UTC, six digits, Z
    bytes     bytes, at most `length`              base64
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable, Mapping
from decimal import Context, Decimal, Inexact, InvalidOperation
from enum import StrEnum
from typing import Any

from schemaless.cell import created_at_text, parse_row_key, parse_time, row_key_text
from schemaless.errors import Invalid
from schemaless.location import INT64_MAX

Value = bytes | str | int | float | Decimal | bool

DECIMAL_DIGITS = 38
DECIMAL_PLACES = 9
_EXACT = Context(prec=DECIMAL_DIGITS, traps=[Inexact, InvalidOperation])
_DECIMAL_LIMIT = Decimal(10) ** (DECIMAL_DIGITS - DECIMAL_PLACES)
_INT_MIN, _INT_MAX = -INT64_MAX - 1, INT64_MAX
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
"""Python's own parsers take blanks, underscores and the digits of every script, too."""
DATETIME_MIN_US = parse_time("1000-01-01T00:00:00Z")  # what MySQL's DATETIME is defined for
_DATETIME_MAX_US = parse_time("9999-12-31T23:59:59.499999Z")


class FieldType(StrEnum):
    UUID = "uuid"
    STRING = "string"
    INT = "int"
    FLOAT = "float"
    DECIMAL = "decimal"
    BOOL = "bool"
    DATETIME = "datetime"
    BYTES = "bytes"


def from_json(kind: FieldType, length: int, found: Any) -> Value | None:
    """Returns the typed value of what a body holds, or None when it is missing or doesn't fit."""
    try:
        return FROM_JSON[kind](found, length)
    except DOES_NOT_FIT:
        return None


def from_text(kind: FieldType, length: int, text: str, field: str) -> Value:
    """Returns the typed value of a query parameter. Raises Invalid, which says what it should look like."""
    value = from_json(kind, length, _READ_TEXT.get(kind, str)(text))
    if value is None:
        if kind is FieldType.STRING:
            raise Invalid(field, f"{why_null(kind, length, text)}: longer values are null in the index")
        raise Invalid(field, f"is no {kind}: give {_TEXT_FORMS[kind].format(length)}")
    return value


def why_null(kind: FieldType, length: int, found: Any) -> str:
    """Returns why something that a body has became null."""
    if kind is FieldType.STRING and isinstance(found, str):
        return f"has {len(found)} code points, the field keeps {length}"
    return f"is no {kind}: it takes {_CELL_FORMS[kind].format(length)}"


def to_json(kind: FieldType, value: Value | None) -> Any:
    """Returns a value as JSON has it."""
    write = json_writer(kind)
    return value if value is None or write is None else write(value)


def json_writer(kind: FieldType) -> Callable[[Any], Any] | None:
    """Returns what makes JSON of the values of a type that aren't None, or None where JSON has them as they are."""
    return _TO_JSON.get(kind)


def shard_text(kind: FieldType, value: Value) -> str:
    """Returns the text whose hash places an entry. It is fixed for ever, for every type that may be a shard field."""
    return _SHARD_TEXT[kind](value)


def _int(found: Any, _length: int) -> Value | None:
    fits = isinstance(found, int) and not isinstance(found, bool) and _INT_MIN <= found <= _INT_MAX
    return found if fits else None


def _float(found: Any, _length: int) -> Value | None:
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    value = float(found) + 0.0  # servers have no -0.0
    return value if math.isfinite(value) else None


def _decimal(found: Any, _length: int) -> Value | None:
    if isinstance(found, bool) or not isinstance(found, str | int | float):
        return None
    if isinstance(found, str) and not _NUMBER.fullmatch(found):
        return None
    value = Decimal(str(found))
    if not value.is_finite() or value.copy_abs() >= _DECIMAL_LIMIT:
        return None
    exact = value.normalize(_EXACT)
    exponent = exact.as_tuple().exponent
    return (exact or Decimal(0)) if isinstance(exponent, int) and -exponent <= DECIMAL_PLACES else None


def _datetime(found: Any, _length: int) -> Value | None:
    moment = parse_time(found)
    return moment if DATETIME_MIN_US <= moment <= _DATETIME_MAX_US else None


def _bytes(found: Any, length: int) -> Value | None:
    if not isinstance(found, str):
        return None
    try:
        value = base64.b64decode(found, validate=True)
    except binascii.Error:
        return None
    return value if len(value) <= length else None


DOES_NOT_FIT = (Invalid, ValueError, ArithmeticError)

FROM_JSON: Mapping[FieldType, Callable[[Any, int], Value | None]] = {
    FieldType.UUID: lambda found, _: parse_row_key(found),
    FieldType.STRING: lambda found, length: found if isinstance(found, str) and len(found) <= length else None,
    FieldType.INT: _int,
    FieldType.FLOAT: _float,
    FieldType.DECIMAL: _decimal,
    FieldType.BOOL: lambda found, _: found if isinstance(found, bool) else None,
    FieldType.DATETIME: _datetime,
    FieldType.BYTES: _bytes,
}
"""Converts what a body holds, with the field's length. None and DOES_NOT_FIT mean that it doesn't fit."""


def _int_of_text(text: str) -> Any:
    return int(text) if _INTEGER.fullmatch(text) else None


def _float_of_text(text: str) -> Any:
    return float(text) if _NUMBER.fullmatch(text) else None


_READ_TEXT: Mapping[FieldType, Callable[[str], Any]] = {
    FieldType.INT: _int_of_text,
    FieldType.FLOAT: _float_of_text,
    FieldType.BOOL: {"true": True, "false": False}.get,
}


_TEXT_FORMS: Mapping[FieldType, str] = {
    FieldType.UUID: "hyphenated text such as 5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11",
    FieldType.INT: "digits, at most 64 bits with the sign",
    FieldType.FLOAT: "a number such as 0.5 or 1e9",
    FieldType.DECIMAL: "a number with at most 29 digits before the point and 9 after it",
    FieldType.BOOL: "true or false",
    FieldType.DATETIME: "RFC 3339 with a zone, such as 2026-01-31T08:00:00Z",
    FieldType.BYTES: "base64 of at most {} bytes",
}

_CELL_FORMS: Mapping[FieldType, str] = {
    **_TEXT_FORMS,
    FieldType.STRING: "text",
    FieldType.INT: "digits without quotes, at most 64 bits with the sign",
    FieldType.FLOAT: "a number without quotes",
    FieldType.BOOL: "true or false without quotes",
}
"""What a cell must have instead. A query has text for everything."""

_TO_JSON: Mapping[FieldType, Callable[[Any], Any]] = {
    FieldType.UUID: row_key_text,
    FieldType.DECIMAL: lambda value: format(value.normalize(_EXACT), "f"),
    FieldType.DATETIME: created_at_text,
    FieldType.BYTES: lambda value: base64.b64encode(value).decode(),
}

_SHARD_TEXT: Mapping[FieldType, Callable[[Any], str]] = {
    FieldType.UUID: row_key_text,
    FieldType.STRING: str,
    FieldType.INT: str,
    FieldType.BOOL: {True: "true", False: "false"}.__getitem__,
    FieldType.DATETIME: created_at_text,
}

SHARD_FIELD_TYPES = frozenset(_SHARD_TEXT)
