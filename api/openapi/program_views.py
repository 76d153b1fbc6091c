"""The shapes of what operators of trigger programs send and get: programs, orders, parked cells, jobs, explanations."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, UnsetType

from api.openapi.cell_views import ROW_KEY, Count, RefKeyNumber, RowKeyText, TimeText, View
from api.openapi.index_views import FaultCountsView

_AT = "2026-01-31T08:00:00.000000Z"
_PARKED_ID = "12:1:7:bill_rider"
ParkedIdText = Annotated[str, Meta(description="SHARD:GENERATION:ADDED_ID:TRIGGER.")]
JobText = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]


class CountsView(View, frozen=True):
    """What became of the cells that a program has seen."""

    seen: int
    called: int
    filtered: int
    skipped: int
    parked: int
    waiting: int


class WaitingShardView(View, frozen=True):
    """A shard in which a worker doesn't go on, and why."""

    consumer: str
    shard: Count
    reason: str | None


class OldestCallView(View, frozen=True):
    """The call that has run longest."""

    trigger: str
    cell: str
    shard: Count
    age_s: float


class FailingCellView(View, frozen=True):
    """A cell whose call failed, and when it is called again."""

    trigger: str
    cell: str
    location: str
    attempt: Count
    attempts: Count
    again_at: TimeText
    error: str


class WorkerView(View, frozen=True):
    """A process that runs a program or maintains an index."""

    consumer: str
    worker: str
    version: str
    transport: str
    host: str
    pid: int
    seen_s: float
    is_member: bool
    partitions: Count
    assigned: list[int]
    rate: float
    unconfirmed_count: Count
    unconfirmed: list[WaitingShardView]
    refused_count: Count
    refused: list[WaitingShardView]
    failing_shards_count: Count
    failing_shards: list[WaitingShardView]
    failing_count: Count
    failing: list[FailingCellView]
    parallel: dict[str, int]
    oldest_call: OldestCallView | None


class ShardReasonView(View, frozen=True):
    """A shard, and why it stands still."""

    shard: Count
    reason: str | None


class SeekView(View, frozen=True):
    """A seek that is ordered."""

    shard: Count
    to: str


class ProgramView(View, frozen=True):
    """A trigger program over all its shards and workers."""

    program: str
    state: str
    reason: str | None
    lag: int
    stopped: list[ShardReasonView]
    tripped_workers: Count
    rate: float
    lag_seconds: float
    parked: Count
    oldest_parked_at: TimeText | None
    counts: CountsView
    counted_from: int
    paused_shards: list[ShardReasonView]
    seeks: list[SeekView]
    worker_count: Count
    unconfirmed_count: Count
    refused_count: Count
    failing_shards_count: Count
    failing_count: Count
    oldest_call_s: float | None

    example: ClassVar[Any] = {
        "program": "examples.billing",
        "state": "running",
        "reason": None,
        "lag": 3,
        "stopped": [],
        "tripped_workers": 0,
        "rate": 12.5,
        "lag_seconds": 0.2,
        "parked": 1,
        "oldest_parked_at": _AT,
        "counts": {"seen": 50, "called": 40, "filtered": 9, "skipped": 0, "parked": 1, "waiting": 0},
        "counted_from": 0,
        "paused_shards": [],
        "seeks": [],
        "worker_count": 2,
        "unconfirmed_count": 0,
        "refused_count": 0,
        "failing_shards_count": 0,
        "failing_count": 0,
        "oldest_call_s": None,
    }


class ProgramsView(View, frozen=True):
    """All programs. `unknown` says by cluster why no server of it answered, `masters_away` why only minions did."""

    triggers: list[ProgramView]
    unknown: dict[str, str]
    masters_away: dict[str, str]

    example: ClassVar[Any] = {"triggers": [ProgramView.example], "unknown": {}, "masters_away": {}}


class ProgramShardView(View, frozen=True):
    """One shard of a program: its checkpoint, and what became of its cells."""

    shard: Count
    generation: Count
    added_id: Count
    lag: int | None
    state: str
    reason: str | None
    kills: Count
    counts: CountsView
    counted_from: int
    seek: str | None


class ProgramDetailsView(ProgramView, frozen=True):
    """A program with each of its shards and workers."""

    shards: list[ProgramShardView]
    workers: list[WorkerView]
    unknown: dict[str, str]
    masters_away: dict[str, str]

    example: ClassVar[Any] = {**ProgramView.example, "shards": [], "workers": [], "unknown": {}, "masters_away": {}}


class PausedView(View, frozen=True):
    """What was paused. `unreached` are clusters that learn it when they are back."""

    program: str
    shards: list[int]
    unreached: list[str]

    example: ClassVar[Any] = {"program": "examples.billing", "shards": [], "unreached": []}


class ResumedView(View, frozen=True):
    """How many stopped and paused shards run again."""

    program: str
    stopped: Count
    paused: Count
    unreached: list[str]

    example: ClassVar[Any] = {"program": "examples.billing", "stopped": 0, "paused": 64, "unreached": []}


class SeekStepView(View, frozen=True, rename={"from_": "from"}):
    """What a seek does to one shard. `again` and `passed` count cells."""

    shard: Count
    from_: str | None
    to: str
    again: Count
    passed: Count
    stopped: bool


