"""job: what people ordered for many parked cells, or of an index. Its parts say what became of it."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import msgspec

from schemaless.storage import shard_head
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import NOW, where
from schemaless.storage.table import Table

KEPT_DAYS = 30
IS_OLD = f"made_at < UTC_TIMESTAMP(6) - INTERVAL {KEPT_DAYS} DAY"


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


_TABLE = Table("schemaless.job", Job)


class JobProgress(msgspec.Struct, frozen=True):
    """A job on one cluster. `pending` records wait for their turn, and `failed` ones have failed again."""

    job: Job
    pending: int
    failed: int


def put(datastore: str, job: Job) -> Operation[None]:
    """Stores a job, and deletes some that are older than KEPT_DAYS."""
    yield _TABLE.insert([job], "INSERT IGNORE", datastore=datastore, made_at=NOW)
    yield f"DELETE FROM {_TABLE.name} WHERE {IS_OLD} ORDER BY made_at LIMIT 1000"


def of_numbers(datastore: str, numbers: Collection[int]) -> Operation[dict[int, Job]]:
    """Returns these jobs as this server has them, by number, without those that are gone."""
    if not numbers:
        return {}
    found = yield from _TABLE.rows(where(datastore=datastore, job=sorted(numbers)))
    return {job.job: job for job in found}


def progress(datastore: str, job: Job) -> Operation[JobProgress]:
    """Returns how far the records of a job of this server are."""
    ((pending, failed),) = yield from query(
        "SELECT COALESCE(SUM(ordered IS NOT NULL), 0), COALESCE(SUM(ordered IS NULL), 0) FROM schemaless.parked "
        + where(job=job.job, datastore=datastore)
        + f" AND {shard_head.not_moved(datastore)}"
    )
    return JobProgress(job, int(pending), int(failed))
