"""Followers: calls that wait for cells which aren't there yet. Bounded by a limit of their own, so that they take
nothing from other calls (I14), and all sent away when the process stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import msgspec

from api.follow.head_watch import FollowedHeads, WatchedShard
from api.follow.reread_backoff import Lagging
from schemaless.errors import Unavailable
from schemaless.location import Location
from schemaless.topology import Datastore

READS_AT_ONCE = 4

Positions = Mapping[int, Location | None]
"""Where a follower stands in each shard; None: it doesn't know yet, because its cluster didn't answer."""


class RequestsInFlight(msgspec.Struct):
    """What the bound on calls counts. A follower is none of them while it follows."""

    count: int = 0


class Followers:
    def __init__(
        self, watches: Mapping[str, FollowedHeads], in_flight: RequestsInFlight, *, followers_max: int
    ) -> None:
        self._watches = watches
        self._in_flight = in_flight
        self._followers_max = followers_max
        self._reading = {cluster: asyncio.Semaphore(READS_AT_ONCE) for cluster in watches}
        self._all: set[Follower] = set()
        self.closed = False

    def __len__(self) -> int:
        return len(self._all)

    @contextmanager
    def follow(self, datastore: Datastore, shards: Collection[int]) -> Iterator[Follower]:
        """Raises Unavailable when there are too many already, or when the process stops."""
        if self.closed or len(self) >= self._followers_max:
            raise Unavailable("this process stops" if self.closed else f"{len(self)} calls follow a log already")
        event = asyncio.Event()
        with ExitStack() as stack:
            watched: dict[int, WatchedShard] = {}
            for cluster, mine in datastore.by_home(shards, lambda shard: shard).items():
                watched |= stack.enter_context(self._watches[cluster].watching(datastore.name, mine, event))
            follower = Follower(watched, event)
            self._all.add(follower)
            self._in_flight.count -= 1
            try:
                yield follower
            finally:
                self._in_flight.count += 1
                self._all.discard(follower)

    def reading(self, cluster: str) -> asyncio.Semaphore:
        """Streams read a cluster's logs a few at a time: what is read and not yet cut to size is bounded."""
        return self._reading[cluster]

    def close(self) -> None:
        """Everybody who waits is let go now, and nobody waits from now on."""
        self.closed = True
        for follower in self._all:
            follower.let_go()


class Follower:
    def __init__(self, watched: Mapping[int, WatchedShard], event: asyncio.Event) -> None:
        self._watched = watched
        self._event = event
        self._lagging = Lagging(asyncio.get_running_loop().time)
        self.let_go_of = False

    def let_go(self) -> None:
        self.let_go_of = True
        self._event.set()

    async def moved(self, positions: Positions, timeout_s: float) -> list[int]:
        """Shards that have something to read after their positions; none when the time is over or the process stops.

        One that is told again at the same position waits a little longer each time: the node that is read lags.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self.let_go_of:
            self._event.clear()
            ahead = {shard: position for shard, position in positions.items() if self._is_ahead(shard, position)}
            ready = self._lagging.due(ahead)
            if ready or loop.time() >= deadline:
                return ready
            await self._wait(min(deadline, self._lagging.next_due(ahead, deadline)) - loop.time())
        return []

    def head(self, shard: int) -> int:
        """As far as it is known."""
        head = self._watched[shard].head
        return 0 if head is None else head.added_id

    def _is_ahead(self, shard: int, position: Location | None) -> bool:
        head = self._watched[shard].head
        return head is not None and (position is None or head > position)

    async def _wait(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
