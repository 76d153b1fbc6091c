"""MasterWriteQueues: all writes of puts to the masters, in batches, behind a circuit breaker for each master."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Generic, TypeVar, cast

import structlog

from schemaless.cell import Placed
from schemaless.errors import (
    AccountRefused,
    Busy,
    LockTimeout,
    NodeRefuses,
    Overloaded,
    PacketTooLarge,
    SchemalessError,
    ShardsLocked,
    ShardsMoved,
    StaleTopology,
    StorageUnavailable,
    TableMissing,
)
from schemaless.runtime import tracing
from schemaless.runtime.batching import Batcher, BatchLimits
from schemaless.storage import append, buffer_table, post_version, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage, Traffic
from schemaless.storage.buffer_table import BufferOutcome, BufferRow
from schemaless.storage.failover import without_frames
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
"""How often one batch waits for a lock. The first time, all heads that are locked are found, and one table."""
_ROW_BYTES = 100
"""What a cell weighs beside its body."""
_BYTES_PER_S_MIN = 8 << 20
"""Large batches get longer than `timeout_s`: at least this much must go through."""
ASKED_AFTER_S = 0.1
PATIENCE_S = 0.25
"""When a master that has a batch is asked whether it is there, again and again, and when one that says nothing is given
up: its puts are buffered then. A slow one answers the question, and has the whole time-out. So has each
where no other cluster takes copies, and where two are required.
"""


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
        patient: bool = False,
        latest: Callable[[str], int | None] = lambda cluster: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`latest` returns the latest created_at that is believed of a cluster's master (I4). `patient`: no master is
        given up before its time-out.
        """
        self.breakers = defaultdict[str, WriteBreaker](partial(WriteBreaker, open_s, clock))
        self._copy_breakers = defaultdict[str, WriteBreaker](partial(WriteBreaker, open_s, clock))
        self._silent = defaultdict[str, WriteBreaker](partial(WriteBreaker, open_s, clock))
        """Masters that were given up for puts. A POST has no other place, so it still waits for them."""
        self._patient = patient
        self._storage = storage
        self._timeout_s = timeout_s
        self._latest = latest
        self._clock = clock
        self._batchers: dict[tuple[str, str], Batcher[BufferRow, Placed | BufferOutcome | SchemalessError]] = {}
        self._appenders: dict[tuple[str, str, bool], Batcher[NewVersion, NextVersion | SchemalessError]] = {}
        self._held: dict[tuple[str, str], HeldShards] = {}

    @property
    def clusters(self) -> list[str]:
        """The clusters that may have buffer rows: those that are only joining have none yet."""
        return [name for name in sorted(self._storage.topology.clusters) if not self._storage.is_joining(name)]

    def takes_copies(self, cluster: str) -> bool:
        """Returns whether second copies may go there: its master answers, and didn't just refuse one."""
        of_cluster = (self.breakers[cluster], self._copy_breakers[cluster], self._silent[cluster])
        return all(breaker.may_allow() for breaker in of_cluster)

    def is_full(self, cluster: str, datastore: Datastore) -> bool:
        batcher = self._batchers.get((cluster, datastore.name))
        return batcher is not None and batcher.full

    def store(
        self, cluster: str, datastore: Datastore, rows: Sequence[BufferRow]
    ) -> asyncio.Future[Sequence[Placed | SchemalessError]]:
        """Puts rows whose home is `cluster` into their entity tables. The result is the place of each, in order.

        A row that the master refuses has an error, such as a ShardsLocked where another transaction holds the head of
        its shard, or a ShardsMoved where that went to another cluster. The other rows are stored.

        Raises StorageUnavailable at once while the breaker is open, Unavailable when the queue is full.
        """
        return cast("asyncio.Future[Sequence[Placed | SchemalessError]]", self._submit(cluster, datastore, rows))

    def buffer(
        self, cluster: str, datastore: Datastore, rows: Sequence[BufferRow]
    ) -> asyncio.Future[Sequence[BufferOutcome | SchemalessError]]:
        """Puts rows whose home is another cluster into the buffer. Raises what `store` does."""
        if not self._copy_breakers[cluster].allows():
            raise self._breaker_open(cluster)
        return cast("asyncio.Future[Sequence[BufferOutcome | SchemalessError]]", self._submit(cluster, datastore, rows))

    def append(
        self, cluster: str, datastore: Datastore, version: NewVersion
    ) -> asyncio.Future[Sequence[NextVersion | SchemalessError]]:
        """Appends a version to its column. POSTs that wait become one script. Raises what `store` does.

        Those without an Idempotency-Key have a queue of their own: nothing recognises a version whose outcome was lost,
        so they are never run again.
        """
        if not self.breakers[cluster].allows():
            raise self._breaker_open(cluster)
        is_keyed = version.idempotency_key is not None
        batcher = self._appenders.get((cluster, datastore.name, is_keyed))
        if batcher is None:
            flush = partial(self._flush_appends, cluster, datastore, AGAIN_ON if is_keyed else (Busy,))
            batcher = self._appenders[cluster, datastore.name, is_keyed] = Batcher(flush, _APPEND_LIMITS)
        return batcher.submit([version], len(version.body) + _ROW_BYTES)

    def note_moved(self, cluster: str, datastore: Datastore, shards: Collection[int]) -> None:
        """A read found that the master of a cluster is closed for shards."""
        self._held_at(cluster, datastore).hold(shards, self._clock())

    async def reopened(self, cluster: str, datastore: Datastore, shard: int, until: float | None = None) -> bool:
        """Waits until a shard for which `cluster` was closed has an open home again: another one, or the same.

        Returns False at `until`, by the clock of these queues, or without one `MOVED_S` after the first refusal.
        """
        held = self._held_at(cluster, datastore)
        while datastore.home(shard) == cluster and (closed_at := held.moved.get(shard)) is not None:
            if self._clock() >= (closed_at + MOVED_S if until is None else until):
                return False
            await self._storage.look_soon()
        return True

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
        if not self.breakers[cluster].allows() or not self._silent[cluster].allows():
            raise self._breaker_open(cluster)
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
        if copies and copy_breaker.state is BreakerState.OPEN:  # it refused one while these waited
            return await self._flush_without_copies(cluster, datastore, rows)

        def shard_at_home(row: BufferRow) -> int | None:
            return row.shard if row.home == cluster else None

        async def write(some: Sequence[BufferRow]) -> Sequence[Placed | BufferOutcome]:
            timeout_s = self._timeout_s + _weight(some) / _BYTES_PER_S_MIN
            began_at = time.time()
            written = await self._on_master(
                cluster,
                buffer_table.put_copies,
                datastore,
                cluster,
                some,
                self._latest(cluster),
                timeout_s=timeout_s,
                is_put=True,
            )
            _note_put_spans(datastore, cluster, some, began_at)
            return written

        async def store(some: Sequence[BufferRow]) -> Sequence[Placed | BufferOutcome | SchemalessError]:
            return await self._without_held(cluster, datastore, some, shard_at_home, write)

        try:
            outcomes = await store(rows)
        except StaleTopology:  # it refuses all, and smaller parts as well
            raise
        except NodeRefuses as error:
            if copies == len(rows) and not isinstance(error, PacketTooLarge):
                copy_breaker.failed(error)
                raise
            if len(rows) == 1:
                raise
            partial_store: PartialStore[Placed | BufferOutcome] = PartialStore(rows, shard_at_home, store)
            outcomes = await partial_store.run(error)
        if copies:
            takes_copies = not any(
                isinstance(outcome, NodeRefuses) and row.home != cluster and not isinstance(outcome, PacketTooLarge)
                for row, outcome in zip(rows, outcomes, strict=True)
            )
            (copy_breaker.succeeded if takes_copies else copy_breaker.failed)()
        return outcomes

    async def _flush_without_copies(
        self, cluster: str, datastore: Datastore, rows: list[BufferRow]
    ) -> Sequence[Placed | BufferOutcome | SchemalessError]:
        at_home = [row for row in rows if row.home == cluster]
        if not at_home:
            raise self._breaker_open(cluster)
        outcomes = iter(await self._flush(cluster, datastore, at_home))
        return [next(outcomes) if row.home == cluster else self._breaker_open(cluster) for row in rows]

    async def _flush_appends(
        self,
        cluster: str,
        datastore: Datastore,
        again_on: tuple[type[SchemalessError], ...],
        versions: list[NewVersion],
    ) -> Sequence[NextVersion | SchemalessError]:
        async def write(some: Sequence[NewVersion]) -> Sequence[NextVersion | SchemalessError]:
            timeout_s = self._timeout_s + sum([len(version.body) for version in some]) / _BYTES_PER_S_MIN
            began_at = time.time()
            written = await self._on_master(
                cluster,
                post_version.put_next,
                datastore,
                some,
                self._latest(cluster),
                timeout_s=timeout_s,
                again_on=again_on,
            )
            _note_spans(datastore, cluster, "entity", some, began_at)
            return written

        return await self._without_held(cluster, datastore, versions, lambda version: version.shard, write)

    async def _without_held(
        self,
        cluster: str,
        datastore: Datastore,
        items: Sequence[Item],
        shard_of: Callable[[Item], int | None],
        write: Callable[[Sequence[Item]], Awaitable[Sequence[Outcome]]],
    ) -> list[Outcome | ShardsLocked | ShardsMoved]:
        """Writes the items whose shards aren't held, and gives the others the error of their shard.

        A shard that turns out to be locked, or to have moved, is held from then on, and the others are written again
        at once.
        """
        held, locks_met = self._held_at(cluster, datastore), 0
        while locks_met <= _LOCKS_MET_MAX:
            free = [item for item in items if shard_of(item) not in held.shards] if held.shards else items
            try:
                outcomes = iter((await write(free)) if free else ())
            except ShardsMoved as error:  # those of one transaction, so each one that is met leaves fewer
                held.hold(error.shards, self._clock())
                continue
            except ShardsLocked as error:
                held.hold(error.shards)
                locked, locks_met = error, locks_met + 1
                continue
            if len(free) == len(items):
                return list(outcomes)
            kept = set(map(id, free))
            return [next(outcomes) if id(item) in kept else held.error(shard_of(item)) for item in items]
        raise StorageUnavailable(f"{locked}, and others before it") from locked  # all are held from now on

    def _held_at(self, cluster: str, datastore: Datastore) -> HeldShards:
        held = self._held.get((cluster, datastore.name))
        if held is None:
            held = self._held[cluster, datastore.name] = HeldShards(
                self._storage.master(cluster), datastore, timeout_s=self._timeout_s
            )
        return held

    async def _on_master(
        self,
        cluster: str,
        operation: Callable[[*Args], Operation[T]],
        *args: *Args,
        timeout_s: float,
        again_on: tuple[type[SchemalessError], ...] = AGAIN_ON,
        is_put: bool = False,
    ) -> T:
        """Runs an operation, and lets the breaker know what came of it. A put gives a silent master up."""
        breaker, master = self.breakers[cluster], self._storage.master(cluster)
        silent = self._silent[cluster]
        if breaker.state is BreakerState.OPEN or (is_put and silent.state is BreakerState.OPEN):
            raise self._breaker_open(cluster)  # it failed while these waited
        watch = SilenceWatch(master, partial(self._may_give_up, cluster)) if is_put else nullcontext()
        try:
            async with watch:
                outcome = await master.run(
                    operation, *args, timeout_s=timeout_s, again_on=again_on, traffic=Traffic.WRITE
                )
        except SchemalessError as error:
            if isinstance(error, MasterSilent):
                silent.failed(error)
            elif tells_breaker(error):
                breaker.failed(error)
            elif not isinstance(error, Overloaded):
                breaker.succeeded()  # it answered
            raise
        breaker.succeeded()
        silent.succeeded()
        return outcome

    def _breaker_open(self, cluster: str) -> StorageUnavailable:
        breakers = (self.breakers[cluster], self._copy_breakers[cluster], self._silent[cluster])
        failures = [one.failure for one in breakers if one.failure]
        why = ": ".join([f"the circuit breaker of cluster {cluster}'s master is open", *map(str, failures[:1])])
        refused = [failure.shown for failure in failures if isinstance(failure, AccountRefused)]
        return AccountRefused(why, refused[0]) if refused else StorageUnavailable(why)

    def _may_give_up(self, cluster: str) -> bool:
        return not self._patient and any(self.takes_copies(name) for name in self.clusters if name != cluster)


