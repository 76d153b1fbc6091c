"""Compares what an index has of some rows with what their newest cells say, and names each difference (I11).

An entry belongs at one place: in one shard, under its row key and element. Two directions are needed. From cells to
entries finds what is missing or has other values. From entries to cells finds what is where nothing belongs.

Both sides must be of one moment. An index follows the log, so that moment is its checkpoint of the rows' shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from schemaless.cell import RowKey, row_key_text
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import Bodies, IndexEntry, entries_for, entry_shard, stored_fields
from schemaless.index.transition import IndexWrite
from schemaless.location import Location

UNREADABLE_NAMED_MAX = 100
"""How many rows that can't be read a check names."""

FIRST_ROW = RowKey(b"")
LAST_ROW = RowKey(b"\xff" * 16)


def row_before(row_key: RowKey) -> RowKey:
    """Returns the greatest row key below this one, and FIRST_ROW below the first."""
    number = int.from_bytes(row_key, "big")
    return RowKey((number - 1).to_bytes(16, "big")) if number else FIRST_ROW


def row_after(row_key: RowKey) -> RowKey:
    """Returns the lowest row key above this one."""
    return RowKey((int.from_bytes(row_key, "big") + 1 if row_key else 0).to_bytes(16, "big"))


class EntryFaultKind(StrEnum):
    MISSING = "missing"  # the cells make an entry that isn't there
    STALE = "stale"  # an entry of a row that has others, or that has other values
    GHOST = "ghost"  # an entry of a row that has none


class EntryPlace(NamedTuple):
    """Where an entry is: the shard of the index table, and its key there."""

    shard: int
    row_key: RowKey
    element: int


Entries = Mapping[EntryPlace, IndexEntry]


class EntryFault(msgspec.Struct, frozen=True, gc=False):
    """One difference at a place. Without `expected` nothing belongs there, without `found` nothing is there."""

    kind: EntryFaultKind
    place: EntryPlace
    expected: IndexEntry | None
    found: IndexEntry | None


def expected_entries(
    definition: IndexDefinition, shards: int, rows: Mapping[RowKey, Bodies]
) -> dict[EntryPlace, IndexEntry]:
    """Returns the entries that the newest cells of rows make, by place."""
    return {
        EntryPlace(entry_shard(definition, entry, shards), row_key, element): entry
        for row_key, bodies in rows.items()
        for element, entry in enumerate(entries_for(definition, bodies))
        if entry is not None
    }


def missing_or_stale(expected: Entries, found: Entries) -> list[EntryFault]:
    """Compares from cells to entries. `found` has what is at the places of `expected`."""
    return [
        EntryFault(
            EntryFaultKind.MISSING if place not in found else EntryFaultKind.STALE, place, entry, found.get(place)
        )
        for place, entry in expected.items()
        if found.get(place) != entry
    ]


def misplaced(expected: Entries, found: Entries) -> list[EntryFault]:
    """Compares from entries to cells. `expected` has all entries of the rows of `found`.

    An entry with other values at a place where one belongs is left to `missing_or_stale`.
    """
    having = {place.row_key for place in expected}
    return [
        EntryFault(EntryFaultKind.STALE if place.row_key in having else EntryFaultKind.GHOST, place, None, entry)
        for place, entry in found.items()
        if place not in expected
    ]


def repairs(places: Iterable[EntryPlace], expected: Entries, at: Location) -> list[IndexWrite]:
    """Returns the writes that bring places to what the cells up to the checkpoint `at` say.

    They are to be written whatever version is there, while nobody can move the checkpoint. Their version is the
    checkpoint: every event up to it loses to them, and every later one wins.
    """
    return [IndexWrite(place.shard, place.row_key, at, expected.get(place), place.element) for place in sorted(places)]


class FaultCounts(msgspec.Struct):
    """What a comparison came to. `unsettled` rows weren't judged.

    They changed while they were compared, or a cell of theirs can't be decoded.
    """

    rows: int = 0
    entries: int = 0
    missing: int = 0
    stale: int = 0
    ghost: int = 0
    repaired: int = 0
    unsettled: int = 0

    @property
    def faults(self) -> int:
        return self.missing + self.stale + self.ghost

    def take(self, rows: int, entries: int, unsettled: int, faults: Collection[EntryFault]) -> None:
        """Adds a page."""
        self.rows += rows
        self.entries += entries
        self.unsettled += unsettled
        for fault in faults:
            setattr(self, fault.kind, getattr(self, fault.kind) + 1)

    def __add__(self, other: FaultCounts) -> FaultCounts:
        return FaultCounts(*map(sum, zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)))


class CheckRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is asked of a check of one shard: its rows and entries, within a range of row keys.

    With `row_keys` it is these rows of the shard, with their entries in all shards.
    """

    repairs: bool = False
    minions: bool = True
    rows_per_s: int | None = None
    first: RowKey = FIRST_ROW
    last: RowKey = LAST_ROW
    row_keys: tuple[RowKey, ...] = ()


class CheckResult(msgspec.Struct, frozen=True):
    """What a check came to on masters and on minions. `unreached`: minions that weren't asked, and why.

    `unreadable`: the first rows that have a cell which can't be decoded, by row key, and why. `withheld`: by minion, of
    how many entries the repair on its master would have stopped its replication, and so was left out.
    """

    masters: FaultCounts
    minions: FaultCounts
    unreached: dict[str, str]
    unreadable: dict[str, str] = {}
    withheld: dict[str, int] = {}

    def document(self) -> dict[str, Any]:
        """Returns it as JSON. The counts of all nodes together come first."""
        both = msgspec.structs.asdict(self.masters + self.minions)
        return {
            "clean": self.masters.faults == self.masters.repaired and not self.minions.faults and not self.unreadable,
            **{kind: both[kind] for kind in (*EntryFaultKind, "repaired")},
            "masters": msgspec.structs.asdict(self.masters),
            "minions": msgspec.structs.asdict(self.minions),
            "unreached": self.unreached,
            "unreadable": self.unreadable,
            "withheld": self.withheld,
        }

    def __add__(self, other: CheckResult) -> CheckResult:
        return CheckResult(
            self.masters + other.masters,
            self.minions + other.minions,
            {**self.unreached, **other.unreached},
            dict([*self.unreadable.items(), *other.unreadable.items()][:UNREADABLE_NAMED_MAX]),
            dict(Counter(self.withheld) + Counter(other.withheld)),
        )


NOTHING_CHECKED = CheckResult(FaultCounts(), FaultCounts(), {})


def fault_document(definition: IndexDefinition, node: str, fault: EntryFault) -> dict[str, Any]:
    """Returns a fault of a node as JSON. A value that no cell can make is shown as it is."""
    return {
        "kind": fault.kind,
        "node": node,
        "shard": fault.place.shard,
        "row_key": row_key_text(fault.place.row_key),
        "element": fault.place.element,
        "found": None if fault.found is None else stored_fields(definition, fault.found),
        "expected": None if fault.expected is None else stored_fields(definition, fault.expected),
    }


def rows_of(faults: Sequence[EntryFault]) -> list[RowKey]:
    """Returns the rows that faults are about, each once."""
    return list(dict.fromkeys(fault.place.row_key for fault in faults))
