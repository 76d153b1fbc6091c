"""The shapes of what callers of indexes send and get: definitions, states, entries, and values that don't fit."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, UnsetType

from api.openapi.cell_views import ROW_KEY, CellView, Count, RowKeyText, TimeText, View

_DEFINITION = {
    "name": "by_driver",
    "shard_field": "driver",
    "fields": [
        {"name": "driver", "column": "BASE", "path": "driver", "type": "uuid"},
        {"name": "created", "column": "BASE", "path": "times.created", "type": "datetime"},
    ],
}
Definition = Annotated[
    dict[str, Any],
    Meta(
        description="An index definition: `shard_field` and `fields`, and optionally `stored` and `where`.",
        examples=[_DEFINITION],
        extra_json_schema={"required": ["shard_field", "fields"]},
    ),
]


class FaultsView(View, frozen=True):
    """How many entries differed from their cells."""

    missing: Count
    stale: Count
    ghost: Count
    repaired: Count


class CheckOrderedView(View, frozen=True):
    """A check of an index was ordered. `job` can be asked what it came to."""

    job: str
    matched: Count
    waits_for: str | None

    example: ClassVar[Any] = {"job": "00c0ffee00c0ffee", "matched": 64, "waits_for": None}


class FaultCountsView(View, frozen=True):
    """What a comparison came to. Rows that changed meanwhile are unsettled."""

    rows: Count
    entries: Count
    missing: Count
    stale: Count
    ghost: Count
    repaired: Count
    unsettled: Count


class ComparedView(FaultCountsView, frozen=True):
    """What the last comparison of each range of row keys found, and in `total` all of them."""

    ranges: Count
    compared_since: TimeText | None
    total: FaultsView


class IndexCleanerView(ComparedView, frozen=True):
    """What the index cleaner found on the masters, and by its name on each minion, where nothing is repaired."""

    minions: dict[str, ComparedView]


class IndexWaitsView(View, frozen=True):
    """A shard in which an index doesn't go on. A reason names the cell if one can't be decoded."""

    shard: Count
    reason: str


class IndexVersionView(View, frozen=True):
    """One version of an index."""

    number: Count
    role: str
    state: str
    reason: str | None
    what_to_do: str | None
    cells_per_s: int | None
    build_lag_cells_max: int | None
    build_commit_max_s: float | None
    build_busy_share: float | None
    progress: dict[str, float | None] | None
    problems: int | None
    switch: str
    kept_until: TimeText | None
    definition: Definition
    lag: int | UnsetType | None = UNSET
    waiting_shards: list[IndexWaitsView] | UnsetType = UNSET
    kept_writes: int | UnsetType | None = UNSET

    example: ClassVar[Any] = {
        "number": 1,
        "role": "answers",
        "state": "active",
        "reason": None,
        "what_to_do": None,
        "cells_per_s": None,
        "build_lag_cells_max": None,
        "build_commit_max_s": None,
        "build_busy_share": None,
        "progress": None,
        "problems": 0,
        "switch": "automatic",
        "kept_until": None,
        "definition": _DEFINITION,
    }


class IndexView(View, frozen=True):
    """An index as the version that answers, and all its versions."""

    name: str
    number: Count
    state: str
    reason: str | None
    what_to_do: str | None
    cells_per_s: int | None
    build_lag_cells_max: int | None
    build_commit_max_s: float | None
    build_busy_share: float | None
    progress: dict[str, float | None] | None
    problems: int | None
    definition: Definition
    versions: list[IndexVersionView]
    lag: int | UnsetType | None = UNSET
    waiting_shards: list[IndexWaitsView] | UnsetType = UNSET
    cleaner: IndexCleanerView | UnsetType | None = UNSET

    example: ClassVar[Any] = {
        "name": "by_driver",
        **{
            name: value
            for name, value in IndexVersionView.example.items()
            if name not in ("role", "switch", "kept_until")
        },
        "versions": [IndexVersionView.example],
    }


class IndexesView(View, frozen=True):
    """All indexes of a datastore."""

    indexes: list[IndexView]

    example: ClassVar[Any] = {"indexes": [IndexView.example]}


class FreshnessView(View, frozen=True):
    """How far the index is behind, null where nobody knows now."""

    behind_cells: int | None
    behind_seconds: float | None
    complete_until: TimeText | None


class EntryView(View, frozen=True):
    """One entry. `element` is the number of an array's element, `cells` are those of `include`."""

    row_key: RowKeyText
    fields: dict[str, Any]
    element: Count | UnsetType = UNSET
    cells: dict[str, CellView | None] | UnsetType = UNSET


class UnreadableCellView(View, frozen=True):
    """A cell that can't be decoded, and why."""

    row_key: RowKeyText
    column_name: str
    ref_key: Count
    reason: str


class EntriesView(View, frozen=True):
    """Entries in order. `cursor` leads to the next page, and is null on the last one.

    `damaged` are rows that are left out, because an entry of them can't be read. `unreadable` are cells that were to be
    included or verified and can't be decoded. Their rows are left out, too.
    """

    entries: list[EntryView]
    cursor: str | None
    version: Count
    freshness: FreshnessView
    dropped: Count | UnsetType = UNSET
    damaged: list[RowKeyText] | UnsetType = UNSET
    unreadable: list[UnreadableCellView] | UnsetType = UNSET
    overlay: dict[str, int] | UnsetType = UNSET
    waited: float | UnsetType = UNSET
    explain: list[dict[str, Any]] | UnsetType = UNSET

    example: ClassVar[Any] = {
        "entries": [{"row_key": ROW_KEY, "fields": {"driver": ROW_KEY, "created": "2026-01-31T08:00:00.000000Z"}}],
        "cursor": None,
        "version": 1,
        "freshness": {"behind_cells": 0, "behind_seconds": 0.0, "complete_until": "2026-01-31T08:00:00.000000Z"},
    }


class MisfitView(View, frozen=True):
    """A value that doesn't fit the type of its field, and is null in the index."""

    row_key: RowKeyText
    column_name: str
    field: str
    reason: str
    value: str
    values: int
    element: int | None


class MisfitsView(View, frozen=True):
    """Values that don't fit. `count` is the number of all of them."""

    problems: list[MisfitView]
    count: Count
    cursor: str | None

    example: ClassVar[Any] = {
        "problems": [
            {
                "row_key": ROW_KEY,
                "column_name": "BASE",
                "field": "created",
                "reason": "is no RFC 3339 time",
                "value": '"yesterday"',
                "values": 1,
                "element": None,
            }
        ],
        "count": 1,
        "cursor": None,
    }
