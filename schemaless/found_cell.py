"""FoundCell: a stored cell as programs see it, whether the client, the topic or a trigger function shows it.

The engine works on `StoredCell` (schemaless/cell.py), which holds the bytes of the row key and of the body.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

from schemaless.cell import EPOCH, StoredCell, cause_and_trace
from schemaless.codec import decode_body
from schemaless.location import Location, ShardLocation


class ErasedBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which erasure removed a body, and when. A record of the topic says neither."""

    erasure: str | None = None
    erased_at: datetime | None = None


class FoundCell(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stored cell. A member of the body reads as an attribute, and as None when the body has no such member.

    The cell's own fields go before members of the same name, and names that begin with an underscore are not looked
    up: `cell.body["shard"]` always works.
    """

    row_key: uuid.UUID
    column_name: str
    ref_key: int
    body: dict[str, Any]
    shard: int
    generation: int
    added_id: int
    created_at: datetime
    cause: str | None = None
    """Who wrote the cell, and for which cell: PROGRAM/FUNCTION@SHARD:GENERATION:ADDED_ID of a trigger function."""
    trace: str | None = None
    """The trace of its put, TRACE_ID-SPAN_ID in hexadecimal, if it was sampled (docs/traces.md)."""
    buffered: bool = False
    """It was acknowledged, and waits in a buffer while its home is away. generation and added_id are 0, and created_at
    is the epoch.
    """
    erased: ErasedBody | None = None
    """Its body was erased (docs/deletion.md). `body` is empty then."""

    @property
    def is_erased(self) -> bool:
        return self.erased is not None

    @property
    def location(self) -> ShardLocation:
        """Its place in the log. As text: SHARD:GENERATION:ADDED_ID."""
        return ShardLocation(self.shard, Location(self.generation, self.added_id))

    def __bool__(self) -> Literal[True]:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.body.get(name)


def found_cell(cell: StoredCell) -> FoundCell:
    """Returns a stored cell as programs see it. Raises Corrupt when the body can't be read."""
    by = cell.erased
    erased = ErasedBody() if by is None else ErasedBody(by.erasure_id, EPOCH + timedelta(microseconds=by.at))
    return FoundCell(
        uuid.UUID(bytes=cell.row_key),
        cell.column_name,
        cell.ref_key,
        {} if cell.is_erased else decode_body(cell.body),
        cell.shard,
        cell.generation,
        cell.added_id,
        EPOCH + timedelta(microseconds=cell.created_at),
        *cause_and_trace(cell.cause),
        erased=erased if cell.is_erased else None,
    )
