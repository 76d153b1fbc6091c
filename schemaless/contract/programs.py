"""The shapes of what operators of trigger programs send and get: programs, orders, parked cells, jobs, explanations."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from schemaless.access import Scope
from schemaless.contract.call import ApiCall, Option
from schemaless.contract.cells import ROW_KEY, Count, RefKeyNumber, RowKeyText, TimeText, View
from schemaless.contract.indexes import FaultCountsView, WouldView

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
    stall: str | None
    stall_reason: str
    rate: float
    unconfirmed_count: Count
    unconfirmed: list[WaitingShardView]
    refused_count: Count
    refused: list[WaitingShardView]
    failing_shards_count: Count
    failing_shards: list[WaitingShardView]
    failing_count: Count
    failing: list[FailingCellView]
    calls: Count
    failures: dict[str, Count]
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
    stall: str | None
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
    calls: Count
    failures: dict[str, Count]
    oldest_call_s: float | None

    example: ClassVar[Any] = {
        "program": "examples.billing",
        "state": "running",
        "stall": None,
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
        "calls": 125,
        "failures": {"HTTPStatusError 429": 12},
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


Shards = Annotated[list[int], Option("only this shard; may be given several times", "--shard")]


class HaltRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What is paused or resumed: some shards, or without `shards` the whole program."""

    shards: Shards = []
    reason: Annotated[str | None, Option("shown in its status")] = None
    dry_run: Annotated[bool, Option("only say what would be touched")] = False

    example: ClassVar[Any] = {"shards": [12], "reason": "the card processor is away"}


class PausedView(View, frozen=True):
    """What was paused. `unreached` are clusters that learn it when they are back. `would` answers a dry run."""

    program: str
    shards: list[int]
    unreached: list[str]
    would: WouldView | UnsetType = UNSET

    example: ClassVar[Any] = {"program": "examples.billing", "shards": [], "unreached": []}


class ResumedView(View, frozen=True):
    """How many stopped and paused shards run again. `was_paused`: the whole program was. `would` answers a dry run."""

    program: str
    stopped: Count
    paused: Count
    unreached: list[str]
    was_paused: bool
    would: WouldView | UnsetType = UNSET

    example: ClassVar[Any] = {
        "program": "examples.billing", "stopped": 0, "paused": 64, "unreached": [], "was_paused": False,
    }  # fmt: skip


class SeekRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`to` is beginning, end, an RFC 3339 time, SHARD:GENERATION:ADDED_ID, or several of those."""

    to: Annotated[str | list[str], Option("beginning, end, a time, or SHARD:GENERATION:ADDED_ID", "TO")]
    shards: Shards = []
    dry_run: Annotated[bool, Option("only say what would come again")] = False

    example: ClassVar[Any] = {"to": "2026-01-31T08:00:00Z", "dry_run": True}


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


class ParkedChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Which parked cells: those that have everything that is given."""

    trigger: str | None = None
    column: str | None = None
    row_key: str | None = None
    cause: str | None = None
    since: str | None = None
    doubt: bool = False


class ParkedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """An order for the cells of `filter`, or of `ids`. `rate` is in cells a second. A discard needs a reason."""

    filter: ParkedChoice | None = None
    ids: list[str] | None = None
    dry_run: Annotated[bool, Option("only say how many match")] = False
    rate: Annotated[float | None, Option("cells a second; default: all at once")] = None
    reason: Annotated[str | None, Option("why")] = None

    example: ClassVar[Any] = {"filter": {"cause": "error"}, "rate": 10, "dry_run": True}


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
    """What became of an order for parked cells of a program, of a check of an index, or of an erasure."""

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


LIST = ApiCall(
    method="GET",
    path="/triggers",
    scope=Scope.READ,
    says="Programs with their state, lag, parked cells and counts.",
    answers={200: ProgramsView},
)
GET = ApiCall(
    method="GET",
    path="/triggers/{program}",
    scope=Scope.READ,
    says="One program, shard by shard.",
    answers={200: ProgramDetailsView},
)
REMOVE = ApiCall(
    method="DELETE",
    path="/triggers/{program}",
    scope=Scope.ADMIN,
    says="Removes a program that no worker runs: its checkpoints, parked cells, jobs and orders.",
    answers={200: RemovedView},
    problems=(409,),
)
PAUSE = ApiCall(
    method="POST",
    path="/triggers/{program}/pause",
    scope=Scope.ADMIN,
    says="Calls nothing of the program, or of some shards, until it is resumed. Workers obey within two seconds.",
    payload=HaltRequest,
    optional=True,
    answers={200: PausedView},
)
RESUME = ApiCall(
    method="POST",
    path="/triggers/{program}/resume",
    scope=Scope.ADMIN,
    says="Lets what was paused, or had stopped, run again.",
    payload=HaltRequest,
    optional=True,
    answers={200: ResumedView},
)
SEEK = ApiCall(
    method="POST",
    path="/triggers/{program}/seek",
    scope=Scope.ADMIN,
    says="Orders that checkpoints go to a location. Says by shard how many cells come again or are passed over.",
    payload=SeekRequest,
    answers={200: SoughtView},
)
RETRY = ApiCall(
    method="POST",
    path="/triggers/{program}/parked/retry",
    scope=Scope.ADMIN,
    says="Orders that parked cells are called again, each row in its order. A retry that fails parks the cell again.",
    payload=ParkedRequest,
    answers={200: OrderedView},
)
DISCARD = ApiCall(
    method="POST",
    path="/triggers/{program}/parked/discard",
    scope=Scope.ADMIN,
    says="Orders that parked cells are never called. What waits behind them is called, in order.",
    payload=ParkedRequest,
    answers={200: OrderedView},
)
JOB = ApiCall(
    method="GET",
    path="/jobs/{job}",
    scope=Scope.READ,
    says="What became of an order. Of a retry or a discard, `done` records are gone: finished, or discarded. Of a check"
    " of an index, `done` shards were compared, and the counts say what they came to so far. Of an erasure, `done`"
    " bodies were removed.",
    answers={200: JobView},
)
