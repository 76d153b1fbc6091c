"""MasterWriteQueues: all writes of puts to the masters, in batches, behind a circuit breaker for each master."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar, cast

from api.write.held_shards import HeldShards
from api.write.partial_store import PartialStore
from api.write.write_breaker import BreakerState, WriteBreaker
from schemaless.cell import Placed
from schemaless.errors import Busy, HeadsLocked, NodeRefuses, Overloaded, SchemalessError, StorageUnavailable
from schemaless.runtime.batching import Batcher, BatchLimits
from schemaless.storage import append, post_version, put_transaction
from schemaless.storage.asyncmy_driver import AsyncStorage, Traffic
from schemaless.storage.buffer_table import BufferOutcome, BufferRow
from schemaless.storage.operation import AGAIN_ON, Args, Operation
from schemaless.storage.post_version import NewVersion, NextVersion
from schemaless.topology import Datastore

T = TypeVar("T")
Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

_LIMITS = BatchLimits(lanes=1)
"""One lane: a second one would wait for the head locks of the first, and halve the batches."""
_APPEND_LIMITS = BatchLimits(lanes=1, items_max=append.SHARDS_MAX)
"""POSTs of one column follow one another in one script. One lane: a second one would wait for the same head."""
_LOCKS_MET_MAX = 2
"""How often one batch waits for a lock. The first time, all shards that are locked are found."""
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
        self,
        storage: AsyncStorage,
        *,
        timeout_s: float,
        open_s: float,
        latest: Callable[[str], int | None] = lambda cluster: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`latest` returns the latest created_at that is believed of a cluster's master (I4)."""
        self.breakers = {name: WriteBreaker(open_s, clock) for name in sorted(storage.topology.clusters)}
        self._copy_breakers = {name: WriteBreaker(open_s, clock) for name in self.breakers}
        self._storage = storage
        self._timeout_s = timeout_s
        self._latest = latest
        self._batchers: dict[tuple[str, str], Batcher[BufferRow, Placed | BufferOutcome | SchemalessError]] = {}
        self._appenders: dict[tuple[str, str, bool], Batcher[NewVersion, NextVersion | SchemalessError]] = {}
        self._held: dict[tuple[str, str], HeldShards] = {}

    def takes_copies(self, cluster: str) -> bool:
        """Returns whether second copies may go there: its master answers, and didn't just refuse one."""
        return self.breakers[cluster].may_allow() and self._copy_breakers[cluster].may_allow()

    def is_full(self, cluster: str, datastore: Datastore) -> bool:
        batcher = self._batchers.get((cluster, datastore.name))
        return batcher is not None and batcher.full

    def store(
        self, cluster: str, datastore: Datastore, rows: Sequence[BufferRow]
    ) -> asyncio.Future[Sequence[Placed | SchemalessError]]:
        """Puts rows whose home is `cluster` into their entity tables. The result is the place of each, in order.

        A row that the master refuses has an error, such as a HeadsLocked where another transaction holds the head of
        its shard. The other rows are stored.

        Raises StorageUnavailable at once while the breaker is open, Unavailable when the queue is full.
        """
        return cast("asyncio.Future[Sequence[Placed | SchemalessError]]", self._submit(cluster, datastore, rows))

    def buffer(
        self, cluster: str, datastore: Datastore, rows: Sequence[BufferRow]
    ) -> asyncio.Future[Sequence[BufferOutcome | SchemalessError]]:
        """Puts rows whose home is another cluster into the buffer. Raises what `store` does."""
        if not self._copy_breakers[cluster].allows():
            raise breaker_open(cluster)
        return cast("asyncio.Future[Sequence[BufferOutcome | SchemalessError]]", self._submit(cluster, datastore, rows))

    def append(
        self, cluster: str, datastore: Datastore, version: NewVersion
    ) -> asyncio.Future[Sequence[NextVersion | SchemalessError]]:
        """Appends a version to its column. POSTs that wait become one script. Raises what `store` does.

        Those without an Idempotency-Key have a queue of their own: nothing recognises a version whose outcome was lost,
        so they are never run again.
        """
        if not self.breakers[cluster].allows():
            raise breaker_open(cluster)
        is_keyed = version.idempotency_key is not None
        batcher = self._appenders.get((cluster, datastore.name, is_keyed))
        if batcher is None:
            flush = partial(self._flush_appends, cluster, datastore, AGAIN_ON if is_keyed else (Busy,))
            batcher = self._appenders[cluster, datastore.name, is_keyed] = Batcher(flush, _APPEND_LIMITS)
        return batcher.submit([version], len(version.body) + _ROW_BYTES)

    def held_shards(self) -> int:
        """Returns how many shards stay out of shared transactions now."""
        return sum(len(held.shards) for held in self._held.values())

    async def drain(self) -> None:
        """Returns when everything that was submitted has its outcome. Called at the end, with no request in flight."""
        for batchers in (self._batchers, self._appenders):
            while busy := [batcher for batcher in batchers.values() if batcher.busy]:
                for batcher in busy:
                    await batcher.drain()
        for held in self._held.values():
            await held.close()

    def _submit(
        self, cluster: str, datastore: Datastore, rows: Sequence[BufferRow]
    ) -> asyncio.Future[Sequence[Placed | BufferOutcome | SchemalessError]]:
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
    ) -> Sequence[Placed | BufferOutcome | SchemalessError]:
        copy_breaker = self._copy_breakers[cluster]
        copies = sum([row.home != cluster for row in rows])
        if copies == len(rows) and copy_breaker.state is BreakerState.OPEN:
            raise breaker_open(cluster)  # it refused one while these waited

        def shard_at_home(row: BufferRow) -> int | None:
            return row.shard if row.home == cluster else None

        async def write(some: Sequence[BufferRow]) -> Sequence[Placed | BufferOutcome]:
            timeout_s = self._timeout_s + _weight(some) / _BYTES_PER_S_MIN
            return await self._on_master(
                cluster,
                put_transaction.put_copies,
                datastore,
                cluster,
                some,
                self._latest(cluster),
                timeout_s=timeout_s,
            )

        async def store(some: Sequence[BufferRow]) -> Sequence[Placed | BufferOutcome | SchemalessError]:
            return await self._without_held(cluster, datastore, some, shard_at_home, write)

        try:
            outcomes = await store(rows)
        except NodeRefuses as error:
            if copies == len(rows):
                copy_breaker.failed()
                raise
            if len(rows) == 1:
                raise
            partial_store: PartialStore[Placed | BufferOutcome] = PartialStore(rows, shard_at_home, store)
            outcomes = await partial_store.run(error)
        if copies:
            takes_copies = not any(
                isinstance(outcome, NodeRefuses) and row.home != cluster
                for row, outcome in zip(rows, outcomes, strict=True)
            )
            (copy_breaker.succeeded if takes_copies else copy_breaker.failed)()
        return outcomes

    async def _flush_appends(
        self,
        cluster: str,
        datastore: Datastore,
        again_on: tuple[type[SchemalessError], ...],
        versions: list[NewVersion],
    ) -> Sequence[NextVersion | SchemalessError]:
        async def write(some: Sequence[NewVersion]) -> Sequence[NextVersion | SchemalessError]:
            timeout_s = self._timeout_s + sum([len(version.body) for version in some]) / _BYTES_PER_S_MIN
            return await self._on_master(
                cluster,
                post_version.put_next,
                datastore,
                some,
                self._latest(cluster),
                timeout_s=timeout_s,
                again_on=again_on,
            )

        return await self._without_held(cluster, datastore, versions, lambda version: version.shard, write)

    async def _without_held(
        self,
        cluster: str,
        datastore: Datastore,
        items: Sequence[Item],
        shard_of: Callable[[Item], int | None],
        write: Callable[[Sequence[Item]], Awaitable[Sequence[Outcome]]],
    ) -> list[Outcome | HeadsLocked]:
        """Writes the items whose shards aren't held, and gives the others a HeadsLocked.

        A shard that turns out to be locked is held from then on, and the others are written again at once.
        """
        held = self._held.get((cluster, datastore.name))
        if held is None:
            held = self._held[cluster, datastore.name] = HeldShards(
                self._storage.master(cluster), datastore.name, timeout_s=self._timeout_s
            )
        for _ in range(_LOCKS_MET_MAX):
            free = [item for item in items if shard_of(item) not in held.shards] if held.shards else items
            try:
                outcomes = iter((await write(free)) if free else ())
            except HeadsLocked as error:
                held.hold(error.shards)
                locked = error
                continue
            if len(free) == len(items):
                return list(outcomes)
            kept = set(map(id, free))
            return [next(outcomes) if id(item) in kept else held.error() for item in items]
        raise locked

    async def _on_master(
        self,
        cluster: str,
        operation: Callable[[*Args], Operation[T]],
        *args: *Args,
        timeout_s: float,
        again_on: tuple[type[SchemalessError], ...] = AGAIN_ON,
    ) -> T:
        """Runs an operation, and lets the breaker know what came of it."""
        breaker = self.breakers[cluster]
        if breaker.state is BreakerState.OPEN:  # it failed while these waited
            raise breaker_open(cluster)
        try:
            outcome = await self._storage.master(cluster).run(
                operation, *args, timeout_s=timeout_s, again_on=again_on, traffic=Traffic.WRITE
            )
        except SchemalessError as error:
            if tells_breaker(error):
                breaker.failed()
            elif not isinstance(error, Overloaded):
                breaker.succeeded()  # it answered
            raise
        breaker.succeeded()
        return outcome


def tells_breaker(error: SchemalessError) -> bool:
    """Returns whether an error means that the master can't be reached, and not that it refuses one thing."""
    return isinstance(error, StorageUnavailable) and not isinstance(error, NodeRefuses)


def breaker_open(cluster: str) -> StorageUnavailable:
    return StorageUnavailable(f"the circuit breaker of cluster {cluster}'s master is open after a failure")


def _weight(rows: Sequence[BufferRow]) -> int:
    return sum([len(row.body) + _ROW_BYTES for row in rows])
