"""/indexes: making, showing and asking secondary indexes. What an index is, is in schemaless/index and indexer."""

from __future__ import annotations

from typing import Any

from api.http.request import Call
from api.http.response import Answer, good_answer
from api.http.route import Route
from api.routes.status import NEVER_KEPT
from schemaless.errors import Invalid, NotBuilt
from schemaless.index.catalogue import build_progress, create_index, find_index, list_indexes
from schemaless.index.definition import parse_definition, parse_index_name
from schemaless.storage.index_definition_table import DefinedIndex, IndexState
from schemaless.topology import Datastore

DEFINITION_BYTES_MAX = 64 << 10


async def put_index(call: Call) -> Answer:
    """Makes an index; it is built from all cells that are there. The same definition again changes nothing."""
    datastore = await call.datastore()
    call.query()
    name = parse_index_name(call.path["name"])
    document = call.request_format().parse(await call.payload(DEFINITION_BYTES_MAX))
    definition = parse_definition({"name": name, **document} if isinstance(document, dict) else document)
    if definition.name != name:
        raise Invalid("definition.name", f"is {definition.name!r}, the path says {name!r}")
    new = await create_index(call.services.storage, datastore, definition)
    index = await find_index(call.services.storage, datastore, name)
    view = await _view(call, datastore, index)
    return good_answer(call.answer_format(), view, NEVER_KEPT, status=201 if new else 200)


async def get_index(call: Call) -> Answer:
    """Definition and state; while it is building, how far it is."""
    datastore = await call.datastore()
    call.query()
    index = await find_index(call.services.storage, datastore, call.path["name"])
    return good_answer(call.answer_format(), await _view(call, datastore, index), NEVER_KEPT)


async def get_indexes(call: Call) -> Answer:
    """All of a datastore, by name."""
    datastore = await call.datastore()
    call.query()
    indexes = await list_indexes(call.services.storage, datastore)
    views = [await _view(call, datastore, index) for index in indexes.values()]
    return good_answer(call.answer_format(), {"indexes": views}, NEVER_KEPT)


async def delete_index(call: Call) -> Answer:
    """Dropping an index; not built yet."""
    raise NotBuilt("dropping an index")


async def _view(call: Call, datastore: Datastore, index: DefinedIndex) -> dict[str, Any]:
    name = index.definition.name
    view = {"name": name, "state": index.state, "definition": index.definition.document()}
    if index.state is not IndexState.BUILDING:
        call.services.build_eta.forget(datastore.name, name)
        return view
    return {**view, "progress": await progress_view(call, datastore, index)}


async def progress_view(call: Call, datastore: Datastore, index: DefinedIndex) -> dict[str, Any]:
    """Of an index that is building, in cells. `total` is null while its tables are being made."""
    progress = await build_progress(call.services.storage, datastore, index)
    eta_s = call.services.build_eta.seconds(datastore.name, index.definition.name, progress)
    return {"done": progress.done, "total": progress.total, "eta_s": eta_s}


_DEFINITION = {"type": "object", "required": ["shard_field", "fields"], "description": "An index definition."}

ROUTES = (
    Route("GET", "/indexes", get_indexes),
    Route("GET", "/indexes/{name}", get_index),
    Route("PUT", "/indexes/{name}", put_index, payload=_DEFINITION, answers=(201, 200)),
    Route("DELETE", "/indexes/{name}", delete_index),
)
