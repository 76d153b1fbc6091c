"""PartitionTail: publishes one partition. It reads behind the last published cell of each shard that is behind (I7).

It holds at most one batch at a time, so an unreachable broker costs no memory. A shard with a hole backs off and is
logged again and again, while the others are published.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

import structlog

from schemaless.bus.partition_log import LogState, PartitionLog, Progress
from schemaless.bus.topics import record_bytes
from schemaless.cell import StoredCell
from schemaless.config import TailerSettings
from schemaless.errors import (
    Corrupt,
    LocationGone,
    Misconfigured,
    NodeRefuses,
    SchemalessError,
    StorageUnavailable,
    Unavailable,
)
from schemaless.location import GenerationStart, Location, next_start
from schemaless.names import Stall
from schemaless.runtime.batching import OF_A_PART, REFUSALS_MAX
from schemaless.runtime.events import Event, emit
from schemaless.runtime.lifecycle import pause
from schemaless.runtime.pace import Pace
from schemaless.shard_cursor import ProvenPage, verify_page
from schemaless.storage import shard_head, shard_log
from schemaless.storage.shard_log import Following
from schemaless.storage.standstill import stall_after
from schemaless.topology import Datastore
from tailer.cluster_reader import ClusterReader
from tailer.metrics import TailerMetrics
from tailer.shard_queue import ShardProgress, ShardQueue, TailState, fair_shares

# TailerSlots: how many transactions, or openings of logs, a tailer has in flight at once, and who is next.

SLOW_AFTER_S = 1.0  # a full transaction takes less, and so does opening a log
SLOW_PER_QUICK = 3  # slots for those that wait for a server


class TailerSlots:
    """Bounds what is in flight. The partition that waits longest gets the next free slot.

    What takes longer than SLOW_AFTER_S moves to a slot for slow ones, as soon as one is free. So a broker or a cluster
    that hangs holds up its own partitions only, and memory stays bounded.
    """

    def __init__(self, quick_max: int) -> None:
        self._quick = asyncio.Semaphore(quick_max)  # first come, first served
        self._slow_free = quick_max * SLOW_PER_QUICK

    @staticmethod
    def threads_max(quick_max: int) -> int:
        """Returns how many can be in flight, slow ones included."""
        return quick_max * (1 + SLOW_PER_QUICK)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Waits for a slot, and holds it inside the context."""
        loop = asyncio.get_running_loop()
        moved = ended = False
        await self._quick.acquire()

        def move() -> None:
            nonlocal moved
            if ended:
                return
            if self._slow_free > 0:
                moved = True
                self._slow_free -= 1
                self._quick.release()
            else:
                loop.call_later(SLOW_AFTER_S, move)

        first = loop.call_later(SLOW_AFTER_S, move)
        try:
            yield
        finally:
            ended = True
            first.cancel()
            if moved:
                self._slow_free += 1
            else:
                self._quick.release()


T = TypeVar("T")
Args = TypeVarTuple("Args")
log = structlog.get_logger()

TRANSACTION_CELLS_MAX = 5000  # 2000 drain a fifth slower, 8000 no faster
TRANSACTION_BYTES_MAX = 8 << 20  # bounds memory when bodies are large
PAUSE_MAX_S = 0.5  # between two transactions of a partition. Slow transactions lengthen the pause, up to this
READ_TIMEOUT_S = 10.0  # enough for a transaction of large bodies
RETRY_S = 1.0  # after a failure that may pass
CORRUPT_RETRY_S = 10.0  # an operator has to repair the shard first
NEWER_CELLS_MAX = 16  # of a shard: beyond its head as last seen
USUAL_MIN_S = 0.004  # a transaction on an idle machine: what a quicker one saves is no reason to wait
SLOW_S = 1.0  # of a transaction: then the next one carries no more, unless a larger one made cells cheaper
CHEAPER = 0.75  # where most of it is waiting, twice the cells cost half as much each
NOT_THERE_YET_S = 0.05  # a minion that lags is asked again, until its own heads are read


