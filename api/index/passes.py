"""What people see of the index cleaner and its finds, and what they and queries have it compare or repair."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import structlog

from schemaless.cell import RowKey, created_at_text, row_key_text
from schemaless.errors import Invalid, NotReady, SchemalessError
from schemaless.facts.indexes import Passes
from schemaless.index.comparison import NOTHING_CHECKED, CheckRequest
from schemaless.index.definition import IndexDefinition
from schemaless.index.inspection import IndexInspector, ranges_of
from schemaless.names import index_of_consumer
from schemaless.runtime.batching import all_or_first_error
from schemaless.storage import index_check_table, index_problem_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import all_masters
from schemaless.storage.index_check_table import CheckProgress
from schemaless.storage.index_pass_table import MASTERS, NO_PASS, IndexPass
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.job_table import Job, JobKind
from schemaless.topology import Datastore


def cleaner_view(storage: AsyncStorage, datastore: Datastore, passes: Passes, version: IndexVersion) -> dict[str, Any]:
    """Shows what the comparisons of an index came to: those of its masters together, and of each minion."""
    minions = [minion.node.name for cluster in datastore.clusters for minion in storage.minions(cluster)]
    return {
        **_pass_view(datastore, passes.get((version, MASTERS))),
        "minions": {name: _pass_view(datastore, passes.get((version, name))) for name in minions},
    }


def _pass_view(datastore: Datastore, found: IndexPass | None) -> dict[str, Any]:
    """Shows the last comparison of each range in sums. `compared_since` is null until all were compared."""
    last = found or NO_PASS
    return {
        "ranges": last.ranges,
        "compared_since": created_at_text(last.compared_since) if last.ranges >= ranges_of(datastore) else None,
        **msgspec.structs.asdict(last.last),
        "total": {kind: getattr(last.total, kind) for kind in ("missing", "stale", "ghost", "repaired")},
    }


# Problems of an index over all clusters: a page of them.

ITEM_BYTES_MAX = 1 << 10  # of one problem, about


class ProblemCursor(msgspec.Struct, frozen=True, array_like=True):
    """The next row of cells, and how many of its problems were shown."""

    number: int
    shard: int = 0
    row_key: str = ""
    shown: int = 0


def read_cursor(text: str, index: IndexDefinition) -> ProblemCursor:
    """Raises Invalid, also for a cursor of another version of the index."""
    try:
        cursor = msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=ProblemCursor)
        if len(bytes.fromhex(cursor.row_key)) != 16 or not 0 <= cursor.shard < 1 << 32 or cursor.shown < 0:
            raise ValueError("another shape")
    except (ValueError, RecursionError, msgspec.MsgspecError):
        raise Invalid("cursor", "is not a cursor of this API: begin again without it") from None
    if cursor.number != index.number:
        raise Invalid("cursor", "belongs to another version of the index: begin again without it")
    return cursor


def cursor_text(cursor: ProblemCursor) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(cursor)).decode().rstrip("=")


async def problems_page(
    storage: AsyncStorage, datastore: Datastore, index: IndexDefinition, after: ProblemCursor, limit: int
) -> tuple[list[dict[str, Any]], ProblemCursor | None]:
    """Returns problems by shard and row key, and where the next page begins. Raises StorageUnavailable."""
    version = IndexVersion(datastore.name, index.name, index.number)
    begin = RowKey(bytes.fromhex(after.row_key))
    found = await all_masters(
        storage, index.placed(datastore).clusters, index_problem_table.page, version, after.shard, begin, limit + 1
    )
    rows = sorted((row for part in found.values() for row in part), key=lambda row: (row.shard, row.row_key))
    shown: list[dict[str, Any]] = []
    for row in rows[: limit + 1]:
        first = after.shown if (row.shard, row.row_key) == (after.shard, begin) else 0
        for number, misfit in list(enumerate(row.misfits))[first:]:
            if len(shown) == limit:
                return shown, ProblemCursor(index.number, row.shard, row.row_key.hex(), number)
            view = {"row_key": row_key_text(row.row_key), "column_name": index.field(misfit.field).column}
            shown.append(view | msgspec.to_builtins(misfit))
    return shown, None


# QueuedRepairs: rows of which a query found wrong entries. They are compared with their cells and repaired soon after.
#
# A query says only that an entry differs at that moment. The comparison says whether it differs from what the index
# has reached, so an index that is merely behind costs no write (I11). Rows of which one can't be compared are tried
# again in smaller parts. What is dropped, or lost with the process, is left to the index cleaner.

log = structlog.get_logger()

ROWS_MAX = 10_000
"""How many rows may wait. What comes then is left to the index cleaner."""

ROWS_AT_ONCE = (100, 10, 1)
"""How many rows are compared together at each attempt. After the last one a row is dropped."""

_PAUSE_S = 1.0
_PAUSE_FACTOR = 10  # times as long as a comparison took


class QueuedRepairs:
    """Belongs to one event loop. Masters are repaired, and what a minion has of its own isn't."""

    def __init__(self, storage: AsyncStorage) -> None:
        self._storage = storage
        self._inspectors: dict[IndexVersion, IndexInspector] = {}
        self._attempts: dict[tuple[IndexVersion, RowKey], int] = {}
        self.counts: Counter[tuple[str]] = Counter({("compared",): 0, ("dropped",): 0})
        """Rows by what became of them."""
        self._wake = asyncio.Event()

    def add(self, datastore: Datastore, definition: IndexDefinition, row_keys: Iterable[RowKey]) -> None:
        """Queues rows, each once."""
        version = IndexVersion(datastore.name, definition.name, definition.number)
        for row_key in row_keys:
            if version not in self._inspectors:
                self._inspectors[version] = IndexInspector(self._storage, datastore, definition)
            self._queue(version, row_key, 0)

    def __len__(self) -> int:
        """How many rows wait."""
        return len(self._attempts)

    def _queue(self, version: IndexVersion, row_key: RowKey, attempt: int) -> None:
        if (version, row_key) in self._attempts:
            return
        if attempt < len(ROWS_AT_ONCE) and len(self._attempts) < ROWS_MAX:
            self._attempts[version, row_key] = attempt
            self._wake.set()
        else:
            self.counts["dropped",] += 1

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            began = time.monotonic()
            await self.step()
            await asyncio.sleep(max(_PAUSE_S, _PAUSE_FACTOR * (time.monotonic() - began)))

    async def step(self) -> None:
        """Compares and repairs the rows of one version that wait longest, as many as their attempt allows."""
        (version, _), attempt = next(iter(self._attempts.items()))
        waiting = [row_key for (of, row_key), tried in self._attempts.items() if (of, tried) == (version, attempt)]
        row_keys = waiting[: ROWS_AT_ONCE[attempt]]
        for row_key in row_keys:
            del self._attempts[version, row_key]
        inspector = self._inspectors[version]
        try:
            unreadable = await self._repair(inspector, row_keys)
            self.counts["dropped",] += unreadable
            self.counts["compared",] += len(row_keys) - unreadable
        except SchemalessError as error:  # a server is away, or the index is being dropped
            log.warning(
                "entries that a query found wrong aren't repaired",
                index=version.name,
                rows=len(row_keys),
                dropped=self.counts["dropped",],
                why=str(error),
            )
            for row_key in row_keys:
                self._queue(version, row_key, attempt + 1)
        if not self._attempts:
            self._inspectors.clear()
            self._wake.clear()

    async def _repair(self, inspector: IndexInspector, row_keys: list[RowKey]) -> int:
        """Returns how many rows have a cell that can't be decoded, and so weren't compared."""
        masters = [self._storage.master(cluster) for cluster in inspector.placed.clusters]
        page = await inspector.of_rows(masters, row_keys)
        for row_key, why in page.unreadable.items():
            log.error(
                "a row isn't compared with its index",
                datastore=inspector.datastore.name,
                index=inspector.definition.name,
                row_key=row_key_text(row_key),
                why=why,
            )
        faults = [fault for found in page.faults.values() for fault in found]
        if faults:
            repaired = await inspector.repair(faults)
            log.warning(
                "entries that a query found wrong are repaired",
                datastore=inspector.datastore.name,
                index=inspector.definition.name,
                faults=len(faults),
                repaired=repaired.written,
                withheld=dict(repaired.withheld),
            )
        return len(page.unreadable)


# Checks of an index as jobs: what people ordered, which the indexers carry out, and what came of it so far.

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
    pending = await all_masters(storage, datastore.clusters, index_check_table.pending_jobs, datastore.name)
    if len(set().union(*pending.values())) >= JOBS_MAX:
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
