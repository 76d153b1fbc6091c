"""The cell: its key, its form before insertion (`Cell`) and after (`StoredCell`). A cell is a value (I1).

A body travels as its stored bytes, zlib over MessagePack (schemaless/codec.py). It is decoded only where a field is
needed.
"""

from __future__ import annotations

import re
import uuid
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import NewType

import msgspec

from schemaless.errors import Invalid
from schemaless.location import INT64_MAX, Location

RowKey = NewType("RowKey", bytes)
"""The 16 bytes of a UUID."""
ColumnName = NewType("ColumnName", str)
RefKey = NewType("RefKey", int)

REF_KEY_MAX = INT64_MAX
COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_UUID = re.compile(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_INTEGER = re.compile(r"0|[1-9][0-9]{0,18}")  # one text for each number
_HOUR_AND_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = re.compile(
    rf"([0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}[Tt]{_HOUR_AND_MINUTE}:)([0-5][0-9]|60)"
    rf"((?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR_AND_MINUTE}))"
)
"""RFC 3339. Python's own parser takes more of ISO 8601, such as weeks. A second 60 is a leap second."""
_CAUSE = re.compile(r"[!-?A-~]{1,250}@[0-9]{1,9}:[0-9]{1,10}:[0-9]{1,19}")  # no space and no second @
_TRACE = re.compile(r";([0-9a-f]{32}-[0-9a-f]{16})$")  # a cause ends with an added_id
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(?![0-9a-f])")
CAUSE_CHARACTERS_MAX = 300  # of its column
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_NAIVE = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)


class CellKey(msgspec.Struct, frozen=True, gc=False, order=True):
    """The permanent name of a cell."""

    row_key: RowKey
    column_name: ColumnName
    ref_key: RefKey

    def __str__(self) -> str:
        return f"{row_key_text(self.row_key)}/{self.column_name}/{self.ref_key}"


