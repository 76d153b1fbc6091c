"""/jobs: what became of what people ordered: retries and discards of parked cells, and checks of indexes."""

from __future__ import annotations

from typing import Any

from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.index.checks import check_view
from api.openapi.program_views import JobView
from api.routes.parked import waits_for
from api.routes.status import NEVER_KEPT
from api.status.workers import read_workers
from api.triggers.control import TriggerControl
from api.triggers.parked_orders import job_view
from schemaless.access import Scope
from schemaless.errors import Invalid, NotFound, StorageUnavailable
from schemaless.location import INT64_MAX
from schemaless.names import INDEX_PREFIX, INDEXER
from schemaless.storage import index_check_table, job_table
from schemaless.storage.failover import answers_of_all
from schemaless.storage.index_check_table import CheckProgress
from schemaless.storage.job_table import JobProgress
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore


async def get_job(request: Request) -> Response:
    """What became of an order. Of a retry or a discard, `done` records are gone: finished, or discarded.

    Of a check of an index, `done` shards were compared, and the counts say what they came to so far.
    """
    datastore = await request.datastore()
    request.query()
    text = request.path["job"]
    if len(text) != 16 or not set(text) <= set("0123456789abcdef") or (number := int(text, 16)) > INT64_MAX:
        raise Invalid("job", "is the 16 hexadecimal digits that an order answered")
    storage = request.state.storage
    answers = await answers_of_all(
        {cluster: storage.master(cluster).run(_job, datastore.name, number) for cluster in datastore.clusters}
    )
    parts = [part for part in answers.found.values() if part is not None]
    if not parts and answers.failures:
        raise StorageUnavailable("; ".join(map(str, answers.failures.values())))
    if not parts:
        raise NotFound(f"there is no job {text}: jobs are kept for {job_table.KEPT_DAYS} days")
    checks = [part for part in parts if isinstance(part, CheckProgress)]
    if checks:
        document = check_view(datastore, checks, await waits_for_indexer(request, datastore))
    else:
        records = [part for part in parts if isinstance(part, JobProgress)]
        document = await _parked_view(request, datastore, records)
    unknown = {name: "unreachable" for name in answers.failures}
    return ok_response(request.response_format(), document | {"unknown": unknown}, NEVER_KEPT)


def _job(datastore: str, number: int) -> Operation[JobProgress | CheckProgress | None]:
    job = (yield from job_table.of_numbers(datastore, [number])).get(number)
    if job is None:
        return None
    if job.consumer.startswith(INDEX_PREFIX):
        return (yield from index_check_table.progress(job))
    return (yield from job_table.progress(datastore, job))


async def _parked_view(request: Request, datastore: Datastore, parts: list[JobProgress]) -> dict[str, Any]:
    program = parts[0].job.consumer.partition(":")[2]
    control = TriggerControl(request.state.storage, datastore, program)
    return job_view(datastore, parts, await waits_for(request, datastore, control))


async def waits_for_indexer(request: Request, datastore: Datastore) -> str | None:
    """Returns why no check, build or removal of an index is carried out now, or None."""
    workers = await read_workers(request.state.storage, datastore, request.state.settings.status_timeout_s)
    if any(row.consumer == INDEXER for row in workers):
        return None
    return (
        "no indexer runs: start one, with `python -m indexer`, or with `schemaless up indexer-0` in an embedded stack"
    )


ROUTES = (Route("GET", "/jobs/{job}", get_job, Scope.READ, answers={200: JobView}),)
