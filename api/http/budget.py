"""ReadBudget: the bytes that a process holds of what it read and its clients have not taken yet (I14)."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from schemaless.errors import TooLarge, Unavailable

T = TypeVar("T")

USUAL_BYTES_MIN = 256 << 10
_USUAL_CELL_BYTES = 1 << 10

SMALL_BYTES_MAX = 64 << 10
"""A response up to this size isn't counted: the limit on concurrent requests bounds those."""


class _RoomWanted(msgspec.Struct, gc=False, eq=False):
    count: int
    peer: str
    room: asyncio.Future[None]


class ReadBudget:
    """Belongs to one event loop. Whoever asks for more than is left waits in order, at most `wait_s`.

    A peer is a client's address. Each may hold half of the bytes, so that one that takes nothing of its responses
    leaves the others room. An empty one, behind a proxy, stands for nobody and has no limit of its own.
    """

    def __init__(self, bytes_max: int, *, wait_s: float) -> None:
        self._bytes_max = bytes_max
        self._peer_bytes_max = bytes_max // 2
        self._wait_s = wait_s
        self._waiting: deque[_RoomWanted] = deque()
        self._by_peer: Counter[str] = Counter()
        self.held_bytes = 0

    async def take(self, count: int, peer: str) -> None:
        """Raises Unavailable when there was no room in time."""
        if not any(self._may(one.peer) for one in self._waiting) and self.take_now(count, peer):
            return
        waiting = _RoomWanted(count, peer, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._wait_s):
                await waiting.room
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiting.room.done() and not waiting.room.cancelled():
                self.give_back(count, peer)
            else:
                self._waiting.remove(waiting)
            if isinstance(error, TimeoutError):
                raise Unavailable("too many large responses at once: earlier ones were not taken yet") from None
            raise

    def take_now(self, count: int, peer: str) -> bool:
        """Takes bytes if there is room for them. A single piece that is larger than the bound fits an empty budget."""
        if self.held_bytes and self.held_bytes + count > self._bytes_max:
            return False
        if peer and self._by_peer[peer] and self._by_peer[peer] + count > self._peer_bytes_max:
            return False
        self._add(count, peer)
        return True

    def give_back(self, count: int, peer: str) -> None:
        self._add(-count, peer)
        for waiting in list(self._waiting):
            if not waiting.room.done() and self.take_now(waiting.count, waiting.peer):
                self._waiting.remove(waiting)
                waiting.room.set_result(None)

    def _may(self, peer: str) -> bool:
        return not peer or self._by_peer[peer] < self._peer_bytes_max

    def _add(self, count: int, peer: str) -> None:
        self.held_bytes += count
        if peer:
            self._by_peer[peer] += count
            if not self._by_peer[peer]:
                del self._by_peer[peer]


class Held:
    """What one request holds of a budget."""

    __slots__ = ("_budget", "_count", "_peer")

    def __init__(self, budget: ReadBudget, peer: str) -> None:
        self._budget = budget
        self._peer = peer
        self._count = 0

    async def reserve(self, count: int) -> None:
        """Makes room for so many bytes in all. Raises Unavailable."""
        if count > self._count:
            await self._budget.take(count - self._count, self._peer)
            self._count = count

    def resize(self, count: int) -> bool:
        """Holds so many bytes in all from now on, or as many as before: False says that there is no room for more."""
        if count > self._count:
            if not self._budget.take_now(count - self._count, self._peer):
                return False
        elif count < self._count:
            self._budget.give_back(self._count - count, self._peer)
        self._count = count
        return True

    async def read(self, bytes_max: int, read: Callable[[int], Awaitable[T]], *, cells: int = 1) -> T:
        """Reads about so many cells within what they usually take, and only where that is too little within the bound.

        Whoever reserved the bound for each request would let three clients at a time read small rows. `read` gets the
        bytes that it may read. Raises what it raises, and Unavailable.
        """
        usual = max(USUAL_BYTES_MIN, cells * _USUAL_CELL_BYTES)
        if usual < bytes_max:
            await self.reserve(usual)
            try:
                return await read(usual)
            except TooLarge:
                pass
        await self.reserve(bytes_max)
        return await read(bytes_max)
