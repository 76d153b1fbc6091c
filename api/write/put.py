"""CellWriter: puts a cell on a secondary, then at home. `put.py` says what came of it (I5).

The way of a put:

    buffer row on the secondary ──► entity row at home ──► STORED or ALREADY_STORED, copies 2
        │ no secondary in time          │ unreachable, hung    └► another body there: own buffer row removed, CONFLICT
        └► home alone, copies 1         └► BUFFERED, on one more secondary if there is one,
                                           or Unavailable when nothing was buffered

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
  the rest of the batch is written (api/write/queue.py).
- The home is closed for a shard that moves. The put waits for the new home and is put there. A second copy that lies
  on the new home is none then, so there is another one, and the cleaner deals with the first. Without a new home in
  time the put is BUFFERED.
- A batch holds K twice. Buffer and home both keep its order, because a caller's cells for one home stay together.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from enum import Enum, StrEnum
from typing import Any

import msgspec
import structlog

from api.http.content import Format
from api.http.response import Response, document_response, ok_response, problem_of, problem_of_put
from api.write.queue import MasterWriteQueues, tells_breaker
from schemaless.cell import Cell, CellKey, ColumnName, Erased, Placed, PutStatus, RowKey, created_at_text, row_key_text
from schemaless.codec import same_body
from schemaless.config import ApiSettings
from schemaless.errors import (
    Conflict,
    Corrupt,
    Invalid,
    KeyErased,
    Overloaded,
    SchemalessError,
    ShardsMoved,
    StaleTopology,
    StorageUnavailable,
    Unavailable,
)
from schemaless.location import shard_location_text
from schemaless.position import digest_text, insertion_digest
from schemaless.runtime.batching import Batcher, BatchLimits, chunks
from schemaless.sharding import by_rendezvous, shard_of
from schemaless.storage import buffer_table, entity_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage, Traffic
from schemaless.storage.buffer_table import BufferedColumn, BufferOutcome, BufferRow
from schemaless.storage.failover import answers_of_all, first_answer
from schemaless.storage.operation import Operation
from schemaless.storage.post_version import NewVersion, NextVersion
from schemaless.topology import Datastore

# What came of a put: one table from what the secondary and the home said to how far the put came (I1, I5).


class PutOutcome(msgspec.Struct, frozen=True, gc=False):
    """A put that was answered. `placed` is None for BUFFERED, and for a CONFLICT with a cell that is only buffered.

    `copies` counts the masters on which the cell is known to be durable, 0 for a CONFLICT. `replayed` marks the first
    answer to an Idempotency-Key, given again.
    """

    status: PutStatus
    key: CellKey
    shard: int
    placed: Placed | None
    copies: int
    replayed: bool = False


PutResult = PutOutcome | SchemalessError
"""An error is a value here, because each cell of a batch succeeds or fails by itself."""


class BufferState(StrEnum):
    """What the secondary said of a put's buffer row."""

    NONE = "none"
    """No secondary took it in time. A row whose outcome is unknown may be there all the same."""
    INSERTED = "inserted"
    SHARED = "shared"
    """The same body is buffered already, and this put took its claim over."""
    CONFLICT = "conflict"
    """Another body is buffered under the key, so the home is read and not written."""


class HomeState(StrEnum):
    """What the home said of the cell."""

    NOT_ASKED = "not_asked"
    STORED = "stored"
    ALREADY_STORED = "already_stored"
    CONFLICT = "conflict"
    NOTHING = "nothing"
    """Read after a conflict in the buffer: no node of the home shows a cell under the key."""
    UNREACHABLE = "unreachable"
    """Unreachable, hung, too busy, or it refused for a reason of its own. The cell may be stored or not."""


class PutState(Enum):
    """How far a put came: its status, and on how many masters the cell is known to be durable."""

    STORED_TWICE = PutStatus.STORED, 2
    STORED_ONCE = PutStatus.STORED, 1
    ALREADY_STORED_TWICE = PutStatus.ALREADY_STORED, 2
    ALREADY_STORED_ONCE = PutStatus.ALREADY_STORED, 1
    BUFFERED = PutStatus.BUFFERED, 1
    CONFLICT = PutStatus.CONFLICT, 0
    FAILED = None, 0
    """The put's error says why."""

    def __init__(self, status: PutStatus | None, copies: int) -> None:
        self.status = status
        self.copies = copies