class MasterSilent(StorageUnavailable):
    pass


class SilenceWatch:
    """A context for an operation of a master. Raises MasterSilent once the master says nothing and may be given up.

    It costs a timer, and asks nothing while operations are quick. The question has a connection of its own.
    """

    def __init__(self, master: AsyncNode, may_give_up: Callable[[], bool]) -> None:
        self._master = master
        self._may_give_up = may_give_up
        self._timeout = asyncio.timeout(None)
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._timer = asyncio.get_running_loop().call_later(ASKED_AFTER_S, self._ask)

    async def __aexit__(self, *raised: Any) -> None:
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
        try:
            await self._timeout.__aexit__(*raised)
        except TimeoutError as error:
            raise MasterSilent(f"{self._master.node.name}: silent for {PATIENCE_S} s") from error

    def _ask(self) -> None:
        self._asking = asyncio.get_running_loop().create_task(self._ask_until_silent())

    async def _ask_until_silent(self) -> None:
        while True:
            try:
                await self._master.run(
                    shard_head.clock, timeout_s=PATIENCE_S - ASKED_AFTER_S, again_on=(), traffic=Traffic.WATCH
                )
            except SchemalessError as error:
                # Only a server that had its time and said nothing is silent: one that refuses, or has closed a
                # connection, says something, and a loop that is late hears nothing.
                said_nothing = tells_breaker(error) and isinstance(error.__cause__, TimeoutError)
                if said_nothing and self._may_give_up():
                    self._timeout.reschedule(asyncio.get_running_loop().time())
                    return
            await asyncio.sleep(ASKED_AFTER_S)


