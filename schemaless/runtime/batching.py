"""Batching: many items in one flush without waiting ("natural batching", `Batcher`), one list in bounded chunks, and
several awaitables at once.

What arrives while a flush is under way goes into the next one. An idle batcher flushes at once, so a single item never
waits for company. Everything is bounded (I14).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from schemaless.errors import (
    LockTimeout,
    NodeRefuses,
    PacketTooLarge,
    SchemalessError,
    ShardsLocked,
    TableMissing,
    Unavailable,
)
from schemaless.runtime.pace import Pace

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def chunks(
    items: Sequence[Item],
    *,
    count_max: int | None = None,
    bytes_max: int | None = None,
    size_bytes: Callable[[Item], int] = lambda item: 0,
) -> Iterator[Sequence[Item]]:
    """Yields consecutive slices of `items`, each within both bounds. An item above `bytes_max` gets a slice of its own.

    No slice is empty, so no items give no slices.
    """
    start = size = 0
    for position, item in enumerate(items):
        item_bytes = size_bytes(item)
        is_full = position - start == count_max or (bytes_max is not None and size + item_bytes > bytes_max)
        if is_full and position > start:
            yield items[start:position]
            start, size = position, 0
        size += item_bytes
    if start < len(items):
        yield items[start:]


async def all_or_first_error(work: Iterable[Awaitable[Item]]) -> list[Item]:
    """Awaits all of them, also after one failed, so that nothing continues unseen. Raises the first error."""
    pending = list(work)
    if len(pending) == 1:  # the usual case needs no task of its own
        return [await pending[0]]
    results = await asyncio.gather(*pending, return_exceptions=True)
    values: list[Item] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


Flush = Callable[[list[Item]], Awaitable[Sequence[Outcome]]]
"""One outcome for each item, in order, or an error for all of them."""


REFUSALS_MAX = 8
"""Of units one after the other, until the node is taken to refuse all: each costs several round trips."""
REFUSED_FOR_S = 1.0
"""How long a node that refused all isn't asked again. Its batches fail at once meanwhile."""
OF_A_PART = (LockTimeout, PacketTooLarge, ShardsLocked, TableMissing)
"""Refusals that say nothing about the rest of the node, so they are never kept."""

