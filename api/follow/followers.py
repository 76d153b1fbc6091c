"""Followers: requests that wait for cells which aren't there yet. They have a limit of their own, so that they take
nothing from other requests (I14), and all of them end when the process stops.

A shard whose last read brought nothing, although its head is known to be further on, is read again after a growing
pause: the node that was read lags, or is unreachable.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import msgspec

from api.http.budget import RequestsInFlight
from schemaless.access import Token
from schemaless.errors import SchemalessError, TooManyRequests, Unavailable
from schemaless.location import Location
from schemaless.storage.shard_head import Moved
from schemaless.topology import Datastore, Placement

POLL_S = 0.03  # how often a cluster is asked which heads moved, while somebody follows
PAUSE_S = 0.02
PAUSE_MAX_S = 1.0


class _Reread(msgspec.Struct, frozen=True):
    position: Location | None
    again_at: float
    pause_s: float


class RereadBackoff:
    """When one follower reads each shard again that brought nothing at its position."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tries: dict[int, _Reread] = {}

    def due(self, ahead: Mapping[int, Location | None]) -> list[int]:
        """Returns the shards to read now, and records that they are read at these positions."""
        now = self._clock()
        due = [shard for shard, position in ahead.items() if self._again_at(shard, position) <= now]
        for shard in due:
            last = self._tries.get(shard)
            repeated = last is not None and last.position == ahead[shard]
            pause_s = min(last.pause_s * 2, PAUSE_MAX_S) if last is not None and repeated else PAUSE_S
            self._tries[shard] = _Reread(ahead[shard], now + pause_s, pause_s)
        return due

    def next_due(self, ahead: Mapping[int, Location | None], otherwise: float) -> float:
        """Returns when the first of the shards is due."""
        return min((self._again_at(shard, position) for shard, position in ahead.items()), default=otherwise)

    def _again_at(self, shard: int, position: Location | None) -> float:
        last = self._tries.get(shard)
        return last.again_at if last is not None and last.position == position else 0.0


READS_AT_ONCE = 4

Positions = Mapping[int, Location | None]
"""The location of a follower in each shard, or None where it is unknown because the cluster didn't answer."""


class Followers:
    def __init__(
        self,
        watches: Mapping[str, FollowedHeads],
        in_flight: RequestsInFlight,
        *,
        followers_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watches = watches
        self._in_flight = in_flight
        self._followers_max = followers_max
        self._clock = clock
        self._reading = defaultdict[str, asyncio.Semaphore](partial(asyncio.Semaphore, READS_AT_ONCE))
        self._all: set[Follower] = set()
        self._moves: dict[str, dict[int, Placement]] = {}
        self.closed = False

    def __len__(self) -> int:
        return len(self._all)

    @contextmanager
    def follow(self, datastore: Datastore, shards: Collection[int], token: Token | None = None) -> Iterator[Follower]:
        """Adds a follower of these shards, who may follow while the token is valid.

        A token may hold half of the places. Raises TooManyRequests when it does, and Unavailable when there are too
        many in all, or when the process stops.
        """
        if self.closed or len(self) >= self._followers_max:
            raise Unavailable(
                "this process stops"
                if self.closed
                else f"too many followers: {len(self)} requests follow a log already"
            )
        if token is not None and self._count_of(token) >= (self._followers_max + 1) // 2:
            raise TooManyRequests(f"too many followers with the token {token.name!r}")
        event = asyncio.Event()
        with ExitStack() as stack:

            def watch(some: Collection[int]) -> dict[int, WatchedShard]:
                found: dict[int, WatchedShard] = {}
                for cluster, mine in datastore.by_home(some, lambda shard: shard).items():
                    found |= stack.enter_context(self._watches[cluster].watching(datastore.name, mine, event))
                return found

            follower = Follower(datastore, watch, shards, event, self._clock, token)
            self._all.add(follower)
            self._in_flight.end(token)
            try:
                yield follower
            finally:
                self._in_flight.begin(token)
                self._all.discard(follower)

    def follow_moves(self) -> None:
        """Lets followers of shards that moved watch their new homes."""
        for name, moves in {each.datastore.name: each.datastore.moves for each in self._all}.items():
            if moves != (known := self._moves.get(name, {})):
                moved = {shard for shard, move in moves.items() if known.get(shard) != move}
                self._moves[name] = dict(moves)
                for follower in [each for each in self._all if each.datastore.name == name]:
                    follower.follow_moves(moved)

    def _count_of(self, token: Token) -> int:
        return sum(each.token is not None and each.token.digest == token.digest for each in self._all)

    def reading(self, cluster: str) -> asyncio.Semaphore:
        """Bounds how many streams read a cluster's logs at once, as a page is cut to size after it was read."""
        return self._reading[cluster]

    def release_unless(self, is_valid: Callable[[Token | None], bool]) -> None:
        """Ends the waits of callers whose token isn't valid now, or who have none."""
        for follower in self._all:
            if not is_valid(follower.token):
                follower.release()

    def close(self) -> None:
        """Ends every wait now, and lets nobody wait from now on."""
        self.closed = True
        for follower in self._all:
            follower.release()


class Follower:
    def __init__(
        self,
        datastore: Datastore,
        watch: Callable[[Collection[int]], dict[int, WatchedShard]],
        shards: Collection[int],
        event: asyncio.Event,
        clock: Callable[[], float],
        token: Token | None = None,
    ) -> None:
        self.token = token
        self.datastore = datastore
        self._watch = watch
        self._watched = watch(shards)
        self._event = event
        self._clock = clock
        self._rereads = RereadBackoff(clock)
        self.is_released = False

    def follow_moves(self, moved: Collection[int]) -> None:
        """Watches the shards, of those that moved, where they are now."""
        if mine := self._watched.keys() & moved:
            self._watched |= self._watch(mine)
            self._event.set()

    def release(self) -> None:
        self.is_released = True
        self._event.set()

    def wake(self) -> None:
        self._event.set()

    async def woken(self, timeout_s: float) -> bool:
        """Waits until somebody wakes it, and returns False where nobody did in time, or when it was released."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
                self._event.clear()
                return not self.is_released
        return False

    async def moved(self, positions: Positions, timeout_s: float) -> list[int]:
        """Waits until shards have something to read after their positions, and returns them. Returns none when the time
        is over or the process stops.

        A shard that is returned again at the same position waits a little longer each time: the node that is read lags.
        """
        deadline = self._clock() + timeout_s
        while not self.is_released:
            self._event.clear()
            ahead = {shard: position for shard, position in positions.items() if self._is_ahead(shard, position)}
            ready = self._rereads.due(ahead)
            if ready or self._clock() >= deadline:
                return ready
            wait_s = min(deadline, self._rereads.next_due(ahead, deadline)) - self._clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._event.wait()
        return []

    def head(self, shard: int) -> int:
        """Returns the head of a shard as far as it is known, or 0."""
        head = self._watched[shard].head
        return 0 if head is None else head.added_id

    def _is_ahead(self, shard: int, position: Location | None) -> bool:
        head = self._watched[shard].head
        return head is not None and (position is None or head > position)


# FollowedHeads: which of the followed shards have moved. Each poll asks the cluster one small question, whatever the
# number of shards and followers. Nothing is asked while nobody follows.
#
# The head of a shard is the most advanced one that any node showed, so a minion that lags takes nothing back. It may
# be behind the truth, and never ahead of it. So a follower before it has something to read, on some node of the
# cluster.

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

    def __init__(
        self, ask: Ask, *, poll_s: float = POLL_S, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
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
