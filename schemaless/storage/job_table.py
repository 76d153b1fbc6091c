"""job: what people ordered for many parked cells at once. What became of it is counted from the records."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from schemaless.storage.operation import Operation, query
from schemaless.storage.parked_table import Order
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import commas, sql

KEPT_DAYS = 30
_TABLE = "schemaless.job"


class Job(msgspec.Struct, frozen=True):
    """One order for many records. `matched` and `replaced` count those of one cluster. `made_at` is in microseconds."""

    job: int
    consumer: str
    kind: Order
    matched: int
    reason: str | None
    who: str
    replaced: int = 0
    made_at: int = 0


class JobProgress(msgspec.Struct, frozen=True):
    """A job on one cluster. `pending` records wait for their turn, and `failed` ones have failed again."""

    job: Job
    pending: int
    failed: int


def put(datastore: str, job: Job) -> Operation[None]:
    """Stores a job, and deletes some that are older than KEPT_DAYS."""
    yield sql(
        f"INSERT IGNORE INTO {_TABLE} (job, datastore, consumer, kind, matched, reason, who, made_at)"
        " VALUES (%s, %s, %s, %s, %s, %s, %s, UTC_TIMESTAMP(6))",
        job.job,
        datastore,
        job.consumer,
        job.kind.value,
        job.matched,
        job.reason,
        job.who,
    )
    old = f"made_at < UTC_TIMESTAMP(6) - INTERVAL {KEPT_DAYS} DAY"
    yield f"DELETE FROM {_TABLE} WHERE {old} ORDER BY made_at LIMIT 1000"


def of_numbers(datastore: str, numbers: Collection[int]) -> Operation[dict[int, Job]]:
    """Returns these jobs as this server has them, by number, without those that are gone."""
    if not numbers:
        return {}
    rows = yield from query(
        f"SELECT job, consumer, kind, matched, reason, who, replaced, {MICROSECONDS.format('made_at')} FROM {_TABLE}"
        + sql(" WHERE datastore = %s", datastore)
        + f" AND job IN ({commas([str(number) for number in sorted(numbers)])})"
    )
    return {job: Job(job, consumer, Order(kind), *rest) for job, consumer, kind, *rest in rows}


def get(datastore: str, number: int) -> Operation[JobProgress | None]:
    """Returns a job as this server has it, or None."""
    rows = yield from query(
        f"SELECT job, consumer, kind, matched, reason, who, replaced, {MICROSECONDS.format('made_at')} FROM {_TABLE}"
        + sql(" WHERE datastore = %s AND job = %s", datastore, number)
    )
    if not rows:
        return None
    job, consumer, kind, *rest = rows[0]
    ((pending, failed),) = yield from query(
        "SELECT COALESCE(SUM(ordered IS NOT NULL), 0), COALESCE(SUM(ordered IS NULL), 0) FROM schemaless.parked"
        + sql(" WHERE job = %s AND datastore = %s", number, datastore)
    )
    return JobProgress(Job(job, consumer, Order(kind), *rest), int(pending), int(failed))