DECISIONS: Mapping[tuple[BufferState, HomeState], PutState] = {
    (BufferState.INSERTED, HomeState.STORED): PutState.STORED_TWICE,
    (BufferState.INSERTED, HomeState.ALREADY_STORED): PutState.ALREADY_STORED_TWICE,
    (BufferState.INSERTED, HomeState.CONFLICT): PutState.CONFLICT,  # and the put removes its own buffer row
    (BufferState.INSERTED, HomeState.UNREACHABLE): PutState.BUFFERED,
    (BufferState.SHARED, HomeState.STORED): PutState.STORED_TWICE,
    (BufferState.SHARED, HomeState.ALREADY_STORED): PutState.ALREADY_STORED_TWICE,
    (BufferState.SHARED, HomeState.CONFLICT): PutState.CONFLICT,  # the row stays: another put relies on it
    (BufferState.SHARED, HomeState.UNREACHABLE): PutState.BUFFERED,
    (BufferState.NONE, HomeState.STORED): PutState.STORED_ONCE,
    (BufferState.NONE, HomeState.ALREADY_STORED): PutState.ALREADY_STORED_ONCE,
    (BufferState.NONE, HomeState.CONFLICT): PutState.CONFLICT,
    (BufferState.NONE, HomeState.UNREACHABLE): PutState.FAILED,
    (BufferState.NONE, HomeState.NOT_ASKED): PutState.FAILED,  # min_copies needs a secondary
    (BufferState.CONFLICT, HomeState.ALREADY_STORED): PutState.ALREADY_STORED_ONCE,  # the buffered one will be refused
    (BufferState.CONFLICT, HomeState.CONFLICT): PutState.CONFLICT,
    (BufferState.CONFLICT, HomeState.NOTHING): PutState.CONFLICT,  # the buffered one came first
    (BufferState.CONFLICT, HomeState.UNREACHABLE): PutState.FAILED,  # the cell at home can't be compared
}
"""Every combination that can happen. The others are impossible: a home is put to only after the buffer took the cell or
no secondary could, and read only after a conflict in the buffer.
"""


def decide(buffered: BufferState, home: HomeState) -> PutState:
    """Returns how far a put came. Raises KeyError for a combination that can't happen."""
    return DECISIONS[buffered, home]


class PendingPut(msgspec.Struct, gc=False):
    """A put under way: its row, and what the secondary and the home said so far. `error` is the last one of either."""

    row: BufferRow
    buffered: BufferState = BufferState.NONE
    secondary: str | None = None
    home: HomeState = HomeState.NOT_ASKED
    placed: Placed | None = None
    error: SchemalessError | None = None
    is_buffered_twice: bool = False

    def goes_to(self, home: str) -> None:
        """Begins again at another home. What lies there is no second copy. Another body there still came first."""
        self.row = msgspec.structs.replace(self.row, home=home)
        self.home, self.error = HomeState.NOT_ASKED, None
        if self.secondary == home and self.is_buffered:
            self.buffered, self.secondary = BufferState.NONE, None

    @property
    def is_buffered(self) -> bool:
        return self.buffered is BufferState.INSERTED or self.buffered is BufferState.SHARED

    def result(self, min_copies: int) -> PutResult:
        """Returns what came of the put. One that has fewer copies than required fails, although a copy may exist."""
        state = decide(self.buffered, self.home)
        if state.status is None:
            assert self.error is not None, "a put fails with an error"
            return self.error
        copies = state.copies + self.is_buffered_twice
        if state.status is not PutStatus.CONFLICT and copies < min_copies:
            return too_few_copies(copies, min_copies)
        return PutOutcome(state.status, self.row.key, self.row.shard, self.placed, copies)


def too_few_copies(copies: int, min_copies: int) -> Unavailable:
    hint = "put the same cell again: it may be stored or buffered already, and may still appear"
    return Unavailable(f"{min_copies} durable copies are required, and {copies} are known in time", hint=hint)


