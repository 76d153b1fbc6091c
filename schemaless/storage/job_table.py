"""job: what people ordered for many parked cells, or of an index. Its parts say what became of it."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import msgspec

from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import commas, sql

KEPT_DAYS = 30
IS_OLD = f"made_at < UTC_TIMESTAMP(6) - INTERVAL {KEPT_DAYS} DAY"
_TABLE = "schemaless.job"


class JobKind(StrEnum):
    RETRY = "retry"  # of parked cells, as the next
    DISCARD = "discard"
    VERIFY = "verify"  # of an index, as the next
    REPAIR = "repair"


class Job(msgspec.Struct, frozen=True):
    """One order for many records or shards. `matched` and `replaced` count those of one cluster.

    `made_at` is in microseconds.
    """

    job: int
    consumer: str
    kind: JobKind
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
    yield f"DELETE FROM {_TABLE} WHERE {IS_OLD} ORDER BY made_at LIMIT 1000"


def of_numbers(datastore: str, numbers: Collection[int]) -> Operation[dict[int, Job]]:
    """Returns these jobs as this server has them, by number, without those that are gone."""
    if not numbers:
        return {}
    rows = yield from query(
        f"SELECT job, consumer, kind, matched, reason, who, replaced, {MICROSECONDS.format('made_at')} FROM {_TABLE}"
        + sql(" WHERE datastore = %s", datastore)
        + f" AND job IN ({commas([str(number) for number in sorted(numbers)])})"
    )
    return {job: Job(job, consumer, JobKind(kind), *rest) for job, consumer, kind, *rest in rows}


def progress(datastore: str, job: Job) -> Operation[JobProgress]:
    """Returns how far the records of a job of this server are."""
    ((pending, failed),) = yield from query(
        "SELECT COALESCE(SUM(ordered IS NOT NULL), 0), COALESCE(SUM(ordered IS NULL), 0) FROM schemaless.parked"
        + sql(" WHERE job = %s AND datastore = %s", job.job, datastore)
    )
    return JobProgress(job, int(pending), int(failed))
