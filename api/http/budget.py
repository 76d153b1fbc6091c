"""Budgets: what a process has room for, and how much of it one caller may take (I14).

They count requests in flight, payloads that arrive, what was read and its clients have not taken yet, and how long one
request works before others have their turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

import msgspec

from schemaless.access import Token
from schemaless.errors import TooLarge, TooManyRequests, Unavailable

T = TypeVar("T")

PAYLOAD_BYTES_MAX = 64 << 20
"""Memory of a process for all large payloads in flight together."""
READ_BYTES_MAX = 96 << 20
"""Memory of a process for what is read from MySQL and not yet taken by clients."""
ARRIVING_MAX = 500
"""Payloads that are arriving at once. One more gets a 503."""
CALLER_ARRIVING_MAX = 250
"""Payloads that are arriving with one token, or from one address without one. One more gets a 429."""

USUAL_BYTES_MIN = 256 << 10
_USUAL_CELL_BYTES = 1 << 10

SMALL_BYTES_MAX = 64 << 10
"""A response up to this size isn't counted: the limit on concurrent requests bounds those."""

STEP_BYTES_MAX = 64 << 10
"""Bytes of JSON or MessagePack that are parsed, compared or rendered before others get their turn.

One body is never split, so a step has at most this and the largest body.
"""


def share_of_token(requests_max: int) -> int:
    """Returns how many of the concurrent requests may have the same token."""
    return (requests_max + 1) // 2


class RequestsInFlight(msgspec.Struct):
    """What the limits on concurrent requests count, in all and by token. A follower isn't counted while it follows."""

    count: int = 0
    by_token: dict[bytes, int] = {}

    def begin(self, token: Token | None) -> None:
        self.count += 1
        if token is not None:
            self.by_token[token.digest] = self.by_token.get(token.digest, 0) + 1

    def end(self, token: Token | None) -> None:
        self.count -= 1
        if token is not None:
            left = self.by_token.get(token.digest, 0) - 1
            if left:
                self.by_token[token.digest] = left
            else:
                del self.by_token[token.digest]

    def of(self, token: Token) -> int:
        return self.by_token.get(token.digest, 0)


class PayloadBudget:
    """The long payloads that a process receives: their bytes, and how many are arriving, in all and of one caller."""

    def __init__(
        self, bytes_max: int, *, arriving_max: int = ARRIVING_MAX, caller_arriving_max: int = CALLER_ARRIVING_MAX
    ) -> None:
        self._left = bytes_max
        self._arriving_max = arriving_max
        self._caller_arriving_max = caller_arriving_max
        self._by_caller: Counter[Hashable] = Counter()
        self.arriving = 0

    def take(self, count: int) -> None:
        """Raises Unavailable."""
        if count > self._left:
            raise Unavailable("too many large payloads at once")
        self._left -= count

    def give_back(self, count: int) -> None:
        self._left += count

    def begin(self, caller: Hashable) -> None:
        """Counts a payload that has not arrived as a whole. Raises TooManyRequests or Unavailable."""
        if caller and self._by_caller[caller] >= self._caller_arriving_max:
            raise TooManyRequests("too many payloads of this caller have not arrived yet")
        if self.arriving >= self._arriving_max:
            raise Unavailable("too many payloads have not arrived yet")
        self.arriving += 1
        self._by_caller[caller] += 1

    def end(self, caller: Hashable) -> None:
        self.arriving -= 1
        self._by_caller[caller] -= 1
        if not self._by_caller[caller]:
            del self._by_caller[caller]


class _RoomWanted(msgspec.Struct, gc=False, eq=False):
    count: int
    caller: Hashable
    grower: Held | None
    room: asyncio.Future[None]
    patience: asyncio.Timeout
    until: float


_WAITS_MAX = 5
"""A request waits for so many times `wait_s` at most, and for `wait_s` while nobody is let in."""


