"""Location: a point in one shard's history, (generation, added_id), and its text forms (I13)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from schemaless.errors import Invalid, LocationGone

FIRST_GENERATION = 1
INT64_MAX = 2**63 - 1
"""The greatest number of a signed BIGINT, and of a long in Java."""

ADDED_ID_MAX = INT64_MAX
_GENERATION, _ADDED_ID = "(?:0|[1-9][0-9]{0,9})", "(?:0|[1-9][0-9]{0,18})"  # one text for each number
_TEXT = re.compile(rf"(?:(?P<generation>{_GENERATION}):)?(?P<added_id>{_ADDED_ID})")
_SHARD_TEXT = re.compile(rf"(?P<shard>0|[1-9][0-9]{{0,8}}):(?P<generation>{_GENERATION}):(?P<added_id>{_ADDED_ID})")


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """`added_id` 0 is the beginning. Text form: GENERATION:ADDED_ID."""

    generation: int
    added_id: int

    def __str__(self) -> str:
        return f"{self.generation}:{self.added_id}"


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """The `location` of a put's response. Text form: SHARD:GENERATION:ADDED_ID."""

    shard: int
    location: Location

    def __str__(self) -> str:
        return shard_location_text(self.shard, self.location.generation, self.location.added_id)


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """A shard's added_ids from `starts_at` belong to `generation` or to a later one."""

    generation: int
    starts_at: int


def shard_location_text(shard: int, generation: int, added_id: int) -> str:
    """Returns SHARD:GENERATION:ADDED_ID without making the values first, for callers that write many."""
    return f"{shard}:{generation}:{added_id}"


BEGINNING = Location(FIRST_GENERATION, 0)


def parse_location(text: str, field: str = "after") -> tuple[int | None, int]:
    """Parses ADDED_ID or GENERATION:ADDED_ID into (generation or None, added_id). Raises Invalid."""
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match["added_id"]) > ADDED_ID_MAX:
        raise Invalid(field, "must be ADDED_ID or GENERATION:ADDED_ID")
    generation = match["generation"]
    return (None if generation is None else int(generation)), int(match["added_id"])


def parse_shard_location(text: str, field: str = "after") -> ShardLocation:
    """Parses SHARD:GENERATION:ADDED_ID, which a put's response carries. Raises Invalid."""
    match = _SHARD_TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match["added_id"]) > ADDED_ID_MAX:
        raise Invalid(field, "must be SHARD:GENERATION:ADDED_ID")
    return ShardLocation(int(match["shard"]), Location(int(match["generation"]), int(match["added_id"])))


def generation_at(added_id: int, starts: Sequence[GenerationStart]) -> int:
    """Returns the generation of the cell at an added_id. A later generation hides the cells of an earlier one."""
    return max((start.generation for start in starts if start.starts_at <= added_id), default=FIRST_GENERATION)


def visible_starts(starts: Sequence[GenerationStart]) -> list[GenerationStart]:
    """Returns the starts that a reader of the log meets, in order.

    A later generation may have begun before an earlier one, which is then hidden.
    """
    visible = [start for start in starts if generation_at(start.starts_at, starts) == start.generation]
    return sorted(visible, key=lambda start: start.starts_at)


def next_start(location: Location, starts: Sequence[GenerationStart]) -> GenerationStart | None:
    """Returns the next generation that a reader at a location meets, if there is a later one (I13).

    It may begin at or before the location. Then cells that the reader has seen are superseded.
    """
    later = [start.starts_at for start in starts if start.generation > location.generation]
    if not later:
        return None
    return GenerationStart(generation_at(min(later), starts), min(later))


def is_lag(location: Location, gone: LocationGone) -> bool:
    """Returns whether the node that refused a location may just be behind it (I13).

    False means that the location is superseded, or that another cell is there. It is asked about a location that could
    be read from before.
    """
    if gone.generation == location.generation:
        return gone.head < location.added_id
    return gone.generation < location.generation


def kept_until(location: Location, starts: Sequence[GenerationStart]) -> int:
    """Returns up to which added_id of the present history a location counts (I13).

    Later generations superseded the rest, and the lowest of them decides.
    """
    later = [start.starts_at - 1 for start in starts if start.generation > location.generation]
    return min([location.added_id, *later])


def verify_location(generation: int | None, added_id: int, starts: Sequence[GenerationStart], head: int) -> int:
    """Returns the added_id to read after for a reader at this location (I13). Without a generation it is the newest.

    Raises LocationGone for a location that is superseded, past the head, or of an unknown generation. Its
    `resume_at` is the last added_id up to which the reader's history and this one surely agree.
    """
    newest = max(starts, key=lambda start: start.generation)

    def gone(why: str, resume_at: int) -> LocationGone:
        return LocationGone(why, head=head, resume_at=resume_at, generation=newest.generation)

    if generation is not None:
        if generation not in {start.generation for start in starts}:
            raise gone(f"generation {generation} is unknown here", min(added_id, newest.starts_at - 1))
        later = [start.starts_at for start in starts if start.generation > generation]
        if later and added_id >= min(later):
            raise gone(f"{generation}:{added_id} is superseded", min(later) - 1)
    if added_id > head:
        raise gone(f"{added_id} is past the head, {head}", head)
    return added_id
