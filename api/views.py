"""Views: what answers show of workers, trigger programs and backlogs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict

from schemaless.cell import created_at_text
from schemaless.facts.consumers import ProgramSummary, tripped
from schemaless.facts.servers import Backlog
from schemaless.ops.erasures import ErasureReport
from schemaless.storage.checkpoint_table import CellCounts, State
from schemaless.storage.worker_table import WaitingShard, WorkerRow

_TOLD = (
    *("is_member", "partitions", "assigned", "stall", "stall_reason", "rate", "unconfirmed_count", "unconfirmed"),
    *("refused_count", "refused", "failing_shards_count", "failing_shards", "parallel", "failing_count"),
    *("calls", "failures"),
)


def worker_view(row: WorkerRow) -> dict[str, Any]:
    """Shows one process, and what waits there."""
    told, call = msgspec.to_builtins(row.report), row.report.oldest_call
    return {
        "consumer": row.consumer,
        "worker": f"{row.worker:016x}",
        **{name: told[name] for name in ("version", "transport", "host", "pid")},
        "seen_s": round(row.age_s, 1),
        **{name: told[name] for name in _TOLD},
        "failing": [{**cell, "again_at": created_at_text(cell["again_at"] * 1_000_000)} for cell in told["failing"]],
        "oldest_call": None if call is None else {**asdict(call), "age_s": _age_s(row)},
    }


def workers_in_all(rows: Sequence[WorkerRow]) -> Mapping[str, Any]:
    """Adds up the processes of one program."""
    return {
        "worker_count": len(rows),
        "unconfirmed_count": sum(row.report.unconfirmed_count for row in rows),
        "refused_count": sum(row.report.refused_count for row in rows),
        "failing_shards_count": sum(row.report.failing_shards_count for row in rows),
        "failing_count": sum(row.report.failing_count for row in rows),
        "calls": sum(row.report.calls for row in rows),
        "failures": dict(sum((Counter(row.report.failures) for row in rows), Counter())),
        "oldest_call_s": max((age for row in rows if (age := _age_s(row)) is not None), default=None),
    }


def _age_s(row: WorkerRow) -> float | None:
    """Returns how long the oldest call has run by now."""
    call = row.report.oldest_call
    return None if call is None else round(call.age_s + row.age_s, 1)


def waiting_view(shards: Iterable[WaitingShard]) -> list[dict[str, Any]]:
    """Shows shards of one consumer that wait."""
    return [{"shard": shard.shard, "reason": shard.reason} for shard in shards]


def program_view(view: Mapping[str, Any], summary: ProgramSummary, workers: Sequence[WorkerRow]) -> dict[str, Any]:
    """Adds what people ask of a program to the view of its consumer: state and reason, rate, counts, parked cells."""
    state, reason = view["state"], view["reason"]
    breakers, orders = tripped(workers), summary.orders
    if orders.program.paused:
        state, reason = "paused", orders.program.reason
    elif breakers and state != State.STOPPED:
        state, reason = "tripped", breakers[0]
    elif state == "running" and not workers:
        reason = "no worker runs it"
    return {
        **view,
        "state": state,
        "stall": view["stall"] if state == "running" else None,
        "reason": reason,
        "tripped_workers": len(breakers),
        "rate": round(sum(row.report.rate for row in workers), 1),
        "lag_seconds": round(max(0, summary.lag_us) / 1_000_000, 3) if view["lag"] else 0.0,
        "parked": summary.parked,
        "oldest_parked_at": None if summary.oldest_parked_at is None else created_at_text(summary.oldest_parked_at),
        "counts": counts_view(summary.counts),
        "counted_from": summary.counted_from,
        "paused_shards": [{"shard": shard, "reason": why} for shard, why in orders.paused.items()],
        "seeks": [{"shard": shard, "to": str(seek.to)} for shard, seek in orders.seeks.items()],
    }


def counts_view(counts: CellCounts) -> dict[str, int]:
    return {"seen": counts.seen, **asdict(counts)}


def erasure_job_view(report: ErasureReport) -> dict[str, Any]:
    """Shows an erasure as the job that it is, too. It counts the bodies at all places that are searched."""
    erasure = report.erasure
    found, removed = (sum(getattr(place, name) for place in report.places) for name in ("found", "removed"))
    return {
        "job": erasure.id,
        "datastore": erasure.datastore,
        "kind": "erase",
        "state": "done" if report.state == "complete" else "running",
        "matched": found,
        "pending": found - removed,
        "done": removed,
        "who": erasure.who,
        "reason": erasure.reason,
        "waits_for": None,
    }


def backlog_views(backlogs: Iterable[Backlog]) -> list[dict[str, Any]]:
    """Shows the backlogs that don't shrink, and those with cells that their home refuses."""
    return [
        {
            "datastore": one.datastore,
            "secondary": one.secondary,
            "home": one.home,
            "rows": one.waiting.rows,
            "oldest_s": round(one.waiting.oldest_s, 3),
            "refused": one.refused.cells if one.refused else 0,
        }
        for one in backlogs
        if one.is_stalled
    ]
