"""Gate: the batched writes of one kind to one master, behind that master's breaker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from api.breaker import Breaker, BreakerState
from schemaless.batcher import Batcher, BatchLimits
from schemaless.cell import Cell
from schemaless.errors import SchemalessError, StorageUnavailable
from schemaless.storage.async_driver import AsyncNode
from schemaless.storage.operation import Operation

Written = TypeVar("Written", bound=Cell)
Outcome = TypeVar("Outcome")

_ROW_BYTES = 100
"""What a cell weighs beside its body."""
_BYTES_PER_S_MIN = 8 << 20
"""Large batches get longer than `timeout_s`: at least this much must go through."""


class Gate(Generic[Written, Outcome]):
    """Puts what arrives into one operation at a time. A failing master turns all that waits away at once."""

    def __init__(
        self,
        node: AsyncNode,
        breaker: Breaker,
        write: Callable[[list[Written]], Operation[list[Outcome]]],
        *,
        timeout_s: float,
        limits: BatchLimits,
    ) -> None:
        self._node = node
        self._breaker = breaker
        self._write = write
        self._timeout_s = timeout_s
        self._batcher: Batcher[Written, Outcome] = Batcher(self._flush, limits)

    @property
    def full(self) -> bool:
        return self._batcher.full

    def submit(self, cells: Sequence[Written]) -> asyncio.Future[Sequence[Outcome]]:
        """The outcome of each, in order. Raises StorageUnavailable at once while the breaker is open, Unavailable
        when too much waits.
        """
        if not self._breaker.allows():
            raise StorageUnavailable(f"{self._node.node.name}: left alone after a failure")
        return self._batcher.submit(cells, _weight(cells))

    async def drain(self) -> None:
        await self._batcher.drain()

    async def _flush(self, cells: list[Written]) -> Sequence[Outcome]:
        if self._breaker.state is BreakerState.OPEN:  # it failed while these waited
            raise StorageUnavailable(f"{self._node.node.name}: left alone after a failure")
        timeout_s = self._timeout_s + _weight(cells) / _BYTES_PER_S_MIN
        try:
            outcomes = await self._node.run(partial(self._write, cells), timeout_s=timeout_s)
        except StorageUnavailable:
            self._breaker.failed()
            raise
        except SchemalessError:
            self._breaker.succeeded()  # it answered
            raise
        self._breaker.succeeded()
        return outcomes


def _weight(cells: Sequence[Cell]) -> int:
    return sum([len(cell.body) + _ROW_BYTES for cell in cells])
