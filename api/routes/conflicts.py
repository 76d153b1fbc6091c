"""/conflicts: buffered cells that met another body at home (I6). None of them is dropped silently."""

from __future__ import annotations

import asyncio
import base64
import heapq
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from api.http.cell_json import views_within
from api.http.parameters import READ_FROM, Parameter, integer_schema, parse_int
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.openapi.cell_views import ConflictsView
from api.read.reader import Reader, served_together
from schemaless.access import Scope
from schemaless.cell import created_at_text, row_key_text
from schemaless.codec import decode_body
from schemaless.errors import Corrupt, Invalid, StorageUnavailable
from schemaless.runtime.batching import chunks
from schemaless.storage import conflict_table
from schemaless.storage.conflict_table import CellConflict, ConflictEntry
from schemaless.topology import Role

LIMIT_MAX = 100  # two bodies each
LIMIT: Parameter[int] = Parameter(
    "limit",
    lambda text, field: parse_int(text, field, 1, LIMIT_MAX),
    LIMIT_MAX,
    f"1 to {LIMIT_MAX}, the default.",
    integer_schema(1, LIMIT_MAX, default=LIMIT_MAX),
)


_NEWEST = 2**63 - 1
_CURSOR_CHARACTERS_MAX = 8192
_ConflictId = Annotated[int, msgspec.Meta(ge=0, le=_NEWEST)]


async def list_conflicts(request: Request) -> Response:
    """Conflicts of all clusters, newest first: the key, the stored body, the buffered body, and when. `cursor` leads to
    older ones, up to the first.
    """
    datastore = await request.datastore()
    query = request.query(LIMIT, CURSOR, READ_FROM)
    limit, below, read_from = LIMIT.of(query), CURSOR.of(query), READ_FROM.of(query)
    state = request.state
    clusters = list(state.storage.topology.clusters)
    parts = await asyncio.gather(
        *(
            state.reader.read(
                cluster,
                conflict_table.newest,
                datastore.name,
                below.get(cluster, _NEWEST),
                limit,
                read_from=read_from,
            )
            for cluster in clusters
        )
    )
    found = list(
        heapq.merge(
            *([(cluster, entry) for entry in part] for cluster, (part, _) in zip(clusters, parts, strict=True)),
            key=lambda one: -one[1].detected_at,
        )
    )
    bytes_max = state.settings.response_bytes_max
    page = next(chunks(found, count_max=limit, bytes_max=bytes_max, size_bytes=lambda one: one[1].size_bytes), ())
    await request.read.reserve(sum(entry.size_bytes for _, entry in page))
    conflicts = await _read(state.reader, page, read_from)
    form = request.response_format()
    views = await views_within(conflicts, _view, form, bytes_max, request.read)
    position = {**below, **{cluster: entry.conflict_id for cluster, entry in page[: len(views)]}}
    is_last = len(views) == len(found) and all(len(part) < limit for part, _ in parts)
    served = served_together([served for _, served in parts])
    document = {"conflicts": views, "cursor": None if is_last else _cursor_text(position)}
    return ok_response(form, document, *served.headers)


async def _read(
    reader: Reader, page: Sequence[tuple[str, ConflictEntry]], read_from: Role | None
) -> list[CellConflict]:
    """Returns conflicts with their bodies. Raises StorageUnavailable where a node that lags shows fewer."""
    by_cluster: dict[str, list[int]] = {}
    for cluster, entry in page:
        by_cluster.setdefault(cluster, []).append(entry.conflict_id)
    parts = await asyncio.gather(
        *(
            reader.read(cluster, conflict_table.get, numbers, read_from=read_from)
            for cluster, numbers in by_cluster.items()
        )
    )
    found = {cluster: part for cluster, (part, _) in zip(by_cluster, parts, strict=True)}
    try:
        return [found[cluster][entry.conflict_id] for cluster, entry in page]
    except KeyError:
        raise StorageUnavailable("the node that was asked second does not show these conflicts yet") from None


def _cursor_text(position: Mapping[str, int]) -> str:
    """Names the last conflict that was shown of each cluster."""
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def _parse_cursor(text: str, field: str) -> dict[str, int]:
    try:
        if len(text) > _CURSOR_CHARACTERS_MAX:
            raise ValueError
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        position = msgspec.json.decode(data, type=dict[str, _ConflictId])
    except (ValueError, msgspec.MsgspecError):
        raise Invalid(field, "is not a cursor of this API") from None
    return position


def _view(conflict: CellConflict) -> dict[str, Any]:
    """Shows null for a body that can't be decoded, and the reason in `unreadable`."""
    bodies = {"stored_body": conflict.stored_body, "buffered_body": conflict.buffered_body}
    shown: dict[str, Any] = {}
    unreadable: dict[str, str] = {}
    for member, body in bodies.items():
        try:
            shown[member] = decode_body(body)
        except Corrupt as error:
            shown[member], unreadable[member] = None, str(error)
    return {
        "row_key": row_key_text(conflict.key.row_key),
        "column_name": conflict.key.column_name,
        "ref_key": conflict.key.ref_key,
        **shown,
        "detected_at": created_at_text(conflict.detected_at),
        **({"unreadable": unreadable} if unreadable else {}),
    }


CURSOR: Parameter[dict[str, int]] = Parameter("cursor", _parse_cursor, {}, "Of the page before: where this one begins.")

ROUTES = (
    Route("GET", "/conflicts", list_conflicts, Scope.READ, (LIMIT, CURSOR, READ_FROM), answers={200: ConflictsView}),
)