def tells_breaker(error: SchemalessError) -> bool:
    """Returns whether an error means that the master can't be reached, and not that it refuses one thing."""
    return isinstance(error, StorageUnavailable) and not isinstance(error, NodeRefuses)


def _weight(rows: Sequence[BufferRow]) -> int:
    return sum([len(row.body) + _ROW_BYTES for row in rows])


# HeldShards: the shards of one master whose heads or tables another session holds, or for which it is closed.
#
# A locked head or table costs its own shard only. The put that met it waited once. From then on the shard's cells stay
# out of the shared transactions, and their puts are buffered, until a look finds that nothing holds them. Meanwhile
# idle transactions of our own account that hold rows are ended: a process that stands still must not stop a shard for
# long. A shard that moves is held until the process knows its new home, or the old one is open for it again.

log = structlog.get_logger()

LOOK_PAUSE_S = 0.1
IDLE_MAX_S = 5
"""A transaction that holds heads takes one script, which is milliseconds."""
MOVED_S = 0.25
"""How long puts wait for the new home of a shard that moves, from the first one that was refused. Then they are
buffered. A switch takes less.
"""


@dataclass(eq=False)
class HeldShards:
    """Keeps the held shards of one datastore on one master. It looks only while a shard is held."""

    master: AsyncNode
    datastore: Datastore
    timeout_s: float
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    shards: frozenset[int] = field(init=False, default_factory=frozenset)
    moved: dict[int, float] = field(init=False, default_factory=dict)
    """Those for which the master is closed, and when that was noticed."""
    _looking: asyncio.Task[None] | None = field(init=False, default=None)

    def hold(self, shards: Collection[int], moved_at: float | None = None) -> None:
        """Keeps these shards out of shared transactions until nothing holds them. `moved_at`: the master is closed for
        them, as was noticed then.
        """
        where = {"node": self.master.node.name, "datastore": self.datastore.name, "shards": sorted(shards)}
        if moved_at is None:
            log.warning("shards are held by another session", **where)
        else:
            log.info("shards went to another cluster", **where)
            self.moved = dict.fromkeys(shards, moved_at) | self.moved
        self.shards |= frozenset(shards)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_until_free())

    def error(self, shard: int | None) -> ShardsLocked | ShardsMoved:
        if shard in self.moved:
            return ShardsMoved(f"datastore {self.datastore.name}: this shard went to another cluster")
        return ShardsLocked(f"datastore {self.datastore.name}: another session holds this shard's head or table")

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def look(self) -> None:
        """Lets the shards that nothing holds return, and ends idle transactions that hold rows."""
        self._release({shard for shard in self.moved if self.datastore.home(shard) != self.master.node.cluster})
        try:
            if self.moved:
                moved = await self.master.run(
                    shard_head.moved,
                    self.datastore.name,
                    self.moved,
                    timeout_s=self.timeout_s,
                    traffic=Traffic.PROBE,
                )
                self._release(self.moved.keys() - moved)
            waiting = sorted(self.shards - self.moved.keys())
            if not waiting:
                return
            locked = await self.master.run(
                append.held,
                self.datastore,
                random.sample(waiting, len(waiting)),  # a locked table hides those after it
                timeout_s=self.timeout_s,
                traffic=Traffic.PROBE,
            )
            self._release(set(waiting) - set(locked))
            if locked:
                for ended in await self.master.run(
                    shard_head.end_idle_holders, IDLE_MAX_S, timeout_s=self.timeout_s, traffic=Traffic.PROBE
                ):
                    log.warning("an idle transaction is ended", node=self.master.node.name, connection=ended)
        except SchemalessError as error:
            log.info("held shards can't be looked at", node=self.master.node.name, error=str(error))

    def _release(self, free: Collection[int]) -> None:
        if free:
            log.info("shards are free again", node=self.master.node.name, shards=sorted(free))
        for shard in free:
            self.moved.pop(shard, None)
        self.shards -= frozenset(free)

    async def _look_until_free(self) -> None:
        while self.shards:
            await self.pause(LOOK_PAUSE_S)
            await self.look()


