"""Lanes: how many rows of a shard are called at once, and what becomes of calls that outlast their pass.

A pass over a shard doesn't wait for a call that takes long, whether it is a first one or a retry. So the call delays
its own row only. It keeps its lane, and the next pass after its end decides what the end means. No I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from math import inf

from schemaless.consume.parked_rows import FinishedCall, ParkedRows, Pass, Replay

PASS_S = 0.25
"""After that a pass ends, and what is finished is recorded: a kill repeats no more than that."""


class Lanes:
    """The lanes of each shard of one program: `parallel` of them. `clock` counts seconds.

    `want` asks for another pass over shards.
    """

    def __init__(self, parallel: int, clock: Callable[[], float], want: Callable[[Iterable[int]], None]) -> None:
        self.parallel = parallel
        self._clock = clock
        self._want = want

    async def has_free(self, tasks: Collection[asyncio.Task[None]], rows: ParkedRows, made: Pass) -> bool:
        """Waits for a free lane until the pass ends. `tasks` are those of the pass. Those of others have lanes, too."""
        while True:
            running = [task for task in tasks if not task.done()]
            running += rows.tasks
            if len(running) < self.parallel:
                return True
            left_s = made.deadline - self._clock()
            if left_s <= 0:
                return False
            await asyncio.wait(running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def leave(self, replay: Replay, task: asyncio.Task[None], rows: ParkedRows) -> None:
        """Lets the call of a record go on beyond its pass. Whoever makes it calls `ended`."""
        replay.task, replay.due_at = task, inf
        rows.tasks.add(task)
        task.add_done_callback(rows.tasks.discard)

    def ended(self, replay: Replay, error: Exception | None, rows: ParkedRows) -> None:
        """Notes what such a call ended with."""
        replay.task, replay.result, replay.due_at = None, FinishedCall(error), self._clock()
        self._want([rows.shard])
