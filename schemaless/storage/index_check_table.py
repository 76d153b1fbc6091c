"""index_check: the parts of a job that compares an index with its cells. Each is of one shard, and on the shard's home.

Indexers carry them out. A part that two processes carry out at once is noted by the first: both compared the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from schemaless.cell import RowKey, parse_row_key, row_key_text
from schemaless.index.comparison import CheckRequest, CheckResult
from schemaless.shapes import shape
from schemaless.storage import job_table
from schemaless.storage.index_problem_table import VERSION, IndexVersion
from schemaless.storage.job_table import Job
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import NOW, literal, matching, where
from schemaless.storage.table import Table

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


_PARTS = Table(_TABLE, CheckPart, version=VERSION)


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
    parts = [CheckPart(job.job, shard, version, request) for shard, request in sorted(requests.items())]
    if parts:
        yield _PARTS.insert(parts, "INSERT IGNORE", made_at=NOW)
    yield f"DELETE FROM {_TABLE} WHERE {job_table.IS_OLD} ORDER BY made_at LIMIT 10000"
    yield "COMMIT"


def pending_jobs(datastore: str) -> Operation[set[int]]:
    """Returns the jobs that this server has parts of which are to be done."""
    rows = yield from query(f"SELECT DISTINCT job FROM {_TABLE} {where(datastore=datastore)} AND done_at IS NULL")
    return {job for (job,) in rows}


def due(datastore: str, shards: Collection[int], without: Collection[int]) -> Operation[CheckPart | None]:
    """Returns the part of these shards that was ordered first and isn't done, of other jobs than those, or None."""
    which = where(datastore=datastore) + " AND done_at IS NULL"
    if not shards or not (yield from query(f"SELECT 1 FROM {_TABLE} {which} LIMIT 1")):
        return None
    others = f" AND NOT {matching(job=sorted(without))}" if without else ""
    which += f"{others} AND {matching(shard=sorted(shards))}"
    parts = yield from _PARTS.rows(f"{which} ORDER BY made_at, job, shard LIMIT 1")
    return parts[0] if parts else None


def done(part: CheckPart, result: CheckResult, faults: _Faults) -> Operation[None]:
    """Notes what came of a part, unless another process did. Faults have values of rows: it notes none of them where
    cells of such a row are being erased, or were (I19).
    """
    found = literal(msgspec.json.encode(faults).decode() if faults else None)
    if faults:
        rows = sorted({parse_row_key(str(fault["row_key"])) for fault in faults})
        which = where(datastore=part.version.datastore, row_key=rows)
        found = f"IF(EXISTS(SELECT 1 FROM schemaless.erasure {which}), NULL, {found})"
    yield (
        f"UPDATE {_TABLE} SET done_at = {NOW.text}, error = NULL, faults = {found},"
        f" result = {literal(msgspec.json.encode(result).decode())}"
        f" {where(job=part.job, shard=part.shard)} AND done_at IS NULL"
    )


def forget_faults(version: IndexVersion, row_key: RowKey) -> Operation[None]:
    """Forgets the faults of parts that name a row: they have values of its cells. What was counted stays."""
    named = literal(f"%{row_key_text(row_key)}%")
    yield f"UPDATE {_TABLE} SET faults = NULL {version.where} AND faults LIKE {named}"


def waits(part: CheckPart, error: str) -> Operation[None]:
    """Notes why a part can't be done now."""
    why = literal(error[:ERROR_CHARACTERS_MAX])
    yield f"UPDATE {_TABLE} SET error = {why} {where(job=part.job, shard=part.shard)} AND done_at IS NULL"


def progress(job: Job) -> Operation[CheckProgress]:
    """Returns how far the parts of a job of this server are. Of its faults it has the first hundred."""
    of_job = f"FROM {_TABLE} {where(job=job.job)}"
    rows = yield from query(f"SELECT result, error {of_job}")
    found = yield from query(f"SELECT faults {of_job} AND faults IS NOT NULL ORDER BY shard LIMIT {_FAULTS_SHOWN_MAX}")
    results = [msgspec.json.decode(result, type=shape(CheckResult)) for result, _ in rows if result is not None]
    faults = [fault for (text,) in found for fault in msgspec.json.decode(text, type=shape(_Faults))]
    error = next((error for result, error in rows if result is None and error is not None), None)
    return CheckProgress(job, len(rows), results, faults[:_FAULTS_SHOWN_MAX], error)