# PartialStore: stores a batch that its master refuses, but for the rows that are to blame.

WRITES_MAX = 64
"""How many transactions look for the rows to blame. Rows that none of them reached are refused, too."""
REFUSED_AT_FIRST_MAX = 16
"""So many that are refused before one is taken mean that the master refuses all."""
REFUSALS_OF_SHARD_MAX = 8
"""So many rows of one shard are refused alone, before the rest of the shard is."""


class PartialStore(Generic[Outcome]):
    """Looks for the rows by halves, in the order of their shards.

    A shard without its table is refused as a whole. So are copies, whose shard is None, unless they are too large.
    """

    def __init__(
        self,
        rows: Sequence[BufferRow],
        shard_of: Callable[[BufferRow], int | None],
        store: Callable[[Sequence[BufferRow]], Awaitable[Sequence[Outcome | SchemalessError]]],
    ) -> None:
        self._rows = rows
        self._shards = [shard_of(row) for row in rows]
        self._store = store
        self._outcomes: dict[int, Outcome | SchemalessError] = {}
        self._refused: set[int | None] = set()
        self._refusals: Counter[int | None] = Counter()
        self._writes = 0
        self._any_taken = False
        self._lost: SchemalessError | None = None

    async def run(self, refusal: NodeRefuses) -> list[Outcome | SchemalessError]:
        """Returns what came of each row: what the store says of it, or an error, `refusal` for one that wasn't reached.

        Raises `refusal` when the master takes nothing.
        """
        if isinstance(refusal, LockTimeout):  # of the buffer table: a shard's own lock is told as ShardsLocked
            self._refused.add(None)
        copies_first = [-1 if shard is None else shard for shard in self._shards]
        by_shard = sorted(range(len(self._rows)), key=copies_first.__getitem__)
        await self._store_halves(by_shard)
        error = self._lost or refusal
        if not self._any_taken:
            raise error
        return [self._outcomes.get(position, error) for position in range(len(self._rows))]

    async def _store_halves(self, part: Sequence[int]) -> None:
        """Writes both halves before it looks into one: where bad rows are side by side, the other half is taken."""
        middle = len(part) // 2
        refused_halves = []
        for half in (part[:middle], part[middle:]):
            wanted = [position for position in half if self._shards[position] not in self._refused]
            if wanted and self._may_write() and await self._is_refused_in_part(wanted):
                refused_halves.append(wanted)
        for half in refused_halves:
            await self._store_halves(half)

    async def _is_refused_in_part(self, part: Sequence[int]) -> bool:
        """Stores rows. Returns whether smaller parts of them may be taken."""
        self._writes += 1
        try:
            found = await self._store([self._rows[position] for position in part])
        except NodeRefuses as error:
            self._outcomes.update(dict.fromkeys(part, error))
            return not self._is_blamed(part, error)
        except SchemalessError as error:  # such as a master that went away: what it took keeps its outcome
            self._lost = error
        else:
            self._any_taken = True
            self._outcomes.update(zip(part, found, strict=True))
        return False

    def _is_blamed(self, part: Sequence[int], error: NodeRefuses) -> bool:
        """Returns whether smaller parts of this one would tell no more."""
        shards = {self._shards[position] for position in part}
        of_all = isinstance(error, TableMissing) or (None in shards and not isinstance(error, PacketTooLarge))
        if len(shards) == 1 and of_all:
            self._refused |= shards
            return True
        if len(part) > 1:
            return False
        self._refusals.update(shards)
        self._refused |= {shard for shard in shards if self._refusals[shard] == REFUSALS_OF_SHARD_MAX}
        return True

    def _may_write(self) -> bool:
        if self._lost is not None:
            return False
        return self._writes < (WRITES_MAX if self._any_taken else REFUSED_AT_FIRST_MAX)