@dataclass(frozen=True, slots=True)
class TailerContext:
    """What the datastores and partitions of one tailer process share."""

    settings: TailerSettings
    readers: Mapping[str, ClusterReader]
    """By cluster."""
    heads: Callable[[str], Mapping[int, Location]]
    """Returns the heads of a datastore as last seen, by shard."""
    paused: Callable[[str], bool]
    """Returns whether an operator has paused a datastore."""
    slots: TailerSlots
    """Bounds how many tails hold a batch at once."""
    publishing: Executor
    openings: TailerSlots
    """Bounds how many logs are opened at once."""
    opening: Executor
    closing: Executor
    """Threads of its own, because those that open logs may all wait for a broker that hangs."""
    prove: Callable[[Datastore], Awaitable[None]]
    """Returns once a datastore's topics are proven to be of these databases (I20)."""
    metrics: TailerMetrics = field(default_factory=TailerMetrics)


async def in_thread(threads: Executor, call: Callable[[*Args], T], *args: *Args) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, call, *args)


def quota_stall(partition_log: PartitionLog) -> tuple[Stall, str] | None:
    """Returns that a quota of Kafka delays a log, if one does."""
    if not partition_log.throttled_s:
        return None
    why = "a quota of Kafka delays the tailers, so transactions carry less: raise producer_byte_rate of their account"
    return Stall.QUOTA, why


