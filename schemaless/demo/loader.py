"""Loader: flights through HTTP batch puts, several under way. A flight's STATUS is put after its BASE is stored.

What is buffered (202) or refused for now (503) is put again until it is stored, however long a server is away, as
long as anything moves within the stall bound; every put is idempotent, so nothing is written twice (I1).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from schemaless.cell import PutStatus
from schemaless.client.answers import PutFailure, PutResult
from schemaless.client.async_client import AsyncClient
from schemaless.client.put_batch import NewCell
from schemaless.demo.flight import Flight
from schemaless.errors import SchemalessError, Unavailable

BATCH_FLIGHTS = 500
BATCHES_UNDER_WAY = 4
STALL_TIMEOUT_S = 180.0
PAUSE_S = 0.25
PAUSE_MAX_S = 2.0
SLICE_CELLS = 100

_DONE = frozenset({PutStatus.STORED, PutStatus.ALREADY_STORED})


@dataclass(slots=True)
class LoadCount:
    """Cells by the status that ended their load, and how many answers asked for another try."""

    by_status: Counter[PutStatus] = field(default_factory=Counter)
    by_copies: Counter[int] = field(default_factory=Counter)
    tried_again: int = 0
    seconds: float = 0.0

    @property
    def acknowledged(self) -> int:
        return sum(self.by_status.values())


class Loader:
    """`progress` is called with the number of cells that were just stored."""

    def __init__(self, client: AsyncClient, progress: Callable[[int], None]) -> None:
        self._client = client
        self._progress = progress
        self.count = LoadCount()

    async def load(self, flights: Iterable[Flight]) -> LoadCount:
        """Raises the first error that putting again can't mend, a conflict say."""
        started = time.monotonic()
        batches = _batches(iter(flights))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(BATCHES_UNDER_WAY):
                    group.create_task(self._work(batches))
        except* SchemalessError as failed:
            raise failed.exceptions[0] from None
        self.count.seconds = time.monotonic() - started
        return self.count

    async def _work(self, batches: Iterator[Sequence[Flight]]) -> None:
        for batch in batches:
            await self._store([flight.base_cell() for flight in batch])
            await self._store([flight.status_cell() for flight in batch])

    async def _store(self, cells: Sequence[NewCell]) -> None:
        """Until every one of them is stored. What has to be put again goes in small requests, after growing pauses."""
        left = await self._put(cells)
        pause_s, moved_at = PAUSE_S, time.monotonic()
        while left:
            await asyncio.sleep(pause_s)
            before, left = left, [cell for part in _slices(left) for cell in await self._put(part)]
            if len(left) < len(before):
                pause_s, moved_at = PAUSE_S, time.monotonic()
                continue
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
            if time.monotonic() - moved_at > STALL_TIMEOUT_S:
                raise Unavailable(f"{len(left)} cells could not be stored for {STALL_TIMEOUT_S:.0f} s")

    async def _put(self, cells: Sequence[NewCell]) -> Sequence[NewCell]:
        """Those that are to be put again."""
        try:
            results = await self._client.put_cells(cells)
        except Unavailable:
            self.count.tried_again += len(cells)
            return cells
        left = [cell for cell, result in zip(cells, results, strict=True) if not self._is_stored(result)]
        self.count.tried_again += len(left)
        self._progress(len(cells) - len(left))
        return left

    def _is_stored(self, result: PutResult) -> bool:
        if isinstance(result, PutFailure):
            _raise_if_final(result.error)
            return False
        if result.status not in _DONE:
            return False
        self.count.by_status[result.status] += 1
        self.count.by_copies[result.copies] += 1
        return True


def _batches(flights: Iterator[Flight]) -> Iterator[Sequence[Flight]]:
    while batch := list(islice(flights, BATCH_FLIGHTS)):
        yield batch


def _slices(cells: Sequence[NewCell]) -> Iterator[Sequence[NewCell]]:
    return (cells[start : start + SLICE_CELLS] for start in range(0, len(cells), SLICE_CELLS))


def _raise_if_final(error: SchemalessError) -> None:
    if not error.retryable:
        raise error