AGAIN_TIMEOUT_S = 0.25  # for one more buffer row: the answer has its copy already
BREAKER_OPEN_S = 1.0  # the circuit breaker of a failing master
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
        on_buffered: Callable[[str], None] = lambda home: None,
        may_wait: Callable[[Datastore, int], bool] = lambda datastore, shard: True,
    ) -> None:
        """`observe` is called with the time of each stage of a put: buffer and home. `on_buffered` is called with the
        home of cells that are in a buffer only, and `may_wait` says whether a shard may have such.
        """
        self.counts: Counter[tuple[PutStatus, int]] = Counter()
        """Counts puts by (status, copies) since the process started."""
        self._observe = observe
        self._on_buffered = on_buffered
        self._clock = clock
        self._storage = storage
        self._settings = settings
        self._timeout_s = settings.write_timeout_s
        self._queues = MasterWriteQueues(
            storage,
            timeout_s=self._timeout_s,
            open_s=BREAKER_OPEN_S,
            patient=settings.min_copies > 1,
            latest=latest,
            clock=clock,
        )
        self._secondaries = Secondaries(
            storage, self._queues, timeout_s=self._timeout_s, clock=clock, may_wait=may_wait
        )

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

        A cell that waits in a buffer was acknowledged, so its ref_key is taken. It is asked for before the home is: the
        home's script holds the head, and waits for no other server. One with this Idempotency-Key is the first answer,
        also where the home lost it.

        Where the shard moves it waits for the new home, which has the Idempotency-Keys of the old one.

        Raises StorageUnavailable when the home is unreachable (the cell is never buffered then), Unavailable when
        `min_copies` isn't reached (the cell may be stored then), and Invalid for an Idempotency-Key that was used with
        another body.
        """
        shard = shard_of(row_key, datastore.shards)
        until = self._clock() + self._timeout_s
        while True:
            home = datastore.home(shard)
            new = NewVersion(shard, row_key, column_name, body, idempotency_key, cause=cause)
            try:
                return await self._put_next_at(home, datastore, new)
            except ShardsMoved:
                if not await self._queues.reopened(home, datastore, shard, until):
                    raise

    async def _put_next_at(self, home: str, datastore: Datastore, new: NewVersion) -> PutOutcome:
        """Raises ShardsMoved with nothing written."""
        shard, row_key, column_name, idempotency_key = new.shard, new.row_key, new.column_name, new.idempotency_key
        if self._settings.min_copies > 1 and not self._secondaries.choose(home, row_key):
            raise too_few_copies(0, self._settings.min_copies)

        def row_of(cell: Cell) -> BufferRow:
            noted = {"cause": cell.cause, "idempotency_key": idempotency_key}
            return BufferRow(cell.key, cell.body, shard, home, _claim(), **noted)

        known = await self._secondaries.known(datastore, home, new)
        if known.ref_key is None:
            next_one = await self._append(home, datastore, msgspec.structs.replace(new, above=known.highest))
            cell, placed, replayed = next_one.cell, next_one.placed, next_one.replayed
        else:
            cell = Cell(CellKey(row_key, column_name, known.ref_key), known.body, cause=known.cause)
            placed, replayed = await self._put_posted(home, datastore, row_of(cell), new.body), True
        put = PendingPut(row_of(cell))
        await self._secondaries.buffer(datastore, home, [put])
        copies = 2 if put.is_buffered else 1
        if copies < self._settings.min_copies:
            raise too_few_copies(copies, self._settings.min_copies)
        self.counts[placed.status, copies] += 1
        return PutOutcome(placed.status, cell.key, shard, placed, copies, replayed)

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
        await self._put_at(datastore, home, puts)
        waiting = [put for put in puts if put.home is HomeState.UNREACHABLE and put.is_buffered]
        for away in {put.row.home for put in waiting} if waiting else ():
            some = [put for put in waiting if put.row.home == away]
            await self._secondaries.buffer_again(datastore, away, some)
            self._on_buffered(away)
        return [put.result(self._settings.min_copies) for put in puts]

    async def _put_at(self, datastore: Datastore, home: str, puts: Sequence[PendingPut]) -> None:
        """Buffers what isn't yet, and stores or compares the cells at home, or where their shards went meanwhile."""
        began = self._clock()
        await self._secondaries.buffer(datastore, home, [put for put in puts if put.buffered is BufferState.NONE])
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
        if moved := [put for put in puts if isinstance(put.error, ShardsMoved)]:
            await self._put_where_they_went(datastore, home, moved)

    async def _put_where_they_went(self, datastore: Datastore, left: str, puts: Sequence[PendingPut]) -> None:
        shards = sorted({put.row.shard for put in puts})
        are_open = await asyncio.gather(*(self._queues.reopened(left, datastore, shard) for shard in shards))
        known = {shard for shard, is_open in zip(shards, are_open, strict=True) if is_open}
        going = [put for put in puts if put.row.shard in known]
        for home, group in datastore.by_home(going, lambda put: put.row.shard).items():
            for put in group:
                put.goes_to(home)
            await self._put_at(datastore, home, group)

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
        await self._require_lease(home, puts)
        refused = [put for put in puts if put.home is HomeState.CONFLICT]
        if refused:
            await self._secondaries.take_back(datastore, refused)

    async def _require_lease(self, home: str, puts: Sequence[PendingPut]) -> None:
        """What rests on the home alone is stored only if it is known that no other master was opened meanwhile."""
        alone = [put for put in puts if not put.is_buffered and put.placed is not None]
        if alone and not await self._storage.is_leased(home):
            for put in alone:
                put.home, put.placed, put.error = HomeState.UNREACHABLE, None, _not_leased(home)

    async def _read_at_home(self, datastore: Datastore, home: str, puts: Sequence[PendingPut]) -> None:
        """Compares cells with what the home shows."""
        try:
            found = await self._shown_at_home(datastore, home, [put.row for put in puts])
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

    async def _shown_at_home(
        self, datastore: Datastore, home: str, rows: Sequence[BufferRow]
    ) -> Sequence[Placed | None]:
        """Returns what the master shows, or else a minion: that is true as well, it may only be late."""
        breaker = self._queues.breakers[home]
        master = self._storage.master(home)

        def on_failure(node: AsyncNode, error: StorageUnavailable) -> None:
            if node is master and tells_breaker(error):
                breaker.failed(error)

        try:
            found, _ = await first_answer(
                [*([master] if breaker.allows() else []), *self._storage.minions(home)],
                lambda node: node.run(_look_up, datastore, rows, timeout_s=self._timeout_s / 2),
                on_failure=on_failure,
            )
        except ShardsMoved as error:
            self._queues.note_moved(home, datastore, error.shards)
            raise
        except StorageUnavailable:
            return [None] * len(rows)
        return found

    async def _append(self, home: str, datastore: Datastore, new: NewVersion) -> NextVersion:
        (appended,) = await self._queues.append(home, datastore, new)
        if isinstance(appended, SchemalessError):
            raise appended
        if not await self._storage.is_leased(home):
            raise _not_leased(home)
        return appended

    async def _put_posted(self, home: str, datastore: Datastore, row: BufferRow, body: bytes) -> Placed:
        """Puts the cell of an earlier POST, which waits in a buffer, at home. Raises Invalid for another body."""
        if not same_body(row.body, body):
            raise Invalid("Idempotency-Key", "was used with another body")
        (placed,) = await self._queues.store(home, datastore, [row])
        if isinstance(placed, SchemalessError):
            raise placed
        if placed.erased is not None:
            raise key_erased(row.key, placed.erased)
        if placed.status is PutStatus.CONFLICT:
            raise Conflict(f"{row.key} is stored with another body: what the first answer named is in the conflicts")
        return msgspec.structs.replace(placed, status=PutStatus.STORED)


