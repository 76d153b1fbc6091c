"""Worker status: the processes that run trigger programs and maintain indexes, from the rows in which they report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from schemaless.cell import created_at_text
from schemaless.errors import SchemalessError
from schemaless.storage import worker_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import answers_of_all, first_answer
from schemaless.storage.worker_table import SEEN_WITHIN_S, WaitingShard, WorkerRow
from schemaless.topology import Datastore


async def read_workers(storage: AsyncStorage, datastore: Datastore, timeout_s: float) -> list[WorkerRow]:
    """Returns the processes that were seen lately. They report to all clusters, so any of them that answers will do.

    A minion is asked only where its master doesn't answer: it may still show a process that has ended.
    """
    questions = {
        cluster: first_answer(
            [storage.nodes[node.name] for node in storage.topology.cluster(cluster).nodes],
            lambda node: node.run(worker_table.of_datastore, datastore.name, timeout_s=timeout_s),
        )
        for cluster in datastore.clusters
    }
    answers = await answers_of_all(questions, tolerated=SchemalessError)
    return present_workers([rows for rows, _ in answers.found.values()])


def present_workers(answers: Iterable[Sequence[WorkerRow]]) -> list[WorkerRow]:
    """Returns the newest row of each process, without those that weren't seen for a while."""
    newest: dict[tuple[str, int], WorkerRow] = {}
    for row in (row for answer in answers for row in answer):
        known = newest.get((row.consumer, row.worker))
        if row.age_s <= SEEN_WITHIN_S and (known is None or row.age_s < known.age_s):
            newest[row.consumer, row.worker] = row
    return [row for _, row in sorted(newest.items())]


def worker_view(row: WorkerRow) -> dict[str, Any]:
    """Shows one process, and what waits there."""
    report = row.report
    call = report.oldest_call
    return {
        "consumer": row.consumer,
        "worker": f"{row.worker:016x}",
        "version": report.version,
        "transport": report.transport,
        "host": report.host,
        "pid": report.pid,
        "seen_s": round(row.age_s, 1),
        "is_member": report.is_member,
        "partitions": report.partitions,
        "assigned": list(report.assigned),
        "rate": report.rate,
        "unconfirmed_count": report.unconfirmed_count,
        "unconfirmed": [_waiting_view(shard) for shard in report.unconfirmed],
        "refused_count": report.refused_count,
        "refused": [_waiting_view(shard) for shard in report.refused],
        "failing_shards_count": report.failing_shards_count,
        "failing_shards": [_waiting_view(shard) for shard in report.failing_shards],
        "parallel": report.parallel,
        "failing_count": report.failing_count,
        "failing": [
            {**msgspec.structs.asdict(cell), "again_at": created_at_text(cell.again_at * 1_000_000)}
            for cell in report.failing
        ],
        "oldest_call": None if call is None else {**msgspec.structs.asdict(call), "age_s": _age_s(row)},
    }


def workers_in_all(rows: Sequence[WorkerRow]) -> Mapping[str, Any]:
    """Adds up the processes of one program."""
    return {
        "worker_count": len(rows),
        "unconfirmed_count": sum(row.report.unconfirmed_count for row in rows),
        "refused_count": sum(row.report.refused_count for row in rows),
        "failing_shards_count": sum(row.report.failing_shards_count for row in rows),
        "failing_count": sum(row.report.failing_count for row in rows),
        "oldest_call_s": max((age for row in rows if (age := _age_s(row)) is not None), default=None),
    }


def waiting_shards(rows: Sequence[WorkerRow], consumer: str) -> list[dict[str, Any]]:
    """Returns the shards in which a consumer doesn't go on, of many only some, and why."""
    return [
        {"shard": shard.shard, "reason": shard.reason}
        for row in rows
        for shard in (*row.report.failing_shards, *row.report.refused)
        if shard.consumer == consumer
    ]


def _age_s(row: WorkerRow) -> float | None:
    """Returns how long the oldest call has run by now."""
    call = row.report.oldest_call
    return None if call is None else round(call.age_s + row.age_s, 1)


def _waiting_view(shard: WaitingShard) -> dict[str, Any]:
    return {"consumer": shard.consumer, "shard": shard.shard, "reason": shard.reason}
