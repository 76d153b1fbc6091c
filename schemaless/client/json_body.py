"""What a body may hold: the types of JSON, and datetimes with a time zone, which become RFC 3339 text."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from schemaless.errors import Invalid

_PLAIN = frozenset({str, int, bool, type(None)})
_DEPTH_MAX = 64  # as the API has it


def json_body(body: Mapping[str, Any]) -> Any:
    """Returns a body with its datetimes as text. Raises Invalid with the name of a member that JSON can't hold."""
    return _json_value(body, "body", 0)


def _json_value(value: Any, name: str, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise Invalid(name, f"is nested more than {_DEPTH_MAX} levels deep")
    if isinstance(value, Mapping):
        members = {}
        for key, member in value.items():
            if not isinstance(key, str):
                raise Invalid(name, f"has the key {key!r}, and JSON has text as keys only")
            plain = type(member) in _PLAIN  # most members, and a call for each would cost ten times as much
            members[key] = member if plain else _json_value(member, f"{name}.{key}", depth + 1)
        return members
    if isinstance(value, list | tuple):
        return [
            item if type(item) in _PLAIN else _json_value(item, f"{name}[{n}]", depth + 1)
            for n, item in enumerate(value)
        ]
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise Invalid(name, "is a datetime without a time zone: nobody could tell which moment it is")
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, str | int | float):
        return value
    raise Invalid(name, f"is a {type(value).__name__}, which JSON doesn't have: make it text, a number or a list")