def _look_up(datastore: Datastore, rows: Sequence[BufferRow]) -> Operation[list[Placed | None]]:
    """Raises ShardsMoved for a server that isn't the home of all: it may lack what the new home has."""
    found = yield from entity_table.look_up(datastore, rows)
    if moved := (yield from shard_head.moved(datastore.name, {row.shard for row in rows})):
        raise ShardsMoved(f"datastore {datastore.name}: shards {sorted(moved)[:5]} went to another cluster", moved)
    return found


def _not_leased(cluster: str) -> StaleTopology:
    return StaleTopology(f"nobody confirms that the master of cluster {cluster} still is its master")


def _claim() -> int:
    return random.getrandbits(63)


# Secondaries: the first durable copy of a put, a buffer row on a master that isn't the cell's home (I5).

log = structlog.get_logger()

_STATES = {
    BufferOutcome.INSERTED: BufferState.INSERTED,
    BufferOutcome.SHARED: BufferState.SHARED,
    BufferOutcome.CONFLICT: BufferState.CONFLICT,
}


_Column = tuple[str, RowKey, ColumnName, str | None]
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
        clock: Callable[[], float],
        may_wait: Callable[[Datastore, int], bool],
    ) -> None:
        self._storage = storage
        self._queues = queues
        self._timeout_s = timeout_s
        self._clock = clock
        self._may_wait = may_wait
        self._questions: dict[str, Batcher[_Column, BufferedColumn]] = {}

    def choose(self, home: str, row_key: RowKey, failed: Collection[str] = ()) -> str | None:
        """Returns the cluster that the row prefers among those that take second copies, or None.

        `failed` are clusters that this put has tried.
        """
        others = [
            name
            for name in self._queues.clusters
            if name != home and name not in failed and self._queues.takes_copies(name)
        ]
        return by_rendezvous(row_key, others)[0] if others else None

    async def known(self, datastore: Datastore, home: str, new: NewVersion) -> BufferedColumn:
        """Returns what waits of a column in the buffers that can be asked.

        It asks all that can be asked, because another process may have answered "buffered". Where the shard has moved,
        its home's own buffer may have rows of before. After a promotion a buffer may have the only copy of what was
        stored at home, too: until that is settled, it raises StorageUnavailable where one can't be asked. Raises
        Overloaded where this process has too much to do to ask: that says nothing about the buffer.
        """
        others = [name for name in self._queues.clusters if name != home or new.shard in datastore.moves]
        asked = [name for name in others if self._queues.breakers[name].may_allow()]
        column = (datastore.name, new.row_key, new.column_name, new.idempotency_key)
        questions = {name: self._ask_for_column(name, column) for name in asked}
        answers = await answers_of_all(questions, tolerated=SchemalessError)
        for name, error in answers.failures.items():
            if isinstance(error, Overloaded):
                raise error
            log.info("a buffer can't be asked for a ref_key", cluster=name, error=str(error))
        unheard = [name for name in others if name not in answers.found]
        if unheard and self._storage.has_lost(home) and self._may_wait(datastore, new.shard):
            raise StorageUnavailable(
                f"cluster {home} has a new master, and the buffer of cluster {unheard[0]} may have a later version"
            )
        found = list(answers.found.values())
        first = next((one for one in found if one.ref_key is not None), BufferedColumn())
        return msgspec.structs.replace(first, highest=max((one.highest for one in found), default=0))

    async def _ask_for_column(self, cluster: str, column: _Column) -> BufferedColumn:
        """Asks together with the other POSTs that arrived while the question before was under way."""
        batcher = self._questions.get(cluster)
        if batcher is None:
            master = self._storage.master(cluster)

            async def ask(columns: list[_Column]) -> list[BufferedColumn]:
                return await master.run(buffer_table.columns, columns, timeout_s=self._timeout_s / 2)

            batcher = self._questions[cluster] = Batcher(ask, _QUESTION_LIMITS)
        (found,) = await batcher.submit([column], _COLUMN_BYTES)
        return found

    async def buffer(self, datastore: Datastore, home: str, puts: Sequence[PendingPut]) -> None:
        """Sets what the secondary said of each put. A put that no secondary took within the time-out stays NONE.

        Any error of a secondary, of whatever kind, means that the next one is tried (I5).
        """
        if len(self._queues.clusters) == 1:  # there is no other cluster
            return
        deadline = self._clock() + self._timeout_s
        failed: set[str] = set()
        waiting = await self._buffer_once(datastore, home, puts, failed)
        for _ in range(len(self._queues.clusters) - 2):
            left_s = deadline - self._clock()
            if not waiting or left_s <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    waiting = await self._buffer_once(datastore, home, waiting, failed)

    async def buffer_again(self, datastore: Datastore, home: str, puts: Sequence[PendingPut]) -> None:
        """Buffers on one more secondary what the home didn't take, where there is one. It is tried once."""
        groups: dict[str, list[PendingPut]] = {}
        for put in puts:
            if another := self.choose(home, put.row.key.row_key, (str(put.secondary),)):
                groups.setdefault(another, []).append(put)

        async def buffer_on(secondary: str, group: Sequence[PendingPut]) -> None:
            outcomes = await self._queues.buffer(secondary, datastore, [put.row for put in group])
            for put, outcome in zip(group, outcomes, strict=True):
                put.is_buffered_twice = outcome in (BufferOutcome.INSERTED, BufferOutcome.SHARED)

        with suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_TIMEOUT_S):
                await answers_of_all(
                    {name: buffer_on(name, group) for name, group in groups.items()}, tolerated=SchemalessError
                )

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
                    self._queues.breakers[secondary].failed(error)
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


