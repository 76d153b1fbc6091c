"""worker: the processes that tail, run trigger programs or maintain indexes, with what each reports of itself.

A clean stop deletes the row of its process. A checkpoint of a trigger program names the process that moved it last.
Where the row of that process is still there, the process died, or it lives and was cut off from its group.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from schemaless.cell import RowKey, row_key_text
from schemaless.names import Stall
from schemaless.shapes import shape
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import NOW, literal, where
from schemaless.storage.table import Table

_TABLE = "schemaless.worker"
_AGE_S = "TIMESTAMPDIFF(MICROSECOND, seen_at, UTC_TIMESTAMP(6)) / 1000000"


SEEN_WITHIN_S = 30.0
"""How long a process counts as running after it was seen last. Each is seen every ten seconds."""

FAILING_MAX = 5
FAILING_ERROR_CHARACTERS_MAX = 4000
"""How many cells a report names that fail, and how much of the end of each error."""

WAITING_MAX = 20
ASSIGNED_MAX = 100
"""How many waiting shards of each kind a report names."""


class WaitingShard(msgspec.Struct, frozen=True, gc=False):
    """A shard that a worker has and doesn't work on. `reason` says what it waits for."""

    consumer: str
    shard: int
    reason: str


class OldestCall(msgspec.Struct, frozen=True, gc=False):
    """The call that has run longest, of a trigger function on a cell, and for how long when that was reported."""

    trigger: str
    cell: str
    shard: int
    age_s: float


class FailingCell(msgspec.Struct, frozen=True, gc=False):
    """A cell whose call failed and is made again at `again_at`, in seconds since the epoch. `error` has its traceback.

    `attempt` of `attempts` failed last. While the program's breaker is open, failures count no attempts.
    """

    trigger: str
    cell: str
    location: str
    attempt: int
    attempts: int
    again_at: int
    error: str


class WorkerReport(msgspec.Struct, frozen=True, gc=False):
    """What a process says of itself. `unconfirmed` shards wait for the group, `refused` ones contradict their log, and
    `failing_shards` are tried again and again.

    `assigned` are its partitions. `rate` is in finished cells a second. `tripped`: why its breaker is open. `stall`:
    why the whole process doesn't continue, and `stall_reason` what a person needs to know of it.
    `parallel`: by function, how many calls are made at once in a shard. `origin` is that of its program. Of many
    shards and failing cells only some are named, and the counts have all. A field that another version doesn't know
    is left out.
    """

    version: str = ""
    transport: str = ""
    host: str = ""
    pid: int = 0
    is_member: bool = False
    partitions: int = 0
    assigned: tuple[int, ...] = ()
    stall: Stall | None = None
    stall_reason: str = ""
    rate: float = 0.0
    unconfirmed: tuple[WaitingShard, ...] = ()
    unconfirmed_count: int = 0
    refused: tuple[WaitingShard, ...] = ()
    refused_count: int = 0
    failing_shards: tuple[WaitingShard, ...] = ()
    failing_shards_count: int = 0
    oldest_call: OldestCall | None = None
    tripped: str | None = None
    parallel: dict[str, int] = {}
    origin: str = ""
    failing: tuple[FailingCell, ...] = ()
    failing_count: int = 0
    erred_count: int = 0
    """Of the failing cells, those whose function raised something else than Retry."""
    calls: int = 0
    """Calls that ended in the last ten seconds or so."""
    failures: dict[str, int] = {}
    """Those of `calls` that failed, by cause: the error's class, with the HTTP status if it has one."""


class WorkerRow(msgspec.Struct, frozen=True, gc=False):
    """One process. `age_s` is the time since it was seen last, by the server's clock."""

    consumer: str
    worker: int
    report: WorkerReport
    age_s: float


_ROWS = Table(_TABLE, WorkerRow, age_s=_AGE_S)


def put(datastore: str, consumer: str, worker: int, report: WorkerReport) -> Operation[None]:
    """Makes the row of a process, or stores a later report of it."""
    yield _ROWS.upsert(
        [WorkerRow(consumer, worker, report, 0.0)], ("report", "seen_at"), datastore=datastore, seen_at=NOW
    )


def remove(datastore: str, consumer: str, workers: Collection[int]) -> Operation[None]:
    """Deletes the rows of these processes."""
    if workers:
        yield f"DELETE FROM {_TABLE} {where(datastore=datastore, consumer=consumer, worker=list(workers))}"


def forget_calls(datastore: str, consumer: str, row_key: RowKey) -> Operation[None]:
    """Removes the failing cells from reports that name a row. A process that lives reports its own again."""
    named = literal(f"%{row_key_text(row_key)}%")
    which = f"{where(datastore=datastore, consumer=consumer)} AND report LIKE {named}"
    yield f"UPDATE {_TABLE} SET report = JSON_REMOVE(report, '$.failing') {which}"


def numbers_of(datastore: str, consumer: str) -> Operation[set[int]]:
    """Returns the processes of a consumer that have a row on this server."""
    rows = yield from query(f"SELECT worker FROM {_TABLE} {where(datastore=datastore, consumer=consumer)}")
    return {worker for (worker,) in rows}


def of_datastore(datastore: str) -> Operation[list[WorkerRow]]:
    """Returns the processes of all consumers that have a row on this server."""
    which = where(datastore=datastore)
    rows = yield from query(f"SELECT {_ROWS.select} FROM {_TABLE} {which} ORDER BY consumer, worker")
    return [WorkerRow(consumer, worker, _report(report), float(age_s)) for consumer, worker, report, age_s in rows]


def _report(text: str) -> WorkerReport:
    try:
        return msgspec.json.decode(text, type=shape(WorkerReport))
    except msgspec.DecodeError:
        return WorkerReport()  # of a version that says it in another way


def remove_forgotten(datastore: str, consumer: str, older_than_s: float) -> Operation[None]:
    """Deletes the rows of processes that weren't seen for so long and that no checkpoint on this server names."""
    rows = yield from query(
        f"SELECT w.worker FROM {_TABLE} AS w {where(datastore=datastore, consumer=consumer)}"
        f" AND {_AGE_S} > {older_than_s} AND NOT EXISTS (SELECT * FROM schemaless.checkpoint AS c"
        " WHERE c.datastore = w.datastore AND c.consumer = w.consumer AND c.worker = w.worker)"
    )
    yield from remove(datastore, consumer, [worker for (worker,) in rows])
