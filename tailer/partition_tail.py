"""PartitionTail: publishes one partition. It reads behind the last published cell of each shard that is behind (I7).

It holds at most one batch at a time, so an unreachable broker costs no memory. A shard with a hole backs off and is
logged again and again, while the others are published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

import structlog

from schemaless.bus.partition_log import LogState, PartitionLog
from schemaless.bus.published_progress import Progress
from schemaless.cell import StoredCell
from schemaless.config import TailerSettings
from schemaless.errors import Corrupt, Misconfigured, StorageUnavailable
from schemaless.events import Event, emit
from schemaless.lifecycle import pause
from schemaless.location import BEGINNING, Location
from schemaless.pace import Pace
from schemaless.storage import shard_head, shard_log
from schemaless.storage.shard_log import LogRange
from schemaless.topology import Datastore
from tailer.cluster_reader import ClusterReader
from tailer.shard_progress import MasterAnswer, ShardProgress, TailState
from tailer.shard_queue import ShardQueue, fair_shares
from tailer.transaction_slots import TransactionSlots

T = TypeVar("T")
Args = TypeVarTuple("Args")
log = structlog.get_logger()

RETRY_S = 1.0  # after a failure that may pass
CORRUPT_RETRY_S = 10.0  # an operator has to repair the shard first
NEWER_CELLS_MAX = 16  # of a shard: beyond its head as last seen
USUAL_MIN_S = 0.004  # a transaction on an idle machine: what a quicker one saves is no reason to wait
NOT_THERE_YET_S = 0.05  # a minion that lags is asked again; its own heads, read soon, end that


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
    slots: TransactionSlots
    """Bounds how many tails hold a batch at once."""
    publishing: Executor
    opening: Executor


async def in_thread(threads: Executor, call: Callable[[*Args], T], *args: *Args) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, call, *args)


class PartitionTail:
    """Publishes one partition through its log. `step` is one transaction."""

    def __init__(
        self, datastore: Datastore, partition_log: PartitionLog, progress: Progress, context: TailerContext
    ) -> None:
        self._datastore = datastore
        self._log = partition_log
        self._context = context
        self._cells_max = context.settings.transaction_cells_max
        self._shards = ShardQueue(datastore, progress)
        self._stopping = asyncio.Event()
        self._pace = Pace(usual_min_s=USUAL_MIN_S, pause_min_s=0.0, pause_max_s=context.settings.pause_max_s)
        self._left_of_round = 0

    def heads_moved(self, heads: Mapping[int, Location]) -> None:
        """Takes note of heads of this partition's shards."""
        self._shards.heads_moved(heads)

    async def run(self) -> None:
        """Publishes until `stop`. While the datastore is paused, it publishes nothing.

        Raises BusUnavailable, Fenced or Misconfigured when the log has to be opened anew.
        """
        while not self._stopping.is_set():
            if self._shards.idle or self._context.paused(self._datastore.name):
                self._shards.news.clear()
                await self._shards.news.wait()
                continue
            async with self._context.slots.taken():
                await self.step()
            await pause(self._stopping, self._pause_s())

    def stop(self) -> None:
        """Lets `run` return after the transaction in flight."""
        self._stopping.set()
        self._shards.news.set()

    def look_again(self) -> None:
        """Lets `run` see whether the datastore is paused."""
        self._shards.news.set()

    async def step(self) -> int:
        """Publishes the next cells of some shards of one cluster in one transaction. Returns how many.

        Where the cluster can't be read, its shards back off, and those of other clusters go on. Raises BusUnavailable,
        Fenced, or Misconfigured.
        """
        with self._shards.taken(TailState.DOUBTFUL) as doubtful:
            if doubtful:
                await self._judge(doubtful)
        if self._left_of_round <= 0:
            self._left_of_round = self._shards.behind
        cells: list[StoredCell] = []
        with self._shards.taken(TailState.BEHIND) as behind:
            self._left_of_round = self._left_of_round - len(behind) if behind else 0
            try:
                for shard in behind:
                    await self._cross_generation(shard)
                readable = [shard for shard in behind if shard.state is TailState.WORKING and shard.waiting]
                if readable:
                    cells = await self._read(readable)
            except (StorageUnavailable, Misconfigured) as error:
                if self._log.state is not LogState.OPEN:
                    raise
                self._set_aside(behind, error)
            if cells:
                began = asyncio.get_running_loop().time()
                published = await in_thread(self._context.publishing, self._log.publish, cells)
                self._pace.took(asyncio.get_running_loop().time() - began)
                for number, location in published.items():
                    self._shards[number].published_up_to(location)
        emit(Event.PASS_FINISHED, datastore=self._datastore.name, cells=len(cells))
        return len(cells)

    def _pause_s(self) -> float:
        """Returns how long to wait after a pass, in seconds.

        Under load it lets cells gather. It doesn't while a shard waits for its turn in this round, or when the cells of
        a whole transaction wait.
        """
        if self._left_of_round > 0 or self._shards.cells_waiting >= self._cells_max:
            return self._log.settling_s
        return max(self._log.settling_s, self._pace.pause_s)

    def _set_aside(self, shards: Sequence[ShardProgress], error: Exception) -> None:
        """Lets the shards of a cluster that can't be read back off."""
        log.warning(
            "a cluster's shards are not tailed for a while",
            datastore=self._datastore.name,
            cluster=self._datastore.home(shards[0].shard),
            shards=len(shards),
            error=str(error),
            retry_s=RETRY_S,
        )
        for shard in shards:
            if shard.state is TailState.WORKING:
                self._shards.back_off(shard, RETRY_S)

    async def _judge(self, doubtful: Sequence[ShardProgress]) -> None:
        """Asks the master whether the topic is ahead of MySQL, or only a lagging minion showed an old head.

        The master held whatever was published, because the log was opened before it is asked.
        """
        name, numbers = self._datastore.name, [shard.shard for shard in doubtful]
        try:
            held = await self._reader(numbers[0]).ask_master(shard_head.heads_of, name, numbers)
        except (StorageUnavailable, Misconfigured) as error:
            self._set_aside(doubtful, error)
            return
        heads = {head.shard: head.location for head in held}
        for shard in doubtful:
            head = heads.get(shard.shard, BEGINNING)
            if head >= shard.published:
                shard.answer = MasterAnswer.HELD
            else:
                self._shards.refuse(shard, head)
                await in_thread(self._context.publishing, self._log.refuse, shard.shard, shard.published, head)

    async def _cross_generation(self, shard: ShardProgress) -> None:
        """Announces the next generation of a shard once all cells before it are published (I13)."""
        if shard.head.generation > shard.published.generation and shard.following is None:
            reader = self._reader(shard.shard)
            head, starts = await reader.run(shard_head.history, self._datastore.name, shard.shard)
            later = [start for start in starts if start.generation > shard.published.generation]
            if later:
                shard.following = later[0]
            elif head.generation > shard.published.generation:
                self._report(shard, f"MySQL doesn't say where generation {head.generation} begins")
            else:
                self._shards.back_off(shard, NOT_THERE_YET_S)
        if shard.following is not None and shard.waiting == 0:
            announced = await in_thread(self._context.publishing, self._log.announce, shard.shard, shard.following)
            shard.published_up_to(announced)

    async def _read(self, shards: Sequence[ShardProgress]) -> list[StoredCell]:
        """Reads the next cells of the shards, and proves that they are the next ones."""
        # Cells that came since the heads were read are taken along, up to a generation that must be announced.
        shares = fair_shares(
            {shard.shard: shard.waiting if shard.following else shard.waiting + NEWER_CELLS_MAX for shard in shards},
            self._cells_max,
        )
        settings = self._context.settings
        batch = await self._reader(shards[0].shard).run(
            shard_log.read,
            self._datastore,
            [LogRange(shard.shard, shard.published.added_id, shares[shard.shard]) for shard in shards],
            settings.transaction_bytes_max,
            timeout_s=settings.statement_timeout_s,
        )
        cells: list[StoredCell] = []
        emit(Event.CELLS_READ, datastore=self._datastore.name, shards=len(shards))
        for shard, found in zip(shards, batch.cells, strict=True):
            if shard.shard in batch.lost:
                self._report(shard, f"the head is {shard.head}, but no cell follows {shard.published.added_id}")
            elif found:
                try:
                    cells += shard.proven(found)
                except Corrupt as error:
                    self._report(shard, str(error))
            elif not batch.cut:  # the head was another server's, and a minion lags behind it
                self._shards.back_off(shard, NOT_THERE_YET_S)
        if batch.cut:  # large bodies come in smaller batches, so that none are read in vain
            self._cells_max = max(1, len(cells) // 2)
        elif len(cells) >= self._cells_max:
            self._cells_max = min(settings.transaction_cells_max, self._cells_max * 2)
        return cells

    def _report(self, shard: ShardProgress, error: str) -> None:
        log.error(
            "shard is not tailed",
            datastore=self._datastore.name,
            shard=shard.shard,
            error=error,
            retry_s=CORRUPT_RETRY_S,
        )
        self._shards.back_off(shard, CORRUPT_RETRY_S)

    def _reader(self, shard: int) -> ClusterReader:
        return self._context.readers[self._datastore.home(shard)]
