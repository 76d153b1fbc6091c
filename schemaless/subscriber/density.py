"""Density: whether the topic brings each cell of a shard once, in order, without a hole (I7, I9).

This is pure. `DensityCheck` watches all shards of some partitions and names faults. The rule for one cell is `judge`
(schemaless/shard_cursor.py).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from schemaless.cell import StoredCell
from schemaless.location import BEGINNING, Location
from schemaless.record import Announcement
from schemaless.shard_cursor import CellPlace, judge

_HOLES_KEPT_MAX = 100  # of a shard, to distinguish a cell that comes late from one that comes again


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
    """`at` is the highest location that was seen. `repeating`: the last cell was a repeat, which was reported."""

    __slots__ = ("at", "holes", "number", "repeating")

    def __init__(self, number: int, at: Location) -> None:
        self.number = number
        self.at = at
        self.holes: list[range] = []
        self.repeating = False

    def take_cell(self, cell: StoredCell) -> DensityFault | None:
        at, here = self.at, cell.location
        place = judge(at, cell)
        if place in (CellPlace.REPEATED, CellPlace.SUPERSEDED):
            if here.generation != at.generation or self._fill(cell.added_id):
                self.repeating = False
                return DensityFault(Fault.DISORDER, self.number, f"{here} comes after {at}")
            was_reported, self.repeating = self.repeating, True  # of several repeats the first is reported
            return None if was_reported else DensityFault(Fault.REPEAT, self.number, f"{here} comes again after {at}")
        self.repeating = False
        self.at = here
        if place is CellPlace.NEXT:
            return None
        if place is CellPlace.UNANNOUNCED:
            detail = f"{here} comes after {at}, but generation {cell.generation} was not announced"
            return DensityFault(Fault.DISORDER, self.number, detail)
        return self._hole(at.added_id + 1, cell.added_id - 1, str(here))

    def take_start(self, found: Announcement) -> DensityFault | None:
        at, last = self.at, found.starts_at - 1
        if found.generation <= at.generation:
            return DensityFault(Fault.REPEAT, self.number, f"generation {found.generation} is announced after {at}")
        self.at = Location(found.generation, last)
        self.repeating = False
        return self._hole(at.added_id + 1, last, f"generation {found.generation}") if last > at.added_id else None

    def _hole(self, first: int, last: int, before: str) -> DensityFault:
        if len(self.holes) < _HOLES_KEPT_MAX:
            self.holes.append(range(first, last + 1))
        missing = f"cell {first} is" if first == last else f"cells {first} to {last} are"
        return DensityFault(Fault.HOLE, self.number, f"{missing} missing before {before}")

    def _fill(self, added_id: int) -> bool:
        """Returns whether the cell was missing. It is missing no more then."""
        for place, hole in enumerate(self.holes):
            if added_id in hole:
                rest = [range(hole.start, added_id), range(added_id + 1, hole.stop)]
                self.holes[place : place + 1] = [part for part in rest if part]
                return True
        return False


class DensityCheck:
    """Takes the records of a partition, or of several, in the topic's order. Memory is bounded by the number of shards.

    The check of a shard begins at its first record, unless its partition is said to be `complete`.
    """

    def __init__(self) -> None:
        self.findings = 0
        self._shards: dict[int, _SeenShard] = {}

    def take(self, found: StoredCell | Announcement, *, complete: bool = False) -> DensityFault | None:
        """Returns what is wrong with a record. `complete`: its partition is read from its very beginning."""
        shard = self._shards.get(found.shard)
        if shard is None:
            if complete:
                before = BEGINNING
            elif isinstance(found, StoredCell):
                before = Location(found.generation, found.added_id - 1)
            else:
                before = Location(found.generation - 1, found.starts_at - 1)
            shard = self._shards[found.shard] = _SeenShard(found.shard, before)
        finding = shard.take_cell(found) if isinstance(found, StoredCell) else shard.take_start(found)
        if finding is not None:
            self.findings += 1
        return finding
