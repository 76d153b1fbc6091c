"""/triggers: the programs that consume a datastore, their lag, and why they stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from api.consumer_status import ConsumerShard, in_all, read_consumer, read_consumers, require_known
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.routes.status import NEVER_KEPT, consumer_view
from api.worker_status import read_workers, worker_view, workers_in_all
from schemaless.access import Scope
from schemaless.errors import NotBuilt, NotFound
from schemaless.names import TRIGGER_PREFIX, trigger_consumer


async def list_triggers(request: Request) -> Response:
    """Programs with their state and lag."""
    datastore = await request.datastore()
    request.query()
    state = request.state
    timeout_s = state.settings.status_timeout_s
    (consumers, unanswered), workers = await asyncio.gather(
        read_consumers(state.storage, datastore, timeout_s), read_workers(state.storage, datastore, timeout_s)
    )
    require_known(consumers, unanswered)
    programs = [
        {**_view(consumer_view(name, consumer)), **workers_in_all([row for row in workers if row.consumer == name])}
        for name, consumer in consumers.items()
        if name.startswith(TRIGGER_PREFIX)
    ]
    return ok_response(request.response_format(), {"triggers": programs, "unknown": unanswered}, NEVER_KEPT)


async def get_trigger(request: Request) -> Response:
    """One program, shard by shard."""
    datastore = await request.datastore()
    request.query()
    program = request.path["program"]
    state, consumer, timeout_s = request.state, trigger_consumer(program), request.state.settings.status_timeout_s
    (shards, unanswered), workers = await asyncio.gather(
        read_consumer(state.storage, datastore, consumer, timeout_s),
        read_workers(state.storage, datastore, timeout_s),
    )
    if not shards:
        raise NotFound(f"no trigger program {program!r} has run here yet")
    own = [row for row in workers if row.consumer == consumer]
    document = {
        **_view(consumer_view(consumer, in_all(shards))),
        **workers_in_all(own),
        "shards": [_shard_view(number, shard) for number, shard in shards.items()],
        "workers": [worker_view(row) for row in own],
        "unknown": unanswered,
    }
    return ok_response(request.response_format(), document, NEVER_KEPT)


async def parked_cells(request: Request) -> Response:
    """Parked cells (not built yet)."""
    raise NotBuilt("parked cells: after the last attempt the shard stops, and the program's state says why")


def _view(consumer: Mapping[str, object]) -> dict[str, object]:
    return {"program": consumer["name"], **{name: consumer[name] for name in ("state", "reason", "lag", "stopped")}}


def _shard_view(number: int, shard: ConsumerShard) -> dict[str, object]:
    return {
        "shard": number,
        "generation": shard.location.generation,
        "added_id": shard.location.added_id,
        "lag": shard.lag,
        "state": shard.state,
        "reason": shard.reason,
        "kills": shard.kills,
    }


ROUTES = (
    Route("GET", "/triggers", list_triggers, Scope.READ),
    Route("GET", "/triggers/{program}", get_trigger, Scope.READ),
    Route("GET", "/triggers/{program}/parked", parked_cells, Scope.READ),
    Route("POST", "/triggers/{program}/parked/{action}", parked_cells, Scope.ADMIN),
    Route("DELETE", "/triggers/{program}/parked/{cell}", parked_cells, Scope.ADMIN),
    Route("POST", "/triggers/{program}/parked/{cell}/{action}", parked_cells, Scope.ADMIN),
)
