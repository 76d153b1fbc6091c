"""CellWriter: puts a cell on a secondary, then at home. `outcome.py` says what came of it (I5).

The way of a put:

    buffer row on the secondary ──► entity row at home ──► STORED or ALREADY_STORED, copies 2
        │ no secondary in time          │ unreachable, hung    └► another body there: own buffer row removed, CONFLICT
        └► home alone, copies 1         └► BUFFERED, or Unavailable when nothing was buffered

Interleavings that decided the details. K is a key, A and B are bodies that differ.

- B meets A in the buffer, while the home holds B. Then A belongs to a put under way that the home will refuse. So a
  conflict in the buffer is decided by the cell at home. The same body there is ALREADY_STORED. B is a CONFLICT only
  when the home holds another body, or when no node of the home shows a cell under K: then A came first.
- Two puts of B share a buffer row, and the home holds A. One put learns that and is a CONFLICT. The home's answer to
  the other one is lost, and that put said BUFFERED. The row must stay until the cleaner records the conflict. The
  `claim` in schemaless/storage/buffer_table.py sees to that.
- A put fails at home with the outcome unknown, and says BUFFERED. The cleaner puts the cell again, which changes
  nothing if the cell is there (I1).
- A buffer row whose outcome is unknown is not counted as a copy. It may be there, and the cleaner treats it as any
  other.
- Everything that is written to one master shares one transaction, second copies too. If another transaction holds a
  head, the batch waits a second, once. Then that shard stays out of shared transactions, its puts are buffered, and
  the rest of the batch is written (api/write/held_shards.py).
- A batch holds K twice. Buffer and home both keep its order, because a caller's cells for one home stay together.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from api.write.buffering import Secondaries
from api.write.outcome import BufferState, HomeState, PendingPut, PutOutcome, PutResult, too_few_copies
from api.write.queue import MasterWriteQueues, tells_breaker
from schemaless.cell import Cell, ColumnName, PutStatus, RowKey
from schemaless.config import ApiSettings
from schemaless.errors import Corrupt, SchemalessError, StorageUnavailable, Unavailable
from schemaless.runtime.batching import chunks
from schemaless.sharding import shard_of
from schemaless.storage import entity_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.buffer_table import BufferRow
from schemaless.storage.failover import first_answer
from schemaless.storage.post_version import NewVersion, NextVersion
from schemaless.topology import Datastore

CHUNK_BYTES_MAX = 4 << 20  # of one operation: twice that as SQL, below any server's max_allowed_packet

_AT_HOME = {
    PutStatus.STORED: HomeState.STORED,
    PutStatus.ALREADY_STORED: HomeState.ALREADY_STORED,
    PutStatus.CONFLICT: HomeState.CONFLICT,
}


class CellWriter:
    """Belongs to one event loop. All requests of a process share it."""

    def __init__(
        self,
        storage: AsyncStorage,
        settings: ApiSettings,
        clock: Callable[[], float] = time.monotonic,
        latest: Callable[[str], int | None] = lambda cluster: None,
        observe: Callable[[str, str, float], None] = lambda datastore, stage, seconds: None,
    ) -> None:
        """`observe` is called with the time of each stage of a put: buffer and home."""
        self.counts: Counter[tuple[PutStatus, int]] = Counter()
        """Counts puts by (status, copies) since the process started."""
        self._observe = observe
        self._clock = clock
        self._storage = storage
        self._settings = settings
        self._timeout_s = settings.write_timeout_s
        self._queues = MasterWriteQueues(
            storage, timeout_s=self._timeout_s, open_s=settings.breaker_open_s, latest=latest, clock=clock
        )
        self._secondaries = Secondaries(storage, self._queues, timeout_s=self._timeout_s, clock=clock)

    async def put(self, datastore: Datastore, cells: Sequence[Cell]) -> list[PutResult]:
        """Puts cells, and returns one result for each, in order. A key that comes twice counts in order.

        An Unavailable as a result means that the cell is not known to be durable on enough masters. It may still
        appear, and it may be put again.
        """
        if len(cells) == 1:  # the usual case pays for no grouping
            shard = shard_of(cells[0].key.row_key, datastore.shards)
            results = await self._put_chunk(datastore, datastore.home(shard), [(cells[0], shard)])
        else:
            results = await self._put_at_all(datastore, cells)
        for result in results:
            if isinstance(result, PutOutcome):
                self.counts[result.status, result.copies] += 1
        return results

    async def put_next(
        self,
        datastore: Datastore,
        row_key: RowKey,
        column_name: ColumnName,
        body: bytes,
        idempotency_key: str | None = None,
        cause: str | None = None,
    ) -> PutOutcome:
        """Puts `body` as the column's next version: home first, which gives the ref_key, then the second copy.

        Buffering first would be wrong. If the process died, the cleaner would store the cell without its
        Idempotency-Key, and the client's retry would create a second version.

        A cell that waits in a buffer was acknowledged, so its ref_key is taken. It is asked for before the home is: the
        home's script holds the head, and waits for no other server.

        Raises StorageUnavailable when the home is unreachable (the cell is never buffered then), Unavailable when
        `min_copies` isn't reached (the cell may be stored then), and Invalid for an Idempotency-Key that was used with
        another body.
        """
        shard = shard_of(row_key, datastore.shards)
        home = datastore.home(shard)
        if self._settings.min_copies > 1 and not self._secondaries.choose(home, row_key):
            raise too_few_copies(0, self._settings.min_copies)
        above = await self._secondaries.highest_ref_key(datastore, home, row_key, column_name)
        new = NewVersion(shard, row_key, column_name, body, idempotency_key, above, cause)
        next_one = await self._put_next_at(home, datastore, new)
        cell = next_one.cell
        put = PendingPut(BufferRow(cell.key, cell.body, shard, home, _claim(), cause=cell.cause))
        await self._secondaries.buffer(datastore, home, [put])
        copies = 2 if put.is_buffered else 1
        if copies < self._settings.min_copies:
            raise too_few_copies(copies, self._settings.min_copies)
        self.counts[next_one.placed.status, copies] += 1
        return PutOutcome(next_one.placed.status, cell.key, shard, next_one.placed, copies, next_one.replayed)

    def held_shards(self) -> int:
        """Returns how many shards stay out of shared transactions now: another transaction holds their heads."""
        return self._queues.held_shards()

    async def close(self) -> None:
        """Returns when every put under way has its outcome. Called at the end, with no request in flight."""
        await self._queues.drain()

    async def _put_at_all(self, datastore: Datastore, cells: Sequence[Cell]) -> list[PutResult]:
        shards = [shard_of(cell.key.row_key, datastore.shards) for cell in cells]
        groups = datastore.by_home(range(len(cells)), lambda position: shards[position])

        async def put_at(home: str, positions: Sequence[int]) -> list[PutResult]:
            results: list[PutResult] = []
            here = [(cells[position], shards[position]) for position in positions]
            for chunk in chunks(here, bytes_max=CHUNK_BYTES_MAX, size_bytes=lambda one: len(one[0].body)):
                results += await self._put_chunk(datastore, home, chunk)
            return results

        answers = await asyncio.gather(*(put_at(home, positions) for home, positions in groups.items()))
        by_position = {
            position: result
            for positions, results in zip(groups.values(), answers, strict=True)
            for position, result in zip(positions, results, strict=True)
        }
        return [by_position[position] for position in range(len(cells))]

    async def _put_chunk(self, datastore: Datastore, home: str, cells: Sequence[tuple[Cell, int]]) -> list[PutResult]:
        """Puts cells, each with its shard, that share their way: one operation on the secondary and one at home.

        They share a claim, too. So a key that comes twice shares a row with itself, and a conflict removes it.
        """
        if self._queues.is_full(home, datastore):  # before anything is buffered for it
            return [Unavailable(f"the write queue of cluster {home} is full")] * len(cells)
        claim = _claim()
        puts = [
            PendingPut(BufferRow(cell.key, cell.body, shard, home, claim, cause=cell.cause)) for cell, shard in cells
        ]
        began = self._clock()
        await self._secondaries.buffer(datastore, home, puts)
        buffered_at = self._clock()
        self._observe(datastore.name, "buffer", buffered_at - began)
        min_copies = self._settings.min_copies
        if min_copies > 1:
            for put in puts:
                if put.buffered is BufferState.NONE:
                    put.error = too_few_copies(0, min_copies)
        to_store = [put for put in puts if put.error is None and put.buffered is not BufferState.CONFLICT]
        if to_store:
            await self._store_at_home(datastore, home, to_store)
            self._observe(datastore.name, "home", self._clock() - buffered_at)
        disputed = [put for put in puts if put.buffered is BufferState.CONFLICT]
        if disputed:
            await self._read_at_home(datastore, home, disputed)
        return [put.result(min_copies) for put in puts]

    async def _store_at_home(self, datastore: Datastore, home: str, puts: Sequence[PendingPut]) -> None:
        try:
            places = await self._queues.store(home, datastore, [put.row for put in puts])
        except SchemalessError as error:  # none is the caller's: those are outcomes (I5)
            for put in puts:
                put.home, put.error = HomeState.UNREACHABLE, error
            return
        for put, placed in zip(puts, places, strict=True):
            if isinstance(placed, SchemalessError):
                put.home, put.error = HomeState.UNREACHABLE, placed
            else:
                put.home, put.placed = _AT_HOME[placed.status], placed
        refused = [put for put in puts if put.home is HomeState.CONFLICT]
        if refused:
            await self._secondaries.take_back(datastore, refused)

    async def _read_at_home(self, datastore: Datastore, home: str, puts: Sequence[PendingPut]) -> None:
        """Compares cells with what the master shows, or else a minion: that is true as well, it may only be late."""
        rows = [put.row for put in puts]
        breaker = self._queues.breakers[home]
        master = self._storage.master(home)

        def on_failure(node: AsyncNode, error: StorageUnavailable) -> None:
            if node is master and tells_breaker(error):
                breaker.failed()

        try:
            found, _ = await first_answer(
                [*([master] if breaker.allows() else []), *self._storage.minions(home)],
                lambda node: node.run(entity_table.look_up, datastore, rows, timeout_s=self._timeout_s / 2),
                on_failure=on_failure,
            )
        except StorageUnavailable:
            found = [None] * len(puts)
        except SchemalessError as error:
            if isinstance(error, Corrupt) and len(puts) > 1:  # a stored body is damaged: only its own put fails
                for put in puts:
                    await self._read_at_home(datastore, home, [put])
                return
            for put in puts:
                put.home, put.error = HomeState.UNREACHABLE, error
            return
        for put, placed in zip(puts, found, strict=True):
            put.home = HomeState.NOTHING if placed is None else _AT_HOME[placed.status]
            put.placed = placed

    async def _put_next_at(self, home: str, datastore: Datastore, new: NewVersion) -> NextVersion:
        (appended,) = await self._queues.append(home, datastore, new)
        if isinstance(appended, SchemalessError):
            raise appended
        return appended


def _claim() -> int:
    return random.getrandbits(63)
