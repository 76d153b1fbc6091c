"""/status and /topology: the whole picture of a datastore, for the dashboard and for people."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.openapi.service_views import StatusView, TopologyView
from api.status.consumers import ConsumerStatus, read_consumers
from api.status.servers import NodeReport, NodeStatus, Status, read_status
from api.status.workers import read_workers, worker_view
from schemaless.access import Scope
from schemaless.cell import created_at_text
from schemaless.storage.refusal_table import Refused
from schemaless.storage.shard_head import Head, ahead
from schemaless.topology import Node, Role, StorageCluster

NEVER_KEPT = (b"cache-control", b"no-store")


async def get_status(request: Request) -> Response:
    """Clusters with their servers and buffered cells, consumers with their lag and why they stopped."""
    datastore = await request.datastore()
    request.query()
    state = request.state
    timeout_s = state.settings.status_timeout_s
    status, (consumers, unheard), workers = await asyncio.gather(
        read_status(state.storage, datastore, timeout_s),
        read_consumers(state.storage, datastore, timeout_s),
        read_workers(state.storage, datastore, timeout_s),
    )
    document = {
        "datastore": datastore.name,
        "shards": datastore.shards,
        "partitions": datastore.partitions,
        "heads_sum": sum(report.heads_sum for report in status.reports()),
        "buffered": sum(waiting.rows for report in status.reports() for waiting in report.waiting.values()),
        "refused": sum(refused.cells for report in status.reports() for refused in report.refused.values()),
        "conflicts": sum(report.conflicts for report in status.reports()),
        "shards_ahead": [ahead_view(head) for report in status.reports() for head in ahead(report.heads, time.time())],
        "tailing": "paused" if status.tailing_paused(datastore.name) else "running",
        "clusters": {name: _cluster_view(request, status, name) for name in status.clusters()},
        "consumers": [consumer_view(name, consumer) for name, consumer in consumers.items()],
        "workers": [worker_view(row) for row in workers],
        "consumers_unknown": unheard.clusters,  # why, by cluster: what its servers know of consumers is missing
    }
    return ok_response(request.response_format(), document, NEVER_KEPT)


async def get_topology(request: Request) -> Response:
    """The servers, and which cluster is home to which shards."""
    datastore = await request.datastore()
    request.query()
    clusters = request.state.storage.topology.clusters
    document = {
        "datastore": datastore.name,
        "shards": datastore.shards,
        "partitions": datastore.partitions,
        "placement": datastore.placement,  # shard n lives on placement[n mod its length]
        "clusters": {name: _servers_view(cluster) for name, cluster in clusters.items()},
    }
    return ok_response(request.response_format(), document, NEVER_KEPT)


def consumer_view(name: str, consumer: ConsumerStatus) -> dict[str, Any]:
    """Shows one consumer without its shards, apart from those that stopped."""
    kind, _, rest = name.partition(":")
    return {
        "consumer": name,
        "kind": kind,
        "name": rest,
        "state": consumer.state,
        "reason": next(iter(consumer.stopped.values()), None),
        "lag": consumer.lag,
        "stopped": [{"shard": number, "reason": reason} for number, reason in consumer.stopped.items()],
    }


def ahead_view(head: Head) -> dict[str, Any]:
    """Shows a shard whose time is frozen: it met a clock that was ahead."""
    return {"shard": head.shard, "last_created_at": created_at_text(head.last_created_at)}


def _cluster_view(request: Request, status: Status, name: str) -> dict[str, Any]:
    report = status.best_report(name)
    return {
        "heads_sum": None if report is None else report.heads_sum,
        "buffered": {} if report is None else {home: waiting.rows for home, waiting in report.waiting.items()},
        "backlogs": {} if report is None else _backlogs_view(request, report),
        "conflicts": None if report is None else report.conflicts,
        "nodes": [_node_view(request, node) for node in status.of_cluster(name)],
    }


def _backlogs_view(request: Request, report: NodeReport) -> dict[str, Any]:
    """Shows by home what waits for it. A backlog that doesn't shrink is stalled, and a home may say why."""
    age_max_s = request.state.settings.backlog_age_max_s
    return {
        home: {
            "rows": waiting.rows,
            "bytes": waiting.size_bytes,
            "oldest_s": round(waiting.oldest_s, 3),
            "stalled": waiting.oldest_s > age_max_s,
            "refused": _refused_view(report.refused.get(home)),
        }
        for home, waiting in report.waiting.items()
    }


def _refused_view(refused: Refused | None) -> dict[str, Any] | None:
    if refused is None:
        return None
    return {"cells": refused.cells, "oldest_s": round(refused.oldest_s, 3), "reason": refused.reason}


def _node_view(request: Request, status: NodeStatus) -> dict[str, Any]:
    reachable = status.report is not None
    return {
        "name": status.node.node.name,
        "role": status.node.node.role,
        "reachable": reachable,
        "why": status.why or None,
        "heads_sum": status.report.heads_sum if status.report else None,
        "lag_s": round(request.state.lag.lag_s(status.node), 3) if reachable else None,
        "setting_faults": [str(fault) for fault in status.node.settings.faults],
    }


def _servers_view(cluster: StorageCluster) -> dict[str, Any]:
    return {"master": _server_view(cluster.master), "minions": [_server_view(minion) for minion in cluster.minions]}


def _server_view(node: Node) -> dict[str, Any]:
    """Shows a server without its account."""
    return {"name": node.name, "role": Role(node.role), "host": node.host, "port": node.port}


ROUTES = (
    Route("GET", "/status", get_status, Scope.READ, answers={200: StatusView}),
    Route("GET", "/topology", get_topology, Scope.READ, answers={200: TopologyView}),
)
