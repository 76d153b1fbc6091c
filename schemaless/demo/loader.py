"""Loader: puts flights through HTTP batches, several in flight. A flight's STATUS is put after its BASE is stored.

A cell that is buffered (202) or refused for now (503) is put again until it is stored. The load fails only when nothing
moves within the stall bound. Every put is idempotent, so nothing is written twice (I1).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from schemaless.cell import PutStatus
from schemaless.client.answers import PutFailure
from schemaless.client.async_client import AsyncClient
from schemaless.client.put_batch import NewCell
from schemaless.demo.flights import Flight
from schemaless.demo.progress import SEE_STATUS
from schemaless.errors import SchemalessError, Unavailable
from schemaless.runtime.batching import chunks

BATCH_FLIGHTS = 500
BATCHES_IN_FLIGHT = 4
STALL_TIMEOUT_S = 180.0
PAUSE_S = 0.25
PAUSE_MAX_S = 2.0
RETRY_CELLS = 100

_DONE = frozenset({PutStatus.STORED, PutStatus.ALREADY_STORED})


@dataclass(slots=True)
class LoadCount:
    """Cells by the status of their last put, and how many puts had to be repeated."""

    by_status: Counter[PutStatus] = field(default_factory=Counter)
    by_copies: Counter[int] = field(default_factory=Counter)
    tried_again: int = 0
    seconds: float = 0.0

    @property
    def acknowledged(self) -> int:
        return sum(self.by_status.values())


class Loader:
    """Puts flights until all of them are stored. `progress` is called with the number of newly stored cells."""

    def __init__(
        self,
        client: AsyncClient,
        progress: Callable[[int], None],
        *,
        batch_flights: int = BATCH_FLIGHTS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._progress = progress
        self._batch_flights = batch_flights
        self._clock = clock
        self._sleep = sleep
        self.count = LoadCount()

    async def load(self, flights: Iterable[Flight]) -> LoadCount:
        """Loads all flights. Raises the first error that another attempt can't repair, such as a conflict."""
        started = self._clock()
        left = iter(flights)

        async def work() -> None:
            while batch := list(islice(left, self._batch_flights)):
                await self._store([flight.base_cell() for flight in batch])
                await self._store([flight.status_cell() for flight in batch])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(BATCHES_IN_FLIGHT):
                    group.create_task(work())
        except* SchemalessError as failed:
            raise failed.exceptions[0] from None
        self.count.seconds = self._clock() - started
        return self.count

    async def _store(self, cells: Sequence[NewCell]) -> None:
        """Puts cells until every one is stored. Later attempts use small requests, with growing pauses before them."""
        left = await self._put(cells)
        pause_s, moved_at = PAUSE_S, self._clock()
        while left:
            await self._sleep(pause_s)
            before, left = left, []
            for some in chunks(before, count_max=RETRY_CELLS):
                left += await self._put(some)
            if len(left) < len(before):
                pause_s, moved_at = PAUSE_S, self._clock()
                continue
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
            if self._clock() - moved_at > STALL_TIMEOUT_S:
                raise Unavailable(f"{len(left)} cells could not be stored for {STALL_TIMEOUT_S:.0f} s", hint=SEE_STATUS)

    async def _put(self, cells: Sequence[NewCell]) -> list[NewCell]:
        """Puts cells once, and returns those that need another attempt."""
        try:
            results = await self._client.put_cells(cells)
        except Unavailable:
            self.count.tried_again += len(cells)
            return list(cells)
        left = []
        for cell, result in zip(cells, results, strict=True):
            if isinstance(result, PutFailure):
                if not result.error.retryable:
                    raise result.error
                left.append(cell)
            elif result.status in _DONE:
                self.count.by_status[result.status] += 1
                self.count.by_copies[result.copies] += 1
            else:
                left.append(cell)
        self.count.tried_again += len(left)
        self._progress(len(cells) - len(left))
        return left
