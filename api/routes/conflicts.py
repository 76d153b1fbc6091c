"""/conflicts: buffered cells that met another body at home (I6). None of them is dropped silently."""

from __future__ import annotations

import asyncio
from typing import Any

from api.http.cell_json import views_within
from api.http.parameters import READ_FROM, Parameter, parse_int
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.read.reader import served_together
from schemaless.cell import created_at_text, row_key_text
from schemaless.codec import decode_body
from schemaless.storage import conflict_table
from schemaless.storage.conflict_table import CellConflict

LIMIT_MAX = 100  # two bodies each
LIMIT: Parameter[int] = Parameter(
    "limit", lambda text, field: parse_int(text, field, 1, LIMIT_MAX), LIMIT_MAX, f"1 to {LIMIT_MAX}, the default."
)


async def list_conflicts(request: Request) -> Response:
    """The last conflicts of all clusters, newest first: the key, the stored body, the buffered body, and when."""
    datastore = await request.datastore()
    query = request.query(LIMIT, READ_FROM)
    limit = LIMIT.of(query)
    clusters = request.state.storage.topology.clusters
    parts = await asyncio.gather(
        *(
            request.state.reader.read(
                cluster, conflict_table.newest, datastore.name, limit, read_from=READ_FROM.of(query)
            )
            for cluster in clusters
        )
    )
    found = sorted((one for part, _ in parts for one in part), key=lambda one: one.detected_at, reverse=True)
    served = served_together([served for _, served in parts])
    form = request.response_format()
    views = await views_within(map(_view, found[:limit]), form, request.state.settings.response_bytes_max)
    return ok_response(form, {"conflicts": views}, *served.headers)


def _view(conflict: CellConflict) -> dict[str, Any]:
    return {
        "row_key": row_key_text(conflict.key.row_key),
        "column_name": conflict.key.column_name,
        "ref_key": conflict.key.ref_key,
        "stored_body": decode_body(conflict.stored_body),
        "buffered_body": decode_body(conflict.buffered_body),
        "detected_at": created_at_text(conflict.detected_at),
    }


ROUTES = (Route("GET", "/conflicts", list_conflicts, (LIMIT, READ_FROM)),)
