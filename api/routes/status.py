"""/status and /buffer: the whole picture of a datastore, for the dashboard and for people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from api.http.serving import Asked, serves
from api.state import ApiState
from api.views import worker_view
from schemaless.cell import created_at_text
from schemaless.contract import services
from schemaless.contract.services import BuffersView, BufferView, SyncedView, SyncRequest
from schemaless.facts.buffers import by_home, settle
from schemaless.facts.consumers import ConsumerStatus, read_consumers, read_workers, stall_of, tailing_of
from schemaless.facts.servers import (
    BACKLOG_AGE_MAX_S,
    STATUS_TIMEOUT_S,
    NodeReport,
    Status,
    Unheard,
    is_tailing_paused,
    read_status,
    texts,
)
from schemaless.names import Stall
from schemaless.storage import buffer_table
from schemaless.storage.asyncmy_driver import AsyncNode
from schemaless.storage.checkpoint_table import State
from schemaless.storage.failover import ask_masters
from schemaless.storage.refusal_table import Refused
from schemaless.storage.shard_head import Head, ahead
from schemaless.storage.standstill import stall_after
from schemaless.storage.worker_table import WorkerRow
from schemaless.topology import Datastore, Role

RATE_OVER_MIN_S = 1.0
"""A difference over less time says little."""


@serves(services.STATUS)
async def get_status(asked: Asked[None]) -> dict[str, Any]:
    return await status_of(asked.state, asked.datastore)


async def status_of(state: ApiState, datastore: Datastore) -> dict[str, Any]:
    status, (consumers, unheard), workers = await asyncio.gather(
        read_status(state.storage, datastore),
        read_consumers(state.storage, datastore),
        read_workers(state.storage, datastore),
    )
    reports = status.best.values()
    tailing, tailing_reason = tailing_of(workers)
    if is_tailing_paused(status, datastore.name):
        tailing, tailing_reason = "paused", None
    return {
        "datastore": datastore.name,
        "shards": datastore.shards,
        "partitions": datastore.partitions,
        "heads_sum": sum(report.heads_sum for report in reports),
        "buffered": sum(waiting.rows for report in reports for waiting in report.waiting.values()),
        "refused": sum(refused.cells for report in reports for refused in report.refused.values()),
        "conflicts": sum(report.conflicts for report in reports),
        "shards_ahead": [ahead_view(head) for report in reports for head in ahead(report.heads, time.time())],
        "tailing": tailing,
        "tailing_reason": tailing_reason,
        "clusters": {name: _cluster_view(state, status, name) for name in sorted(state.storage.topology.clusters)},
        "consumers": [
            consumer_view(name, consumer, stalled(unheard, workers, name)) for name, consumer in consumers.items()
        ],
        "workers": [worker_view(row) for row in workers],
        "consumers_unknown": texts(unheard.clusters),  # why, by cluster: what its servers know of consumers is missing
    }


def stalled(unheard: Unheard, workers: Sequence[WorkerRow], consumer: str) -> tuple[Stall, str] | None:
    """Returns why a consumer doesn't continue, in all or in some of its shards."""
    if (stall := stall_of(workers, consumer)) is not None:
        return stall
    for cluster, error in {**unheard.masters, **unheard.clusters}.items():
        return stall_after(error), f"the master of cluster {cluster} can't be asked: {error}"
    return None


def consumer_view(name: str, consumer: ConsumerStatus, stall: tuple[Stall, str] | None = None) -> dict[str, Any]:
    """Shows one consumer without its shards, apart from those that stopped."""
    kind, _, rest = name.partition(":")
    word, why = stall if stall is not None and consumer.state is State.RUNNING else (None, None)
    return {
        "consumer": name,
        "kind": kind,
        "name": rest,
        "state": consumer.state,
        "stall": word,
        "reason": next(iter(consumer.stopped.values()), why),
        "lag": consumer.lag,
        "stopped": [{"shard": number, "reason": reason} for number, reason in consumer.stopped.items()],
    }


