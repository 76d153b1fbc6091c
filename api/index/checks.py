"""Checks of an index as jobs: what people ordered, which the indexers carry out, and what came of it so far."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from schemaless.errors import NotReady
from schemaless.index.comparison import NOTHING_CHECKED, CheckRequest
from schemaless.index.definition import IndexDefinition
from schemaless.names import index_of_consumer
from schemaless.runtime.batching import all_or_first_error
from schemaless.storage import index_check_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_check_table import CheckProgress
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.job_table import Job, JobKind
from schemaless.topology import Datastore

JOBS_MAX = 16
"""How many checks of a datastore's indexes may be pending."""

FAULTS_SHOWN_MAX = 100


async def order_check(
    storage: AsyncStorage,
    datastore: Datastore,
    definition: IndexDefinition,
    requests: Mapping[int, CheckRequest],
    who: str,
) -> int:
    """Orders a check of some shards, and returns the number of the job.

    Raises NotReady when enough of them are pending. Raises StorageUnavailable when a master is away. Then a part of
    the check may be carried out, which does no harm.
    """
    pending = await all_or_first_error(
        storage.master(cluster).run(index_check_table.pending_jobs, datastore.name) for cluster in datastore.clusters
    )
    if len(set().union(*pending)) >= JOBS_MAX:
        raise NotReady(f"{JOBS_MAX} checks of indexes of {datastore.name} are pending already: wait for one to end")
    job = secrets.randbits(63)
    kind = JobKind.REPAIR if any(request.repairs for request in requests.values()) else JobKind.VERIFY
    version = IndexVersion(datastore.name, definition.name, definition.number)
    await all_or_first_error(
        storage.master(cluster).run(
            index_check_table.put,
            version,
            Job(job, definition.consumer, kind, len(shards), None, who),
            {shard: requests[shard] for shard in shards},
        )
        for cluster, shards in datastore.by_home(requests, lambda shard: shard).items()
    )
    return job


def check_view(datastore: Datastore, parts: Sequence[CheckProgress], waits: str | None) -> dict[str, Any]:
    """Shows a check from what each cluster has of it, at least one. It counts shards, and what they came to so far."""
    job = parts[0].job
    name, number = index_of_consumer(job.consumer)
    matched, left = sum(part.job.matched for part in parts), sum(part.parts for part in parts)
    done = sum(len(part.results) for part in parts)
    result = sum((result for part in parts for result in part.results), start=NOTHING_CHECKED)
    state = "running" if done < left else "dropped" if left < matched else "done"
    error = next((part.error for part in parts if part.error is not None), None)
    return {
        "job": f"{job.job:016x}",
        "datastore": datastore.name,
        "index": name,
        "version": number,
        "kind": job.kind.value,
        "state": state,
        "matched": matched,
        "pending": left - done,
        "done": done,
        **result.document(),
        "faults": [fault for part in parts for fault in part.faults][:FAULTS_SHOWN_MAX],
        "who": job.who,
        "reason": job.reason,
        "waits_for": (waits or error) if state == "running" else None,
    }
