"""Results of a client's calls: found and missing cells, outcomes of puts, pages of a log or of an index."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec

from schemaless.cell import PutStatus, microseconds_since_epoch
from schemaless.errors import Invalid, SchemalessError, StateConflict
from schemaless.found_cell import FoundCell
from schemaless.location import Location
from schemaless.position import Position, insertion_digest, parse_digest


class MissingCell(msgspec.Struct, frozen=True):
    """A missing cell. It is false, and every field reads as None. It remembers the column in which it was looked for.

    `client.put(row_key, cell, body)` writes into that column.
    """

    _column: str | None = None
    _hint: str | None = None
    """Why it may exist all the same, as the API says it."""

    def __bool__(self) -> Literal[False]:
        return False

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


ReadCell = FoundCell | MissingCell


def column_of(column: str | ReadCell) -> str:
    """Returns the name of a column, which a cell that was read stands for, too. Raises Invalid."""
    if isinstance(column, FoundCell):
        return column.column_name
    if isinstance(column, MissingCell):
        if column._column is None:
            raise Invalid("column", "must be a name, or a cell that a client returned")
        return column._column
    return column


class PutAnswer(msgspec.Struct, frozen=True):
    """The result of a durable put. A buffered one has no generation, added_id, created_at and location."""

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
    digest: str | None = None
    """With it the shard's log is read after this cell, and no other: `GENERATION:ADDED_ID:DIGEST`."""
    replayed: bool = False
    """The server had seen this Idempotency-Key, and repeats its first response."""

    def __bool__(self) -> Literal[True]:
        return True


class PutFailure(msgspec.Struct, frozen=True):
    """The result for one cell of put_cells that is not known to be durable. It is false."""

    status: Literal["conflict", "error"]
    error: SchemalessError

    def __bool__(self) -> Literal[False]:
        return False


PutResult = PutAnswer | PutFailure


class VersionsPage(msgspec.Struct, frozen=True):
    """A page of versions. `next` is the ref_key of the next page, or None at the end."""

    cells: list[FoundCell]
    next: int | None = None

    def __iter__(self) -> Iterator[FoundCell]:
        return iter(self.cells)


class Next(msgspec.Struct, frozen=True):
    """The last location that was examined, as HTTP writes it. `digest` is that of the cell there, where it was read."""

    generation: int
    added_id: int
    digest: str | None = None


class LogPage(msgspec.Struct, frozen=True):
    """Cells of a shard in added_id order. `pending` = head - next.

    `generation` is the shard's present one, None where the server doesn't say it.
    """

    cells: list[FoundCell]
    next: Next
    head: int
    pending: int
    generation: int | None = None
    shard: int = -1

    def __iter__(self) -> Iterator[FoundCell]:
        return iter(self.cells)

    @property
    def position(self) -> Position:
        """The position to continue after. It proves that the log is still the same one (I16)."""
        digest = None if self.next.digest is None else parse_digest(self.next.digest, "next")
        return Position(self.shard, self.next.generation, self.next.added_id, digest=digest)

    @property
    def location(self) -> Location:
        """The location of `position`."""
        return Location(self.next.generation, self.next.added_id)


def position_after(cell: FoundCell) -> Position:
    """Returns the position of a reader that has read a shard's log up to a cell."""
    digest = insertion_digest(
        cell.generation,
        cell.added_id,
        microseconds_since_epoch(cell.created_at),
        cell.row_key.bytes,
        cell.column_name,
        cell.ref_key,
    )
    return Position(cell.shard, cell.generation, cell.added_id, digest=digest)


class Entry(msgspec.Struct, frozen=True):
    """One row of an index: keyed and stored fields together, and the cells that were asked for with `include`.

    `element` is the number of the array's element that the entry is of, None where the index has no array.
    """

    row_key: uuid.UUID
    fields: dict[str, Any]
    cells: dict[str, FoundCell | None] = {}
    element: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.fields.get(name)


class EntriesFreshness(msgspec.Struct, frozen=True):
    """How far an index is behind its cells. Every cell created before `complete_until` is in the answer.

    None is not known, for example while a master is unreachable.
    """

    behind_cells: int | None = None
    behind_seconds: float | None = None
    complete_until: datetime | None = None


class EntriesPage(msgspec.Struct, frozen=True):
    """A page of an index query. `cursor` goes into the next query, and is None at the end.

    `version` is the number of the version of the index that answered.
    `dropped` entries were left out by `verify`: the newest cells of their rows make other ones.
    `damaged` are row keys of entries that can't be read. They are left out. So are the rows of `unreadable` cells,
    which were to be included or verified and can't be decoded: row_key, column_name, ref_key and reason of each.

    With `after`, `overlay` says how many `cells` were evaluated that the index lacked. `waited` is how many seconds the
    query waited for the index.
    """

    entries: list[Entry]
    cursor: str | None = None
    freshness: EntriesFreshness = EntriesFreshness()
    dropped: int = 0
    explain: list[dict[str, Any]] = []
    overlay: dict[str, int] | None = None
    waited: float | None = None
    version: int = 1
    damaged: list[str] = []
    unreadable: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


INDEX_POLL_S = 0.5
"""How often a client that waits for an index asks for it."""


def awaited_version(index: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the version of an index that somebody waits for: the change, or else the one that answers."""
    changes = [version for version in index["versions"] if version["role"] == "change"]
    return changes[-1] if changes else index


def is_ready(awaited: Mapping[str, Any]) -> bool:
    """Returns whether a version answers, or waits for its switch. Raises StateConflict if it doesn't come by itself."""
    if awaited["state"] in ("paused", "failed", "deleting"):
        why = f": {awaited['reason']}" if awaited.get("reason") else ""
        what = f"version {awaited['number']} of the index is {awaited['state']}{why}"
        raise StateConflict(what, hint=awaited.get("what_to_do"))
    return awaited["state"] == "active" and awaited.get("switch") != "automatic"