class _Caused(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Keyword only, so that subclasses of Cell may add fields. `cause` may end with a trace (`with_trace`)."""

    cause: str | None = None
    idempotency_key: str | None = None


class Cell(_Caused, frozen=True, gc=False):
    """A cell that is to be written. `body` is the stored form, not JSON. `cause` has passed `parse_cause`.

    `idempotency_key` is that of the POST that first wrote it. It is written home in the cell's own transaction.
    """

    key: CellKey
    body: bytes


class Erased(msgspec.Struct, frozen=True, gc=False):
    """Which erasure emptied a cell's body, and when, in microseconds since the epoch."""

    erasure: int
    at: int

    @property
    def erasure_id(self) -> str:
        return erasure_id(self.erasure)


def erasure_id(erasure: int) -> str:
    """Returns the text by which callers know an erasure."""
    return f"{erasure:016x}"


class StoredCell(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A cell in its entity table. `created_at` is in microseconds since the epoch, UTC.

    One that was read from a buffer has no place yet: generation, added_id and created_at are 0. One that was erased has
    an empty body, which no other cell has (I1). Its record in the topic doesn't say by what.
    """

    row_key: RowKey
    column_name: ColumnName
    ref_key: RefKey
    shard: int
    generation: int
    added_id: int
    created_at: int
    body: bytes
    cause: str | None = None
    erased: Erased | None = None

    @property
    def key(self) -> CellKey:
        return CellKey(self.row_key, self.column_name, self.ref_key)

    @property
    def is_erased(self) -> bool:
        return not self.body

    @property
    def is_buffered(self) -> bool:
        return self.added_id == 0

    @property
    def location(self) -> Location:
        return Location(self.generation, self.added_id)


class PutStatus(StrEnum):
    """The outcome of one put."""

    STORED = "stored"
    ALREADY_STORED = "already_stored"
    BUFFERED = "buffered"
    CONFLICT = "conflict"


class Placed(msgspec.Struct, frozen=True, gc=False):
    """Where the home cluster holds a put cell. For CONFLICT it is the place of the cell that exists under that key.

    `erased`: that cell was erased, so it can't be compared.
    """

    status: PutStatus
    shard: int
    generation: int
    added_id: int
    created_at: int
    erased: Erased | None = None


def parse_row_key(text: str) -> RowKey:
    """Parses a hyphenated UUID in any case. Raises Invalid."""
    if not isinstance(text, str) or not _UUID.fullmatch(text):
        raise Invalid("row_key", "must be a hyphenated UUID")
    return RowKey(bytes.fromhex(text.replace("-", "")))


def row_key_text(row_key: bytes) -> str:
    """Returns the canonical text of 36 characters, which is hashed (I2) and is the key of a Kafka record."""
    h = row_key.hex()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def row_key_of(value: uuid.UUID | str) -> RowKey:
    return RowKey(value.bytes) if isinstance(value, uuid.UUID) else parse_row_key(value)


def parse_column_name(text: str, field: str = "column_name") -> ColumnName:
    """Parses a column name. Raises Invalid, which names `field`."""
    if not isinstance(text, str) or not COLUMN_NAME.fullmatch(text):
        raise Invalid(field, "must match [A-Za-z_][A-Za-z0-9_.-]{0,63}")
    return ColumnName(text)


def parse_ref_key(value: int | str, field: str = "ref_key") -> RefKey:
    """Parses an int from 0 to 2^63-1, or its decimal text. Raises Invalid."""
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= REF_KEY_MAX:
        raise Invalid(field, "must be an integer from 0 to 2^63-1")
    return RefKey(value)


def parse_int(text: str, field: str, least: int, most: int) -> int:
    """Parses the decimal text of an integer that isn't negative. Raises Invalid."""
    if not (_INTEGER.fullmatch(text) and least <= int(text) <= most):
        raise Invalid(field, f"must be an integer from {least} to {most}")
    return int(text)


def parse_cause(text: str, field: str = "cause") -> str:
    """Checks the cause of a cell: who wrote it, and the location of the cell for which it did. Raises Invalid.

    A cause is neither part of a cell's body nor of the digest of its insertion.
    """
    if not isinstance(text, str) or not _CAUSE.fullmatch(text):
        raise Invalid(field, "must be WRITER@SHARD:GENERATION:ADDED_ID, with a writer of 1 to 250 visible characters")
    return text


def with_trace(cause: str | None, trace: str) -> str | None:
    """Returns what is stored of a cell's cause and of the trace of its put, TRACE_ID-SPAN_ID in hexadecimal.

    They share a column, because few cells have a trace. Where there is no room the cause goes first.
    """
    both = f"{cause or ''};{trace}"
    return both if len(both) <= CAUSE_CHARACTERS_MAX else cause


def cause_and_trace(stored: str | None) -> tuple[str | None, str | None]:
    """Returns the cause and the trace of a cell, from what is stored of both."""
    if stored is None or not (found := _TRACE.search(stored)):
        return stored, None
    return stored[: found.start()] or None, found[1]


def sampled_trace(traceparent: str) -> str | None:
    """Returns the trace of a W3C traceparent, None where it isn't sampled or isn't one."""
    found = _TRACEPARENT.match(traceparent)
    return found[1] if found and int(found[2], 16) & 1 else None


def traceparent(trace: str, is_sampled: bool = True) -> str:
    """Returns the W3C traceparent of a trace."""
    return f"00-{trace}-0{int(is_sampled)}"


@lru_cache(1024)  # cells that were inserted together have the same time
def created_at_text(microseconds: int) -> str:
    """Returns a time as RFC 3339 in UTC, with six digits and Z."""
    return (_EPOCH_NAIVE + timedelta(microseconds=microseconds)).isoformat(timespec="microseconds") + "Z"


def parse_time(text: str, field: str = "since") -> int:
    """Parses an RFC 3339 time into microseconds since the epoch. Raises Invalid."""
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    try:
        if match is not None:
            minute, second, rest = match.groups()
            is_leap = second == "60"
            moment = datetime.fromisoformat((f"{minute}59{rest}" if is_leap else text).upper())
            return microseconds_since_epoch(moment.astimezone(UTC) + timedelta(seconds=is_leap))
    except (ValueError, OverflowError):  # no day of the calendar
        pass
    raise Invalid(field, "must be an RFC 3339 time with a zone, as in 2026-01-31T00:00:00Z")


def microseconds_since_epoch(moment: datetime) -> int:
    """Returns what `created_at` holds for a moment with a time zone."""
    return (moment - EPOCH) // _MICROSECOND
