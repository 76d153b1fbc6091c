"""What operators ask: health, readiness and metrics outside of /v1, and tokens, conflicts and explain."""

from __future__ import annotations

import asyncio
import base64
import heapq
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from prometheus_client.exposition import choose_encoder

from api.explain.explainer import EXPLAIN_BYTES_MAX
from api.http.asgi import Route
from api.http.content import JSON, decode
from api.http.request import Request
from api.http.response import RESPONSE_BYTES_MAX, Header, Response, ok_response, views_within
from api.http.serving import NEVER_KEPT
from api.read.reader import Reader, served_together
from api.views import backlog_views
from schemaless.access import LIFETIME_DEFAULT, Scope, now_us
from schemaless.cell import RowKey, created_at_text, parse_int, parse_row_key, row_key_text
from schemaless.codec import decode_body
from schemaless.contract.cells import ConflictsView
from schemaless.contract.parameters import LIMIT, READ_FROM, Parameter, integer_schema
from schemaless.contract.programs import ExplanationView
from schemaless.contract.services import AliveView, EntranceView, IssuedView, ReadyView, RevokedView, TokensView
from schemaless.errors import Corrupt, Invalid, StorageUnavailable, Unavailable
from schemaless.location import ShardLocation, parse_shard_location
from schemaless.ops.tokens import anybody, create_token, known_tokens, revoke_token
from schemaless.runtime.batching import chunks
from schemaless.storage import conflict_table
from schemaless.storage.conflict_table import CellConflict, ConflictEntry
from schemaless.topology import Role


def _line(document: dict[str, Any], *headers: Header) -> Response:
    """Returns a document that ends its line: people ask these calls from a shell."""
    return msgspec.structs.replace(answer := ok_response(JSON, document, *headers), body=answer.body + b"\n")


async def get_entrance(request: Request) -> Response:
    """Points the way: the documentation, the calls, and what operators ask."""
    at = request.root_path
    document = {
        "service": "schemaless",
        "ui": f"{at}/ui",
        "docs": f"{at}/docs",
        "openapi": f"{at}/openapi.json",
        "calls": f"{at}/v1/{{datastore}}",
        **{name: f"{at}/{name}" for name in ("healthz", "readyz", "metrics")},
    }
    return _line(document)


async def healthz(request: Request) -> Response:
    """The process answers."""
    return _line({"status": "alive"}, NEVER_KEPT)


async def readyz(request: Request) -> Response:
    """200 if the catalogue can be read from at least one server, else 503, also while the process drains. It waits for
    no other server.

    Its details name the buffers whose backlog doesn't shrink. The process serves all the same.
    """
    if request.state.draining.is_set():
        raise Unavailable("this process stops: it serves what comes for a moment, so send nothing more here")
    datastores = await request.state.catalogue.readable()
    document = {
        "status": "ready",
        "datastores": sorted(datastores),
        "backlogs": backlog_views(request.state.backlogs.last),
    }
    return _line(document, NEVER_KEPT)


async def metrics(request: Request) -> Response:
    """The process's metrics, in Prometheus' text format or in OpenMetrics, as it is asked."""
    encode, content_type = choose_encoder((request.header(b"accept") or b"").decode("latin-1"))
    return Response(200, encode(request.state.metrics.registry), ((b"content-type", content_type.encode()),))


_METRICS_EXAMPLE = 'schemaless_api_requests_total{route="put_cell",status="201"} 7.0\n'

ROUTES = (
    Route("GET", "/", get_entrance, Scope.READ, answers={200: EntranceView}),
    Route("GET", "/healthz", healthz, Scope.READ, answers={200: AliveView}),
    Route("GET", "/readyz", readyz, Scope.READ, answers={200: ReadyView}),
    Route("GET", "/metrics", metrics, Scope.READ, answers={200: None}, text={"text/plain": _METRICS_EXAMPLE}),
)


# /tokens: issues, lists and revokes tokens (I17). A token acts only on those that reach no further than itself.

PAYLOAD_BYTES_MAX = 16 << 10


class TokenRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A token to issue: read, write or admin, for this datastore unless `datastores` names others. It ends with the
    caller's own at the latest.
    """

    name: str
    scope: Annotated[str, msgspec.Meta(extra_json_schema={"enum": [str(scope) for scope in Scope]})]
    expires: str = LIFETIME_DEFAULT
    datastores: list[str] = []

    example: ClassVar[Any] = {"name": "loader", "scope": "write", "expires": "90d"}


async def post_token(request: Request) -> Response:
    """A new token for this datastore, or for `datastores`. The answer shows it once: only its digest is stored."""
    request.query()
    asked = decode(await request.payload(PAYLOAD_BYTES_MAX), request.request_format().decoder(TokenRequest), "token")
    state = request.state
    datastores = asked.datastores or [request.path["datastore"]]
    request.action = f"name={asked.name} scope={asked.scope} expires={asked.expires} datastores={','.join(datastores)}"
    issued = await create_token(
        state.storage,
        asked.name,
        datastores,
        asked.scope,
        asked.expires,
        request.token or anybody(),
    )
    state.tokens.learn([issued.token])
    view = {"token": issued.secret, **issued.token.view(now_us()), "unreached": issued.unreached}
    return ok_response(request.response_format(), view, NEVER_KEPT, status=201)


async def get_tokens(request: Request) -> Response:
    """The tokens that reach this datastore, without their secrets."""
    request.query()
    datastore, now = request.path["datastore"], now_us()
    known = sorted((await known_tokens(request.state.storage)).values(), key=lambda token: token.created_at)
    views = [token.view(now) for token in known if token.reaches(datastore)]
    return ok_response(request.response_format(), {"tokens": views}, NEVER_KEPT)


async def delete_token(request: Request) -> Response:
    """The valid token of that name is revoked. `unreached` are clusters that learn it when they are back."""
    request.query()
    name = request.path["name"]
    unreached = await revoke_token(request.state.storage, name, request.token or anybody())
    await request.state.tokens.refresh()
    return ok_response(request.response_format(), {"name": name, "unreached": unreached}, NEVER_KEPT)


TOKEN_ROUTES = (
    Route("POST", "/tokens", post_token, Scope.ADMIN, payload=TokenRequest, answers={201: IssuedView}, problems=(409,)),
    Route("GET", "/tokens", get_tokens, Scope.ADMIN, answers={200: TokensView}),
    Route("DELETE", "/tokens/{name}", delete_token, Scope.ADMIN, answers={200: RevokedView}),
)


# /conflicts: buffered cells that met another body at home (I6). None of them is dropped silently.

CONFLICTS_MAX = 100  # two bodies each
CONFLICTS_LIMIT: Parameter[int] = Parameter(
    "limit",
    lambda text, field: parse_int(text, field, 1, CONFLICTS_MAX),
    CONFLICTS_MAX,
    f"1 to {CONFLICTS_MAX}, the default.",
    integer_schema(1, CONFLICTS_MAX, default=CONFLICTS_MAX),
)


_NEWEST = 2**63 - 1
_CURSOR_CHARACTERS_MAX = 8192
_ConflictId = Annotated[int, msgspec.Meta(ge=0, le=_NEWEST)]


async def list_conflicts(request: Request) -> Response:
    """Conflicts of all clusters, newest first: the key, the stored body, the buffered body, and when. `cursor` leads to
    older ones, up to the first.
    """
    datastore = await request.datastore()
    query = request.query(CONFLICTS_LIMIT, CURSOR, READ_FROM)
    limit, below, read_from = CONFLICTS_LIMIT.of(query), CURSOR.of(query), READ_FROM.of(query)
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
    pages = chunks(found, count_max=limit, bytes_max=RESPONSE_BYTES_MAX, size_bytes=lambda one: one[1].size_bytes)
    page = next(pages, ())
    await request.read.reserve(sum(entry.size_bytes for _, entry in page))
    conflicts = await _read(state.reader, page, read_from)
    form = request.response_format()
    views = await views_within(conflicts, _view, form, RESPONSE_BYTES_MAX, request.read)
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

CONFLICT_ROUTES = (
    Route(
        "GET",
        "/conflicts",
        list_conflicts,
        Scope.READ,
        (CONFLICTS_LIMIT, CURSOR, READ_FROM),
        answers={200: ConflictsView},
    ),
)


# /explain: the timeline of one row, and what it waits for (api/explain/).


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

EXPLAIN_ROUTES = (
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
