"""Caution: how the calls of a shard are made after a process died that had it, so that the cell it died of is found.

A call that kills its process leaves nothing but a checkpoint that names a dead process. Many cells were in flight then.
So the next process calls the cells of such a shard one at a time, and marks each in the checkpoint before. A cell whose
mark is found after another death is a suspect. It is called alone, so that nothing else can be what kills the process.
This module does no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from enum import Enum
from itertools import islice

from schemaless.cell import StoredCell
from schemaless.consume.ports import Mark, Predecessor

CAREFUL_CELLS = 1000
"""How many cells of a shard are called one at a time after a process died."""


class Care(Enum):
    """What the next call of a shard needs."""

    NONE = "none"
    CLAIM = "claim"  # the checkpoint doesn't name this process yet
    MARK = "mark"  # a process died: one cell at a time, marked
    SUSPECT = "suspect"  # the call of the next cell has ended processes: it is marked, and called alone


class ShardCaution:
    """What is known about how the process ended that had a shard before.

    `cells_left` are to be called with care. `kills` counts the processes that the call of the next cell has ended.
    """

    __slots__ = ("cells_left", "is_claimed", "kills")

    def __init__(self) -> None:
        self.is_claimed = True
        self.cells_left = 0
        self.kills = 0

    @property
    def care(self) -> Care:
        if self.kills:
            return Care.SUSPECT
        if self.cells_left > 0:
            return Care.MARK
        return Care.NONE if self.is_claimed else Care.CLAIM

    def begin(self, predecessor: Predecessor, kills: int) -> None:
        """Takes what the checkpoint says when a shard begins."""
        self.is_claimed = predecessor is Predecessor.OURSELVES
        self.kills = kills
        if predecessor is Predecessor.DIED:
            self.cells_left = CAREFUL_CELLS

    def let_go(self) -> None:
        """Notes that the shard was given away. It has to be claimed again, also when it comes back at once."""
        self.is_claimed = False

    def mark(self) -> Mark:
        """Returns what the checkpoint has to say before the next call begins. Call `marked` when it does."""
        return Mark(begun=self.care is not Care.CLAIM, kills=self.kills)

    def marked(self) -> None:
        self.is_claimed = True

    def finished(self) -> None:
        """Notes that the next cell is finished: whatever was suspected of it was wrong."""
        self.kills = 0
        self.cells_left = max(0, self.cells_left - 1)

    def forget(self) -> None:
        """Notes that the next cell is another one now: a generation superseded it."""
        self.kills = 0

    def cells_of_call(self, waiting: Iterable[StoredCell], is_called: Callable[[StoredCell], bool], most: int) -> int:
        """Returns how many cells one call may take. With care that is one that calls a function, or those before it."""
        if self.care in (Care.NONE, Care.CLAIM):
            return most
        for n, cell in enumerate(islice(waiting, most)):
            if is_called(cell):
                return max(1, n)
        return most


class MarkedCalls:
    """The marked calls of one process. While a suspect is called, no other marked call runs. One event loop."""

    def __init__(self) -> None:
        self._entry = asyncio.Lock()  # held while a suspect waits or runs, so others wait behind it
        self._running = 0
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    @asynccontextmanager
    async def turn(self, care: Care) -> AsyncIterator[None]:
        """Waits until a call with this care may run, and holds its place."""
        if care in (Care.NONE, Care.CLAIM):
            yield
        elif care is Care.SUSPECT:
            async with self._entry:
                await self._none_runs.wait()
                yield
        else:
            async with self._entry:
                self._running += 1
                self._none_runs.clear()
            try:
                yield
            finally:
                self._running -= 1
                if not self._running:
                    self._none_runs.set()
