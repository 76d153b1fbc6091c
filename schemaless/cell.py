"""The cell: its key, its form before insertion (`Cell`) and after (`StoredCell`). A cell is a value (I1).

A body travels as its stored bytes, zlib over MessagePack (schemaless/codec.py). It is decoded only where a field is
needed.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
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
_REF_KEY = re.compile(r"[0-9]{1,19}")
_CAUSE = re.compile(r"[!-?A-~]{1,250}@[0-9]{1,9}:[0-9]{1,10}:[0-9]{1,19}")  # no space and no second @
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
    """Keyword only, so that subclasses of Cell may add fields."""

    cause: str | None = None


class Cell(_Caused, frozen=True, gc=False):
    """A cell that is to be written. `body` is the stored form, not JSON. `cause` has passed `parse_cause`."""

    key: CellKey
    body: bytes


class StoredCell(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A cell in its entity table. `created_at` is in microseconds since the epoch, UTC."""

    row_key: RowKey
    column_name: ColumnName
    ref_key: RefKey
    shard: int
    generation: int
    added_id: int
    created_at: int
    body: bytes
    cause: str | None = None

    @property
    def key(self) -> CellKey:
        return CellKey(self.row_key, self.column_name, self.ref_key)

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
    """Where the home cluster holds a put cell. For CONFLICT it is the place of the cell that exists under that key."""

    status: PutStatus
    shard: int
    generation: int
    added_id: int
    created_at: int


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
    if isinstance(value, str) and _REF_KEY.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= REF_KEY_MAX:
        raise Invalid(field, "must be an integer from 0 to 2^63-1")
    return RefKey(value)


def parse_cause(text: str, field: str = "cause") -> str:
    """Checks the cause of a cell: who wrote it, and the location of the cell for which it did. Raises Invalid.

    A cause is neither part of a cell's body nor of the digest of its insertion.
    """
    if not isinstance(text, str) or not _CAUSE.fullmatch(text):
        raise Invalid(field, "must be WRITER@SHARD:GENERATION:ADDED_ID, with a writer of 1 to 250 visible characters")
    return text


@lru_cache(1024)  # cells that were inserted together have the same time
def created_at_text(microseconds: int) -> str:
    """Returns a time as RFC 3339 in UTC, with six digits and Z."""
    return (_EPOCH_NAIVE + timedelta(microseconds=microseconds)).isoformat(timespec="microseconds") + "Z"


def parse_time(text: str, field: str = "since") -> int:
    """Parses an RFC 3339 time into microseconds since the epoch. Raises Invalid."""
    try:
        moment = datetime.fromisoformat(text)
    except (ValueError, TypeError):
        raise Invalid(field, "must be an RFC 3339 time") from None
    if moment.tzinfo is None or "T" not in text.upper():
        raise Invalid(field, "must be an RFC 3339 time with a zone, as in 2026-01-31T00:00:00Z")
    return microseconds_since_epoch(moment)


def microseconds_since_epoch(moment: datetime) -> int:
    """Returns what `created_at` holds for a moment with a time zone."""
    return (moment - EPOCH) // _MICROSECOND


def is_dense(after: Location, cells: Sequence[StoredCell]) -> bool:
    """Returns whether these cells are the next ones after a location, without a hole (I3)."""
    return all(cell.added_id == n for n, cell in enumerate(cells, start=after.added_id + 1))
