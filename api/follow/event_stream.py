"""EventStream: one reader's stream of a shard's events (SSE), until the reader goes, the process stops, or its location
is superseded (I13).

The next page is read when the reader has taken the last one, so a slow reader holds one small page (I14). A home that
is away costs the stream nothing but time: it goes on from whatever node shows what comes next.
"""

from __future__ import annotations

import asyncio

from api.follow.events import ShardEvents, problem_event
from api.follow.followers import Follower
from api.follow.log_reader import AfterLocation, PageRequest, ShardLogPage, Start
from api.follow.pages import read_shard
from api.http.cell_json import cell_view, views_within
from api.http.content import EVENTS, JSON
from api.http.parameters import LIMIT_MAX
from api.http.request import Request
from api.http.response import Send, problem_response, send_response
from api.read.reader import Served
from schemaless.errors import LocationGone, SchemalessError
from schemaless.location import Location, generation_at, is_superseded
from schemaless.topology import Datastore, Role

HEADERS = (
    (b"content-type", EVENTS.encode()),
    (b"cache-control", b"no-store"),
    (b"vary", b"accept"),
    (b"x-accel-buffering", b"no"),  # a proxy must not gather events
)
CELLS_AT_FIRST = 10  # until it is known how large they are


class EventStream:
    def __init__(
        self, request: Request, datastore: Datastore, shard: int, wanted: PageRequest, read_from: Role | None
    ) -> None:
        self._request = request
        self._datastore = datastore
        self._shard = shard
        self._wanted = wanted
        self._read_from = read_from
        self._pending = False
        self._limit = CELLS_AT_FIRST
        self._settings = request.state.settings

    async def run(self, send: Send) -> None:
        """What stands in the way before the stream began is a problem document."""
        self._request.follows()
        try:
            with self._request.state.followers.follow(self._datastore, (self._shard,)) as follower:
                events, served = await self._begin()
                await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *served.headers]})
                if self._request.headers_only:
                    await send({"type": "http.response.body", "body": b""})
                else:
                    await self._request.unless_hung_up(self._go_on(send, follower, events))
        except SchemalessError as error:
            await send_response(problem_response(error), send)

    async def _begin(self) -> tuple[ShardEvents, Served]:
        """Where the stream begins, and whether it can."""
        page, served = await self._read(self._wanted.start, limit=0)
        self._pending = page.pending > 0
        return ShardEvents(_beginning(self._wanted, page)), served

    async def _go_on(self, send: Send, follower: Follower, events: ShardEvents) -> None:
        try:
            if not self._pending:
                await _send_and_drain(send, events.heartbeat())
            while await _send_and_drain(send, await self._next(events, follower)):  # no name holds on to what was sent
                pass
        except SchemalessError as error:
            await send({"type": "http.response.body", "body": problem_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _next(self, events: ShardEvents, follower: Follower) -> bytes:
        """What came, or a heartbeat. Nothing: the process stops. Raises LocationGone for a superseded location."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.heartbeat_s
        while not follower.let_go_of:
            waiting = {self._shard: events.position}
            if self._pending or await follower.moved(waiting, deadline - loop.time()):
                page = await self._read_on(events.position)
                chunk = self._told(events, page) if page is not None else b""
                if chunk:
                    return chunk
            if loop.time() >= deadline:
                return events.heartbeat(follower.head(self._shard))
        return b""

    async def _read_on(self, position: Location) -> ShardLogPage | None:
        """None: nobody can show it for now."""
        after = AfterLocation(position.generation, position.added_id)
        try:
            page, _ = await self._read(after, min(self._limit, self._wanted.limit))
        except LocationGone as gone:
            if is_superseded(position, gone):
                raise
        except SchemalessError as error:
            if not error.retryable:
                raise
        else:
            return page
        self._pending = False
        return None

    async def _read(self, start: Start, limit: int) -> tuple[ShardLogPage, Served]:
        wanted = PageRequest(start, limit, self._wanted.columns)
        async with self._request.state.followers.reading(self._datastore.home(self._shard)):
            return await read_shard(
                self._request, self._datastore, self._shard, wanted, self._read_from, self._settings.follow_bytes_max
            )

    def _told(self, events: ShardEvents, page: ShardLogPage) -> bytes:
        views = views_within(map(cell_view, page.cells), JSON, self._settings.follow_bytes_max)
        was_cut = len(views) < len(page.cells)
        self._limit = len(views) if was_cut else min(self._limit * 2, LIMIT_MAX)  # no more is read than can be told
        page = page.cut(len(views))
        self._pending = page.pending > 0
        return events.of_page(page, views)


def _beginning(wanted: PageRequest, first: ShardLogPage) -> Location:
    """Where a reader stands before its first page; it is told of any later generation."""
    given = wanted.start.generation if isinstance(wanted.start, AfterLocation) else None
    return Location(generation_at(first.after, first.starts) if given is None else given, first.after)


async def _send_and_drain(send: Send, chunk: bytes) -> bool:
    """Returns once the connection takes more: the second message waits for that, when the first was written. False for
    nothing.
    """
    if not chunk:
        return False
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await asyncio.sleep(0)  # what is written in one turn goes out at its end (api/http/server.py)
    await send({"type": "http.response.body", "body": b"", "more_body": True})
    return True
