"""What a client is given: cells that were found or are missing, what came of a put, pages of a log or of an index."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal

import msgspec

from schemaless.cell import PutStatus
from schemaless.errors import SchemalessError
from schemaless.location import Location


class FoundCell(msgspec.Struct, frozen=True):
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

    def __bool__(self) -> Literal[True]:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.body.get(name)


class MissingCell(msgspec.Struct, frozen=True):
    """No cell stands there: false, and every field reads as None."""

    def __bool__(self) -> Literal[False]:
        return False

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


ReadCell = FoundCell | MissingCell
MISSING = MissingCell()


class PutAnswer(msgspec.Struct, frozen=True):
    """Of a put that is durable. For a buffered one generation, added_id, created_at and location are None."""

    row_key: uuid.UUID
    column_name: str
    ref_key: int
    status: PutStatus
    shard: int
    copies: int
    generation: int | None = None
    added_id: int | None = None
    created_at: datetime | None = None
    location: str | None = None
    replayed: bool = False
    """The server had seen this Idempotency-Key: the answer is that of the first time."""

    def __bool__(self) -> Literal[True]:
        return True


class PutFailure(msgspec.Struct, frozen=True):
    """Of one cell of put_cells that is not known to be durable: false."""

    status: Literal["conflict", "error"]
    error: SchemalessError

    def __bool__(self) -> Literal[False]:
        return False


PutResult = PutAnswer | PutFailure


class VersionsPage(msgspec.Struct, frozen=True):
    """`next` is the ref_key to go on from, or None at the end."""

    cells: list[FoundCell]
    next: int | None = None

    def __iter__(self) -> Iterator[FoundCell]:
        return iter(self.cells)


class Next(msgspec.Struct, frozen=True):
    """The last location that was examined, as HTTP writes it."""

    generation: int
    added_id: int


class LogPage(msgspec.Struct, frozen=True):
    """Cells of a shard in added_id order. `pending` = head - next."""

    cells: list[FoundCell]
    next: Next
    head: int
    pending: int

    def __iter__(self) -> Iterator[FoundCell]:
        return iter(self.cells)

    @property
    def location(self) -> Location:
        """Where to go on."""
        return Location(self.next.generation, self.next.added_id)


class Entry(msgspec.Struct, frozen=True):
    """One row of an index: keyed and stored fields together, and the cells that were asked for with `include`."""

    row_key: uuid.UUID
    fields: dict[str, Any]
    cells: dict[str, FoundCell | None] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.fields.get(name)


class EntriesPage(msgspec.Struct, frozen=True):
    """`cursor` goes into the next query, or is None at the end."""

    entries: list[Entry]
    cursor: str | None = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
