"""index_check: the parts of a job that compares an index with its cells. Each is of one shard, and on the shard's home.

Indexers carry them out. A part that two processes carry out at once is noted by the first: both compared the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from schemaless.index.comparison import CheckRequest, CheckResult
from schemaless.storage import job_table
from schemaless.storage.index_problem_table import IndexVersion, versions_in
from schemaless.storage.job_table import Job
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import commas, sql

ERROR_CHARACTERS_MAX = 300
_TABLE = "schemaless.index_check"
_FAULTS_SHOWN_MAX = 100
_Faults = list[dict[str, object]]


class CheckPart(msgspec.Struct, frozen=True):
    """A part that is to be done."""

    job: int
    shard: int
    version: IndexVersion
    request: CheckRequest


class CheckProgress(msgspec.Struct, frozen=True):
    """A job on one cluster. `error`: why a pending part can't be done now."""

    job: Job
    parts: int
    results: Sequence[CheckResult]
    faults: _Faults
    error: str | None


def put(version: IndexVersion, job: Job, requests: dict[int, CheckRequest]) -> Operation[None]:
    """Stores a job with its parts of this cluster, by shard, and deletes old ones. Idempotent."""
    yield "BEGIN"
    yield from job_table.put(version.datastore, job)
    parts = [
        sql(
            "(%s, %s, %s, %s, %s, %s, UTC_TIMESTAMP(6))",
            job.job,
            shard,
            version.datastore,
            version.name,
            version.number,
            msgspec.json.encode(request).decode(),
        )
        for shard, request in sorted(requests.items())
    ]
    if parts:
        columns = "job, shard, datastore, name, number, request, made_at"
        yield f"INSERT IGNORE INTO {_TABLE} ({columns}) VALUES {commas(parts)}"
    yield f"DELETE FROM {_TABLE} WHERE {job_table.IS_OLD} ORDER BY made_at LIMIT 10000"
    yield "COMMIT"


def pending_jobs(datastore: str) -> Operation[set[int]]:
    """Returns the jobs that this server has parts of which are to be done."""
    rows = yield from query(
        f"SELECT DISTINCT job FROM {_TABLE}" + sql(" WHERE datastore = %s AND done_at IS NULL", datastore)
    )
    return {job for (job,) in rows}


def due(datastore: str, shards: Collection[int], without: Collection[int]) -> Operation[CheckPart | None]:
    """Returns the part of these shards that was ordered first and isn't done, of other jobs than those, or None."""
    where = sql(" WHERE datastore = %s AND done_at IS NULL", datastore)
    if not shards or not (yield from query(f"SELECT 1 FROM {_TABLE}{where} LIMIT 1")):
        return None
    others = f" AND job NOT IN ({commas([str(job) for job in sorted(without)])})" if without else ""
    rows = yield from query(
        f"SELECT job, shard, name, number, request FROM {_TABLE}{where}{others}"
        f" AND shard IN ({commas([str(shard) for shard in sorted(shards)])}) ORDER BY made_at, job, shard LIMIT 1"
    )
    for job, shard, name, number, request in rows:
        return CheckPart(
            job, shard, IndexVersion(datastore, name, number), msgspec.json.decode(request, type=CheckRequest)
        )
    return None


def done(part: CheckPart, result: CheckResult, faults: _Faults) -> Operation[None]:
    """Notes what came of a part, unless another process did."""
    yield sql(
        f"UPDATE {_TABLE} SET done_at = UTC_TIMESTAMP(6), error = NULL, result = %s, faults = %s"
        " WHERE job = %s AND shard = %s AND done_at IS NULL",
        msgspec.json.encode(result).decode(),
        msgspec.json.encode(faults).decode() if faults else None,
        part.job,
        part.shard,
    )


def waits(part: CheckPart, error: str) -> Operation[None]:
    """Notes why a part can't be done now."""
    yield sql(
        f"UPDATE {_TABLE} SET error = %s WHERE job = %s AND shard = %s AND done_at IS NULL",
        error[:ERROR_CHARACTERS_MAX],
        part.job,
        part.shard,
    )


def progress(job: Job) -> Operation[CheckProgress]:
    """Returns how far the parts of a job of this server are. Of its faults it has the first hundred."""
    number = job.job
    rows = yield from query(sql(f"SELECT result, error FROM {_TABLE} WHERE job = %s", number))
    found = yield from query(
        sql(f"SELECT faults FROM {_TABLE} WHERE job = %s AND faults IS NOT NULL ORDER BY shard", number)
        + f" LIMIT {_FAULTS_SHOWN_MAX}"
    )
    results = [msgspec.json.decode(result, type=CheckResult) for result, _ in rows if result is not None]
    faults = [fault for (text,) in found for fault in msgspec.json.decode(text, type=_Faults)]
    error = next((error for result, error in rows if result is None and error is not None), None)
    return CheckProgress(job, len(rows), results, faults[:_FAULTS_SHOWN_MAX], error)


def delete_all(version: IndexVersion) -> Operation[None]:
    """Deletes the parts of a version that is gone. Its jobs stay."""
    yield f"DELETE FROM {_TABLE}" + sql(
        " WHERE datastore = %s AND name = %s AND number = %s", version.datastore, version.name, version.number
    )


def versions(datastore: str) -> Operation[set[tuple[str, int]]]:
    """Returns the names and numbers of the versions that have rows here."""
    return (yield from versions_in(_TABLE, datastore))