# The outcomes of puts as HTTP shows them: as the response to a request, and as an item of a batch.

HTTP_STATUS = {PutStatus.STORED: 201, PutStatus.ALREADY_STORED: 200, PutStatus.BUFFERED: 202}
REPLAYED = (b"idempotency-replayed", b"true")


def put_answer(result: PutResult, form: Format) -> Response:
    """Returns 201, 200 or 202 with the cell's place, 409 for a conflict, or the problem of an error."""
    if isinstance(result, SchemalessError):
        return document_response(problem_of_put(result), *result.headers)
    if result.status is PutStatus.CONFLICT:
        return document_response(conflict_problem(result))
    headers = (REPLAYED,) if result.replayed else ()
    return ok_response(form, put_view(result), *headers, status=HTTP_STATUS[result.status])


def item_view(result: PutResult) -> dict[str, Any]:
    """Returns what `put_answer` shows, as an item of a batch."""
    if isinstance(result, SchemalessError):
        return {"status": "error", "problem": problem_of_put(result)}
    if result.status is PutStatus.CONFLICT:
        return {"status": "conflict", **_key_view(result), "problem": conflict_problem(result)}
    return put_view(result)


def put_view(outcome: PutOutcome) -> dict[str, Any]:
    """Returns the members of a put's answer. What is not known yet of a buffered cell is null."""
    return {
        "status": outcome.status,
        **_key_view(outcome),
        "shard": outcome.shard,
        **_place_view(outcome.placed),
        "digest": _digest(outcome),
        "copies": outcome.copies,
    }


