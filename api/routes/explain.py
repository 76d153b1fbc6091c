"""/explain: the timeline of one row, and what it waits for (api/explain/)."""

from __future__ import annotations

from api.explain.explainer import EXPLAIN_BYTES_MAX
from api.http.parameters import LIMIT, READ_FROM, Parameter
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.openapi.program_views import ExplanationView
from api.routes.status import NEVER_KEPT
from schemaless.access import Scope
from schemaless.cell import RowKey, parse_row_key
from schemaless.errors import Invalid
from schemaless.location import ShardLocation, parse_shard_location


async def explain_row(request: Request) -> Response:
    """What happened to a row: its cells, failed calls and parked cells. And what it waits for, of programs and indexes.

    Name the row, or the location of one of its cells. `limit` counts cells: the last ones, or those around a location.
    """
    datastore = await request.datastore()
    query = request.query(ROW_KEY, LOCATION, LIMIT, READ_FROM)
    if len(query.keys() & {"row_key", "location"}) != 1:
        raise Invalid("row_key", "or location is needed, and not both")
    where: RowKey | ShardLocation = ROW_KEY.of(query) if "row_key" in query else LOCATION.of(query)
    await request.read.reserve(EXPLAIN_BYTES_MAX)
    document, served = await request.state.explainer.explain(datastore, where, LIMIT.of(query), READ_FROM.of(query))
    return ok_response(request.response_format(), document, NEVER_KEPT, *served.headers)


def _parse_row_key(text: str, field: str) -> RowKey:
    return parse_row_key(text)


ROW_KEY: Parameter[RowKey] = Parameter("row_key", _parse_row_key, RowKey(b""), "The row.")
LOCATION: Parameter[ShardLocation] = Parameter(
    "location",
    parse_shard_location,
    parse_shard_location("0:1:0"),
    "Instead of row_key: the location of one of its cells.",
)

ROUTES = (
    Route(
        "GET",
        "/explain",
        explain_row,
        Scope.READ,
        (ROW_KEY, LOCATION, LIMIT, READ_FROM),
        answers={200: ExplanationView},
        problems=(409,),
    ),
)