class SoughtView(View, frozen=True):
    """What a seek does, or would do."""

    program: str
    dry_run: bool
    again: Count
    passed: Count
    shards: list[SeekStepView]

    example: ClassVar[Any] = {
        "program": "examples.billing",
        "dry_run": True,
        "again": 7,
        "passed": 0,
        "shards": [{"shard": 12, "from": "1:7", "to": "1:0", "again": 7, "passed": 0, "stopped": False}],
    }


class RemovedView(View, frozen=True):
    """What was removed of a program."""

    program: str
    checkpoints: Count
    finished: Count
    parked: Count

    example: ClassVar[Any] = {"program": "examples.billing", "checkpoints": 64, "finished": 50, "parked": 1}


class ParkedView(View, frozen=True):
    """A parked cell, or one that waits behind it in its row.

    The body of a superseded cell is null. So is one that can't be decoded, and `unreadable` has the reason.
    """

    id: ParkedIdText
    row_key: RowKeyText
    column_name: str
    ref_key: RefKeyNumber
    shard: Count
    generation: Count
    added_id: Count
    trigger: str
    cause: str
    error: str | None
    attempts: Count
    parked_at: TimeText | None
    version: str | None
    holds_row: bool
    body: dict[str, Any] | None
    attempted_at: list[TimeText] | UnsetType = UNSET
    ordered: str | UnsetType | None = UNSET
    due_at: TimeText | UnsetType | None = UNSET
    job: JobText | UnsetType | None = UNSET
    reason: str | UnsetType | None = UNSET
    behind: ParkedIdText | UnsetType = UNSET
    unreadable: str | UnsetType = UNSET

    example: ClassVar[Any] = {
        "id": _PARKED_ID,
        "row_key": ROW_KEY,
        "column_name": "BASE",
        "ref_key": 1,
        "shard": 12,
        "generation": 1,
        "added_id": 7,
        "trigger": "bill_rider",
        "cause": "error",
        "error": "CardBlocked: 4711",
        "attempts": 5,
        "parked_at": _AT,
        "version": "c0ffee",
        "holds_row": True,
        "body": {"fare": 12.5},
    }


class ParkedPageView(View, frozen=True):
    """Parked cells by shard and added_id. `count` counts all that match."""

    parked: list[ParkedView]
    cursor: str | None
    count: Count

    example: ClassVar[Any] = {"parked": [ParkedView.example], "cursor": None, "count": 1}


class LeftOutView(View, frozen=True):
    """What wasn't ordered, and why."""

    name: str
    cells: Count
    why: str


class OrderedView(View, frozen=True):
    """What was ordered. `job` can be asked what became of it."""

    matched: Count
    job: JobText | None
    dry_run: bool
    more: bool
    left_out: list[LeftOutView]
    waits_for: str | None

    example: ClassVar[Any] = {
        "matched": 1,
        "job": "00c0ffee00c0ffee",
        "dry_run": False,
        "more": False,
        "left_out": [],
        "waits_for": None,
    }


class JobView(View, frozen=True):
    """What became of an order for parked cells of a program, or of a check of an index."""

    job: JobText
    datastore: str
    kind: str
    state: str
    matched: Count
    pending: Count
    done: Count
    who: str
    reason: str | None
    waits_for: str | None
    unknown: dict[str, str]
    program: str | UnsetType = UNSET
    failed: Count | UnsetType = UNSET
    replaced: Count | UnsetType = UNSET
    index: str | UnsetType = UNSET
    version: Count | UnsetType = UNSET
    clean: bool | UnsetType = UNSET
    missing: Count | UnsetType = UNSET
    stale: Count | UnsetType = UNSET
    ghost: Count | UnsetType = UNSET
    repaired: Count | UnsetType = UNSET
    masters: FaultCountsView | UnsetType = UNSET
    minions: FaultCountsView | UnsetType = UNSET
    unreached: dict[str, str] | UnsetType = UNSET
    unreadable: dict[str, str] | UnsetType = UNSET
    withheld: dict[str, int] | UnsetType = UNSET
    faults: list[dict[str, Any]] | UnsetType = UNSET

    example: ClassVar[Any] = {
        "job": "00c0ffee00c0ffee",
        "datastore": "mezzanine",
        "program": "examples.billing",
        "kind": "retry",
        "state": "done",
        "matched": 1,
        "pending": 0,
        "failed": 0,
        "replaced": 0,
        "done": 1,
        "who": "ada",
        "reason": None,
        "waits_for": None,
        "unknown": {},
    }


class ExplanationView(View, frozen=True):
    """What happened to a row, in the order of time, and what it waits for."""

    row_key: RowKeyText
    shard: Count
    cluster: str
    head: str | None
    events: list[dict[str, Any]]
    earlier: bool
    later: bool
    programs: list[dict[str, Any]]
    indexes: list[dict[str, Any]]
    waits: list[dict[str, Any]]
    unknown: dict[str, str]

    example: ClassVar[Any] = {
        "row_key": ROW_KEY,
        "shard": 12,
        "cluster": "a",
        "head": "12:1:1400",
        "events": [
            {"at": _AT, "kind": "cell", "location": "12:1:7", "column_name": "BASE", "ref_key": 1, "size_bytes": 40}
        ],
        "earlier": False,
        "later": False,
        "programs": [],
        "indexes": [],
        "waits": [],
        "unknown": {},
    }
