"""SQL text with its values in it. Owns the one way in which a value becomes a literal.

Several statements in one round trip can't carry parameters in MySQL's protocol, so values are written into the text.
Bytes and strings go as hexadecimal literals, numbers as digits: nothing that a caller sends can end a literal.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache

import msgspec

Script = str
"""One statement, or several with ';' between them: one round trip."""

SERVICE_PRIVILEGES = "SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP"
"""What the services' account may do in the server's database and in those of each datastore (I17)."""


_EPOCH = datetime(1970, 1, 1)  # without a zone, as a DATETIME is


class Name(msgspec.Struct, frozen=True):
    """An identifier, quoted when rendered."""

    text: str


class Expression(msgspec.Struct, frozen=True):
    """SQL that the server evaluates, and that stands as it is."""

    text: Script


NOW = Expression("UTC_TIMESTAMP(6)")


class Time(msgspec.Struct, frozen=True):
    """A DATETIME(6) in UTC, from microseconds since the epoch."""

    microseconds: int


def sql(template: str, *values: object) -> Script:
    """Returns `template` with each %s replaced by a literal. Raises TypeError for a value that has no literal."""
    return template % tuple(map(literal, values))


def literal(value: object) -> str:
    """Returns a value as SQL text. Raises TypeError for a kind of value that has no literal."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return f"_utf8mb4 x'{value.encode().hex()}'"
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Time):
        return time_literal(value.microseconds)
    if isinstance(value, Expression):
        return value.text
    if isinstance(value, Name):
        return "`" + value.text.replace("`", "``") + "`"
    raise TypeError(f"no SQL literal for {type(value).__name__}")


def literals(*values: object) -> Script:
    """Returns a row of values, in brackets."""
    return f"({commas(list(map(literal, values)))})"


@lru_cache(maxsize=8192)
def time_literal(microseconds: int) -> str:
    """Returns a DATETIME(6). It is cached: rendering is slow, and the cells of a transaction share few times."""
    return f"'{(_EPOCH + timedelta(microseconds=microseconds)).isoformat(' ', 'microseconds')}'"


def where(**columns: object) -> Script:
    """Returns a WHERE: each column has its value, or one of several, at least one."""
    return "WHERE " + matching(**columns)


def matching(**columns: object) -> Script:
    """Returns the condition of `where`, for one that has more."""
    return " AND ".join(
        f"{name} IN ({commas(list(map(literal, value)))})"
        if isinstance(value, list | tuple | set | frozenset | range)
        else f"{name} = {literal(value)}"
        for name, value in columns.items()
    )


def commas(rendered: list[str]) -> str:
    return ",".join(rendered)
