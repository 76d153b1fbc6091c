"""/shards: the log of each shard, its head, and its cells as pages or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from api.follow.log_pages import BEGINNING, AfterLocation, End, EventStream, PageRequest, ShardPages, Since, Start
from api.http.asgi import Route
from api.http.content import EVENTS, Format, decode, follow_format
from api.http.request import Request
from api.http.response import Response, ok_response, problem_of, stream_response
from api.read.reader import Served, served_together
from schemaless.access import Scope
from schemaless.cell import parse_int, parse_time
from schemaless.contract.cells import LogPageView, ShardPagesView, ShardsView
from schemaless.contract.parameters import (
    COLUMNS,
    FLAG,
    LIMIT,
    LIMIT_MAX,
    READ_FROM,
    WAIT_DEFAULT_S,
    WAIT_MAX_S,
    Parameter,
    check_wait,
    parse_flag,
    parse_wait,
)
from schemaless.errors import Invalid, NotFound, TooLarge
from schemaless.position import parse_position
from schemaless.storage import shard_head
from schemaless.storage.shard_head import Head
from schemaless.topology import Datastore

LOCATIONS_MAX = 4096
PAYLOAD_BYTES_MAX = 1 << 20


def _after(text: str, field: str) -> Start:
    return End() if text == "end" else AfterLocation(*parse_position(text, field))


def _since(text: str, field: str) -> Since:
    return Since(parse_time(text, field))


AFTER: Parameter[Start | None] = Parameter(
    "after",
    _after,
    None,
    "ADDED_ID, GENERATION:ADDED_ID, GENERATION:ADDED_ID:DIGEST, or end: the head as it is now. Default: 0. A digest is"
    " that of `next` or of a put, 16 hexadecimal digits. Another cell there: 409.",
)
SINCE: Parameter[Since | None] = Parameter("since", _since, None, "RFC 3339 time, instead of `after`.")
FOLLOW: Parameter[bool] = Parameter(
    "follow",
    parse_flag,
    False,
    f"true with Accept: {EVENTS}: a stream of events, without end. With another Accept: as `wait`.",
    FLAG,
)
WAIT: Parameter[float | None] = Parameter(
    "wait",
    parse_wait,
    None,
    f"Seconds to wait for the first cell, 0 to {WAIT_MAX_S:.0f}; {WAIT_DEFAULT_S:.0f} with `follow`, else 0.",
    {"type": "number", "minimum": 0, "maximum": WAIT_MAX_S},
)
LAST_EVENT_ID: Parameter[None] = Parameter(
    "Last-Event-ID", lambda text, field: None, None, "Where a stream of events continues. It overrides `after`."
)
PAGE_PARAMETERS = (AFTER, SINCE, LIMIT, COLUMNS, FOLLOW, WAIT, READ_FROM)


async def list_shards(request: Request) -> Response:
    """Every shard with its home, generation and head."""
    datastore = await request.datastore()
    read_from = READ_FROM.of(request.query(READ_FROM))
    reader = request.state.reader

    async def of_home(cluster: str, shards: Collection[int]) -> tuple[list[Head], Served]:
        """A cluster has heads of shards that left it, too."""
        heads, served = await reader.read(
            cluster, shard_head.heads, datastore.name, read_from=read_from, of=(datastore, shards)
        )
        return [head for head in heads if head.shard in shards], served

    async def of_all() -> list[tuple[list[Head], Served]]:
        homes = datastore.by_home(range(datastore.shards), lambda shard: shard)
        return await asyncio.gather(*(of_home(cluster, frozenset(shards)) for cluster, shards in homes.items()))

    parts = await reader.following(datastore, of_all)
    found = sorted(
        ((head, served.cluster) for heads, served in parts for head in heads), key=lambda pair: pair[0].shard
    )
    shards = [
        {"shard": head.shard, "cluster": cluster, "generation": head.generation, "head": head.added_id}
        for head, cluster in found
    ]
    served = served_together([served for _, served in parts])
    return ok_response(request.response_format(), {"shards": shards}, *served.headers)


async def get_shard_cells(request: Request) -> Response:
    """Cells of a shard after a location, in added_id order. `next` is the `after` of the next page.

    With `follow` it waits for cells: it is a stream of server-sent events, or a page that waits for its first cell.
    """
    datastore = await request.datastore()
    shard = parse_shard(datastore, request.path["shard"])
    query = request.query(*PAGE_PARAMETERS)
    read_from = READ_FROM.of(query)
    follow, wait_s = FOLLOW.of(query), WAIT.of(query)
    form = _form(request, follow)
    wanted = PageRequest(_start(request, query, resumes=form is None), LIMIT.of(query), COLUMNS.of(query))
    if form is None:
        if wait_s is not None:
            raise Invalid("wait", "is for pages: a stream of events has no end")
        return stream_response(EventStream(request, datastore, shard, wanted, read_from).run)
    pages = ShardPages(request, datastore, {shard: wanted}, read_from, form)
    wait_s = (WAIT_DEFAULT_S if follow else 0.0) if wait_s is None else wait_s
    await pages.read(wait_s)
    pages.page(shard)  # what is wrong now won't be right after a while
    await pages.wait(wait_s)
    return ok_response(form, pages.page(shard).document(), *pages.served.headers)


def parse_shard(datastore: Datastore, text: str) -> int:
    """Raises NotFound."""
    try:
        return parse_int(text, "shard", 0, datastore.shards - 1)
    except Invalid:
        raise NotFound(
            f"datastore {datastore.name} has the shards 0 to {datastore.shards - 1}, none called {text!r}"
        ) from None


def _form(request: Request, follow: bool) -> Format | None:
    """Returns the format of a page, or None for a stream of events."""
    accept = request.header(b"accept")
    if follow:
        return follow_format(accept)
    if accept.partition(b";")[0].strip().lower() == EVENTS.encode():
        raise Invalid("follow", f"must be true for {EVENTS}")
    return request.response_format()


def _start(request: Request, query: Mapping[str, str], *, resumes: bool) -> Start:
    after, since = AFTER.of(query), SINCE.of(query)
    if after is not None and since is not None:
        raise Invalid("since", "is given together with after: one of them")
    last_event_id = request.header(b"last-event-id")
    if resumes and last_event_id:
        return AfterLocation(*parse_position(last_event_id.decode("latin-1"), "last-event-id"))
    return after or since or BEGINNING


async def post_shards_cells(request: Request) -> Response:
    """Pages of several shards at once, each after its own location. `wait` waits for the first cell."""
    datastore = await request.datastore()
    read_from = READ_FROM.of(request.query(READ_FROM))
    asked = decode(
        await request.payload(PAYLOAD_BYTES_MAX), request.request_format().decoder(LocationsRequest), "locations"
    )
    shards, problems = _shards_of(datastore, asked)
    if not 1 <= asked.limit <= LIMIT_MAX:
        raise Invalid("limit", f"must be an integer from 1 to {LIMIT_MAX}")
    columns = COLUMNS.parse(",".join(asked.columns), "columns") if asked.columns else ()
    starts = {text: _parse_start(start, f"locations.{text}") for text, start in asked.locations.items()}
    wanted = {shard: PageRequest(starts[text], asked.limit, columns) for text, shard in shards.items()}
    wait_s = check_wait(asked.wait, "wait")
    form = request.response_format()
    pages = ShardPages(request, datastore, wanted, read_from, form)
    await pages.read(0.0 if problems else wait_s)
    if not problems:
        await pages.wait(wait_s)
    views = problems | {text: pages.document(shard) for text, shard in shards.items()}
    answer = {"shards": {text: views[text] for text in asked.locations}}
    return ok_response(form, answer, *pages.served.headers)


class LocationsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Where to read from, by shard: a location as in `after`, or {"since": TIME}."""

    locations: dict[str, Any]
    limit: Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 1, "maximum": LIMIT_MAX})] = 100
    columns: list[str] = []
    wait: Annotated[Any, msgspec.Meta(extra_json_schema={"type": "number", "minimum": 0, "maximum": WAIT_MAX_S})] = 0

    example: ClassVar[Any] = {"locations": {"0": 1000, "7": "1:1000", "9": "end"}, "limit": 100}


