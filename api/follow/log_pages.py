"""Pages of shards' logs over HTTP, and the long poll: a call that waits for the first cell.

What a page holds is in docs/http.md. `next` of a page is right in every case: with cells, without any, and when the
time to wait is over.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from api.follow.followers import Follower
from api.http.budget import SMALL_BYTES_MAX
from api.http.content import EVENTS, JSON, Format
from api.http.request import Request
from api.http.response import RESPONSE_BYTES_MAX, Send, problem_of, problem_response, send_response, views_within
from api.read.reader import Served, served_together
from schemaless.cell import StoredCell
from schemaless.codec import cell_view
from schemaless.contract.parameters import LIMIT_MAX
from schemaless.errors import LocationGone, SchemalessError, StorageUnavailable
from schemaless.location import (
    FIRST_GENERATION,
    GenerationStart,
    Location,
    generation_at,
    is_lag,
    visible_starts,
)
from schemaless.position import BEGINNING_DIGEST, Position, cell_digest, digest_text, verify_position
from schemaless.runtime.batching import chunks
from schemaless.storage import entity_table, shard_head, shard_log
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore, Role

LOG_EXAMINED_MAX = 20_000  # added_ids of one page that filters columns
FOLLOW_BYTES_MAX = 256 << 10  # of a page of a stream, which a slow reader holds in memory
READ_CHUNK_CELLS = 100  # of a megabyte at most: bounds what is held before the page's own bound is noticed


class Since(msgspec.Struct, frozen=True):
    """Starts at the first cell that is not older than a time in microseconds since the epoch, or at the head."""

    created_at: int


class AfterLocation(msgspec.Struct, frozen=True):
    """Starts after a location. Without a generation it is the present one.

    With a digest, the cell at the location has to be the one that the digest names (I16).
    """

    generation: int | None
    added_id: int
    digest: int | None = None


class End(msgspec.Struct, frozen=True):
    """Starts at the head, as the node that answers shows it."""


Start = AfterLocation | Since | End
BEGINNING = AfterLocation(None, 0)


class PageRequest(msgspec.Struct, frozen=True):
    """Asks for one page. No columns means all of them."""

    start: Start
    limit: int
    columns: tuple[str, ...] = ()


class ShardLogPage(msgspec.Struct, frozen=True):
    """The cells after `after`. `examined` is the last added_id that was looked at, whether or not its cell matched.

    `digest` is that of the cell at `examined`, None where that was not read.
    """

    shard: int
    cells: Sequence[StoredCell]
    after: int
    examined: int
    head: Location
    starts: Sequence[GenerationStart]
    digest: int | None = None

    def cut(self, count: int) -> ShardLogPage:
        """Returns the page with its first `count` cells, at least one, as if nothing after them had been examined."""
        if count == len(self.cells):
            return self
        last = self.cells[count - 1]
        return msgspec.structs.replace(self, cells=self.cells[:count], examined=last.added_id, digest=cell_digest(last))

    @property
    def next(self) -> Position:
        return self._at_examined(generation_at(self.examined, self.starts))

    @property
    def position(self) -> Position:
        """The position of a follower: as `next`, but in the generation of the cell after it."""
        return self._at_examined(generation_at(self.examined + 1, self.starts))

    def _at_examined(self, generation: int) -> Position:
        return Position(self.shard, generation, self.examined, digest=self.digest)

    @property
    def pending(self) -> int:
        return self.head.added_id - self.examined


def read_page(
    datastore: Datastore, shard: int, wanted: PageRequest, examined_max: int, bytes_max: int
) -> Operation[ShardLogPage]:
    """Reads a page as one node shows it. Raises LocationGone, and NotWhole where the node lacks a cell of it (I3).

    Beside the cells it reads one short row, the cell at the location. With `columns` it also reads that at `examined`,
    and counts the cells between them.
    """
    head, starts = yield from shard_head.history(datastore.name, shard)
    after, digest = yield from _resolve(datastore, shard, wanted.start, starts, head.location)
    until = min(head.added_id, after + examined_max)
    cells: list[StoredCell] = []
    examined = after
    for limit in map(len, chunks(range(wanted.limit), count_max=READ_CHUNK_CELLS)):
        reached = cells[-1].added_id if cells else after
        left = bytes_max - sum(len(cell.body) for cell in cells)
        if reached >= until or left <= 0:
            break
        page = yield from entity_table.read_page_after(datastore, shard, reached, limit, wanted.columns, until, left)
        cells += page.cells
        was_cut = page.following is not None
        examined = cells[-1].added_id if was_cut or len(page.cells) == limit else until
        if len(page.cells) < limit:
            break
    if wanted.columns or len(cells) != examined - after:
        yield from shard_log.verify_dense(datastore, shard, after, examined)
    if cells and cells[-1].added_id == examined:
        digest = cell_digest(cells[-1])
    elif examined != after:
        digest = (yield from shard_log.digests(datastore, {shard: examined}))[shard]
    return ShardLogPage(shard, cells, after, examined, head.location, starts, digest)


def _resolve(
    datastore: Datastore, shard: int, start: Start, starts: Sequence[GenerationStart], head: Location
) -> Operation[tuple[int, int | None]]:
    """Returns the added_id to read after, and the digest of the cell there."""
    if isinstance(start, Since):
        first = yield from shard_log.first_since(datastore, shard, start.created_at, head.added_id)
        after = AfterLocation(None, first - 1)
    else:
        after = AfterLocation(None, head.added_id) if isinstance(start, End) else start
    generation = generation_at(after.added_id, starts) if after.generation is None else after.generation
    found: int | None = BEGINNING_DIGEST
    if after.added_id:
        found = (yield from shard_log.digests(datastore, {shard: after.added_id}))[shard]
    verify_position(Position(shard, generation, after.added_id, digest=after.digest), found, starts, head)
    return after.added_id, found


SHARDS_AT_ONCE = 4
DIGESTS_AT_ONCE = 500
HeadPosition = tuple[Position, Location]
"""The position of a reader that is at the head of its shard, and the head."""


class ShownPage(msgspec.Struct, frozen=True):
    """A page as it will be sent. `position` is where a follower continues."""

    views: list[msgspec.Raw]
    next: Position
    position: Position
    head: Location

    def document(self) -> dict[str, Any]:
        digest = None if self.next.digest is None else digest_text(self.next.digest)
        return {
            "cells": self.views,
            "next": {"generation": self.next.generation, "added_id": self.next.added_id, "digest": digest},
            "head": self.head.added_id,
            "generation": self.head.generation,
            "pending": self.head.added_id - self.next.added_id,
        }


async def read_shard(
    request: Request, datastore: Datastore, shard: int, wanted: PageRequest, read_from: Role | None, bytes_max: int
) -> tuple[ShardLogPage, Served]:
    """Raises LocationGone, StorageUnavailable."""
    return await request.state.reader.read_shard(
        datastore,
        shard,
        read_page,
        datastore,
        shard,
        wanted,
        LOG_EXAMINED_MAX,
        bytes_max,
        read_from=read_from,
    )


class ShardPages:
    """Reads one page of each shard in `wanted`, for one request.

    The answer as a whole is bounded in bytes. Shards for which nothing is left get an empty page at their own location.
    """

    def __init__(
        self,
        request: Request,
        datastore: Datastore,
        wanted: Mapping[int, PageRequest],
        read_from: Role | None,
        form: Format,
    ) -> None:
        self._request = request
        self._datastore = datastore
        self._wanted = wanted
        self._read_from = read_from
        self._form = form
        self._bytes_left = RESPONSE_BYTES_MAX
        self._limiter = asyncio.Semaphore(SHARDS_AT_ONCE)
        self._shown: dict[int, ShownPage | SchemalessError] = {}
        self._served: dict[int, Served] = {}

    @property
    def served(self) -> Served:
        return served_together(list(self._served.values()))

    def page(self, shard: int) -> ShownPage:
        """Returns the page of a shard. Raises the error that it met instead."""
        shown = self._shown[shard]
        if isinstance(shown, SchemalessError):
            raise shown
        return shown

    def document(self, shard: int) -> dict[str, Any]:
        shown = self._shown[shard]
        return {"problem": problem_of(shown)} if isinstance(shown, SchemalessError) else shown.document()

    async def read(self, wait_s: float) -> None:
        """Reads every page. `wait_s` is how long `wait` may take: a shard that waits at its head is proven later."""
        if len(self._wanted) > 1:
            # One question to each cluster finds the shards whose location is their head. They need no page.
            waits = wait_s > 0
            homes = self._datastore.by_home(self._wanted, lambda shard: shard)
            await asyncio.gather(*(self._show_heads_of(cluster, shards, waits) for cluster, shards in homes.items()))
        await self._read([shard for shard in self._wanted if shard not in self._shown])

    async def wait(self, wait_s: float) -> None:
        """Waits at most `wait_s` for a cell, or for an error that only the caller can fix. Raises Unavailable."""
        if wait_s <= 0 or self._has_news():
            return
        with self._request.state.followers.follow(self._datastore, self._wanted, self._request.token) as follower:
            self._request.follows()
            await self._request.unless_hung_up(self._wait(follower, wait_s))

    async def _wait(self, follower: Follower, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while not self._has_news():
            positions = {
                shard: None if isinstance(shown, SchemalessError) else shown.position.location
                for shard, shown in self._shown.items()
            }
            moved = await follower.moved(positions, deadline - loop.time())
            if not moved:
                return
            await self._read(moved)

    def _has_news(self) -> bool:
        return any(
            not shown.retryable if isinstance(shown, SchemalessError) else bool(shown.views)
            for shown in self._shown.values()
        )

    async def _show_heads_of(self, cluster: str, shards: Collection[int], waits: bool) -> None:
        starts = {shard: self._wanted[shard].start for shard in shards}
        of = self._datastore, shards
        try:
            heads, served = await self._request.state.reader.read(
                cluster, _positions_at_head, self._datastore, starts, waits, read_from=self._read_from, of=of
            )
        except StorageUnavailable:  # each shard's page will say so
            return
        for position, head in heads:
            self._shown[position.shard] = ShownPage([], position, position, head)
            self._served[position.shard] = served

    async def _read(self, shards: Collection[int]) -> None:
        mixed = random.sample(list(shards), len(shards))  # so that a full answer leaves out other shards each time
        held = sum(self._wanted[shard].limit for shard in shards) * self._request.state.settings.body_bytes_max
        await self._request.read.reserve(min(held, RESPONSE_BYTES_MAX))
        await asyncio.gather(*map(self._read_one, mixed))
        shown = [page for page in self._shown.values() if isinstance(page, ShownPage)]
        self._request.read.resize(sum(len(bytes(view)) for page in shown for view in page.views))

    async def _read_one(self, shard: int) -> None:
        async with self._limiter:
            try:
                self._shown[shard] = await self._show(shard)
            except SchemalessError as error:  # an unreachable cluster doesn't hide the others
                if not self._may_pass(shard, error):
                    self._shown[shard] = error

    def _may_pass(self, shard: int, error: SchemalessError) -> bool:
        """Returns whether the known page stays, because the node that was asked lags or is unreachable."""
        shown = self._shown.get(shard)
        if shown is None or isinstance(shown, SchemalessError):
            return False
        if isinstance(error, LocationGone):
            return is_lag(shown.position.location, error)
        return error.retryable

    async def _show(self, shard: int) -> ShownPage:
        wanted = self._wanted[shard]
        if self._bytes_left <= 0:
            wanted = msgspec.structs.replace(wanted, limit=0)
        known = self._shown.get(shard)
        if isinstance(known, ShownPage):
            at = known.position
            start = AfterLocation(at.generation, at.added_id, at.digest)
            wanted = msgspec.structs.replace(wanted, start=start)
        bytes_max = max(1, self._bytes_left // min(SHARDS_AT_ONCE, len(self._wanted)))
        page, served = await read_shard(self._request, self._datastore, shard, wanted, self._read_from, bytes_max)
        views = await views_within(page.cells, cell_view, self._form, bytes_max)
        self._bytes_left -= sum(len(bytes(view)) for view in views)
        self._served[shard] = served
        page = page.cut(len(views))
        return ShownPage(views, page.next, page.position, page.head)


def _positions_at_head(datastore: Datastore, starts: Mapping[int, Start], waits: bool) -> Operation[list[HeadPosition]]:
    """Returns the shards whose start names their head: the position and the head. Others need a page.

    The cell there has to be the one that the digest names (I16). A caller that waits is spared that for a digest of its
    own: it is compared when the next cell comes.
    """
    heads = {head.shard: head.location for head in (yield from shard_head.heads_of(datastore.name, starts))}
    found: dict[int, tuple[int | None, Location]] = {}
    for shard, start in starts.items():
        head = heads.get(shard)
        if head is not None and _is_at(start, head):
            found[shard] = start.digest if isinstance(start, AfterLocation) else None, head
    digests: dict[int, int | None] = {
        shard: BEGINNING_DIGEST for shard, (_, head) in found.items() if not head.added_id
    }
    unread = [
        shard for shard, (digest, _) in found.items() if shard not in digests and not (waits and digest is not None)
    ]
    for some in chunks(unread, count_max=DIGESTS_AT_ONCE):
        digests |= yield from shard_log.digests(datastore, {shard: found[shard][1].added_id for shard in some})
    return [
        (Position(shard, head.generation, head.added_id, digest=digests.get(shard, digest)), head)
        for shard, (digest, head) in found.items()
        if digest is None or digest == digests.get(shard, digest)
    ]


def _is_at(start: Start, head: Location) -> bool:
    """Returns whether a start names the head. That needs no look at the generations."""
    if isinstance(start, AfterLocation):
        generations = (None, FIRST_GENERATION) if head.generation == FIRST_GENERATION else (head.generation,)
        return start.added_id == head.added_id and start.generation in generations
    return isinstance(start, End) and head.generation == FIRST_GENERATION


# A shard's log as server-sent events: what a reader is sent, and the stream that sends it (I13).
#
# Events are `cell`, `heartbeat`, `generation` (a new one begins) and `problem` (the last one of its stream). `id` is a
# position to resume from. A problem has none, so that the one before it stays.
#
# The next page is read when the reader has taken the last one, so a slow reader holds one small page (I14). An
# unreachable home costs the stream nothing but time: it continues from any node that shows the next cell.


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
        self._heartbeat_s = request.state.settings.heartbeat_s

    async def run(self, send: Send) -> None:
        """Sends the stream. An error before it has begun is sent as a problem document."""
        self._request.follows()
        try:
            with self._request.state.followers.follow(self._datastore, (self._shard,), self._request.token) as follower:
                events, served = await self._begin()
                await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *served.headers]})
                if not self._request.headers_only:
                    await self._request.unless_hung_up(self._continue(send, follower, events))
                await send({"type": "http.response.body", "body": b""})
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

    async def _next(self, events: ShardEvents, follower: Follower) -> bytes:
        """Returns the next events, or a heartbeat, or nothing when the process stops.

        Raises LocationGone for a location that is superseded, or where another cell is now.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._heartbeat_s
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
                self._request, self._datastore, self._shard, wanted, self._read_from, FOLLOW_BYTES_MAX
            )

    async def _events_of(self, events: ShardEvents, page: ShardLogPage) -> bytes:
        views = await views_within(page.cells, cell_view, JSON, FOLLOW_BYTES_MAX)
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
