"""The shapes of what callers of indexes send and get: definitions, states, entries, and values that don't fit."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from schemaless.access import Scope, parse_lifetime
from schemaless.cell import parse_int
from schemaless.contract.call import ApiCall, Option, within
from schemaless.contract.cells import ROW_KEY, CellView, Count, RowKeyText, TimeText, View
from schemaless.contract.parameters import DRY_RUN, FLAG, Parameter, integer_schema, parse_flag
from schemaless.index.definition import NUMBER_MAX

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


class WouldView(View, frozen=True):
    """What an order would touch, as a dry run answers. `becomes` is the state then. `workers` are the processes that
    would obey.

    Of an index: the numbers of its versions, the limits that would change, and of a drop about how many entries go.
    """

    becomes: str
    shards: Count
    workers: Count
    versions: list[int] | UnsetType = UNSET
    limits: dict[str, float | None] | UnsetType = UNSET
    entries: Count | UnsetType = UNSET


class CheckOrderedView(View, frozen=True):
    """A check of an index was ordered. `job` can be asked what it came to. It is null for a dry run."""

    job: str | None
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
    """An index as the version that answers, and all its versions. `would` is in the answer to a dry run."""

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
    would: WouldView | UnsetType = UNSET

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


CELLS_MAX = 10**9
COMMIT_S_MIN, COMMIT_S_MAX = 0.001, 3600.0
BUSY_SHARE_MIN = 0.001


def parse_keep(text: str, field: str) -> int:
    """Returns seconds. Raises Invalid."""
    return 0 if text in ("0", "0s") else parse_lifetime(text, field)


VERSION: Parameter[int | None] = Parameter(
    "version",
    lambda text, field: parse_int(text, field, 1, NUMBER_MAX),
    None,
    "The number of a version. Without it: the change, or else the version that answers.",
    integer_schema(1, NUMBER_MAX),
)
DROPPED: Parameter[int | None] = Parameter(
    "version",
    VERSION.parse,
    None,
    "Drops this version only: a change that is given up, or one that is kept.",
    integer_schema(1, NUMBER_MAX),
)
CHANGE: Parameter[bool] = Parameter(
    "change",
    parse_flag,
    False,
    "true: an index with another definition gets a new version, beside the present one.",
    FLAG,
)
HOLD: Parameter[bool] = Parameter(
    "hold",
    parse_flag,
    False,
    "true: the new version waits for `switch`. By default it answers once it is complete.",
    FLAG,
)
KEEP: Parameter[int | None] = Parameter(
    "keep", parse_keep, None, "How long the version before is kept after the switch, such as 30m, 12h or 0s."
)
CHECKED_VERSION: Parameter[int | None] = Parameter(
    "version",
    VERSION.parse,
    None,
    "The number of a version that is complete. Without it: the version that answers.",
    integer_schema(1, NUMBER_MAX),
)

_Cells = Annotated[int, within(0, CELLS_MAX)]
_CommitS = Annotated[float, within(COMMIT_S_MIN, COMMIT_S_MAX)]
_Share = Annotated[float, within(BUSY_SHARE_MIN, 1)]


class ThrottleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What each indexer process may take of the servers for an index. What isn't given stays as it is.

    `cells_per_s`: how many cells a second it delivers. 0 and null: no bound. The others bound a build, and null means
    that the default counts again.
    """

    cells_per_s: Annotated[
        _Cells | UnsetType | None, Option("cells a second that it delivers to the index; 0: no bound")
    ] = UNSET
    build_lag_cells_max: Annotated[
        _Cells | UnsetType | None, Option("a build waits while a minion is further behind; 0: it never waits")
    ] = UNSET
    build_commit_max_s: Annotated[
        _CommitS | UnsetType | None, Option("a build rests while 1 of 100 of its commits takes longer")
    ] = UNSET
    build_busy_share: Annotated[
        _Share | UnsetType | None, Option("share of the time that a build works while cells come in, up to 1")
    ] = UNSET

    example: ClassVar[Any] = {"cells_per_s": 500, "build_busy_share": 0.05}


class SwitchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Which version shall answer: the newest, the one before with `back`, or `version`."""

    version: Annotated[int | None, Option("number of the version that shall answer")] = None
    back: Annotated[bool, Option("let the version before answer again, at once")] = False
    keep: Annotated[str | None, Option("how long the version that answered until now is kept, like 30m, 12h or 0s")] = (
        None
    )

    example: ClassVar[Any] = {"version": 2, "keep": "12h"}


class IndexCheckRequest(msgspec.Struct, forbid_unknown_fields=True, rename={"first": "from", "last": "to"}):
    """What is compared: all, some shards, the rows between two row keys, or up to 100 rows."""

    shards: list[int] | None = None
    row_keys: list[str] | None = None
    first: str | None = None
    last: str | None = None
    minions: bool = True
    rows_per_s: int | None = None

    example: ClassVar[Any] = {"shards": [12], "minions": False}


LIST = ApiCall(
    method="GET",
    path="/indexes",
    scope=Scope.READ,
    says="All indexes of a datastore, by name.",
    answers={200: IndexesView},
)
GET = ApiCall(
    method="GET",
    path="/indexes/{name}",
    scope=Scope.READ,
    says="Definition and state, with progress while it is building, why it failed, and how far it is behind. These are"
    " of the version that answers. `versions` has all of them: a change, and one that is kept after a switch.",
    answers={200: IndexView},
)
PUT = ApiCall(
    method="PUT",
    path="/indexes/{name}",
    scope=Scope.ADMIN,
    says="Creates an index, which is built from all cells. The same definition again changes nothing. With `change`,"
    " another definition becomes a new version, which is built beside the present one and then answers.",
    parameters=(CHANGE, HOLD, KEEP),
    payload=Definition,
    payload_bytes_max=64 << 10,
    answers={201: IndexView, 200: IndexView},
    problems=(409,),
)
DROP = ApiCall(
    method="DELETE",
    path="/indexes/{name}",
    scope=Scope.ADMIN,
    says="Drops an index in whatever state it is, or one version. Indexers delete its tables.",
    parameters=(DROPPED, DRY_RUN),
    answers={202: IndexView, 200: IndexView},
    problems=(409,),
)
PAUSE = ApiCall(
    method="POST",
    path="/indexes/{name}/pause",
    scope=Scope.ADMIN,
    says="Lets no indexer work on an index. It answers queries on, if it was complete, with what it has.",
    parameters=(VERSION, DRY_RUN),
    answers={200: IndexView},
    problems=(409,),
)
RESUME = ApiCall(
    method="POST",
    path="/indexes/{name}/resume",
    scope=Scope.ADMIN,
    says="Lets indexers work on an index again that was paused, or that has failed.",
    parameters=(VERSION, DRY_RUN),
    answers={200: IndexView},
    problems=(409,),
)
THROTTLE = ApiCall(
    method="POST",
    path="/indexes/{name}/throttle",
    scope=Scope.ADMIN,
    says="Bounds what each indexer process may take of the servers for an index, while it runs.",
    parameters=(VERSION, DRY_RUN),
    payload=ThrottleRequest,
    answers={200: IndexView},
    problems=(409,),
)
SWITCH = ApiCall(
    method="POST",
    path="/indexes/{name}/switch",
    scope=Scope.ADMIN,
    says="Lets another version answer: the newest one, with `back` the one before, or the `version` with a number. The"
    " version that answered until now is kept for `keep`, such as 30m. Switching to the one that answers is harmless.",
    parameters=(DRY_RUN,),
    payload=SwitchRequest,
    answers={200: IndexView},
    problems=(409,),
)
VERIFY = ApiCall(
    method="POST",
    path="/indexes/{name}/verify",
    scope=Scope.ADMIN,
    says="Orders that an index is compared with its cells. `GET /jobs/{job}` names what is missing, stale or a ghost.",
    parameters=(CHECKED_VERSION, DRY_RUN),
    payload=IndexCheckRequest,
    optional=True,
    answers={202: CheckOrderedView, 200: CheckOrderedView},
    problems=(409,),
)
REPAIR = ApiCall(
    method="POST",
    path="/indexes/{name}/repair",
    scope=Scope.ADMIN,
    says="Orders the same, and that entries on masters are brought to what the cells say.",
    parameters=(CHECKED_VERSION, DRY_RUN),
    payload=IndexCheckRequest,
    optional=True,
    answers={202: CheckOrderedView, 200: CheckOrderedView},
    problems=(409,),
)
