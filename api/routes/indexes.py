"""/indexes: creates and shows secondary indexes. Their definitions and rows are in schemaless/index."""

from __future__ import annotations

from typing import Any

from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.routes.status import NEVER_KEPT
from schemaless.access import Scope
from schemaless.errors import Invalid, NotBuilt
from schemaless.index.catalogue import build_progress, create_index, find_index, list_indexes
from schemaless.index.definition import parse_definition, parse_index_name
from schemaless.storage.index_definition_table import DefinedIndex, IndexState
from schemaless.topology import Datastore

DEFINITION_BYTES_MAX = 64 << 10


async def put_index(request: Request) -> Response:
    """Creates an index, which is built from all cells. The same definition again changes nothing."""
    datastore = await request.datastore()
    request.query()
    name = parse_index_name(request.path["name"])
    document = request.request_format().parse(await request.payload(DEFINITION_BYTES_MAX))
    definition = parse_definition({"name": name, **document} if isinstance(document, dict) else document)
    if definition.name != name:
        raise Invalid("definition.name", f"is {definition.name!r}, the path says {name!r}")
    new = await create_index(request.state.storage, datastore, definition)
    index = await find_index(request.state.storage, datastore, name)
    view = await _view(request, datastore, index)
    return ok_response(request.response_format(), view, NEVER_KEPT, status=201 if new else 200)


async def get_index(request: Request) -> Response:
    """Definition and state, with progress while it is building."""
    datastore = await request.datastore()
    request.query()
    index = await find_index(request.state.storage, datastore, request.path["name"])
    return ok_response(request.response_format(), await _view(request, datastore, index), NEVER_KEPT)


async def get_indexes(request: Request) -> Response:
    """All indexes of a datastore, by name."""
    datastore = await request.datastore()
    request.query()
    indexes = await list_indexes(request.state.storage, datastore)
    views = [await _view(request, datastore, index) for index in indexes.values()]
    return ok_response(request.response_format(), {"indexes": views}, NEVER_KEPT)


async def delete_index(request: Request) -> Response:
    """Dropping an index (not built yet)."""
    raise NotBuilt("dropping an index")


async def _view(request: Request, datastore: Datastore, index: DefinedIndex) -> dict[str, Any]:
    name = index.definition.name
    view = {"name": name, "state": index.state, "definition": index.definition.document()}
    if index.state is not IndexState.BUILDING:
        request.state.build_eta.forget(datastore.name, name)
        return view
    return {**view, "progress": await progress_view(request, datastore, index)}


async def progress_view(request: Request, datastore: Datastore, index: DefinedIndex) -> dict[str, Any]:
    """Returns how far a building index is, in cells. `total` is null while its tables are being made."""
    progress = await build_progress(request.state.storage, datastore, index)
    eta_s = request.state.build_eta.seconds(datastore.name, index.definition.name, progress)
    return {"done": progress.done, "total": progress.total, "eta_s": eta_s}


_DEFINITION = {"type": "object", "required": ["shard_field", "fields"], "description": "An index definition."}

ROUTES = (
    Route("GET", "/indexes", get_indexes, Scope.READ),
    Route("GET", "/indexes/{name}", get_index, Scope.READ),
    Route("PUT", "/indexes/{name}", put_index, Scope.ADMIN, payload=_DEFINITION, answers=(201, 200)),
    Route("DELETE", "/indexes/{name}", delete_index, Scope.ADMIN),
)
