"""/indexes/{name}/entries: queries of an index. Their language is in api/index/query.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from api.http.cell_json import all_views
from api.http.content import Format
from api.http.parameters import READ_FROM, Parameter, parse_pairs
from api.http.request import Request
from api.http.response import Response, document_response, ok_response, problem_of
from api.http.route import Route
from api.index.checkpoint_waiter import CheckpointsAt
from api.index.query import Behind, EntryPage, IndexQuery, entry_view, find_entries, parse_query
from api.read.multi_get import WantedCell, read_many
from api.read.reader import Served, said_by, served_together
from api.routes.indexes import progress_view
from schemaless.access import Scope
from schemaless.errors import Invalid, LocationGone, NotReady
from schemaless.location import ShardLocation, is_lag, verify_location
from schemaless.names import index_consumer
from schemaless.storage import shard_head
from schemaless.storage.index_definition_table import DefinedIndex, IndexState
from schemaless.topology import Datastore, Role

CELLS_MAX = 5000  # entries times included columns


async def get_entries(request: Request) -> Response:
    """Entries of an index by FIELD=v, FIELD.gte=v and so on. The shard field by equality is required.

    The options are `order`, `desc`, `limit`, `cursor`, `fields` and `include`. With `after`, a put's location, the
    answer includes that put.
    """
    datastore = await request.datastore()
    pairs = parse_pairs(request.raw_query) if request.raw_query else []
    read_from = READ_FROM.of(dict(pairs))
    index = await request.state.index_catalogue.find(datastore, request.path["name"])
    if index.state is not IndexState.ACTIVE:
        error = NotReady(f"index {index.definition.name} is {index.state}")
        return document_response({**problem_of(error), "progress": await progress_view(request, datastore, index)})
    query = parse_query(index.definition, datastore.shards, pairs)
    page, served = await _read(request, datastore, index, query, read_from)
    form = request.response_format()
    entries = [entry_view(index.definition, query, entry) for entry in page.entries]
    if query.include and entries:
        cells_served = await _include(request, datastore, query, page, entries, form, read_from)
        served = served_together([served, cells_served])
    return ok_response(form, {"entries": entries, "cursor": page.cursor}, *served.headers)


async def _read(
    request: Request, datastore: Datastore, index: DefinedIndex, query: IndexQuery, read_from: Role | None
) -> tuple[EntryPage, Served]:
    """Waits, within the query's `wait`, until the node that answers shows what was asked for.

    Raises Behind, and LocationGone for an `after` that is superseded.
    """
    cluster = datastore.home(query.shard)
    place = CheckpointsAt(cluster, read_from, datastore.name, index_consumer(index.definition.name))
    deadline = time.monotonic() + query.wait_s
    while True:
        try:
            page, served = await request.state.reader.read(
                cluster, find_entries, datastore, index.definition, query, read_from=read_from
            )
        except Behind as behind:
            assert query.after is not None, "only a query with `after` can come too early"
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await request.state.checkpoint_waiter.reached(place, query.after)
            except TimeoutError:
                await _verify_kept(request, datastore, query.after)
                raise behind from None
        else:
            if (
                page.reached is not None
                and query.after is not None
                and page.reached.generation != query.after.location.generation
            ):
                await _verify_kept(request, datastore, query.after)
            return page, served


async def _verify_kept(request: Request, datastore: Datastore, after: ShardLocation) -> None:
    """Raises LocationGone for a location that is superseded: no index includes that put (I13)."""
    home = datastore.home(after.shard)
    (head, starts), served = await request.state.reader.read(home, shard_head.history, datastore.name, after.shard)
    try:
        verify_location(after.location.generation, after.location.added_id, starts, head.added_id)
    except LocationGone as gone:
        if not is_lag(after.location, gone):
            raise said_by(gone, served) from None


async def _include(
    request: Request,
    datastore: Datastore,
    query: IndexQuery,
    page: EntryPage,
    entries: Sequence[dict[str, Any]],
    form: Format,
    read_from: Role | None,
) -> Served:
    """Adds to each entry the newest cells of the columns asked for, null for an empty one."""
    wanted = [WantedCell(found.row_key, column, None) for found in page.entries for column in query.include]
    if len(wanted) > CELLS_MAX:
        raise Invalid("include", f"{len(wanted)} cells are too many: ask for fewer columns, or a lower limit")
    bytes_max = request.state.settings.response_bytes_max
    cells, served = await request.read.read(
        bytes_max,
        lambda within: read_many(request.state.reader, datastore, wanted, read_from, within),
        cells=len(wanted),
    )
    views = iter(await all_views(cells, form, bytes_max))
    for entry in entries:
        entry["cells"] = {column: next(views) for column in query.include}
    return served


def _option(name: str, description: str) -> Parameter[str]:
    """Documents an option, which api/index/query.py parses by the index's definition."""
    return Parameter(name, lambda text, field: text, "", description)


_OPTIONS = (
    _option("order", "The field that entries are ordered by; default: the second keyed field."),
    _option("desc", "true: from the highest down."),
    _option("limit", "1 to 1000, default 100."),
    _option("cursor", "Of the page before: where this one begins."),
    _option("fields", "Names of stored fields with commas; default: all."),
    _option("include", "Columns with commas whose newest cells each entry brings."),
    _option("after", "A put's location: the answer includes it, or is a 503. A superseded one is a 409."),
    _option("wait", "Seconds that `after` may take, default 5."),
)

ROUTES = (Route("GET", "/indexes/{name}/entries", get_entries, Scope.READ, (READ_FROM, *_OPTIONS)),)