def _shards_of(datastore: Datastore, asked: LocationsRequest) -> tuple[dict[str, int], dict[str, Any]]:
    """Returns shards by the names that they are given, and problems by the names that are no shard's."""
    if not asked.locations:
        raise Invalid("locations", "needs at least one shard")
    if len(asked.locations) > LOCATIONS_MAX:
        raise TooLarge(f"at most {LOCATIONS_MAX} shards are read at once")
    shards: dict[str, int] = {}
    problems: dict[str, Any] = {}
    for text in asked.locations:
        try:
            shards[text] = parse_shard(datastore, text)
        except NotFound as error:
            problems[text] = {"problem": problem_of(error)}
    return shards, problems


def _parse_start(start: Any, field: str) -> Start:
    """Takes 1000, "1000", "1:1000[:DIGEST]", "end" or {"since": "2026-01-31T00:00:00Z"}. Raises Invalid."""
    if isinstance(start, dict) and set(start) == {"since"}:
        return _since(start["since"], field)
    if isinstance(start, int) and not isinstance(start, bool):
        return _after(str(start), field)
    return _after(start, field)


ROUTES = (
    Route("GET", "/shards", list_shards, Scope.READ, (READ_FROM,), answers={200: ShardsView}),
    Route(
        "GET",
        "/shards/{shard}/cells",
        get_shard_cells,
        Scope.READ,
        PAGE_PARAMETERS,
        answers={200: LogPageView},
        headers=(LAST_EVENT_ID,),
        problems=(409,),
    ),
    Route(
        "POST",
        "/shards/cells",
        post_shards_cells,
        Scope.READ,
        (READ_FROM,),
        payload=LocationsRequest,
        answers={200: ShardPagesView},
    ),
)