class ReadBudget:
    """Belongs to one event loop. A request for more than is left waits in order.

    A caller is a token, or the address of a client without one. Each may hold half of the bytes, so that one that takes
    nothing of its responses leaves the others room. Who waits for that half is overtaken, nobody else. An empty caller,
    behind a proxy, stands for nobody and has no limit of its own.

    A request that holds a part already goes before those that hold nothing, and its next part may pass both bounds
    where nothing passes them yet. It alone may then grow further, as often as it needs to. Otherwise requests that hold
    all bytes together would wait for one another. So the process holds at most the bound and one response.
    """

    def __init__(self, bytes_max: int, *, wait_s: float) -> None:
        self._bytes_max = bytes_max
        self._caller_bytes_max = bytes_max // 2
        self._wait_s = wait_s
        self._growing: list[_RoomWanted] = []
        self._starting: list[_RoomWanted] = []
        self._by_caller: Counter[Hashable] = Counter()
        self._passing: Held | None = None
        """The request that passed the bound of all, while more than that is held."""
        self._passing_share: dict[Hashable, Held] = {}
        """By caller, the request that passed its share, while the caller holds more than that."""
        self.held_bytes = 0

    async def take(self, count: int, caller: Hashable, *, grower: Held | None = None) -> None:
        """Takes bytes, in turn. `grower` is the request if it holds some already. Raises Unavailable when there was no
        room in time.
        """
        ahead = [*self._growing, *self._starting] if grower is None else self._growing
        in_turn = self._may_pass(grower) or not any(self._waits_for_all(one) for one in ahead)
        if in_turn and self.take_now(count, caller, grower=grower):
            return
        queue = self._starting if grower is None else self._growing
        loop = asyncio.get_running_loop()
        now = loop.time()
        patience = asyncio.timeout_at(now + self._wait_s)
        waiting = _RoomWanted(count, caller, grower, loop.create_future(), patience, now + _WAITS_MAX * self._wait_s)
        queue.append(waiting)
        try:
            async with patience:
                await waiting.room
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiting.room.done() and not waiting.room.cancelled():
                self.give_back(count, caller)
            else:
                queue.remove(waiting)
                self._let_in()  # those behind it may fit where it didn't
            if isinstance(error, TimeoutError):
                raise Unavailable("too many large responses at once: earlier ones were not taken yet") from None
            raise

    def take_now(self, count: int, caller: Hashable, *, grower: Held | None = None) -> bool:
        """Takes bytes if there is room for them. A single piece that is larger than the bound fits an empty budget."""
        within = self.held_bytes + count if grower is None else self.held_bytes
        if self.held_bytes and within > self._bytes_max and not self._may_pass(grower):
            return False
        if not self._is_within_share(count, caller, grower):
            return False
        self._add(count, caller)
        if grower is not None:
            if self.held_bytes > self._bytes_max:
                self._passing = grower
            if caller and self._by_caller[caller] > self._caller_bytes_max:
                self._passing_share[caller] = grower
        return True

    def give_back(self, count: int, caller: Hashable) -> None:
        self._add(-count, caller)
        self._let_in()

    def _let_in(self) -> None:
        waits, was_let_in = False, False
        for queue in (self._growing, self._starting):
            for waiting in list(queue):
                if waits or waiting.room.done():
                    continue
                if self.take_now(waiting.count, waiting.caller, grower=waiting.grower):
                    queue.remove(waiting)
                    waiting.room.set_result(None)
                    was_let_in = True
                else:
                    waits = self._waits_for_all(waiting)  # smaller ones behind it would keep it waiting for ever
        if was_let_in:
            for waiting in (*self._growing, *self._starting):
                self._prolong(waiting)

    def _prolong(self, waiting: _RoomWanted) -> None:
        """The queue moves, so the turn of those who wait will come."""
        if not waiting.patience.expired():
            soon = asyncio.get_running_loop().time() + self._wait_s
            waiting.patience.reschedule(min(soon, waiting.until))

    def _waits_for_all(self, waiting: _RoomWanted) -> bool:
        """Returns whether it waits for what all have in common, and not for its caller's share."""
        return self._is_within_share(waiting.count, waiting.caller, waiting.grower)

    def _may_pass(self, grower: Held | None) -> bool:
        """Returns whether it is the request that passed the bound, which all others wait for. One that began with more
        than the bound is the only one.
        """
        return grower is not None and self.held_bytes > self._bytes_max and self._passing in (None, grower)

    def _is_within_share(self, count: int, caller: Hashable, grower: Held | None) -> bool:
        held = self._by_caller[caller] if caller else 0
        if grower is None:
            return not held or held + count <= self._caller_bytes_max
        return held <= self._caller_bytes_max or self._passing_share.get(caller) in (None, grower)

    def _add(self, count: int, caller: Hashable) -> None:
        self.held_bytes += count
        if self.held_bytes <= self._bytes_max:
            self._passing = None
        if caller:
            self._by_caller[caller] += count
            if self._by_caller[caller] <= self._caller_bytes_max:
                self._passing_share.pop(caller, None)
            if not self._by_caller[caller]:
                del self._by_caller[caller]


class Held:
    """What one request holds of a budget."""

    __slots__ = ("_budget", "_caller", "_count")

    def __init__(self, budget: ReadBudget, caller: Hashable) -> None:
        self._budget = budget
        self._caller = caller
        self._count = 0

    def covers(self, count: int) -> bool:
        """Returns whether there is room for so many bytes in all."""
        return count <= self._count

    async def reserve(self, count: int) -> None:
        """Makes room for so many bytes in all. Raises Unavailable."""
        if count > self._count:
            await self._budget.take(count - self._count, self._caller, grower=self if self._count else None)
            self._count = count

    def resize(self, count: int) -> bool:
        """Holds so many bytes in all from now on, or as many as before: False says that there is no room for more."""
        if count > self._count:
            if not self._budget.take_now(count - self._count, self._caller, grower=self if self._count else None):
                return False
        elif count < self._count:
            self._budget.give_back(self._count - count, self._caller)
        self._count = count
        return True

    async def read(self, bytes_max: int, read: Callable[[int], Awaitable[T]], *, cells: int = 1) -> T:
        """Reads about so many cells within what they usually take, and only where that is too little within the bound.

        If each request reserved the bound, three clients at a time could read small rows. `read` gets the
        bytes that it may read. Raises what it raises, and Unavailable.
        """
        usual = max(USUAL_BYTES_MIN, cells * _USUAL_CELL_BYTES)
        if usual < bytes_max:
            await self.reserve(usual)
            try:
                return await read(usual)
            except TooLarge:
                self.resize(0)  # nothing of it is left, so others may have it while this one waits
        await self.reserve(bytes_max)
        return await read(bytes_max)


class Steps:
    """Counts the work of one request, and lets the process do other things in between."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = 0

    async def after(self, bytes_done: int) -> None:
        """Says that so many bytes were worked on since the last call. Others have their turn once it is enough."""
        self._bytes += bytes_done
        if self._bytes >= STEP_BYTES_MAX:
            self._bytes = 0
            await asyncio.sleep(0)
