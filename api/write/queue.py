"""MasterWriteQueues: all writes of puts to the masters, in batches, behind a circuit breaker for each master."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from api.write.write_breaker import BreakerState, WriteBreaker
from schemaless.batching import Batcher, BatchLimits
from schemaless.cell import Placed
from schemaless.errors import NodeRefuses, SchemalessError, StorageUnavailable
from schemaless.storage import put_transaction
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.buffer_table import BufferOutcome, BufferRow
from schemaless.topology import Datastore

_LIMITS = BatchLimits(lanes=1)
"""One lane: a second one would wait for the head locks of the first, and halve the batches."""
_ROW_BYTES = 100
"""What a cell weighs beside its body."""
_BYTES_PER_S_MIN = 8 << 20
"""Large batches get longer than `timeout_s`: at least this much must go through."""


class MasterWriteQueues:
    """One queue for each master and datastore, and one breaker for each master.

    A queue has one operation in flight, and the next one takes all that arrived meanwhile. When a master fails, all
    that waits for it fails at once.
    """

    def __init__(
        self, storage: AsyncStorage, *, timeout_s: float, open_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.breakers = {name: WriteBreaker(open_s, clock) for name in sorted(storage.topology.clusters)}
        self._copy_breakers = {name: WriteBreaker(open_s, clock) for name in self.breakers}
        self._storage = storage
        self._timeout_s = timeout_s
        self._batchers: dict[tuple[str, str], Batcher[BufferRow, Placed | BufferOutcome]] = {}

    def takes_copies(self, cluster: str) -> bool:
        """Returns whether second copies may go there: its master answers, and didn't just refuse one."""
        return self.breakers[cluster].may_allow() and self._copy_breakers[cluster].may_allow()

    def is_full(self, cluster: str, datastore: Datastore) -> bool:
        batcher = self._batchers.get((cluster, datastore.name))
        return batcher is not None and batcher.full

    def store(self, cluster: str, datastore: Datastore, rows: Sequence[BufferRow]) -> asyncio.Future[Sequence[Placed]]:
        """Puts rows whose home is `cluster` into their entity tables. The result is the place of each, in order.

        Raises StorageUnavailable at once while the breaker is open, Unavailable when the queue is full.
        """
        return cast("asyncio.Future[Sequence[Placed]]", self._submit(cluster, datastore, rows))

    def buffer(
        self, cluster: str, datastore: Datastore, rows: Sequence[BufferRow]
    ) -> asyncio.Future[Sequence[BufferOutcome]]:
        """Puts rows whose home is another cluster into the buffer. Raises what `store` does."""
        if not self._copy_breakers[cluster].allows():
            raise breaker_open(cluster)
        return cast("asyncio.Future[Sequence[BufferOutcome]]", self._submit(cluster, datastore, rows))

    async def drain(self) -> None:
        """Returns when everything that was submitted has its outcome. Called at the end, with no request in flight."""
        while busy := [batcher for batcher in self._batchers.values() if batcher.busy]:
            for batcher in busy:
                await batcher.drain()

    def _submit(
        self, cluster: str, datastore: Datastore, rows: Sequence[BufferRow]
    ) -> asyncio.Future[Sequence[Placed | BufferOutcome]]:
        """The rows' own `home` decides which table each goes to, so both kinds share a transaction."""
        if not self.breakers[cluster].allows():
            raise breaker_open(cluster)
        batcher = self._batchers.get((cluster, datastore.name))
        if batcher is None:
            flush = partial(self._flush, cluster, datastore)
            batcher = self._batchers[cluster, datastore.name] = Batcher(flush, _LIMITS)
        return batcher.submit(rows, _weight(rows))

    async def _flush(
        self, cluster: str, datastore: Datastore, rows: list[BufferRow]
    ) -> Sequence[Placed | BufferOutcome]:
        breaker, copy_breaker = self.breakers[cluster], self._copy_breakers[cluster]
        copies = sum([row.home != cluster for row in rows])
        only_copies = copies == len(rows)
        if breaker.state is BreakerState.OPEN or (only_copies and copy_breaker.state is BreakerState.OPEN):
            raise breaker_open(cluster)  # it failed while these waited
        timeout_s = self._timeout_s + _weight(rows) / _BYTES_PER_S_MIN
        try:
            outcomes = await self._storage.master(cluster).run(
                put_transaction.put_copies, datastore, cluster, rows, timeout_s=timeout_s
            )
        except SchemalessError as error:
            if tells_breaker(error):
                breaker.failed()
                raise
            breaker.succeeded()  # it answered
            if only_copies and isinstance(error, NodeRefuses):
                copy_breaker.failed()
            raise
        breaker.succeeded()
        if copies:
            copy_breaker.succeeded()
        return outcomes


def tells_breaker(error: SchemalessError) -> bool:
    """Returns whether an error means that the master can't be reached, and not that it refuses one thing."""
    return isinstance(error, StorageUnavailable) and not isinstance(error, NodeRefuses)


def breaker_open(cluster: str) -> StorageUnavailable:
    return StorageUnavailable(f"the circuit breaker of cluster {cluster}'s master is open after a failure")


def _weight(rows: Sequence[BufferRow]) -> int:
    return sum([len(row.body) + _ROW_BYTES for row in rows])
