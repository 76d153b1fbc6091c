"""LoopLag and LiveTimeout: how late an event loop runs, and time-outs that don't count what it was late (I15).

A loop that stood still for a second reads no answer in that second, and then its timers fire first. Taken as it is,
each such time-out looks like a dead server. So a time-out counts only the time in which the loop could read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

TICK_S = 0.05
LATE_MIN_S = 0.01
"""A timer that is less late than this is on time: loops count in milliseconds."""

_STRETCH_MAX = 3.0
"""A time-out lasts at most so many times as long, however late the loop is."""


class LoopLag:
    """Measures one event loop by a task that ticks. Before it runs nothing counts as late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.longest_s = 0.0
        """The longest that a tick was late."""
        self._total_s = 0.0
        self._due: float | None = None

    def late_s(self) -> float:
        """Returns how late the loop was in all, the tick that is due included."""
        return self._total_s + self._pending_s()

    def tick(self) -> None:
        """Notes how late this tick is. The next one is due in TICK_S."""
        late_s = self._pending_s()
        self._total_s += late_s
        self.longest_s = max(self.longest_s, late_s)
        self._due = self.clock() + TICK_S

    async def run(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def _pending_s(self) -> float:
        late_s = 0.0 if self._due is None else self.clock() - self._due
        return late_s if late_s >= LATE_MIN_S else 0.0


class Deadline:
    """The end of a time-out of `limit_s` that begins now, by the loop's live time."""

    __slots__ = ("_began", "_lag", "_late_before_s", "limit_s")

    def __init__(self, limit_s: float, lag: LoopLag) -> None:
        self.limit_s = limit_s
        self._lag = lag
        self._began = lag.clock()
        self._late_before_s = lag.late_s()

    def left_s(self) -> float:
        """Returns the live time that is left, 0 or less when it is over."""
        return self.limit_s - (self._lag.clock() - self._began - (self._lag.late_s() - self._late_before_s))

    @property
    def is_stretched_out(self) -> bool:
        """Returns whether to give up although the loop was too late to judge."""
        return self._lag.clock() - self._began >= self.limit_s * _STRETCH_MAX


class LiveTimeout:
    """A context that raises TimeoutError after `limit_s` of the loop's live time, as asyncio.timeout does.

    `server_had_its_time` then says whether the time-out tells something about the server.
    """

    __slots__ = ("_cut", "_deadline", "_lag", "_limit_s", "_loop", "_timer", "server_had_its_time")

    def __init__(self, limit_s: float, lag: LoopLag) -> None:
        self.server_had_its_time = True
        self._limit_s = limit_s
        self._lag = lag

    async def __aenter__(self) -> LiveTimeout:
        self._loop = asyncio.get_running_loop()
        self._deadline = Deadline(self._limit_s, self._lag)
        self._cut = asyncio.timeout(None)
        await self._cut.__aenter__()
        self._timer = self._loop.call_later(self._limit_s, self._fire)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._cut.__aexit__(kind, error, trace)

    def _fire(self) -> None:
        left_s = self._deadline.left_s()
        if left_s > 0.001 and not self._deadline.is_stretched_out:
            self._timer = self._loop.call_later(left_s, self._fire)
            return
        self.server_had_its_time = left_s <= 0.001
        self._cut.reschedule(self._loop.time())