def conflict_problem(outcome: PutOutcome) -> dict[str, Any]:
    """Returns the problem with the place of the cell that is stored, null while that one is only buffered."""
    placed = outcome.placed
    if placed is not None and placed.erased is not None:
        document = problem_of(key_erased(outcome.key, placed.erased))
    else:
        where = "is stored" if placed else "is buffered"
        document = problem_of(Conflict(f"another body {where} under {outcome.key}"))
    return {**document, "shard": outcome.shard, **_place_view(outcome.placed)}


def key_erased(key: CellKey, by: Erased) -> KeyErased:
    return KeyErased(f"the body under {key} was erased, and no put brings one back", by.erasure_id, by.at)


def _key_view(outcome: PutOutcome) -> dict[str, Any]:
    key = outcome.key
    return {"row_key": row_key_text(key.row_key), "column_name": key.column_name, "ref_key": key.ref_key}


def _digest(outcome: PutOutcome) -> str | None:
    """Returns the digest with which the log can be read after the cell, None while its place is not known (I16)."""
    key, placed = outcome.key, outcome.placed
    if placed is None:
        return None
    return digest_text(
        insertion_digest(
            placed.generation, placed.added_id, placed.created_at, key.row_key, key.column_name, key.ref_key
        )
    )


def _place_view(placed: Placed | None) -> dict[str, Any]:
    if placed is None:
        return {"generation": None, "added_id": None, "created_at": None, "location": None}
    return {
        "generation": placed.generation,
        "added_id": placed.added_id,
        "created_at": created_at_text(placed.created_at),
        "location": shard_location_text(placed.shard, placed.generation, placed.added_id),
    }