def ahead_view(head: Head) -> dict[str, Any]:
    """Shows a shard whose time is frozen: it met a clock that was ahead."""
    return {"shard": head.shard, "last_created_at": created_at_text(head.last_created_at)}


def _cluster_view(state: ApiState, status: Status, name: str) -> dict[str, Any]:
    report = status.best.get(name)
    return {
        "heads_sum": None if report is None else report.heads_sum,
        "generations": None if report is None else _generations(report.heads),
        "buffered": {} if report is None else {home: waiting.rows for home, waiting in report.waiting.items()},
        "backlogs": {} if report is None else _backlogs_view(report),
        "conflicts": None if report is None else report.conflicts,
        "nodes": [_node_view(state, status, node) for node in status.nodes.values() if node.node.cluster == name],
    }


def _generations(heads: Sequence[Head]) -> list[int] | None:
    found = {head.generation for head in heads}
    return [min(found), max(found)] if found else None


def _backlogs_view(report: NodeReport) -> dict[str, Any]:
    """Shows by home what waits for it. A backlog that doesn't shrink is stalled, and a home may say why."""
    return {
        home: {
            "rows": waiting.rows,
            "bytes": waiting.size_bytes,
            "oldest_s": round(waiting.oldest_s, 3),
            "stalled": waiting.oldest_s > BACKLOG_AGE_MAX_S,
            "refused": _refused_view(report.refused.get(home)),
        }
        for home, waiting in report.waiting.items()
    }


def _refused_view(refused: Refused | None) -> dict[str, Any] | None:
    if refused is None:
        return None
    return {"cells": refused.cells, "oldest_s": round(refused.oldest_s, 3), "reason": refused.reason}


def _node_view(state: ApiState, status: Status, asked: AsyncNode) -> dict[str, Any]:
    node, faults, report = asked.node, asked.settings.faults, status.reports.get(asked.node.name)
    why, error = status.failures.get(node.name), status.errors.get(node.name)
    stall = None if error is None or asked.role is Role.MINION else stall_after(error)
    if report is not None and report.standstill is not None:
        why, stall = report.standstill.why, report.standstill.stall
    return {
        "name": node.name,
        "role": asked.role,
        "reachable": report is not None,
        "stall": stall or next((fault.stall for fault in faults if fault.stall), None),
        "why": why or None,
        "heads_sum": report.heads_sum if report else None,
        "lag_s": round(state.lag.lag_s(asked), 3) if report else None,
        "setting_faults": [str(fault) for fault in faults],
    }


@serves(services.BUFFER)
async def get_buffer(asked: Asked[None]) -> BuffersView:
    storage, name, sample = asked.state.storage, asked.datastore.name, asked.state.backlogs
    answers = await ask_masters(storage, storage.topology.clusters, buffer_table.waiting, timeout_s=STATUS_TIMEOUT_S)
    now = {(secondary, *key): one for secondary, found in answers.found.items() for key, one in found.items()}
    before = {(one.secondary, one.datastore, one.home): one.waiting for one in sample.last}
    age_s = time.monotonic() - sample.at
    views = {}
    for home, one in by_home(name, now).items():
        grown = [now[key].rows - before[key].rows for key in now if key in before and key[1:] == (name, home)]
        rate = round(sum(grown) / age_s, 3) if grown and age_s >= RATE_OVER_MIN_S else None
        views[home] = BufferView(one.rows, one.size_bytes, round(one.oldest_s, 3), rate)
    return BuffersView(views, {cluster: str(error) for cluster, error in answers.failures.items()})


@serves(services.BUFFER_SYNC)
async def sync_buffer(asked: Asked[SyncRequest]) -> SyncedView:
    began, state = time.monotonic(), asked.state
    work = settle(state.storage, asked.datastore, asked.payload.wait, state.draining.is_set)
    await asked.request.unless_hung_up(work)
    return SyncedView(round(time.monotonic() - began, 3))


ROUTES = (get_status, get_buffer, sync_buffer)
