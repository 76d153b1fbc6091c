"""CellWriter: puts a cell on a secondary, then at home, and says how far it came (I5).

A put's way, and what each ending means:

    buffer row on the secondary ──► entity row at home ──► STORED or ALREADY_STORED, copies 2
        │ no secondary in time          │ away, hung           └ another body there: own buffer row removed, CONFLICT
        └► home alone, copies 1         └► BUFFERED, or Unavailable when nothing was buffered

Interleavings that decided the details (K a key, A and B bodies that differ):

- B meets A in the buffer, while the home holds B: A is a put under way that the home will refuse. So a conflict in
  the buffer is judged by the home's cell: the same body there is ALREADY_STORED. Only where the home (or, when it is
  away, a minion) shows nothing under K is A the one that came first, and B a CONFLICT.
- Two puts of B share a buffer row, the home holds A: one learns it and is a CONFLICT, the other's home answer is lost
  and it said BUFFERED. The row must stay until the cleaner records the conflict: buffer_table.py, `claim`.
- A put fails at home with the outcome unknown and says BUFFERED: the cleaner puts the cell again, which changes
  nothing if it is there (I1).
- A buffer row whose outcome is unknown isn't counted as a copy, and may be there: the cleaner treats it as any other.
- What is written to one master is one transaction, second copies too: whoever holds a head's lock for longer than
  write_timeout_s, say a process that was stopped between lock and insert, takes the second copies that share a batch
  with that shard down to one copy meanwhile. The server ends such a transaction (storage/session.py).
- A batch holds K twice: buffer and home both keep its order, because a caller's cells for one home stay together.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from api.write.buffering import Copy, Secondaries
from api.write.outcome import PutOutcome, PutResult
from api.write.queue import Gates
from schemaless.batching import chunks
from schemaless.cell import Cell, ColumnName, Placed, PutStatus, RowKey, StoredCell
from schemaless.codec import same_body
from schemaless.config import ApiSettings
from schemaless.errors import Busy, SchemalessError, StorageUnavailable, Unavailable
from schemaless.sharding import shard_of
from schemaless.storage import entity_table, post_version
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.buffer_table import BufferOutcome, BufferRow
from schemaless.storage.failover import first_answer
from schemaless.storage.operation import AGAIN_ON
from schemaless.storage.post_version import NewVersion, NextVersion
from schemaless.topology import Datastore

CHUNK_BYTES_MAX = 4 << 20  # of one operation: twice that as SQL, below any server's max_allowed_packet


class CellWriter:
    """Lives on one event loop; shared by all calls of a process."""

    def __init__(
        self, storage: AsyncStorage, settings: ApiSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts: Counter[tuple[PutStatus, int]] = Counter()
        """Puts by (status, copies), since the process began."""
        self._storage = storage
        self._settings = settings
        self._timeout_s = settings.write_timeout_s
        self._gates = Gates(storage, timeout_s=self._timeout_s, open_s=settings.breaker_open_s, clock=clock)
        self._secondaries = Secondaries(storage, self._gates, timeout_s=self._timeout_s, clock=clock)

    async def put(self, datastore: Datastore, cells: Sequence[Cell]) -> list[PutResult]:
        """One result for each cell, in order. A key that comes twice counts in order.

        StorageUnavailable as a result: not known to be durable, it may still appear, and may be put again.
        """
        rows = [_row(datastore, cell) for cell in cells]
        if len(rows) == 1:  # the usual case pays for no pieces
            results = await self._put_chunk(datastore, rows[0].home, rows)
        else:
            results = await self._put_at_all(datastore, rows)
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
    ) -> PutOutcome:
        """Puts `body` as the column's next version: home first, which gives the ref_key, then the second copy.

        The buffer can't come first: a row of it whose put died would become a version without its Idempotency-Key,
        and the caller's repeat a second one. Raises StorageUnavailable when the home is away (never buffered) or
        `min_copies` isn't reached; Invalid for an Idempotency-Key that was used with another body.
        """
        shard = shard_of(row_key, datastore.shards)
        home = datastore.home(shard)
        if self._settings.min_copies > 1 and not self._secondaries.choose(home, row_key):
            raise _no_secondary()
        new = NewVersion(shard, row_key, column_name, body, idempotency_key)
        next_one = await self._put_next_at(home, datastore, new)
        cell = next_one.cell
        copy = Copy(BufferRow(cell.key, cell.body, shard, home, random.getrandbits(63)))
        await self._secondaries.buffer(datastore, home, [copy])
        copies = 2 if copy.durable else 1
        if copies < self._settings.min_copies:
            raise _no_secondary()
        self.counts[next_one.placed.status, copies] += 1
        return PutOutcome(next_one.placed.status, cell.key, shard, next_one.placed, copies, next_one.replayed)

    async def close(self) -> None:
        """Returns when all that was begun has its outcome. For the end, when no call is in hand any more."""
        await self._gates.drain()

    async def _put_at_all(self, datastore: Datastore, rows: Sequence[BufferRow]) -> list[PutResult]:
        groups = datastore.by_home(range(len(rows)), lambda position: rows[position].shard)
        answers = await asyncio.gather(
            *(self._put_at(datastore, home, [rows[n] for n in positions]) for home, positions in groups.items())
        )
        by_position = {
            position: result
            for positions, results in zip(groups.values(), answers, strict=True)
            for position, result in zip(positions, results, strict=True)
        }
        return [by_position[position] for position in range(len(rows))]

    async def _put_at(self, datastore: Datastore, home: str, rows: Sequence[BufferRow]) -> list[PutResult]:
        results: list[PutResult] = []
        for chunk in chunks(rows, bytes_max=CHUNK_BYTES_MAX, size_bytes=lambda row: len(row.body)):
            results += await self._put_chunk(datastore, home, chunk)
        return results

    async def _put_chunk(self, datastore: Datastore, home: str, rows: Sequence[BufferRow]) -> list[PutResult]:
        if self._gates.to(home, datastore).full:  # before anything is buffered for it
            return [Unavailable("too much waits to be written already")] * len(rows)
        copies = [Copy(row) for row in rows]
        await self._secondaries.buffer(datastore, home, copies)
        if self._settings.min_copies > 1:
            for copy in copies:
                if copy.secondary is None and copy.result is None:
                    copy.result = _no_secondary()
        going = [copy for copy in copies if copy.result is None and copy.outcome is not BufferOutcome.CONFLICT]
        if going:
            await self._put_home(datastore, home, going)
        refused = [copy for copy in copies if copy.outcome is BufferOutcome.CONFLICT]
        if refused:
            await self._judge(datastore, home, refused)
        return [copy.result or _no_secondary() for copy in copies]

    async def _put_home(self, datastore: Datastore, home: str, copies: Sequence[Copy]) -> None:
        try:
            placed = await self._gates.to(home, datastore).store([copy.cell for copy in copies])
        except (Unavailable, Busy) as error:
            for copy in copies:
                copy.result = error if copy.secondary is None else _buffered(copy)
            return
        except SchemalessError as error:
            for copy in copies:
                copy.result = error
            return
        for copy, at in zip(copies, placed, strict=True):
            copy.result = _placed(copy, at)
        conflicts = [copy for copy, at in zip(copies, placed, strict=True) if at.status is PutStatus.CONFLICT]
        if conflicts:
            await self._secondaries.take_back(datastore, conflicts)

    async def _judge(self, datastore: Datastore, home: str, copies: Sequence[Copy]) -> None:
        """What a conflict in the buffer means: see the interleavings above."""
        found = await self._read_at_home(datastore, home, [copy.cell for copy in copies])
        for copy, stored in zip(copies, found, strict=True):
            copy.result = _judged(copy.cell, stored)

    async def _read_at_home(
        self, datastore: Datastore, home: str, rows: Sequence[BufferRow]
    ) -> Sequence[StoredCell | None]:
        """From the master, else from a minion: what that shows is true as well, it may only be late."""
        keys = [(row.shard, row.key) for row in rows]
        breaker = self._gates.breakers[home]
        master = self._storage.master(home)

        def on_failure(node: AsyncNode, error: StorageUnavailable) -> None:
            if node is master:
                breaker.failed()

        try:
            found, _ = await first_answer(
                [*([master] if breaker.allows() else []), *self._storage.minions(home)],
                lambda node: node.run(entity_table.get, datastore, keys, timeout_s=self._timeout_s / 2),
                on_failure=on_failure,
            )
        except StorageUnavailable:
            return [None] * len(rows)
        return found

    async def _put_next_at(self, home: str, datastore: Datastore, new: NewVersion) -> NextVersion:
        breaker = self._gates.breakers[home]
        if not breaker.allows():
            raise StorageUnavailable(f"the master of cluster {home} is left alone after a failure")
        # Without a key to recognise it by, what was lost with the outcome unknown would be written twice.
        again_on = (Busy,) if new.idempotency_key is None else AGAIN_ON
        try:
            next_one = await self._storage.master(home).run(
                post_version.put_next,
                datastore,
                new,
                timeout_s=self._timeout_s,
                again_on=again_on,
            )
        except StorageUnavailable:
            breaker.failed()
            raise
        breaker.succeeded()
        return next_one


def _row(datastore: Datastore, cell: Cell) -> BufferRow:
    shard = shard_of(cell.key.row_key, datastore.shards)
    return BufferRow(cell.key, cell.body, shard, datastore.home(shard), random.getrandbits(63))


def _placed(copy: Copy, placed: Placed) -> PutOutcome:
    copies = 0 if placed.status is PutStatus.CONFLICT else 1 if copy.secondary is None else 2
    return PutOutcome(placed.status, copy.cell.key, copy.cell.shard, placed, copies)


def _buffered(copy: Copy) -> PutOutcome:
    return PutOutcome(PutStatus.BUFFERED, copy.cell.key, copy.cell.shard, None, 1)


def _judged(row: BufferRow, stored: StoredCell | None) -> PutOutcome:
    if stored is None:
        return PutOutcome(PutStatus.CONFLICT, row.key, row.shard, None, 0)
    status = PutStatus.ALREADY_STORED if same_body(row.body, stored.body) else PutStatus.CONFLICT
    placed = Placed(status, row.shard, stored.generation, stored.added_id, stored.created_at)
    return PutOutcome(status, row.key, row.shard, placed, 1 if status is PutStatus.ALREADY_STORED else 0)


def _no_secondary() -> StorageUnavailable:
    return StorageUnavailable("no secondary could be reached, and min_copies asks for one")
