"""/indexes: creates and shows secondary indexes, and orders what becomes of them (schemaless/index/catalogue.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from api.http.content import decode
from api.http.parameters import LIMIT, Parameter
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.index.passes import pass_view, read_passes
from api.index.problems import (
    ITEM_BYTES_MAX,
    ProblemCursor,
    count_problems,
    counts_or_none,
    cursor_text,
    problems_page,
    read_cursor,
)
from api.routes.status import NEVER_KEPT
from api.status.consumers import in_all, read_consumer
from schemaless.access import Scope
from schemaless.errors import Invalid, NotBuilt, StorageUnavailable
from schemaless.index.catalogue import (
    build_progress,
    create_index,
    drop_index,
    pause_index,
    read_versions,
    resume_index,
    throttle_index,
)
from schemaless.index.definition import parse_definition, parse_index_name
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import DefinedIndex, IndexState
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.topology import Datastore

DEFINITION_BYTES_MAX = 64 << 10
CELLS_PER_S_MAX = 10**9
_ORDER_BYTES_MAX = 1 << 10


async def put_index(request: Request) -> Response:
    """Creates an index, which is built from all cells. The same definition again changes nothing."""
    datastore = await request.datastore()
    request.query()
    name = parse_index_name(request.path["name"])
    document = request.request_format().parse(await request.payload(DEFINITION_BYTES_MAX))
    definition = parse_definition({"name": name, **document} if isinstance(document, dict) else document)
    if definition.name != name:
        raise Invalid("definition.name", f"is {definition.name!r}, the path says {name!r}")
    new = await create_index(request.state.storage, datastore, definition, request.state.settings.indexes_max)
    return await _shown(request, datastore, name, status=201 if new else 200)


async def get_index(request: Request) -> Response:
    """Definition and state, with progress while it is building, why it failed, and how far it is behind."""
    datastore = await request.datastore()
    request.query()
    return await _shown(request, datastore, request.path["name"])


async def get_indexes(request: Request) -> Response:
    """All indexes of a datastore, by name."""
    datastore = await request.datastore()
    request.query()
    versions = await read_versions(request.state.storage, datastore)
    problems = await counts_or_none(request.state.storage, datastore, request.state.settings.status_timeout_s)
    views = await asyncio.gather(
        *(_view(request, datastore, index, list(versions.away), problems) for index in versions.newest().values())
    )
    return ok_response(request.response_format(), {"indexes": views}, NEVER_KEPT)


async def delete_index(request: Request) -> Response:
    """Drops an index in whatever state it is. Indexers delete its tables, those of a cluster that is away later."""
    datastore = await request.datastore()
    request.query()
    index = await drop_index(request.state.storage, datastore, request.path["name"])
    request.state.index_catalogue.forget(datastore, index.name)
    away = list((await read_versions(request.state.storage, datastore)).away)
    view = await _view(request, datastore, index, away, {})
    return ok_response(request.response_format(), view, NEVER_KEPT, status=202)


async def pause_one(request: Request) -> Response:
    """Lets no indexer work on an index. It answers queries on, if it was complete, with what it has."""
    return await _ordered(request, pause_index)


async def resume_one(request: Request) -> Response:
    """Lets indexers work on an index again that was paused, or that has failed."""
    return await _ordered(request, resume_index)


class _NewThrottle(msgspec.Struct, forbid_unknown_fields=True):
    cells_per_s: int | None


async def throttle_one(request: Request) -> Response:
    """Bounds how many cells a second each indexer process delivers to an index. 0 and null: no bound."""
    document = decode(
        await request.payload(_ORDER_BYTES_MAX), request.request_format().decoder(_NewThrottle), "throttle"
    )
    cells_per_s = document.cells_per_s or None
    if cells_per_s is not None and not 0 < cells_per_s <= CELLS_PER_S_MAX:
        raise Invalid("cells_per_s", f"must be an integer from 1 to {CELLS_PER_S_MAX}, or 0 for no bound")
    return await _ordered(
        request, lambda storage, datastore, name: throttle_index(storage, datastore, name, cells_per_s)
    )


async def get_problems(request: Request) -> Response:
    """Values that don't fit the types of the index, and are null there. `count` is their exact number."""
    datastore = await request.datastore()
    query = request.query(LIMIT, CURSOR)
    limit, storage, timeout_s = LIMIT.of(query), request.state.storage, request.state.settings.status_timeout_s
    index = (await read_versions(storage, datastore)).of(datastore.name, request.path["name"]).definition
    cursor = CURSOR.of(query)
    after = ProblemCursor(index.number) if cursor is None else read_cursor(cursor, index)
    await request.read.reserve(limit * ITEM_BYTES_MAX)
    shown, following = await problems_page(storage, datastore, index, after, limit)
    counts = await count_problems(storage, datastore, timeout_s)
    document = {
        "problems": shown,
        "count": counts.get(IndexVersion(datastore.name, index.name, index.number), 0),
        "cursor": None if following is None else cursor_text(following),
    }
    return ok_response(request.response_format(), document, NEVER_KEPT)


