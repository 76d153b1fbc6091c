"""Secondaries: the first durable copy of a put, a buffer row on a master that isn't the cell's home (I5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import structlog

from api.write.outcome import BufferState, PendingPut
from api.write.queue import MasterWriteQueues, tells_breaker
from schemaless.cell import ColumnName, RowKey
from schemaless.errors import Overloaded, SchemalessError
from schemaless.runtime.batching import Batcher, BatchLimits
from schemaless.sharding import by_rendezvous
from schemaless.storage import buffer_table
from schemaless.storage.asyncmy_driver import AsyncStorage, Traffic
from schemaless.storage.buffer_table import BufferOutcome, BufferRow
from schemaless.storage.failover import answers_of_all
from schemaless.topology import Datastore

log = structlog.get_logger()

_STATES = {
    BufferOutcome.INSERTED: BufferState.INSERTED,
    BufferOutcome.SHARED: BufferState.SHARED,
    BufferOutcome.CONFLICT: BufferState.CONFLICT,
}


_Column = tuple[str, RowKey, ColumnName]
_QUESTION_LIMITS = BatchLimits(lanes=1)
_COLUMN_BYTES = 100


class Secondaries:
    """Chooses the secondary of each put, and another one when that fails."""

    def __init__(
        self,
        storage: AsyncStorage,
        queues: MasterWriteQueues,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._queues = queues
        self._timeout_s = timeout_s
        self._clock = clock
        self._questions: dict[str, Batcher[_Column, int]] = {}

    def choose(self, home: str, row_key: RowKey, failed: Collection[str] = ()) -> str | None:
        """Returns the cluster that the row prefers among those that take second copies, or None.

        `failed` are clusters that this put has tried.
        """
        others = [
            name
            for name in self._queues.breakers
            if name != home and name not in failed and self._queues.takes_copies(name)
        ]
        return by_rendezvous(row_key, others)[0] if others else None

    async def highest_ref_key(self, datastore: Datastore, home: str, row_key: RowKey, column_name: ColumnName) -> int:
        """Returns the highest ref_key of a column's cells that wait in a buffer which can be asked, 0 for none.

        It asks all that can be asked, because another process may have answered "buffered". Raises Overloaded where
        this process has too much to do to ask: that says nothing about the buffer.
        """
        others = [name for name in self._queues.breakers if name != home]
        asked = [name for name in others if self._queues.breakers[name].may_allow()]
        column = (datastore.name, row_key, column_name)
        questions = {name: self._ask_for_ref_key(name, column) for name in asked}
        answers = await answers_of_all(questions, tolerated=SchemalessError)
        for name, error in answers.failures.items():
            if isinstance(error, Overloaded):
                raise error
            log.info("a buffer can't be asked for a ref_key", cluster=name, error=str(error))
        return max(answers.found.values(), default=0)

    async def _ask_for_ref_key(self, cluster: str, column: _Column) -> int:
        """Asks together with the other POSTs that arrived while the question before was under way."""
        batcher = self._questions.get(cluster)
        if batcher is None:
            master = self._storage.master(cluster)

            async def ask(columns: list[_Column]) -> list[int]:
                return await master.run(buffer_table.highest_ref_keys, columns, timeout_s=self._timeout_s / 2)

            batcher = self._questions[cluster] = Batcher(ask, _QUESTION_LIMITS)
        (highest,) = await batcher.submit([column], _COLUMN_BYTES)
        return highest

    async def buffer(self, datastore: Datastore, home: str, puts: Sequence[PendingPut]) -> None:
        """Sets what the secondary said of each put. A put that no secondary took within the time-out stays NONE.

        Any error of a secondary, of whatever kind, means that the next one is tried (I5).
        """
        if len(self._queues.breakers) == 1:  # there is no other cluster
            return
        deadline = self._clock() + self._timeout_s
        failed: set[str] = set()
        waiting = await self._buffer_once(datastore, home, puts, failed)
        for _ in range(len(self._queues.breakers) - 2):
            left_s = deadline - self._clock()
            if not waiting or left_s <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    waiting = await self._buffer_once(datastore, home, waiting, failed)

    async def take_back(self, datastore: Datastore, puts: Sequence[PendingPut]) -> None:
        """Deletes the buffer rows that refused puts inserted. If a delete fails, the cleaner records the conflict."""
        groups: dict[str, list[BufferRow]] = {}
        for put in puts:
            if put.secondary is not None and put.buffered is BufferState.INSERTED:
                groups.setdefault(put.secondary, []).append(put.row)
        for secondary, rows in groups.items():
            try:
                await self._storage.master(secondary).run(
                    buffer_table.remove, datastore, rows, timeout_s=self._timeout_s, traffic=Traffic.WRITE
                )
            except SchemalessError as error:
                if tells_breaker(error):
                    self._queues.breakers[secondary].failed()
                log.warning("a refused put's buffer row stays for the cleaner", cluster=secondary, error=str(error))

    async def _buffer_once(
        self, datastore: Datastore, home: str, puts: Sequence[PendingPut], failed: set[str]
    ) -> list[PendingPut]:
        """Tries each put's preferred secondary once, and adds those that fail to `failed`.

        Returns the puts that no secondary took.
        """
        groups: dict[str, list[PendingPut]] = {}
        for put in puts:
            secondary = self.choose(home, put.row.key.row_key, failed)
            if secondary is not None:
                groups.setdefault(secondary, []).append(put)
        if len(groups) == 1:  # the usual case pays for no tasks
            ((secondary, group),) = groups.items()
            await self._buffer_on(datastore, secondary, group, failed)
        elif groups:
            await asyncio.gather(*(self._buffer_on(datastore, name, group, failed) for name, group in groups.items()))
        return [put for put in puts if put.buffered is BufferState.NONE]

    async def _buffer_on(
        self, datastore: Datastore, secondary: str, puts: Sequence[PendingPut], failed: set[str]
    ) -> None:
        try:
            outcomes = await self._queues.buffer(secondary, datastore, [put.row for put in puts])
        except SchemalessError:
            failed.add(secondary)
            return
        for put, outcome in zip(puts, outcomes, strict=True):
            if isinstance(outcome, SchemalessError):
                failed.add(secondary)
            else:
                put.buffered, put.secondary = _STATES[outcome], secondary
