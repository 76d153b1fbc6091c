"""ApiCall: one call of the API, declared once. Handler, documentation, clients and command derive from it."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from schemaless.access import Scope
from schemaless.contract.parameters import Parameter
from schemaless.errors import Invalid


class ApiCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call under /v1/{datastore}: method, path, and the scope that a caller's token needs (I17).

    `says` is its documentation. `payload` is the shape of what it takes, and `optional` says that it may be left out.
    `answers` has the shape of each status that is no problem, the usual one first. `problems` lists the statuses that
    it has beside those of all calls.
    """

    method: str
    path: str
    scope: Scope
    says: str
    answers: Mapping[int, Any]
    parameters: tuple[Parameter[Any], ...] = ()
    payload: Any = None
    payload_bytes_max: int = 256 << 10
    optional: bool = False
    problems: tuple[int, ...] = ()

    @property
    def path_parameters(self) -> tuple[str, ...]:
        return tuple(re.findall("{(.*?)}", self.path))


class Option(typing.NamedTuple):
    """How a command offers a member of a payload, as a note in the member's type.

    `flag` is its name where the member has another one. Without `--` it is an argument.
    """

    says: str
    flag: str | None = None


def within(least: float, most: float) -> msgspec.Meta:
    """Returns the bounds of a number. `verify_bounds` holds them."""
    return msgspec.Meta(extra_json_schema={"minimum": least, "maximum": most})


def notes(shape: type[msgspec.Struct]) -> Mapping[str, tuple[Any, ...]]:
    """Returns what the type of each member is annotated with, by the member's name."""
    hints = typing.get_type_hints(shape, include_extras=True)
    return {name: tuple(_notes(hints[name])) for name in shape.__struct_fields__}


def _notes(hint: Any) -> Iterator[Any]:
    yield from getattr(hint, "__metadata__", ())
    for part in typing.get_args(hint):
        yield from _notes(part)


def verify_bounds(payload: msgspec.Struct) -> None:
    """Raises Invalid for a number of a payload that is not within its bounds."""
    for name, noted in notes(type(payload)).items():
        value = getattr(payload, name)
        for schema in (note.extra_json_schema for note in noted if isinstance(note, msgspec.Meta)):
            if schema and "minimum" in schema and isinstance(value, int | float):
                least, most = schema["minimum"], schema["maximum"]
                if not least <= value <= most:
                    raise Invalid(name, f"must be from {least:g} to {most:g}")
