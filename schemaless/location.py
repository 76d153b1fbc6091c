"""Location: a point in one shard's history, (generation, added_id), and its text forms (I13)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from schemaless.errors import Invalid

FIRST_GENERATION = 1
_ADDED_ID_MAX = 2**63 - 1
_TEXT = re.compile(r"(?:(?P<generation>[0-9]{1,10}):)?(?P<added_id>[0-9]{1,19})")
_SHARD_TEXT = re.compile(r"(?P<shard>[0-9]{1,9}):(?P<generation>[0-9]{1,10}):(?P<added_id>[0-9]{1,19})")


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """`added_id` 0 is the beginning. Text form: GENERATION:ADDED_ID."""

    generation: int
    added_id: int

    def __str__(self) -> str:
        return f"{self.generation}:{self.added_id}"


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """What a put's answer calls `location`. Text form: SHARD:GENERATION:ADDED_ID."""

    shard: int
    location: Location

    def __str__(self) -> str:
        return f"{self.shard}:{self.location}"


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """From `starts_at` on, a shard's added_ids belong to `generation` (or to a later one)."""

    generation: int
    starts_at: int


BEGINNING = Location(FIRST_GENERATION, 0)


def parse_location(text: str, field: str = "after") -> tuple[int | None, int]:
    """(generation or None, added_id) of ADDED_ID or GENERATION:ADDED_ID. Raises Invalid."""
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match["added_id"]) > _ADDED_ID_MAX:
        raise Invalid(field, "must be ADDED_ID or GENERATION:ADDED_ID")
    generation = match["generation"]
    return (None if generation is None else int(generation)), int(match["added_id"])


def parse_shard_location(text: str, field: str = "after") -> ShardLocation:
    """SHARD:GENERATION:ADDED_ID, as a put's answer has it. Raises Invalid."""
    match = _SHARD_TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match["added_id"]) > _ADDED_ID_MAX:
        raise Invalid(field, "must be SHARD:GENERATION:ADDED_ID")
    return ShardLocation(int(match["shard"]), Location(int(match["generation"]), int(match["added_id"])))
