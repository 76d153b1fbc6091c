"""Position: how far a shard is finished, with a digest that proves which history it stands on (I16).

Equal numbers prove nothing after a restore: a master that lost cells gives their added_ids to other cells. So a
follower stores with its position the digest of the cell at it, and compares that before it continues.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence

import msgspec

from schemaless.cell import StoredCell
from schemaless.errors import Invalid, LocationGone
from schemaless.location import ADDED_ID_MAX, GenerationStart, Location, verify_location

BEGINNING_DIGEST = 0
"""The digest of a position before the first cell: there all histories agree."""

_TEXT = re.compile(r"(?:(0|[1-9][0-9]{0,9}):)?(0|[1-9][0-9]{0,18})(?::([0-9a-fA-F]{16}))?")
_FIXED = struct.Struct(">QQq16sq")
_DIGEST_TEXT = re.compile(r"[0-9a-fA-F]{16}")


class Position(msgspec.Struct, frozen=True):
    """How far a shard is finished. Every field is a number, to be stored as it is.

    `offset` is where reading the shard's partition of the topic should begin. It is a hint that saves time. What it
    would miss is found, because added_ids are dense (I3, I9). `digest` names the cell at `added_id`. Without it that
    cell is taken to be the right one, once.
    """

    shard: int
    generation: int
    added_id: int
    offset: int | None = None
    digest: int | None = None

    @property
    def location(self) -> Location:
        return Location(self.generation, self.added_id)

    def __str__(self) -> str:
        """Returns GENERATION:ADDED_ID:DIGEST, as the log API takes it, or without the digest where there is none."""
        return position_text(self.generation, self.added_id, self.digest)


def cell_digest(cell: StoredCell) -> int:
    """Returns 63 bits that name the insertion of a cell: they differ for the same cell that was inserted again.

    The bits are the first of SHA-256 over generation, added_id, created_at, row key, column name and ref_key.
    """
    return insertion_digest(
        cell.generation, cell.added_id, cell.created_at, cell.row_key, cell.column_name, cell.ref_key
    )


def insertion_digest(  # what it is made of
    generation: int, added_id: int, created_at: int, row_key: bytes, column_name: str, ref_key: int
) -> int:
    """Returns what `cell_digest` does, of a cell without its body."""
    fixed = _FIXED.pack(generation, added_id, created_at, row_key, ref_key)
    return int.from_bytes(hashlib.sha256(fixed + column_name.encode()).digest()[:8]) >> 1


def position_of(cell: StoredCell) -> Position:
    """Returns the position of a shard that is finished up to a cell."""
    return Position(cell.shard, cell.generation, cell.added_id, digest=cell_digest(cell))


def digest_text(digest: int) -> str:
    """Returns a digest as 16 hexadecimal digits: JSON's numbers lose digits above 2^53."""
    return f"{digest:016x}"


def parse_digest(text: str, field: str = "after") -> int:
    """Parses 16 hexadecimal digits. Raises Invalid."""
    if not isinstance(text, str) or not _DIGEST_TEXT.fullmatch(text) or (digest := int(text, 16)) >> 63:
        raise Invalid(field, "a digest is 16 hexadecimal digits, of which the first is 0 to 7")
    return digest


def position_text(generation: int, added_id: int, digest: int | None) -> str:
    """Returns GENERATION:ADDED_ID, with :DIGEST where it is known."""
    return f"{generation}:{added_id}" if digest is None else f"{generation}:{added_id}:{digest:016x}"


def parse_position(text: str, field: str = "after") -> tuple[int | None, int, int | None]:
    """Parses ADDED_ID or GENERATION:ADDED_ID[:DIGEST] into (generation or None, added_id, digest or None).

    Raises Invalid.
    """
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    generation, added_id, digest = match.groups() if match is not None else (None, None, None)
    if added_id is None or int(added_id) > ADDED_ID_MAX or (digest is not None and generation is None):
        raise Invalid(field, "must be ADDED_ID or GENERATION:ADDED_ID[:DIGEST], a digest of 16 hexadecimal digits")
    return (
        None if generation is None else int(generation),
        int(added_id),
        None if digest is None else parse_digest(digest, field),
    )


def verify_position(position: Position, found: int | None, starts: Sequence[GenerationStart], head: Location) -> None:
    """Raises LocationGone where a log can't be read on from a position (I13, I16).

    `found` is the digest of the cell that the log has there, None if it has none, and BEGINNING_DIGEST before the
    first cell. Without a generation that superseded the position, the error's generation is that of the position.
    """
    verify_location(position.generation, position.added_id, starts, head.added_id)
    if found is None:
        why = f"the cell at {position.location} is missing"
    elif position.digest is not None and found != position.digest:
        why = f"another cell is at {position.location}: this log has another history"
    else:
        return
    agreed = max((start.starts_at - 1 for start in starts if start.generation <= position.generation), default=0)
    raise LocationGone(
        why, head=head.added_id, resume_at=min(agreed, position.added_id), generation=position.generation
    )
