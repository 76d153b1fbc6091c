"""MemoryWorker: a worker of a trigger program in memory. A real delivery and a real handler, and a clock of its own.

Belongs to one event loop. Nothing of it waits in real time, except for functions that do.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from schemaless.config import ConsumerSettings
from schemaless.consume.delivery import Delivery
from schemaless.consume.trigger_handler import TriggerHandler
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.testing.memory_program import MemoryCheckpoints, MemoryHomeLog, MemoryParkedStore, MemoryProgram
from schemaless.triggers.context import ContextServices

BATCH_CELLS_MAX = 8
_CALL_S = 0.2
_LATE_CALL_S = 1.0


def memory_settings(**settings: object) -> ConsumerSettings:
    """Returns the settings of a worker that needs no servers. Those that aren't given are the defaults."""
    return ConsumerSettings(topology=Path("unused"), kafka="unused", **settings)  # type: ignore[arg-type]


class MemoryWorker:
    """The worker of one number, which has all shards. `now` is its clock in seconds."""

    record_within_s = TriggerHandler.record_within_s
    pause_max_s = 0.25

    def __init__(
        self,
        program: MemoryProgram,
        functions: TriggerProgram,
        number: int,
        settings: ConsumerSettings,
        *,
        now: float,
        checkpoints: MemoryCheckpoints | None = None,
        services: ContextServices | None = None,
    ) -> None:
        self.program = program
        self.number = number
        self.now = now
        parked = MemoryParkedStore(program)
        self.handler = TriggerHandler(
            functions, program.datastore, settings, parked, self._clock, lambda: int(self.now * 1e6), services
        )
        self.handler.record_within_s = self.record_within_s
        self.delivery = Delivery(
            self.handler,
            checkpoints or MemoryCheckpoints(program, number),
            MemoryHomeLog(program),
            batch_cells_max=BATCH_CELLS_MAX,
            clock=self._clock,
        )
        self._given_time: set[asyncio.Task[object]] = set()
        program.present.add(number)
        self.look()
        self.delivery.gain(program.checkpoints)

    def look(self) -> None:
        """Looks at the heads, and for what people ordered."""
        self.delivery.look(self.program.heads())
        self.handler.order(self.program.due())

    async def pass_by(self, seconds: float, steps: int = 40) -> None:
        """Works for so many seconds of its clock, in at most so many steps before each look."""
        end = self.now + seconds
        while True:  # the clock moves with each round
            self.look()
            pause_s = 0.05
            for _ in range(steps):
                pause_s = await self.delivery.step()
                await asyncio.sleep(0)
                if calls := self.delivery.calls:
                    await asyncio.wait(calls, timeout=_CALL_S)
                    pause_s = 0.0
                elif pause_s > 0.0:
                    break
            if self.now >= end:
                return
            await self._give_time_to_late_calls()
            self.now += max(0.01, min(pause_s, self.pause_max_s, end - self.now))

    async def _give_time_to_late_calls(self) -> None:
        """Waits in real time for calls that no pass waits for, once for each. Their threads may just be slow to start,
        while this clock runs through seconds in no time."""
        late = asyncio.all_tasks() - {asyncio.current_task()} - self._given_time
        if late:
            self._given_time |= late
            await asyncio.wait(late, timeout=_LATE_CALL_S)

    async def kill(self) -> None:
        """Ends it without a word, with all other tasks of the event loop. Its number stays present."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _clock(self) -> float:
        return self.now
