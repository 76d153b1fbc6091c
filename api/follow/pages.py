"""ShardPages: pages of some shards' logs for one call, or why there are none; now, or as soon as there is a cell.

`next` of a page is right whatever came: cells, nothing yet, or the end of the time to wait.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from api.follow.followers import Follower, Positions
from api.follow.log_reader import AfterLocation, End, PageRequest, ShardLogPage, Start, read_page
from api.http.cell_json import cell_view, views_within
from api.http.content import Format
from api.http.request import Request
from api.http.response import problem_of
from api.read.reader import Served, served_together
from schemaless.errors import LocationGone, SchemalessError, StorageUnavailable
from schemaless.location import FIRST_GENERATION, Location, is_superseded
from schemaless.storage import shard_head
from schemaless.topology import Datastore, Role

SHARDS_AT_ONCE = 4


class ShownPage(msgspec.Struct, frozen=True):
    """A page as it will be sent. `position` is where a follower goes on."""

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
    """`wanted` says after which location each shard is read. The answer as a whole is bounded in bytes: shards that are
    left over get an empty page at their own location.
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
        """Raises what stood in the way of it."""
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
        """Until there is a cell, or something that only the caller can mend; at most `wait_s`. Raises Unavailable."""
        if wait_s <= 0 or self._has_news():
            return
        with self._request.state.followers.follow(self._datastore, self._wanted) as follower:
            self._request.follows()
            await self._request.unless_hung_up(self._wait(follower, wait_s))

    async def _wait(self, follower: Follower, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while not self._has_news():
            moved = await follower.moved(self._positions(), deadline - loop.time())
            if not moved:
                return
            await self._read(moved)

    def _has_news(self) -> bool:
        return any(
            not shown.retryable if isinstance(shown, SchemalessError) else bool(shown.views)
            for shown in self._shown.values()
        )

    def _positions(self) -> Positions:
        return {
            shard: None if isinstance(shown, SchemalessError) else shown.position
            for shard, shown in self._shown.items()
        }

    async def _show_heads(self) -> None:
        """Shards whose location is their head need no page of their own: one question to each cluster finds them."""
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
        mixed = random.sample(list(shards), len(shards))  # an answer that is full: not always the same are left over
        await asyncio.gather(*map(self._read_one, mixed))

    async def _read_one(self, shard: int) -> None:
        async with self._limiter:
            try:
                self._shown[shard] = await self._show(shard)
            except SchemalessError as error:  # one cluster that is away doesn't hide the others
                if not self._may_pass(shard, error):
                    self._shown[shard] = error

    def _may_pass(self, shard: int, error: SchemalessError) -> bool:
        """Whether the page that is known already stays: the node that was asked lags, or can't be read."""
        shown = self._shown.get(shard)
        if shown is None or isinstance(shown, SchemalessError):
            return False
        if isinstance(error, LocationGone):
            return not is_superseded(shown.position, error)
        return error.retryable

    async def _show(self, shard: int) -> ShownPage:
        wanted = self._wanted_now(shard)
        bytes_max = self._request.state.settings.response_bytes_max
        page, served = await read_shard(self._request, self._datastore, shard, wanted, self._read_from, bytes_max)
        views = views_within(map(cell_view, page.cells), self._form, bytes_max)
        self._bytes_left -= sum(len(bytes(view)) for view in views)
        self._served[shard] = served
        page = page.cut(len(views))
        return ShownPage(views, page.next, page.position, page.head)

    def _wanted_now(self, shard: int) -> PageRequest:
        wanted = self._wanted[shard]
        if self._bytes_left <= 0:
            wanted = msgspec.structs.replace(wanted, limit=0)
        shown = self._shown.get(shard)
        if isinstance(shown, ShownPage):
            position = shown.position
            wanted = msgspec.structs.replace(wanted, start=AfterLocation(position.generation, position.added_id))
        return wanted


def _is_at(start: Start, head: Location) -> bool:
    """Whether a reader that begins there surely stands at the head, which needs no look at the generations."""
    if head.generation == FIRST_GENERATION:
        return start in (End(), AfterLocation(None, head.added_id), AfterLocation(head.generation, head.added_id))
    return start == AfterLocation(head.generation, head.added_id)