class PartitionTail:
    """Publishes one partition through its log. `step` is one transaction."""

    def __init__(
        self,
        datastore: Datastore,
        partition_log: PartitionLog,
        progress: Progress,
        context: TailerContext,
        cells_max: int | None = None,
        stall: tuple[Stall, str] | None = None,
    ) -> None:
        self._datastore = datastore
        self._log = partition_log
        self._context = context
        self.cells_max = cells_max or TRANSACTION_CELLS_MAX
        """How many cells the next transaction carries. It is halved after a failure, down to one."""
        self._stall = stall  # of the log before, until a transaction succeeds
        self._may_grow = True  # the next transaction
        self._left_out = set[int]()  # shards of which a minion was said to lack what was published
        self._cell_s = math.inf  # what a cell cost in the last one
        self.shards = ShardQueue(datastore, progress)
        self._stopping = asyncio.Event()
        self._pace = Pace(usual_min_s=USUAL_MIN_S, pause_min_s=0.0, pause_max_s=PAUSE_MAX_S)
        self._left_of_round = 0
        self._refused_alone = 0  # reads of one shard after another

    @property
    def stall(self) -> tuple[Stall, str] | None:
        """Why its cells wait longer than they should, while some do."""
        return self._stall if self.shards.lag_cells() else None

    def heads_moved(self, heads: Mapping[int, Location]) -> None:
        """Takes note of heads of this partition's shards."""
        self.shards.heads_moved(heads)

    async def run(self) -> None:
        """Publishes until `stop`. While the datastore is paused, it publishes nothing.

        Raises BusUnavailable, Fenced or Misconfigured when the log has to be opened anew.
        """
        while not self._stopping.is_set():
            if self.shards.idle or self._context.paused(self._datastore.name):
                self.shards.news.clear()
                await self.shards.news.wait()
                continue
            async with self._context.slots.taken():
                await self.step()
            await pause(self._stopping, self._pause_s())

    def stop(self) -> None:
        """Lets `run` return after the transaction in flight."""
        self._stopping.set()
        self.shards.news.set()

    def look_again(self) -> None:
        """Lets `run` see whether the datastore is paused."""
        self.shards.news.set()

    async def step(self) -> int:
        """Publishes the next cells of some shards of one cluster in one transaction. Returns how many.

        Where the cluster can't be read, its shards back off, and those of other clusters go on. Raises BusUnavailable,
        Fenced, or Misconfigured.
        """
        with self.shards.taken(TailState.DOUBTFUL) as doubtful:
            if doubtful:
                await self._judge(doubtful)
        if self._left_of_round <= 0:
            self._left_of_round = self.shards.behind
        cells: list[StoredCell] = []
        with self.shards.taken(TailState.BEHIND, self.cells_max) as behind:
            self._left_of_round = self._left_of_round - len(behind) if behind else 0
            began = asyncio.get_running_loop().time()
            try:
                if behind:
                    cells = await self._read_part(behind)
            except (Unavailable, Misconfigured) as error:
                if self._log.state is not LogState.OPEN:
                    raise
                self._set_aside(behind, error)
            if cells:
                await self._publish(cells, read_s=asyncio.get_running_loop().time() - began)
        emit(Event.PASS_FINISHED, datastore=self._datastore.name, cells=len(cells))
        return len(cells)

    async def _publish(self, cells: Sequence[StoredCell], *, read_s: float) -> None:
        """Publishes cells that took `read_s` to read, and notes how far their shards are published."""
        began, name = asyncio.get_running_loop().time(), self._datastore.name
        try:
            published = await in_thread(self._context.publishing, self._log.publish, cells)
        except SchemalessError as error:
            self._context.metrics.failed(name, type(error).__name__)
            # A quota that delays for a minute leaves room for a sixtieth in a second.
            self.cells_max = max(1, int(len(cells) / max(2.0, self._log.throttled_s)))
            raise
        took_s = asyncio.get_running_loop().time() - began
        is_slow, cell_s = took_s >= SLOW_S, took_s / len(cells)
        self._may_grow = not is_slow or (not self._log.throttled_s and cell_s < CHEAPER * self._cell_s)
        self._cell_s = cell_s
        self._stall = quota_stall(self._log) if is_slow else None
        self._pace.took(took_s)
        created_at = {cell.shard: cell.created_at for cell in cells}  # of the last one of each shard
        for number, position in published.items():
            self.shards[number].published_up_to(position, created_at[number])
        in_kafka = self._log.stages_s
        stages = {"read": read_s, "wait": max(0.0, took_s - sum(in_kafka.values())), **in_kafka}
        self._context.metrics.published(name, len(cells), sum([len(cell.body) for cell in cells]), stages)

    def _pause_s(self) -> float:
        """Returns how long to wait after a pass, in seconds.

        Under load it lets cells gather. It doesn't while a shard waits for its turn in this round, or when the cells of
        a whole transaction wait.
        """
        if self._left_of_round > 0 or self.shards.cells_waiting >= self.cells_max:
            return self._log.settling_s
        return max(self._log.settling_s, self._pace.pause_s)

    def _set_aside(self, shards: Sequence[ShardProgress], error: Exception) -> None:
        """Lets the shards of a cluster that can't be read back off."""
        log.warning(
            "a cluster's shards are not tailed for a while",
            datastore=self._datastore.name,
            cluster=self._datastore.home(shards[0].shard),
            shards=len(shards),
            stall=(stall := stall_after(error)),
            error=str(error),
            retry_s=RETRY_S,
        )
        for shard in shards:
            if shard.state is TailState.WORKING:
                self.shards.back_off(shard, RETRY_S, stall, str(error))

    async def _read_part(self, shards: Sequence[ShardProgress]) -> list[StoredCell]:
        """Reads the next cells of the shards. Where a server refuses that, it reads fewer, down to one.

        A single shard that is refused backs off, and is read alone from then on. The others keep their turn. Raises
        what a server says that refuses one after the other.
        """
        part = shards
        while True:
            try:
                cells = await self._read(part)
            except NodeRefuses as error:
                if self._refused_alone >= REFUSALS_MAX and not isinstance(error, OF_A_PART):
                    raise
                if len(part) > 1:
                    part = part[: len(part) // 2]
                    continue
                self._refused_alone += 1
                part[0].is_read_alone = True
                self._set_aside(part, error)
                return []
            self._refused_alone = 0
            return cells

    async def _judge(self, doubtful: Sequence[ShardProgress]) -> None:
        """Asks the master whether it holds what was published. Else only a lagging minion showed less (I16).

        The master held whatever was published, because the log was opened before it is asked.
        """
        wanted = [Following(shard.published, 0) for shard in doubtful]
        try:
            answers = await self._reader(doubtful[0].shard).ask_master(shard_log.follow, self._datastore, wanted, 1)
        except (Unavailable, Misconfigured) as error:
            self._set_aside(doubtful, error)
            return
        for shard in doubtful:
            answer = answers[shard.shard]
            if not isinstance(answer, LocationGone):
                shard.held = True
            elif answer.generation > shard.published.generation:
                shard.head = max(shard.head, Location(answer.generation, answer.head))
            else:
                self.shards.refuse(shard, str(answer), CORRUPT_RETRY_S)

    async def _read(self, shards: Sequence[ShardProgress]) -> list[StoredCell]:
        """Reads the next cells of the shards, and proves that they are the next ones, of the history in the topic."""
        # Cells that came since the heads were read are taken along.
        shares = fair_shares({shard.shard: shard.waiting + NEWER_CELLS_MAX for shard in shards}, self.cells_max)
        pages = await self._reader(shards[0].shard).run(
            shard_log.follow,
            self._datastore,
            [Following(shard.published, shares[shard.shard]) for shard in shards],
            TRANSACTION_BYTES_MAX,
            timeout_s=READ_TIMEOUT_S,
        )
        emit(Event.CELLS_READ, datastore=self._datastore.name, shards=len(shards))
        cells: list[StoredCell] = []
        cut = False
        doubtful: dict[int, LocationGone] = {}
        ended: list[ShardProgress] = []
        for shard in shards:
            page = pages.get(shard.shard)
            if page is None:  # no bytes were left
                cut = True
            elif isinstance(page, ProvenPage):
                found = await self._next_cells(shard, page, ended)
                cells += found
                cut |= bool(found) and len(page.cells) < shares[shard.shard] and found[-1].added_id < page.head.added_id
            elif page.generation > shard.published.generation:
                ended.append(shard)
            else:
                doubtful[shard.shard] = page
        if doubtful:
            cells += await self._judge_reading(doubtful, self.cells_max - len(cells), ended)
        if ended:
            await self._cross_generation(ended)
        if cut:  # large bodies come in smaller batches, so that none are read in vain
            self.cells_max = max(1, len(cells) // 2)
        elif len(cells) >= self.cells_max and self._may_grow:
            self.cells_max = min(TRANSACTION_CELLS_MAX, self.cells_max * 2)
        return cells

    async def _next_cells(
        self, shard: ShardProgress, page: ProvenPage, ended: list[ShardProgress]
    ) -> Sequence[StoredCell]:
        """Returns the cells of a page that can be published now: those of the published generation.

        They end before a cell that is too large for Kafka, which no retry would change. Where none are left of the
        generation, the shard is among those that `ended`.
        """
        generation = shard.published.generation
        try:
            page = await self._proven(shard, page)
        except Corrupt as error:
            self._report(shard, str(error))
            return ()
        cells = [cell for cell in page.cells if cell.generation == generation]
        if not cells:
            if page.cells or page.head.generation > generation:
                ended.append(shard)
            elif shard.waiting:  # the head was another server's, and a minion lags behind it
                self.shards.back_off(shard, NOT_THERE_YET_S)
        if cells and record_bytes(cells[0]) > self._log.record_bytes_max:
            await in_thread(self._context.publishing, self._log.look_at_bound)  # somebody may have raised it
        for n, cell in enumerate(cells):
            if record_bytes(cell) > self._log.record_bytes_max:
                if n == 0:
                    what = f"cell {cell.location}, {cell.key}, has {len(cell.body)} stored bytes"
                    why = f"{what} and fits no record of Kafka: at most {self._log.record_bytes_max} do, key and all"
                    self._report(shard, why, Stall.BOUND)
                return cells[:n]
        return cells

    async def _proven(self, shard: ShardProgress, page: ProvenPage) -> ProvenPage:
        """Returns the page, or its master's where it has a hole, which may be a minion's own. Raises Corrupt."""
        try:
            verify_page(shard.published, page)
        except Corrupt:
            until = page.cells[-1].added_id if page.cells else page.head.added_id
            masters = await self._masters_page(shard, until - shard.published.added_id)
            if masters is None:
                raise
            verify_page(shard.published, masters)
            return masters
        return page

    async def _masters_page(self, shard: ShardProgress, cells_max: int) -> ProvenPage | None:
        """Returns the next cells of the master, None if it isn't reached, or hasn't what was published."""
        answers = dict[int, ProvenPage | LocationGone]()
        wanted = [Following(shard.published, max(1, min(cells_max, TRANSACTION_CELLS_MAX)))]
        with contextlib.suppress(Unavailable, Misconfigured):
            reader = self._reader(shard.shard)
            answers |= await reader.ask_master(shard_log.follow, self._datastore, wanted, TRANSACTION_BYTES_MAX)
        page = answers.get(shard.shard)
        return page if isinstance(page, ProvenPage) else None

    async def _cross_generation(self, ended: Sequence[ShardProgress]) -> None:
        """Announces the next generation that a reader of these shards of a cluster meets, in one transaction: a
        promotion begins one for all of them. All cells before it are published (I13).
        """
        reader, name = self._reader(ended[0].shard), self._datastore.name
        moment = await reader.run(shard_head.moment, name)
        heads = {head.shard: head for head in moment.heads}
        starts: dict[int, GenerationStart] = {}
        for shard in ended:
            head, published = heads.get(shard.shard), shard.published
            start = next_start(published.location, moment.starts.get(shard.shard, ()))
            if head is None:  # it moved
                self.shards.back_off(shard, RETRY_S)
            elif start is None and head.generation <= published.generation:  # a minion lags
                self.shards.back_off(shard, NOT_THERE_YET_S)
            elif start is None or start.starts_at > published.added_id + 1:
                self._report(shard, f"MySQL doesn't say where generation {head.generation} begins")
            else:
                starts[shard.shard] = start
        kept = {number: start.starts_at - 1 for number, start in starts.items()}
        digests = await reader.run(shard_log.digests, self._datastore, kept) if kept else {}
        if left := {number: kept[number] for number, digest in digests.items() if digest is None}:  # by a minion
            with contextlib.suppress(Unavailable, Misconfigured):
                digests |= await reader.ask_master(shard_log.digests, self._datastore, left)
        for number in left:
            if digests[number] is None:
                why = f"cell {kept[number]} is missing, and generation {starts.pop(number).generation} follows it"
                self._report(self.shards[number], why)
        if starts:
            found = [(number, start, digests[number]) for number, start in starts.items()]
            for position in await in_thread(self._context.publishing, self._log.announce, found):
                self.shards[position.shard].published_up_to(position)

    async def _judge_reading(
        self, doubtful: Mapping[int, LocationGone], cells_max: int, ended: list[ShardProgress]
    ) -> list[StoredCell]:
        """Asks the master about shards of which a node doesn't have what was published. Returns its next cells of those
        of which a minion left that out, or has something else, and lets the others wait once there are enough.
        """
        await self._judge([self.shards[number] for number in doubtful])
        cells, name = list[StoredCell](), self._datastore.name
        for number, gone in doubtful.items():
            shard = self.shards[number]
            if shard.state is not TailState.WORKING:
                continue
            lags = gone.head < shard.published.added_id or gone.generation < shard.published.generation
            left = cells_max - len(cells) if sum(len(cell.body) for cell in cells) < TRANSACTION_BYTES_MAX else 0
            if lags or not shard.held or left <= 0:
                self.shards.back_off(shard, NOT_THERE_YET_S)
                continue
            if number not in self._left_out:
                log.warning("a minion has another history than its master", shard=number, why=str(gone), datastore=name)
                self._left_out.add(number)
            page = await self._masters_page(shard, min(left, max(1, shard.waiting)))
            if page is None:
                self.shards.back_off(shard, NOT_THERE_YET_S)
            else:
                cells += await self._next_cells(shard, page, ended)
        return cells

    def _report(self, shard: ShardProgress, error: str, stall: Stall = Stall.NOT_DENSE) -> None:
        log.error(
            "shard is not tailed",
            datastore=self._datastore.name,
            shard=shard.shard,
            stall=stall,
            error=error,
            retry_s=CORRUPT_RETRY_S,
        )
        self.shards.back_off(shard, CORRUPT_RETRY_S, stall, error)

    def _reader(self, shard: int) -> ClusterReader:
        """Raises StorageUnavailable when the shard moved to a cluster that this machine's file doesn't have yet."""
        home = self._datastore.home(shard)
        if home not in self._context.readers:
            raise StorageUnavailable(f"cluster {home} is not in the topology file of this process")
        return self._context.readers[home]
