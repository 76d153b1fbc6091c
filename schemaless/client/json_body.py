"""What a body may hold: the types of JSON, and datetimes with a time zone, which become RFC 3339 text.

Everything else is refused by the name of its member, before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

import msgspec

from schemaless.errors import Invalid

_PLAIN = frozenset({str, int, bool, type(None)})
_DEPTH_MAX = 64  # as the API has it
_encode = msgspec.msgpack.Encoder().encode
_MINUTE = timedelta(minutes=1)
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


def encode_json_body(body: Mapping[str, Any]) -> bytes:
    """Returns a body as MessagePack, its datetimes as text. Raises Invalid with the name of what JSON can't hold."""
    if not isinstance(body, Mapping):
        raise Invalid("body", f"must be a JSON object, and is a {_type_name(body)}")
    members = _json_value(body, "body", 0)
    try:
        return _encode(members)
    except (OverflowError, UnicodeEncodeError) as error:  # the encoder checks integers and texts, and names no member
        raise next(_faults(members, "body"), Invalid("body", f"can't be sent: {error}")) from error


def _json_value(value: Any, name: str, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise Invalid(name, f"is nested more than {_DEPTH_MAX} levels deep")
    if isinstance(value, Mapping):
        members = {}
        for key, member in value.items():
            if type(key) is not str:
                raise Invalid(name, f"has the key {key!r} ({_type_name(key)}), and JSON has text as keys only")
            plain = type(member) in _PLAIN  # most members, and a call for each would cost ten times as much
            members[key] = member if plain else _json_value(member, f"{name}.{key}", depth + 1)
        return members
    if isinstance(value, list | tuple):
        return [
            item if type(item) in _PLAIN else _json_value(item, f"{name}[{n}]", depth + 1)
            for n, item in enumerate(value)
        ]
    return _json_scalar(value, name)


def _json_scalar(value: Any, name: str) -> Any:
    """Subclasses of JSON's types are refused, numpy's scalars among them, but for enums of texts and integers."""
    if type(value) is float:
        if math.isfinite(value):
            return value
        raise Invalid(name, f"is {value}, and JSON has no such number: leave the member out, or make it null")
    if isinstance(value, datetime):
        offset = value.utcoffset()
        if offset is None:
            raise Invalid(name, "is a datetime without a time zone: nobody could tell which moment it is")
        if offset % _MINUTE:  # RFC 3339 has offsets of whole minutes
            try:
                value = value.astimezone(UTC)
            except OverflowError as error:
                raise Invalid(name, "is a datetime that UTC can't hold: its year would be 0 or 10000") from error
        return value.isoformat().removesuffix("+00:00") + ("" if value.utcoffset() else "Z")
    if isinstance(value, Enum) and type(value.value) in _PLAIN and isinstance(value, str | int):
        return value.value
    if type(value) in _PLAIN:
        return value
    raise Invalid(name, f"is a {_type_name(value)}, which JSON doesn't have: make it text, a number or a list")


def _faults(value: Any, name: str) -> Iterator[Invalid]:
    if isinstance(value, dict):
        for key, member in value.items():
            if not _is_unicode(key):
                yield Invalid(name, f"has the key {key!r} with half a surrogate pair, which UTF-8 can't hold")
            yield from _faults(member, f"{name}.{key}")
    elif isinstance(value, list):
        for n, item in enumerate(value):
            yield from _faults(item, f"{name}[{n}]")
    elif isinstance(value, int) and not _INT_MIN <= value <= _INT_MAX:
        yield Invalid(name, "is an integer beyond 64 bits: make it text")
    elif isinstance(value, str) and not _is_unicode(value):
        yield Invalid(name, "has half a surrogate pair, which UTF-8 can't hold")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
