"""A shard's log as server-sent events: what a reader is sent, and the stream that sends it (I13).

Events are `cell`, `heartbeat`, `generation` (a new one begins) and `problem` (the last one of its stream). `id` is a
position to resume from. A problem has none, so that the one before it stays.

The next page is read when the reader has taken the last one, so a slow reader holds one small page (I14). An
unreachable home costs the stream nothing but time: it continues from any node that shows the next cell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from api.follow.followers import Follower
from api.follow.log_pages import AfterLocation, PageRequest, ShardLogPage, Start, read_shard
from api.http.budget import SMALL_BYTES_MAX
from api.http.cell_json import views_within
from api.http.content import EVENTS, JSON
from api.http.parameters import LIMIT_MAX
from api.http.request import Request
from api.http.response import Send, problem_of, problem_response, send_response
from api.read.reader import Served
from schemaless.codec import cell_view
from schemaless.errors import LocationGone, SchemalessError
from schemaless.location import GenerationStart, generation_at, is_lag, visible_starts
from schemaless.position import Position, cell_digest
from schemaless.topology import Datastore, Role


class ShardEvents:
    """Writes events. `position` is where the last event left the reader, and `head` the last head that was read."""

    def __init__(self, position: Position) -> None:
        self.position = position
        self.head = position.added_id

    def of_page(self, page: ShardLogPage, views: Sequence[msgspec.Raw]) -> bytes:
        """Returns the events of a page that was read after `position`. `views` are its cells as JSON."""
        starts = [start for start in visible_starts(page.starts) if start.generation > self.position.generation]
        events = b"".join(self._in_order(page, views, starts))
        at = self.position
        self.position = Position(at.shard, at.generation, page.examined, digest=page.digest)
        self.head = page.head.added_id
        return events

    def heartbeat(self, head: int = 0) -> bytes:
        position = self.position
        data = {
            "generation": position.generation,
            "added_id": position.added_id,
            "head": max(self.head, head),
        }
        return _event("heartbeat", data, position)

    def _in_order(
        self, page: ShardLogPage, views: Sequence[msgspec.Raw], starts: list[GenerationStart]
    ) -> Iterator[bytes]:
        for cell, view in zip(page.cells, views, strict=True):
            yield from self._begun_until(cell.added_id, starts)
            self.position = Position(cell.shard, cell.generation, cell.added_id, digest=cell_digest(cell))
            yield b"event: cell\nid: %b\ndata: %b\n\n" % (str(self.position).encode(), bytes(view))
        yield from self._begun_until(page.examined + 1, starts)

    def _begun_until(self, added_id: int, starts: list[GenerationStart]) -> Iterator[bytes]:
        """Yields, once, the generations in `starts` that have begun at an added_id."""
        while starts and starts[0].starts_at <= added_id:
            start = starts.pop(0)
            at, last = self.position, start.starts_at - 1
            digest = at.digest if at.added_id == last else None  # with columns the cell before may not have been read
            self.position = Position(at.shard, start.generation, last, digest=digest)
            data = {"generation": start.generation, "starts_at": start.starts_at}
            yield _event("generation", data, self.position)


def problem_event(error: SchemalessError) -> bytes:
    return _event("problem", problem_of(error))


def _event(kind: str, data: dict[str, Any], position: Position | None = None) -> bytes:
    named = b"" if position is None else b"id: %b\n" % str(position).encode()
    return b"event: %b\n%bdata: %b\n\n" % (kind.encode(), named, JSON.encode(data))


HEADERS = (
    (b"content-type", EVENTS.encode()),
    (b"cache-control", b"no-store"),
    (b"vary", b"accept"),
    (b"x-accel-buffering", b"no"),  # a proxy must not gather events
)
CELLS_AT_FIRST = 10  # until it is known how large they are


class EventStream:
    """Sends the events of one shard until the reader leaves, the process stops, or the location is superseded."""

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
        """Sends the stream. An error before it has begun is sent as a problem document."""
        self._request.follows()
        try:
            with self._request.state.followers.follow(self._datastore, (self._shard,), self._request.token) as follower:
                events, served = await self._begin()
                await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *served.headers]})
                if self._request.headers_only:
                    await send({"type": "http.response.body", "body": b""})
                else:
                    await self._request.unless_hung_up(self._continue(send, follower, events))
        except SchemalessError as error:
            await send_response(problem_response(error), send)

    async def _begin(self) -> tuple[ShardEvents, Served]:
        """Returns the events from where the stream begins, and the node that said so."""
        page, served = await self._read(self._wanted.start, limit=0)
        self._pending = page.pending > 0
        # A reader at a location stays in its generation: any later one becomes an event.
        start = self._wanted.start
        given = start.generation if isinstance(start, AfterLocation) else None
        generation = generation_at(page.after, page.starts) if given is None else given
        return ShardEvents(Position(self._shard, generation, page.after, digest=page.digest)), served

    async def _continue(self, send: Send, follower: Follower, events: ShardEvents) -> None:
        try:
            if not self._pending:
                await self._send_and_drain(send, events.heartbeat())
            while await self._send_and_drain(send, await self._next(events, follower)):  # no name holds what was sent
                pass
        except SchemalessError as error:
            await send({"type": "http.response.body", "body": problem_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _next(self, events: ShardEvents, follower: Follower) -> bytes:
        """Returns the next events, or a heartbeat, or nothing when the process stops.

        Raises LocationGone for a location that is superseded, or where another cell is now.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.heartbeat_s
        while not follower.is_released:
            waiting = {self._shard: events.position.location}
            if self._pending or await follower.moved(waiting, deadline - loop.time()):
                page = await self._read_on(events.position)
                chunk = await self._events_of(events, page) if page is not None else b""
                if chunk:
                    return chunk
            if loop.time() >= deadline:
                return events.heartbeat(follower.head(self._shard))
        return b""

    async def _read_on(self, position: Position) -> ShardLogPage | None:
        """Returns the next page, or None while no node can show it."""
        after = AfterLocation(position.generation, position.added_id, position.digest)
        try:
            page, _ = await self._read(after, min(self._limit, self._wanted.limit))
        except LocationGone as gone:
            if not is_lag(position.location, gone):
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

    async def _events_of(self, events: ShardEvents, page: ShardLogPage) -> bytes:
        views = await views_within(page.cells, cell_view, JSON, self._settings.follow_bytes_max)
        was_cut = len(views) < len(page.cells)
        self._limit = len(views) if was_cut else min(self._limit * 2, LIMIT_MAX)  # no more is read than can be sent
        page = page.cut(len(views))
        self._pending = page.pending > 0
        return events.of_page(page, views)

    async def _send_and_drain(self, send: Send, chunk: bytes) -> bool:
        """Sends a chunk, and returns once the connection takes more. Returns False for an empty chunk.

        The second message waits until the first one was written.
        """
        if not chunk:
            return False
        if len(chunk) > SMALL_BYTES_MAX:
            await self._request.read.reserve(len(chunk))
        try:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)  # what is written in one pass of the loop is sent at its end (api/http/server.py)
            await send({"type": "http.response.body", "body": b"", "more_body": True})
        finally:
            self._request.release()
        return True
