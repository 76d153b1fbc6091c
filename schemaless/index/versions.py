"""The versions of a datastore's indexes, merged from what several masters have, and which of them answer queries.

Rows only move forward, so they merge in any sequence. Whoever reads the same rows finds the same version answering.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import msgspec

from schemaless.errors import NotFound
from schemaless.storage.everywhere import together
from schemaless.storage.index_definition_table import DefinedIndex, IndexOrder, IndexStage, IndexSwitch


class VersionRole(StrEnum):
    """What a version is for, beside the others of its name."""

    ANSWERS = "answers"
    CHANGE = "change"  # it is being built, or waits for the switch
    KEPT = "kept"  # it answered before, and is maintained until it goes
    DELETING = "deleting"


@dataclass(frozen=True)
class NamedIndex:
    """The versions of one index that aren't gone, at least one, by number."""

    versions: Sequence[DefinedIndex]

    @cached_property
    def answering(self) -> DefinedIndex:
        """The one version that answers queries, once it is complete. It is deleting if all are."""
        present = [index for index in self.versions if index.is_present] or self.versions
        return max(present, key=lambda index: (index.switch.number, index.number))

    @property
    def change(self) -> DefinedIndex | None:
        """The version that shall answer once it is built."""
        changes = [index for index in self.versions if self.role(index) is VersionRole.CHANGE]
        return changes[-1] if changes else None

    @property
    def meant(self) -> DefinedIndex:
        """The version that an order means which names none: the change, or else the one that answers."""
        return self.change or self.answering

    def role(self, index: DefinedIndex) -> VersionRole:
        if not index.is_present:
            return VersionRole.DELETING
        if index == self.answering:
            return VersionRole.ANSWERS
        return VersionRole.KEPT if index.switch.number else VersionRole.CHANGE

    def version(self, number: int) -> DefinedIndex | None:
        return next((index for index in self.versions if index.number == number), None)

    def kept_until(self, index: DefinedIndex) -> int | None:
        """Returns when a kept version goes, in microseconds of the first master's clock. None for other versions."""
        if self.role(index) is not VersionRole.KEPT:
            return None
        later = [each.switch for each in self.versions if each.switch.number > index.switch.number and each.is_present]
        overtaken_by = min(later, key=lambda switch: switch.number)
        return None if overtaken_by.at is None else overtaken_by.at + overtaken_by.keep_s * 1_000_000


VersionKey = tuple[str, int]
"""Name and number of a version."""


class IndexVersions(msgspec.Struct, frozen=True):
    """All versions of a datastore's indexes, as the masters that answer know them together.

    `lagging`: the masters that lack something of a version. `away`: the masters that didn't answer, and why.
    `disputed`: the versions of which masters have different orders of one revision, because they were given at once.
    """

    merged: Mapping[VersionKey, DefinedIndex] = {}
    lagging: Sequence[tuple[str, DefinedIndex]] = ()
    away: Mapping[str, Exception] = {}
    disputed: frozenset[VersionKey] = frozenset()

    def indexes(self) -> dict[str, NamedIndex]:
        """Returns the indexes by name, with all versions that aren't gone."""
        by_name: dict[str, list[DefinedIndex]] = {}
        for (name, _), index in sorted(self.merged.items()):
            if index.stage is not IndexStage.GONE:
                by_name.setdefault(name, []).append(index)
        return {name: NamedIndex(tuple(versions)) for name, versions in by_name.items()}

    def of(self, datastore: str, name: str) -> NamedIndex:
        """Returns the versions of a name. Raises NotFound."""
        try:
            return self.indexes()[name]
        except KeyError:
            if any(known == name for known, _ in self.merged):
                why = f"index {name} of {datastore} was dropped, and nothing of it is left"
                raise NotFound(why, hint="make it anew if it is needed: its name is free") from None
            raise NotFound(f"there is no index {name!r} in {datastore}") from None


def merge(rows: Mapping[str, Iterable[DefinedIndex]], away: Mapping[str, Exception]) -> IndexVersions:
    """Merges what each master has, by its cluster.

    The furthest stage, the order of the highest revision and the latest switch count.
    """
    held = {cluster: {(index.name, index.number): index for index in own} for cluster, own in sorted(rows.items())}
    merged = together(held.values(), _further)
    highest: dict[tuple[str, str], int] = {}
    for cluster, (name, number) in ((cluster, key) for cluster, own in held.items() for key in own):
        highest[cluster, name] = max(number, highest.get((cluster, name), 0))
    lagging = [
        (cluster, index)
        for cluster, own in held.items()
        for key, index in merged.items()
        if _lags(own.get(key), index, highest.get((cluster, index.name), 0))
    ]
    disputed = {
        key
        for own in held.values()
        for key, index in own.items()
        if index.order != (counting := merged[key].order) and index.order.revision == counting.revision
    }
    return IndexVersions(merged, lagging, away, frozenset(disputed))


def _further(one: DefinedIndex, other: DefinedIndex) -> DefinedIndex:
    stage = max(one.stage, other.stage, key=lambda each: each.rank)
    return replace(
        one,
        text="" if stage is IndexStage.GONE else one.text or other.text,
        stage=stage,
        order=max(one.order, other.order, key=_order_key),
        switch=max(one.switch, other.switch, key=_switch_key),
    )


def _lags(own: DefinedIndex | None, index: DefinedIndex, highest: int) -> bool:
    """Whether a master has less than `index`, and may have it: a version below its highest number is made no more."""
    if own is None:
        return index.number > highest
    return (
        own.stage.rank < index.stage.rank
        or own.order.revision < index.order.revision
        or own.switch.number < index.switch.number
    )


def _order_key(order: IndexOrder) -> tuple[int, str, str, str]:
    """Returns by what orders are compared. If two were given at once, the same one counts everywhere."""
    return order.revision, order.run_state, repr(order.limits), order.reason or ""


def _switch_key(switch: IndexSwitch) -> tuple[int, int, int, bool]:
    return switch.number, switch.at or 0, switch.keep_s, switch.by_hand
