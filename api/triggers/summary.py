"""Trigger summary: counts, parked cells, orders and the oldest unfinished cell of programs, over all clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from schemaless.cell import created_at_text
from schemaless.errors import SchemalessError
from schemaless.names import TRIGGER_PREFIX
from schemaless.storage import parked_selection, shard_log, trigger_order_table, trigger_progress
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.checkpoint_table import NO_COUNTS, CellCounts
from schemaless.storage.failover import answers_of_all, first_answer
from schemaless.storage.operation import Operation
from schemaless.storage.parked_selection import ParkedSummary
from schemaless.storage.trigger_order_table import NOT_PAUSED, ProgramPause, SeekOrder, TriggerOrders, latest
from schemaless.storage.trigger_progress import TriggerProgress
from schemaless.storage.worker_table import WorkerRow
from schemaless.topology import Datastore


class _ClusterPart(msgspec.Struct, frozen=True):
    """What one cluster knows of all programs, by consumer."""

    progress: Mapping[str, TriggerProgress]
    parked: Mapping[str, ParkedSummary]
    orders: Mapping[str, TriggerOrders]
    oldest_us: Mapping[str, int]


class ProgramSummary(msgspec.Struct, frozen=True):
    """One program over all clusters that answered. Times are in microseconds."""

    counts: CellCounts = NO_COUNTS
    counted_from: int = 0
    parked: int = 0
    oldest_parked_at: int | None = None
    lag_us: int = 0
    pause: ProgramPause = NOT_PAUSED
    paused: Mapping[int, str | None] = {}
    seeks: Mapping[int, SeekOrder] = {}


async def read_summaries(storage: AsyncStorage, datastore: Datastore, timeout_s: float) -> dict[str, ProgramSummary]:
    """Returns the programs that are known by consumer. Clusters that don't answer are left out."""
    answers = await answers_of_all(
        {
            cluster: first_answer(
                [storage.nodes[node.name] for node in storage.topology.cluster(cluster).nodes],
                lambda node: node.run(_part, datastore, timeout_s=timeout_s),
            )
            for cluster in datastore.clusters
        },
        tolerated=SchemalessError,
    )
    return summaries_of([part for part, _ in answers.found.values()])


def summaries_of(parts: Sequence[_ClusterPart]) -> dict[str, ProgramSummary]:
    names = {name for part in parts for name in (*part.progress, *part.parked, *part.orders)}
    return {name: _of_program(parts, name) for name in sorted(names)}


def _of_program(parts: Sequence[_ClusterPart], name: str) -> ProgramSummary:
    progress = [part.progress[name] for part in parts if name in part.progress]
    parked = [part.parked[name] for part in parts if name in part.parked]
    orders = [part.orders[name] for part in parts if name in part.orders]
    return ProgramSummary(
        sum((one.counts for one in progress), NO_COUNTS),
        sum(one.counted_from for one in progress),
        sum(one.parked for one in parked),
        min((one.oldest_at for one in parked if one.oldest_at is not None), default=None),
        max((part.oldest_us.get(name, 0) for part in parts), default=0),
        latest(orders),
        {shard: reason for one in orders for shard, reason in sorted(one.paused.items())},
        {shard: seek for one in orders for shard, seek in sorted(one.seeks.items())},
    )


def _part(datastore: Datastore) -> Operation[_ClusterPart]:
    progress = yield from trigger_progress.of_datastore(datastore.name)
    parked = yield from parked_selection.summaries(datastore.name)
    orders = yield from trigger_order_table.of_datastore(datastore.name)
    oldest: dict[str, int] = {}
    for name in progress:
        behind = yield from trigger_progress.behind(datastore.name, name)
        found = (yield from shard_log.oldest_after(datastore, behind)) if behind else {}
        oldest[name] = max((one.age_us for one in found.values() if one is not None), default=0)
    return _ClusterPart(progress, parked, orders, oldest)


def program_view(view: Mapping[str, Any], summary: ProgramSummary, workers: Sequence[WorkerRow]) -> dict[str, Any]:
    """Adds what people ask of a program to the view of its consumer: state and reason, rate, counts, parked cells."""
    state, reason = view["state"], view["reason"]
    tripped = [row.report.tripped for row in workers if row.report.tripped is not None]
    if summary.pause.paused:
        state, reason = "paused", summary.pause.reason
    elif state == "running" and tripped:
        state, reason = "tripped", tripped[0]
    return {
        **view,
        "state": state,
        "reason": reason,
        "tripped_workers": len(tripped),
        "rate": round(sum(row.report.rate for row in workers), 1),
        "lag_seconds": round(max(0, summary.lag_us) / 1_000_000, 3) if view["lag"] else 0.0,
        "parked": summary.parked,
        "oldest_parked_at": None if summary.oldest_parked_at is None else created_at_text(summary.oldest_parked_at),
        "counts": counts_view(summary.counts),
        "counted_from": summary.counted_from,
        "paused_shards": [{"shard": shard, "reason": why} for shard, why in summary.paused.items()],
        "seeks": [{"shard": shard, "to": str(seek.to)} for shard, seek in summary.seeks.items()],
    }


def counts_view(counts: CellCounts) -> dict[str, int]:
    return {"seen": counts.seen, **msgspec.structs.asdict(counts)}


def is_program(consumer: str) -> bool:
    return consumer.startswith(TRIGGER_PREFIX)
