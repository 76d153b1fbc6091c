"""Gate: all batched writes to one master, behind that master's breaker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from api.write.breaker import Breaker, BreakerState
from schemaless.batching import Batcher, BatchLimits
from schemaless.cell import Placed
from schemaless.errors import SchemalessError, StorageUnavailable
from schemaless.storage import put_transaction
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.buffer_table import BufferOutcome, BufferRow
from schemaless.topology import Datastore

_LIMITS = BatchLimits(lanes=1)
"""One: a second one would wait for the head locks of the first, and halve the batches."""
_ROW_BYTES = 100
"""What a cell weighs beside its body."""
_BYTES_PER_S_MIN = 8 << 20
"""Large batches get longer than `timeout_s`: at least this much must go through."""


class Gate:
    """Puts what arrives for one datastore on one master into one operation at a time. A failing master turns all that
    waits away at once.
    """

    def __init__(self, node: AsyncNode, breaker: Breaker, datastore: Datastore, cluster: str, timeout_s: float) -> None:
        self._node = node
        self._breaker = breaker
        self._datastore = datastore
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._batcher: Batcher[BufferRow, Placed | BufferOutcome] = Batcher(self._flush, _LIMITS)

    @property
    def full(self) -> bool:
        return self._batcher.full

    @property
    def busy(self) -> bool:
        return self._batcher.busy

    def store(self, rows: Sequence[BufferRow]) -> asyncio.Future[Sequence[Placed]]:
        """Puts rows whose home this is (`row.home` decides) into their entity tables; the place of each, in order.

        Raises StorageUnavailable at once while the breaker is open, Unavailable when too much waits.
        """
        return cast("asyncio.Future[Sequence[Placed]]", self._submit(rows))

    def buffer(self, rows: Sequence[BufferRow]) -> asyncio.Future[Sequence[BufferOutcome]]:
        """Puts rows whose home is elsewhere into the buffer. Raises as `store`."""
        return cast("asyncio.Future[Sequence[BufferOutcome]]", self._submit(rows))

    async def drain(self) -> None:
        await self._batcher.drain()

    def _submit(self, rows: Sequence[BufferRow]) -> asyncio.Future[Sequence[Placed | BufferOutcome]]:
        if not self._breaker.allows():
            raise StorageUnavailable(f"{self._node.node.name}: left alone after a failure")
        return self._batcher.submit(rows, _weight(rows))

    async def _flush(self, rows: list[BufferRow]) -> Sequence[Placed | BufferOutcome]:
        if self._breaker.state is BreakerState.OPEN:  # it failed while these waited
            raise StorageUnavailable(f"{self._node.node.name}: left alone after a failure")
        timeout_s = self._timeout_s + _weight(rows) / _BYTES_PER_S_MIN
        try:
            outcomes = await self._node.run(
                put_transaction.put_copies, self._datastore, self._cluster, rows, timeout_s=timeout_s
            )
        except StorageUnavailable:
            self._breaker.failed()
            raise
        except SchemalessError:
            self._breaker.succeeded()  # it answered
            raise
        self._breaker.succeeded()
        return outcomes


def _weight(rows: Sequence[BufferRow]) -> int:
    return sum([len(row.body) + _ROW_BYTES for row in rows])


class Gates:
    """Of all masters, each with one breaker for whoever writes there."""

    def __init__(self, storage: AsyncStorage, *, timeout_s: float, open_s: float, clock: Callable[[], float]) -> None:
        self.breakers = {name: Breaker(open_s, clock) for name in sorted(storage.topology.clusters)}
        self._storage = storage
        self._timeout_s = timeout_s
        self._gates: dict[tuple[str, str], Gate] = {}

    def to(self, cluster: str, datastore: Datastore) -> Gate:
        gate = self._gates.get((datastore.name, cluster))
        if gate is None:
            node, breaker = self._storage.master(cluster), self.breakers[cluster]
            gate = self._gates[datastore.name, cluster] = Gate(node, breaker, datastore, cluster, self._timeout_s)
        return gate

    async def drain(self) -> None:
        """Returns when all that was submitted has its outcome. For the end, when no call is in hand any more."""
        while busy := [gate for gate in self._gates.values() if gate.busy]:
            for gate in busy:
                await gate.drain()