# WriteBreaker: the circuit breaker of one master, for puts.
#
# It keeps puts from waiting for a master that just failed (I5: a put whose home hangs is answered within 3 s). It
# differs from the read breaker (api/read/reader.py): nothing samples the masters for writes, so one put at a
# time is the probe that closes it.


class BreakerState(StrEnum):
    """A failure leads from any state to OPEN, a success to CLOSED, a probe from OPEN or HALF_OPEN to HALF_OPEN."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class WriteBreaker:
    """The circuit breaker of one master. It is open for `open_s` after each failure, then lets one probe through every
    `open_s`.

    A probe has no duty to report. One whose caller disappeared costs `open_s`, nothing more.
    """

    def __init__(self, open_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = BreakerState.CLOSED
        self.failure: SchemalessError | None = None
        """What opened it last, None once it is closed."""
        self._open_s = open_s
        self._clock = clock
        self._next_probe_at = 0.0

    def allows(self) -> bool:
        """Returns whether to try now. Unless it is closed, at most one caller in `open_s` gets True: the probe."""
        if self.state is BreakerState.CLOSED:
            return True
        now = self._clock()
        if now < self._next_probe_at:
            return False
        self.state = BreakerState.HALF_OPEN
        self._next_probe_at = now + self._open_s
        return True

    def may_allow(self) -> bool:
        """Returns what `allows` would return, without taking the probe."""
        return self.state is BreakerState.CLOSED or self._clock() >= self._next_probe_at

    def succeeded(self) -> None:
        self.state, self.failure = BreakerState.CLOSED, None

    def failed(self, failure: SchemalessError | None = None) -> None:
        self.state, self.failure = BreakerState.OPEN, failure and without_frames(failure)
        self._next_probe_at = self._clock() + self._open_s


def _note_put_spans(datastore: Datastore, cluster: str, rows: Sequence[BufferRow], began_at: float) -> None:
    if tracing.is_on():
        _note_spans(datastore, cluster, "entity", [row for row in rows if row.home == cluster], began_at)
        _note_spans(datastore, cluster, "buffer", [row for row in rows if row.home != cluster], began_at)


def _note_spans(
    datastore: Datastore, cluster: str, table: str, rows: Sequence[BufferRow | NewVersion], began_at: float
) -> None:
    """One span for each traced row that a transaction wrote into a table."""
    if traced := tracing.traces_of(rows):
        attributes: dict[str, str | int] = {
            "db.system.name": "mysql",
            "db.operation.name": "INSERT",
            "db.collection.name": table,
            "db.namespace": datastore.name,
            "db.operation.batch.size": len(rows),
            "schemaless.cluster": cluster,
        }
        tracing.wrote(traced, f"INSERT {table}", began_at, attributes)
