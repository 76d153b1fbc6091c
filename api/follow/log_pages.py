"""Pages of shards' logs over HTTP, and the long poll: a call that waits for the first cell.

What a page holds is in docs/http.md. `next` of a page is right in every case: with cells, without any, and when the
time to wait is over.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from api.follow.followers import Follower
from api.http.cell_json import cell_view, views_within
from api.http.content import Format
from api.http.request import Request
from api.http.response import problem_of
from api.read.reader import Served, served_together
from schemaless.batching import chunks
from schemaless.cell import StoredCell
from schemaless.errors import LocationGone, SchemalessError, StorageUnavailable
from schemaless.location import (
    FIRST_GENERATION,
    GenerationStart,
    Location,
    generation_at,
    is_superseded,
    verify_location,
)
from schemaless.storage import entity_table, shard_head
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore, Role

READ_CHUNK_CELLS = 100  # of a megabyte at most: bounds what is held before the page's own bound is noticed


class Since(msgspec.Struct, frozen=True):
    """Starts at the first cell that is not older than a time in microseconds since the epoch, or at the head."""

    created_at: int


class AfterLocation(msgspec.Struct, frozen=True):
    """Starts after a location. Without a generation it is the present one."""

    generation: int | None
    added_id: int


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
    """The cells after `after`. `examined` is the last added_id that was looked at, whether or not its cell matched."""

    cells: Sequence[StoredCell]
    after: int
    examined: int
    head: int
    starts: Sequence[GenerationStart]

    def cut(self, count: int) -> ShardLogPage:
        """Returns the page with its first `count` cells, as if nothing after them had been examined."""
        if count == len(self.cells):
            return self
        examined = self.cells[count].added_id - 1
        return msgspec.structs.replace(self, cells=self.cells[:count], examined=examined)

    @property
    def next(self) -> Location:
        return Location(generation_at(self.examined, self.starts), self.examined)

    @property
    def position(self) -> Location:
        """The location of a follower: as `next`, but in the generation of the cell after it."""
        return Location(generation_at(self.examined + 1, self.starts), self.examined)

    @property
    def pending(self) -> int:
        return self.head - self.examined


def read_page(
    datastore: Datastore, shard: int, wanted: PageRequest, examined_max: int, bytes_max: int
) -> Operation[ShardLogPage]:
    """Reads a page as one node shows it. Raises LocationGone."""
    head, starts = yield from shard_head.history(datastore.name, shard)
    after = yield from _resolve(datastore, shard, wanted.start, starts, head.added_id)
    until = min(head.added_id, after + examined_max)
    cells: list[StoredCell] = []
    for limit in map(len, chunks(range(wanted.limit), count_max=READ_CHUNK_CELLS)):
        reached = cells[-1].added_id if cells else after
        if reached >= until or sum(len(cell.body) for cell in cells) >= bytes_max:
            break
        chunk = yield from entity_table.read_after(datastore, shard, reached, limit, wanted.columns, until)
        cells += chunk
        if len(chunk) < limit:
            return ShardLogPage(cells, after, until, head.added_id, starts)
    return ShardLogPage(cells, after, cells[-1].added_id if cells else after, head.added_id, starts)


def _resolve(
    datastore: Datastore, shard: int, start: Start, starts: Sequence[GenerationStart], head: int
) -> Operation[int]:
    if isinstance(start, End):
        return head
    if isinstance(start, AfterLocation):
        return verify_location(start.generation, start.added_id, starts, head)
    first = yield from entity_table.first_since(datastore, shard, start.created_at, head)
    return first - 1


SHARDS_AT_ONCE = 4


class ShownPage(msgspec.Struct, frozen=True):
    """A page as it will be sent. `position` is where a follower continues."""

    views: list[msgspec.Raw]
    next: Location
    position: Location
    head: int

    def document(self) -> dict[str, Any]:
        return {
            "cells": self.views,
            "next": {"generation": self.next.generation, "added_id": self.next.added_id},
            "head": self.head,
            "pending": self.head - self.next.added_id,
        }


async def read_shard(
    request: Request, datastore: Datastore, shard: int, wanted: PageRequest, read_from: Role | None, bytes_max: int
) -> tuple[ShardLogPage, Served]:
    """Raises LocationGone, StorageUnavailable."""
    examined_max = request.state.settings.log_examined_max
    return await request.state.reader.read(
        datastore.home(shard),
        read_page,
        datastore,
        shard,
        wanted,
        examined_max,
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
        self._bytes_left = request.state.settings.response_bytes_max
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

    async def read(self) -> None:
        if len(self._wanted) > 1:
            await self._show_heads()
        await self._read([shard for shard in self._wanted if shard not in self._shown])

    async def wait(self, wait_s: float) -> None:
        """Waits at most `wait_s` for a cell, or for an error that only the caller can fix. Raises Unavailable."""
        if wait_s <= 0 or self._has_news():
            return
        with self._request.state.followers.follow(self._datastore, self._wanted) as follower:
            self._request.follows()
            await self._request.unless_hung_up(self._wait(follower, wait_s))

    async def _wait(self, follower: Follower, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while not self._has_news():
            positions = {
                shard: None if isinstance(shown, SchemalessError) else shown.position
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

    async def _show_heads(self) -> None:
        """Finds the shards whose location is their head with one question to each cluster. They need no page."""
        homes = self._datastore.by_home(self._wanted, lambda shard: shard)
        await asyncio.gather(*(self._show_heads_of(cluster, shards) for cluster, shards in homes.items()))

    async def _show_heads_of(self, cluster: str, shards: Collection[int]) -> None:
        try:
            heads, served = await self._request.state.reader.read(
                cluster, shard_head.heads_of, self._datastore.name, shards, read_from=self._read_from
            )
        except StorageUnavailable:  # each shard's page will say so
            return
        for head in heads:
            location = head.location
            if _is_at(self._wanted[head.shard].start, location):
                self._shown[head.shard] = ShownPage([], location, location, head.added_id)
                self._served[head.shard] = served

    async def _read(self, shards: Collection[int]) -> None:
        mixed = random.sample(list(shards), len(shards))  # so that a full answer leaves out other shards each time
        await asyncio.gather(*map(self._read_one, mixed))

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
            return not is_superseded(shown.position, error)
        return error.retryable

    async def _show(self, shard: int) -> ShownPage:
        wanted = self._wanted[shard]
        if self._bytes_left <= 0:
            wanted = msgspec.structs.replace(wanted, limit=0)
        known = self._shown.get(shard)
        if isinstance(known, ShownPage):
            start = AfterLocation(known.position.generation, known.position.added_id)
            wanted = msgspec.structs.replace(wanted, start=start)
        bytes_max = self._request.state.settings.response_bytes_max
        page, served = await read_shard(self._request, self._datastore, shard, wanted, self._read_from, bytes_max)
        views = views_within(map(cell_view, page.cells), self._form, bytes_max)
        self._bytes_left -= sum(len(bytes(view)) for view in views)
        self._served[shard] = served
        page = page.cut(len(views))
        return ShownPage(views, page.next, page.position, page.head)


def _is_at(start: Start, head: Location) -> bool:
    """Returns whether a start is surely the head. That needs no look at the generations."""
    if head.generation == FIRST_GENERATION:
        return start in (End(), AfterLocation(None, head.added_id), AfterLocation(head.generation, head.added_id))
    return start == AfterLocation(head.generation, head.added_id)
