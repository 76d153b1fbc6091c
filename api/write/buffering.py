"""Secondaries: the first durable copy of a put, a buffer row on a master that isn't the cell's home (I5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from api.write.outcome import PutResult
from api.write.queue import Gates
from schemaless.cell import RowKey
from schemaless.errors import Busy, SchemalessError, StorageUnavailable, Unavailable
from schemaless.sharding import by_rendezvous
from schemaless.storage import buffer_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.buffer_table import BufferOutcome, BufferRow
from schemaless.topology import Datastore


class Copy(msgspec.Struct, gc=False):
    """A cell on its way: the secondary that took it and what it said; at last, what came of the put."""

    cell: BufferRow
    secondary: str | None = None
    outcome: BufferOutcome | None = None
    result: PutResult | None = None

    @property
    def durable(self) -> bool:
        return self.outcome is BufferOutcome.INSERTED or self.outcome is BufferOutcome.SHARED


class Secondaries:
    """Chooses the secondary of each put, and another one when that fails."""

    def __init__(
        self, storage: AsyncStorage, gates: Gates, *, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._storage = storage
        self._gates = gates
        self._timeout_s = timeout_s
        self._clock = clock

    def choose(self, home: str, row_key: RowKey) -> str | None:
        """The cluster that the row prefers of those that may be tried now; None when there is none."""
        others = [name for name, breaker in self._gates.breakers.items() if name != home and breaker.may_allow()]
        return by_rendezvous(row_key, others)[0] if others else None

    async def buffer(self, datastore: Datastore, home: str, copies: Sequence[Copy]) -> None:
        """Each copy learns its secondary and outcome within the time-out; it keeps None when no secondary took it."""
        deadline = self._clock() + self._timeout_s
        waiting = await self._buffer_once(datastore, home, copies)
        for _ in range(len(self._gates.breakers) - 2):  # one failed: another one is tried
            left_s = deadline - self._clock()
            if not waiting or left_s <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    waiting = await self._buffer_once(datastore, home, waiting)

    async def take_back(self, datastore: Datastore, copies: Sequence[Copy]) -> None:
        """Removes the rows of puts that the home refused. What can't be removed now the cleaner finds, and records."""
        groups: dict[str, list[BufferRow]] = {}
        for copy in copies:
            if copy.secondary is not None and copy.outcome is BufferOutcome.INSERTED:
                groups.setdefault(copy.secondary, []).append(copy.cell)
        for secondary, rows in groups.items():
            try:
                await self._storage.master(secondary).run(
                    buffer_table.remove, datastore, rows, timeout_s=self._timeout_s
                )
            except StorageUnavailable:
                self._gates.breakers[secondary].failed()

    async def _buffer_once(self, datastore: Datastore, home: str, copies: Sequence[Copy]) -> list[Copy]:
        """Returns those that no secondary took."""
        groups: dict[str, list[Copy]] = {}
        for copy in copies:
            secondary = self.choose(home, copy.cell.key.row_key)
            if secondary is not None:
                groups.setdefault(secondary, []).append(copy)
        if len(groups) == 1:  # the usual case pays for no tasks
            ((secondary, group),) = groups.items()
            await self._buffer_on(datastore, secondary, group)
        elif groups:
            await asyncio.gather(*(self._buffer_on(datastore, name, group) for name, group in groups.items()))
        return [copy for copy in copies if copy.secondary is None and copy.result is None]

    async def _buffer_on(self, datastore: Datastore, secondary: str, copies: Sequence[Copy]) -> None:
        try:
            outcomes = await self._gates.to(secondary, datastore).buffer([copy.cell for copy in copies])
        except (Unavailable, Busy):
            return
        except SchemalessError as error:
            for copy in copies:
                copy.result = error
            return
        for copy, outcome in zip(copies, outcomes, strict=True):
            copy.secondary = secondary
            copy.outcome = outcome
