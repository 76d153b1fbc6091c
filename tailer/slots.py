"""TailerSlots: how many transactions, or openings of logs, a tailer has in flight at once, and who is next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SLOW_AFTER_S = 1.0  # a full transaction takes less, and so does opening a log
SLOW_PER_QUICK = 3  # slots for those that wait for a server


class TailerSlots:
    """Bounds what is in flight. The partition that waits longest gets the next free slot.

    What takes longer than SLOW_AFTER_S moves to a slot for slow ones, as soon as one is free. So a broker or a cluster
    that hangs holds up its own partitions only, and memory stays bounded.
    """

    def __init__(self, quick_max: int) -> None:
        self._quick = asyncio.Semaphore(quick_max)  # first come, first served
        self._slow_free = quick_max * SLOW_PER_QUICK

    @staticmethod
    def threads_max(quick_max: int) -> int:
        """Returns how many can be in flight, slow ones included."""
        return quick_max * (1 + SLOW_PER_QUICK)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Waits for a slot, and holds it inside the context."""
        loop = asyncio.get_running_loop()
        moved = ended = False
        await self._quick.acquire()

        def move() -> None:
            nonlocal moved
            if ended:
                return
            if self._slow_free > 0:
                moved = True
                self._slow_free -= 1
                self._quick.release()
            else:
                loop.call_later(SLOW_AFTER_S, move)

        first = loop.call_later(SLOW_AFTER_S, move)
        try:
            yield
        finally:
            ended = True
            first.cancel()
            if moved:
                self._slow_free += 1
            else:
                self._quick.release()
