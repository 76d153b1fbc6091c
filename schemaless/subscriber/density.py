"""Density: whether records of the topic come as they were promised: of each shard each cell once, in order (I7, I9).

Pure. `judge` is the rule for one cell; `DensityCheck` watches all shards of some partitions and names what is wrong.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from schemaless.cell import StoredCell
from schemaless.location import BEGINNING, Location
from schemaless.record import Announcement

_HOLES_KEPT_MAX = 100  # of a shard, to tell a cell that comes late from one that comes again


class CellPlace(StrEnum):
    """A cell of the topic beside the location that its shard has reached."""

    NEXT = "next"
    REPEATED = "repeated"
    AHEAD = "ahead"  # cells between are missing
    SUPERSEDED = "superseded"  # of a generation that is over (I13)
    UNANNOUNCED = "unannounced"  # of a generation that the topic has not announced


def judge(at: Location, cell: StoredCell) -> CellPlace:
    if cell.generation < at.generation:
        return CellPlace.SUPERSEDED if cell.added_id > at.added_id else CellPlace.REPEATED
    if cell.generation > at.generation:
        return CellPlace.UNANNOUNCED
    if cell.added_id <= at.added_id:
        return CellPlace.REPEATED
    return CellPlace.NEXT if cell.added_id == at.added_id + 1 else CellPlace.AHEAD


class Fault(StrEnum):
    HOLE = "hole"
    REPEAT = "repeat"
    DISORDER = "disorder"


class DensityFault(msgspec.Struct, frozen=True):
    fault: Fault
    shard: int
    detail: str

    def __str__(self) -> str:
        return f"{self.fault.upper()} in shard {self.shard}: {self.detail}"


class _SeenShard:
    """`at`: the highest location that was seen. `repeating`: the last cell was a repeat, which was told."""

    __slots__ = ("at", "holes", "repeating")

    def __init__(self, at: Location) -> None:
        self.at = at
        self.holes: list[range] = []
        self.repeating = False


class DensityCheck:
    """Records are given in the topic's order, those of a shard at least. Memory is bounded by the number of shards.

    Where a shard's first record lies is where its check begins, unless its partition is said to be `complete`.
    """

    def __init__(self) -> None:
        self.findings = 0
        self._shards: dict[int, _SeenShard] = {}

    def take(self, found: StoredCell | Announcement, *, complete: bool = False) -> DensityFault | None:
        """`complete`: the partition is read from its very beginning, and nothing was cut off there."""
        shard = self._shards.get(found.shard)
        if shard is None:
            shard = self._shards[found.shard] = _SeenShard(BEGINNING if complete else _before(found))
        finding = _take_cell(shard, found) if isinstance(found, StoredCell) else _take_start(shard, found)
        if finding is not None:
            self.findings += 1
        return finding


def _before(found: StoredCell | Announcement) -> Location:
    if isinstance(found, StoredCell):
        return Location(found.generation, found.added_id - 1)
    return Location(found.generation - 1, found.starts_at - 1)


def _take_cell(shard: _SeenShard, cell: StoredCell) -> DensityFault | None:
    at, here = shard.at, cell.location
    verdict = judge(at, cell)
    if verdict in (CellPlace.REPEATED, CellPlace.SUPERSEDED):
        return _take_lower(shard, cell, here)
    shard.repeating = False
    shard.at = here
    if verdict is CellPlace.NEXT:
        return None
    if verdict is CellPlace.UNANNOUNCED:
        detail = f"{here} comes after {at}, but generation {cell.generation} was not announced"
        return DensityFault(Fault.DISORDER, cell.shard, detail)
    return _hole(shard, cell.shard, at.added_id + 1, cell.added_id - 1, str(here))


def _take_lower(shard: _SeenShard, cell: StoredCell, here: Location) -> DensityFault | None:
    """Not above what was seen. Of a row of repeats the first is told."""
    late = here.generation != shard.at.generation or _fill(shard, cell.added_id)
    if late:
        shard.repeating = False
        return DensityFault(Fault.DISORDER, cell.shard, f"{here} comes after {shard.at}")
    told, shard.repeating = shard.repeating, True
    return None if told else DensityFault(Fault.REPEAT, cell.shard, f"{here} comes again after {shard.at}")


def _take_start(shard: _SeenShard, found: Announcement) -> DensityFault | None:
    at, last = shard.at, found.starts_at - 1
    if found.generation <= at.generation:
        return DensityFault(Fault.REPEAT, found.shard, f"generation {found.generation} is announced after {at}")
    shard.at = Location(found.generation, last)
    shard.repeating = False
    if last <= at.added_id:
        return None
    return _hole(shard, found.shard, at.added_id + 1, last, f"generation {found.generation}")


def _hole(shard: _SeenShard, number: int, first: int, last: int, before: str) -> DensityFault:
    if len(shard.holes) < _HOLES_KEPT_MAX:
        shard.holes.append(range(first, last + 1))
    missing = f"cell {first} is" if first == last else f"cells {first} to {last} are"
    return DensityFault(Fault.HOLE, number, f"{missing} missing before {before}")


def _fill(shard: _SeenShard, added_id: int) -> bool:
    """Whether it was missing: then it is missing no more."""
    for place, hole in enumerate(shard.holes):
        if added_id in hole:
            rest = [range(hole.start, added_id), range(added_id + 1, hole.stop)]
            shard.holes[place : place + 1] = [part for part in rest if part]
            return True
    return False