async def not_built(request: Request) -> Response:
    """Verification, repair and change in place (not built yet)."""
    raise NotBuilt("verification, repair and change in place of an index")


async def _ordered(
    request: Request, order: Callable[[AsyncStorage, Datastore, str], Awaitable[DefinedIndex]]
) -> Response:
    datastore = await request.datastore()
    request.query()
    index = await order(request.state.storage, datastore, request.path["name"])
    request.state.index_catalogue.forget(datastore, index.name)
    return await _shown(request, datastore, index.name)


async def _shown(request: Request, datastore: Datastore, name: str, status: int = 200) -> Response:
    """Shows one index, and how many cells it is behind."""
    versions = await read_versions(request.state.storage, datastore)
    index = versions.of(datastore.name, name)
    timeout_s = request.state.settings.status_timeout_s
    problems = await counts_or_none(request.state.storage, datastore, timeout_s)
    view = await _view(request, datastore, index, list(versions.away), problems)
    if index.has_tables and index.state is not IndexState.BUILDING:
        shards, unanswered = await read_consumer(request.state.storage, datastore, index.definition.consumer, timeout_s)
        view["lag"] = None if unanswered else in_all(shards).lag
        passes = await read_passes(request.state.storage, datastore, timeout_s)
        version = IndexVersion(datastore.name, index.name, index.number)
        view["cleaner"] = None if passes is None else pass_view(datastore, passes.get(version))
    return ok_response(request.response_format(), view, NEVER_KEPT, status=status)


async def _view(
    request: Request,
    datastore: Datastore,
    index: DefinedIndex,
    unreached: list[str],
    problems: Mapping[IndexVersion, int] | None,
) -> dict[str, Any]:
    """Shows an index. `unreached` names clusters that don't answer now. `problems` are None if one doesn't."""
    version = IndexVersion(datastore.name, index.name, index.number)
    return {
        "name": index.name,
        "number": index.number,
        "state": index.state,
        "reason": index.order.reason,
        "what_to_do": _what_to_do(index, unreached),
        "cells_per_s": index.order.cells_per_s,
        "progress": await progress_view(request, datastore, index),
        "problems": None if problems is None else problems.get(version, 0),
        "definition": index.definition.document(),
    }


def _what_to_do(index: DefinedIndex, unreached: list[str]) -> str | None:
    """Returns what a person should do or wait for, None if nothing."""
    if index.state is IndexState.FAILED:
        return f"correct what the reason names, then `schemaless index resume {index.name}`, or drop it"
    if index.state is IndexState.PAUSED:
        return f"`schemaless index resume {index.name}` lets it go on from where it is"
    if unreached and index.state in (IndexState.DELETING, IndexState.BUILDING):
        return f"bring {', '.join(unreached)} back: it goes on by itself then"
    return None


async def progress_view(request: Request, datastore: Datastore, index: DefinedIndex) -> dict[str, Any] | None:
    """Returns how far an index is that was never complete, in cells. `total` is null while its tables are being made.

    Returns None for an index that was complete, or is dropped. All is null while a master is away.
    """
    if not index.is_being_built:
        request.state.build_eta.forget(datastore.name, index.definition.consumer)
        return None
    try:
        progress = await build_progress(request.state.storage, datastore, index)
    except StorageUnavailable:
        return {"done": None, "total": None, "eta_s": None}
    eta_s = request.state.build_eta.seconds(datastore.name, index.definition.consumer, progress)
    if index.state is not IndexState.BUILDING:
        eta_s = None
        request.state.build_eta.forget(datastore.name, index.definition.consumer)
    return {"done": progress.done, "total": progress.total, "eta_s": eta_s}


CURSOR: Parameter[str | None] = Parameter(
    "cursor", lambda text, field: text, None, "Of the page before: where this one begins."
)
_DEFINITION = {"type": "object", "required": ["shard_field", "fields"], "description": "An index definition."}
_THROTTLE = {
    "type": "object",
    "required": ["cells_per_s"],
    "properties": {"cells_per_s": {"type": ["integer", "null"], "minimum": 0, "maximum": CELLS_PER_S_MAX}},
}

ROUTES = (
    Route("GET", "/indexes", get_indexes, Scope.READ),
    Route("GET", "/indexes/{name}", get_index, Scope.READ),
    Route("PUT", "/indexes/{name}", put_index, Scope.ADMIN, payload=_DEFINITION, answers=(201, 200)),
    Route("DELETE", "/indexes/{name}", delete_index, Scope.ADMIN, answers=(202,)),
    Route("POST", "/indexes/{name}/pause", pause_one, Scope.ADMIN),
    Route("POST", "/indexes/{name}/resume", resume_one, Scope.ADMIN),
    Route("POST", "/indexes/{name}/throttle", throttle_one, Scope.ADMIN, payload=_THROTTLE),
    Route("GET", "/indexes/{name}/problems", get_problems, Scope.READ, (LIMIT, CURSOR)),
    Route("POST", "/indexes/{name}/verify", not_built, Scope.ADMIN),
    Route("POST", "/indexes/{name}/repair", not_built, Scope.ADMIN),
    Route("POST", "/indexes/{name}/switch", not_built, Scope.ADMIN),
)