_NO_OUTCOME = Unavailable("the flush ended without an outcome")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`lanes` flushes run at once. At most `queued_bytes_max` bytes wait, and more are turned away.

    An idle lane waits `gather_s` for what is submitted at nearly the same time. A pause of the pace ends when
    `paced_bytes_max` bytes wait: in a batch so large it is the items that cost, and no longer the batch itself.
    """

    lanes: int = 1
    items_max: int = 1000
    bytes_max: int = 4 << 20
    queued_bytes_max: int = 64 << 20
    queued_units_max: int = 20_000
    gather_s: float = 0.0
    paced_bytes_max: int = 64 << 10


class _Unit(Generic[Item, Outcome]):
    """What one caller submitted: never split, so the order of its items holds."""

    __slots__ = ("future", "items", "size_bytes")

    def __init__(self, items: Sequence[Item], size_bytes: int, future: asyncio.Future[Sequence[Outcome]]) -> None:
        self.items = items
        self.size_bytes = size_bytes
        self.future = future

    def resolve(self, outcomes: Sequence[Outcome]) -> None:
        if not self.future.done():  # its caller may have gone away
            self.future.set_result(outcomes)

    def fail(self, error: SchemalessError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Batcher(Generic[Item, Outcome]):
    """Lives on one event loop. With a `pace`, a lane waits after a flush in proportion to what the last ones took.

    It waits no longer than until a large batch has come together.
    """

    def __init__(self, flush: Flush[Item, Outcome], limits: BatchLimits, pace: Pace | None = None) -> None:
        self._flush = flush
        self._pace = pace
        self._limits = limits
        self._queue: deque[_Unit[Item, Outcome]] = deque()
        self._queued_bytes = 0
        self._large = asyncio.Event()  # so many bytes wait that no lane pauses
        self._lanes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()  # kept: Python asks the kernel for the process each time
        self._refusal: NodeRefuses | None = None
        self._refused_until = 0.0
        self._running = 0  # lanes that will look at the queue again. A task is done only a few steps of the loop later

    @property
    def busy(self) -> bool:
        """Whether anything submitted may still be without its outcome."""
        return bool(self._lanes)

    @property
    def full(self) -> bool:
        return self._queued_bytes >= self._limits.queued_bytes_max or len(self._queue) >= self._limits.queued_units_max

    def submit(self, items: Sequence[Item], size_bytes: int) -> asyncio.Future[Sequence[Outcome]]:
        """The outcomes of `items`, in order. They are flushed together, in one batch with others.

        Raises Unavailable when the queue is full. Cancelling the future takes the items out if they still wait.
        """
        if self.full:
            raise Unavailable("too many items are queued already")
        future: asyncio.Future[Sequence[Outcome]] = self._loop.create_future()
        self._queue.append(_Unit(items, size_bytes, future))
        self._queued_bytes += size_bytes
        if self._queued_bytes >= self._limits.paced_bytes_max:
            self._large.set()
        if self._running < self._limits.lanes:
            self._running += 1
            lane = self._loop.create_task(self._run_lane())
            self._lanes.add(lane)
            lane.add_done_callback(self._lanes.discard)
        return future

    async def drain(self) -> None:
        """Returns when all that was submitted has its outcome."""
        while self._lanes:
            await asyncio.wait(self._lanes)

    async def _run_lane(self) -> None:
        try:
            if self._limits.gather_s:
                await asyncio.sleep(self._limits.gather_s)
            while batch := self._take():
                began = self._loop.time()
                await self._settle(batch)
                if self._pace is not None:
                    self._pace.took(self._loop.time() - began)
                    await self._pause(self._pace.pause_s)
        finally:
            self._running -= 1
            if not self._running:  # it failed: no other lane will come for what waits
                for unit in self._take_all():
                    unit.fail(_NO_OUTCOME)

    async def _pause(self, seconds: float) -> None:
        """Waits, but no longer than until a large batch waits."""
        if not seconds or self._queued_bytes >= self._limits.paced_bytes_max:
            return await asyncio.sleep(0)
        self._large.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._large.wait()

    def _take(self) -> list[_Unit[Item, Outcome]]:
        """Returns the oldest units that fit into one flush. A unit above the limits goes alone."""
        batch: list[_Unit[Item, Outcome]] = []
        items = size_bytes = 0
        while self._queue:
            unit = self._queue[0]
            items += len(unit.items)
            size_bytes += unit.size_bytes
            if batch and (items > self._limits.items_max or size_bytes > self._limits.bytes_max):
                break
            self._queue.popleft()
            self._queued_bytes -= unit.size_bytes
            if unit.future.cancelled():
                items -= len(unit.items)
                size_bytes -= unit.size_bytes
            else:
                batch.append(unit)
        return batch

    def _take_all(self) -> Iterator[_Unit[Item, Outcome]]:
        while batch := self._take():
            yield from batch

    async def _settle(self, batch: list[_Unit[Item, Outcome]]) -> None:
        if self._refusal is not None and self._loop.time() < self._refused_until:
            for unit in batch:
                unit.fail(self._refusal)
            return
        try:
            outcomes = await self._flush([item for unit in batch for item in unit.items])
            start = 0
            for unit in batch:
                end = start + len(unit.items)
                unit.resolve(outcomes[start:end])
                start = end
        except NodeRefuses as error:  # perhaps for the sake of one unit
            await self._settle_one_by_one(batch, error)
        except Unavailable as error:
            for unit in batch:
                unit.fail(error)
        except SchemalessError as error:
            await self._settle_one_by_one(batch, error)
        finally:
            for unit in batch:  # whatever ended the flush, nobody waits for ever
                unit.fail(_NO_OUTCOME)

    async def _settle_one_by_one(self, batch: list[_Unit[Item, Outcome]], error: SchemalessError) -> None:
        """The batch was refused for the sake of one unit: only the guilty one fails."""
        if len(batch) == 1:
            batch[0].fail(error)
            return
        refused = 0
        for unit in batch:
            if refused >= REFUSALS_MAX:
                unit.fail(error)
                continue
            await self._settle([unit])
            failure = None if unit.future.cancelled() else unit.future.exception()
            if isinstance(failure, NodeRefuses):
                refused += 1
                if refused == REFUSALS_MAX and not isinstance(failure, OF_A_PART):
                    self._refusal, self._refused_until = failure, self._loop.time() + REFUSED_FOR_S
            elif failure is None:
                refused = 0
