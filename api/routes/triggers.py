"""/triggers: the programs that consume a datastore, their lag, and why they stopped."""

from __future__ import annotations

from collections.abc import Mapping

from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.routes.status import NEVER_KEPT, consumer_view
from api.status import ConsumerShard, read_status
from schemaless.errors import NotBuilt, NotFound
from schemaless.names import TRIGGER_PREFIX

_STOPPED_MEMBERS = ("shard", "reason")


async def list_triggers(request: Request) -> Response:
    """Programs with their state and lag."""
    views = [_view(program, shards) for program, shards in (await _programs(request)).items()]
    return ok_response(request.response_format(), {"triggers": views}, NEVER_KEPT)


async def get_trigger(request: Request) -> Response:
    """One program, shard by shard."""
    program = request.path["program"]
    shards = (await _programs(request)).get(program)
    if shards is None:
        raise NotFound(f"no trigger program {program!r} has run here yet")
    view = {**_view(program, shards), "shards": consumer_view(TRIGGER_PREFIX + program, shards)["shards"]}
    return ok_response(request.response_format(), view, NEVER_KEPT)


async def parked_cells(request: Request) -> Response:
    """Parked cells (not built yet)."""
    raise NotBuilt("parked cells: after the last attempt the shard stops, and the program's state says why")


async def _programs(request: Request) -> dict[str, Mapping[int, ConsumerShard]]:
    datastore = await request.datastore()
    request.query()
    status = await read_status(request.state.storage, datastore, request.state.settings.status_timeout_s)
    return {
        name.removeprefix(TRIGGER_PREFIX): shards
        for name, shards in status.consumers().items()
        if name.startswith(TRIGGER_PREFIX)
    }


def _view(program: str, shards: Mapping[int, ConsumerShard]) -> dict[str, object]:
    view = consumer_view(TRIGGER_PREFIX + program, shards)
    stopped = [{name: shard[name] for name in _STOPPED_MEMBERS} for shard in view["shards"] if shard["reason"]]
    return {"program": program, "state": view["state"], "lag": view["lag"], "stopped": stopped}


ROUTES = (
    Route("GET", "/triggers", list_triggers),
    Route("GET", "/triggers/{program}", get_trigger),
    Route("GET", "/triggers/{program}/parked", parked_cells),
    Route("POST", "/triggers/{program}/parked/{action}", parked_cells),
    Route("DELETE", "/triggers/{program}/parked/{cell}", parked_cells),
    Route("POST", "/triggers/{program}/parked/{cell}/{action}", parked_cells),
)
