"""FollowedHeads: which of the followed shards have moved. Each poll asks the cluster one small question, whatever the
number of shards and followers. Nothing is asked while nobody follows.

The head of a shard is the most advanced one that any node showed, so a minion that lags takes nothing back. It may be
behind the truth, and never ahead of it. So a follower before it has something to read, on some node of the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from schemaless.errors import SchemalessError
from schemaless.location import Location
from schemaless.storage.shard_head import Moved

Ask = Callable[[Mapping[str, Moved], Mapping[str, Collection[int]]], Awaitable[dict[str, Moved]]]
"""Runs `shard_head.moved_since` on one node of the cluster."""


class WatchedShard:
    """`head` is None until a node was asked. `waiting` are set whenever it moves."""

    __slots__ = ("head", "waiting")

    def __init__(self) -> None:
        self.head: Location | None = None
        self.waiting: set[asyncio.Event] = set()

    def show(self, head: Location) -> None:
        if self.head is None or head > self.head:
            self.head = head
            for event in self.waiting:
                event.set()


class FollowedHeads:
    """The heads of one cluster. `pause` waits between polls."""

    def __init__(self, ask: Ask, *, poll_s: float, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._ask = ask
        self._poll_s = poll_s
        self._pause = pause
        self._shards: dict[str, dict[int, WatchedShard]] = {}
        self._seen: dict[str, Moved] = {}
        self._wanted = asyncio.Event()

    @contextmanager
    def watching(
        self, datastore: str, shards: Collection[int], event: asyncio.Event
    ) -> Iterator[dict[int, WatchedShard]]:
        """Sets `event` whenever one of the shards moves."""
        known = self._shards.setdefault(datastore, {})
        watched = {shard: known.setdefault(shard, WatchedShard()) for shard in shards}
        for shard in watched.values():
            shard.waiting.add(event)
        self._wanted.set()
        try:
            yield watched
        finally:
            for number, shard in watched.items():
                shard.waiting.discard(event)
                if not shard.waiting:
                    del known[number]
            self._shards = {name: shards for name, shards in self._shards.items() if shards}
            if not self._shards:
                self._wanted.clear()
                self._seen.clear()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            await self.step()
            await self._pause(self._poll_s)

    async def step(self) -> None:
        """Polls once. While no node answers, the followers keep waiting."""
        watched = {name: tuple(shards) for name, shards in self._shards.items()}
        # A datastore in which a shard was added since the last poll is asked for all its heads.
        seen = {
            name: news
            for name, news in self._seen.items()
            if all(shard.head is not None for shard in self._shards.get(name, {}).values())
        }
        try:
            moved = await self._ask(seen, watched)
        except SchemalessError:
            return
        for name, news in moved.items():
            self._seen[name] = news
            shards = self._shards.get(name, {})
            for head in news.heads:
                if head.shard in shards:
                    shards[head.shard].show(head.location)
