"""Parameter: one query parameter of a route, with its limits. Whatever a route doesn't document is a 422."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec

from schemaless.cell import REF_KEY_MAX, ColumnName, parse_column_name, parse_int, parse_ref_key
from schemaless.errors import Invalid
from schemaless.topology import Role

T = TypeVar("T")

PARAMETERS_MAX = 100
LIMIT_DEFAULT = 100
LIMIT_MAX = 1000
WAIT_DEFAULT_S = 5.0
WAIT_MAX_S = 30.0
COLUMNS_MAX = 100
TEXT: Mapping[str, Any] = {"type": "string"}
FLAG: Mapping[str, Any] = {"type": "boolean", "default": False}


class Parameter(msgspec.Struct, Generic[T], frozen=True, eq=False):
    """`parse` takes the text and the name. It raises Invalid. `schema` tells others what it takes."""

    name: str
    parse: Callable[[str, str], T]
    default: T
    description: str
    schema: Mapping[str, Any] = msgspec.field(default_factory=lambda: TEXT)

    def of(self, query: Mapping[str, str]) -> T:
        text = query.get(self.name)
        return self.default if text is None else self.parse(text, self.name)

    def openapi(self, place: str = "query") -> dict[str, Any]:
        return {"name": self.name, "in": place, "description": self.description, "schema": self.schema}


def integer_schema(least: int, most: int, **more: Any) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most, **more}


def parse_query(raw: bytes, known: Iterable[Parameter[Any]]) -> dict[str, str]:
    """Returns text by name. Raises Invalid for an unknown or repeated name, or for what is no query string."""
    if not raw:
        return {}
    pairs = parse_pairs(raw)
    verify_given_once(pairs)
    names = {parameter.name for parameter in known}
    for name, _ in pairs:
        if name not in names:
            raise Invalid(name, "is not a query parameter here")
    return dict(pairs)


def parse_pairs(raw: bytes, parameters_max: int = PARAMETERS_MAX) -> list[tuple[str, str]]:
    """Returns names and texts. Raises Invalid for what is no query string."""
    try:
        pairs = parse_qsl(
            raw.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=True,
            errors="strict",
            max_num_fields=parameters_max,
        )
    except ValueError as error:  # not ASCII, not UTF-8 behind the percent signs, too many
        raise Invalid("query", f"can't be parsed: {error}") from None
    return pairs


def verify_given_once(pairs: Iterable[tuple[str, str]]) -> None:
    """Raises Invalid for a repeated name."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise Invalid(name, "is given twice")
        seen.add(name)


def parse_limit(text: str, field: str) -> int:
    return parse_int(text, field, 1, LIMIT_MAX)


def parse_flag(text: str, field: str) -> bool:
    if text not in ("", "true", "false", "1", "0"):
        raise Invalid(field, "must be true or false")
    return text in ("", "true", "1")


def parse_role(text: str, field: str) -> Role:
    try:
        return Role(text)
    except ValueError:
        raise Invalid(field, "must be master or minion") from None


_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,20})?([eE]-[0-9]{1,3})?")


def parse_wait(text: str, field: str) -> float:
    """Returns seconds. Raises Invalid."""
    return check_wait(float(text) if _SECONDS.fullmatch(text) else None, field)


def check_wait(value: Any, field: str) -> float:
    """Returns the seconds of a document: there they are a number. Raises Invalid."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= WAIT_MAX_S:
        raise Invalid(field, f"must be seconds from 0 to {WAIT_MAX_S:.0f}")
    return float(value)


def parse_columns(text: str, field: str) -> tuple[ColumnName, ...]:
    names = text.split(",")
    if len(names) > COLUMNS_MAX:
        raise Invalid(field, f"names at most {COLUMNS_MAX} columns")
    return tuple(parse_column_name(name, field) for name in names)


def parse_order(text: str, field: str) -> bool:
    """Returns True for descending."""
    if text not in ("asc", "desc"):
        raise Invalid(field, "must be asc or desc")
    return text == "desc"


READ_FROM: Parameter[Role | None] = Parameter(
    "read_from",
    parse_role,
    None,
    "master or minion. Without it: the master, or a minion when the master can't be reached.",
    {"type": "string", "enum": [str(role) for role in Role]},
)
LIMIT: Parameter[int] = Parameter(
    "limit",
    parse_limit,
    LIMIT_DEFAULT,
    f"1 to {LIMIT_MAX}, default {LIMIT_DEFAULT}.",
    integer_schema(1, LIMIT_MAX, default=LIMIT_DEFAULT),
)
COLUMNS: Parameter[tuple[ColumnName, ...]] = Parameter("columns", parse_columns, (), "Column names with commas.")
DRY_RUN: Parameter[bool] = Parameter(
    "dry_run", parse_flag, False, "true: only say what would be touched. Nothing is ordered.", FLAG
)
REF_KEY = integer_schema(0, REF_KEY_MAX, format="int64")
FROM: Parameter[int] = Parameter("from", parse_ref_key, 0, "Lowest ref_key, included.", REF_KEY)
TO: Parameter[int] = Parameter("to", parse_ref_key, REF_KEY_MAX, "Highest ref_key, included.", REF_KEY)
DESCENDING: Parameter[bool] = Parameter(
    "order",
    parse_order,
    False,
    "asc or desc, by ref_key; default asc.",
    {"type": "string", "enum": ["asc", "desc"], "default": "asc"},
)
