"""One partition: reads after the last published cell of each shard that is behind, and publishes (I7).

Holds at most one batch at a time, so a broker that is away costs no memory. A shard with a hole is put aside and
reported, again and again; the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from schemaless.bus.partition_log import LogState, PartitionLog
from schemaless.bus.progress import Progress
from schemaless.cell import StoredCell
from schemaless.errors import Corrupt, Misconfigured, StorageUnavailable
from schemaless.events import Event, emit
from schemaless.location import BEGINNING, Location
from schemaless.storage import shard_head, shard_log
from schemaless.storage.shard_log import LogRange
from schemaless.topology import Datastore
from tailer.cluster_reader import ClusterSource
from tailer.context import Shared, in_thread, pause
from tailer.fair_shares import shares
from tailer.shard_progress import ShardTail
from tailer.shard_queue import ShardTails

log = structlog.get_logger()

RETRY_S = 1.0  # after a failure that may pass
CORRUPT_RETRY_S = 10.0  # somebody has to repair the shard first
NEWER_CELLS_MAX = 16  # of a shard: beyond its head as last seen
NOT_THERE_YET_S = 0.05  # a minion that lags is asked again; its own heads, read soon, end that


class PartitionTail:
    """Publishes one partition through its log. `step` is one transaction."""

    def __init__(
        self,
        datastore: Datastore,
        partition_log: PartitionLog,
        progress: Progress,
        shared: Shared,
    ) -> None:
        self._datastore = datastore
        self._log = partition_log
        self._shared = shared
        self._cells_max = shared.settings.transaction_cells_max
        self._shards = ShardTails(datastore, progress)
        self._stopping = asyncio.Event()

    def heads_moved(self, heads: Mapping[int, Location]) -> None:
        """Takes note of heads of this partition's shards."""
        self._shards.heads_moved(heads)

    async def run(self) -> None:
        """Until `stop`; at most as many tails as there are slots hold a batch. While paused, nothing is published.

        Raises BusUnavailable, Fenced or Misconfigured when the log has to be opened anew.
        """
        while not self._stopping.is_set():
            if self._shards.idle or self._shared.paused(self._datastore.name):
                self._shards.news.clear()
                await self._shards.news.wait()
                continue
            try:
                async with self._shared.slots:
                    await self.step()
                await pause(self._log.settling_s, self._stopping)
            except (StorageUnavailable, Misconfigured) as error:
                if self._log.state is not LogState.OPEN:
                    raise
                log.warning("tailing pauses", datastore=self._datastore.name, error=str(error))
                await pause(RETRY_S, self._stopping)

    def stop(self) -> None:
        """Lets `run` return after the transaction in hand."""
        self._stopping.set()
        self._shards.news.set()

    def look_again(self) -> None:
        """Lets `run` see whether the datastore is paused."""
        self._shards.news.set()

    async def step(self) -> int:
        """One transaction with the next cells of some shards of one cluster; how many cells.

        Raises StorageUnavailable, BusUnavailable, Fenced, or Misconfigured.
        """
        await self._judge_doubtful()
        turn = self._shards.next_turn()
        try:
            await self._cross_generations(turn)
            cells = await self._read(turn)
            if cells:
                for shard, location in (
                    await in_thread(self._shared.publishing, lambda: self._log.publish(cells))
                ).items():
                    self._shards[shard].published_up_to(location)
            return len(cells)
        finally:
            for shard_tail in turn:
                self._shards.queue(shard_tail)
            emit(Event.PASS_FINISHED, datastore=self._datastore.name)

    async def _judge_doubtful(self) -> None:
        """Is the topic ahead of MySQL, or did a minion answer that lags? The master knows, asked after the log was
        opened: whatever was published, it held before.
        """
        doubtful = self._shards.next_doubtful()
        if not doubtful:
            return
        name, shards = self._datastore.name, [shard_tail.shard for shard_tail in doubtful]
        try:
            held = await self._source(shards[0]).ask_master(shard_head.heads_of, name, shards)
        except StorageUnavailable:
            for shard in shards:
                self._shards.put_aside(shard, RETRY_S)
            return
        heads = {head.shard: head.location for head in held}
        for shard_tail in doubtful:
            await self._judge(shard_tail, heads.get(shard_tail.shard, BEGINNING))

    async def _judge(self, shard_tail: ShardTail, head: Location) -> None:
        if head >= shard_tail.published:
            shard_tail.held = shard_tail.published
            return
        self._shards.refuse(shard_tail, head)
        refuse = partial(self._log.refuse, shard_tail.shard, shard_tail.published, head)
        await in_thread(self._shared.publishing, refuse)

    async def _cross_generations(self, turn: Sequence[ShardTail]) -> None:
        for shard_tail in turn:
            if shard_tail.must_look_for_generation:
                await self._look_for_generation(shard_tail)
            following = shard_tail.following
            if following is not None and shard_tail.waiting == 0:
                announce = partial(self._log.announce, shard_tail.shard, following)
                shard_tail.published_up_to(await in_thread(self._shared.publishing, announce))

    async def _look_for_generation(self, shard_tail: ShardTail) -> None:
        name, shard = self._datastore.name, shard_tail.shard
        head, starts = await self._source(shard).run(shard_head.history, name, shard)
        later = [start for start in starts if start.generation > shard_tail.published.generation]
        if later:
            shard_tail.following = later[0]
        elif head.generation > shard_tail.published.generation:
            self._report(shard, Corrupt(f"nothing tells where generation {head.generation} begins"))
        else:
            self._shards.put_aside(shard, NOT_THERE_YET_S)

    async def _read(self, turn: Sequence[ShardTail]) -> list[StoredCell]:
        """The next cells of the shards, proven to be the next ones."""
        waiting = {tail.shard: tail.waiting for tail in turn if tail.waiting and not self._shards.is_aside(tail.shard)}
        if not waiting:
            return []
        wanted = [
            LogRange(shard, self._shards[shard].published.added_id, limit)
            for shard, limit in shares(self._with_newer(waiting), self._cells_max).items()
        ]
        settings = self._shared.settings
        batch = await self._source(wanted[0].shard).run(
            shard_log.read,
            self._datastore,
            wanted,
            settings.transaction_bytes_max,
            timeout_s=settings.statement_timeout_s,
        )
        emit(Event.CELLS_READ, datastore=self._datastore.name, cells=sum(map(len, batch.cells)))
        proven = [self._proven(part.shard, cells) for part, cells in zip(wanted, batch.cells, strict=True)]
        self._put_empty_aside(wanted, batch)
        cells = [cell for part in proven for cell in part]
        self._adapt(len(cells), cut=batch.cut)
        return cells

    def _with_newer(self, waiting: Mapping[int, int]) -> Mapping[int, int]:
        """Cells that came since the heads were read are taken along, up to a generation that must be announced."""
        return {
            shard: count if self._shards[shard].following else count + NEWER_CELLS_MAX
            for shard, count in waiting.items()
        }

    def _proven(self, shard: int, cells: Sequence[StoredCell]) -> Sequence[StoredCell]:
        try:
            return self._shards[shard].proven(cells)
        except Corrupt as error:
            self._report(shard, error)
            return []

    def _put_empty_aside(self, wanted: Sequence[LogRange], batch: shard_log.LogBatch) -> None:
        """Where nothing came, cells were lost, or the head was another server's, and a minion lags behind it."""
        for part, cells in zip(wanted, batch.cells, strict=True):
            if part.shard in batch.lost:
                head = self._shards[part.shard].head
                self._report(part.shard, Corrupt(f"the head is {head}, but no cell follows {part.after}"))
            elif not cells and not batch.cut:
                self._shards.put_aside(part.shard, NOT_THERE_YET_S)

    def _adapt(self, cells: int, *, cut: bool) -> None:
        """Bodies that are large on the average come in smaller batches, and are not read in vain."""
        if cut:
            self._cells_max = max(1, cells // 2)
        elif cells >= self._cells_max:
            self._cells_max = min(self._shared.settings.transaction_cells_max, self._cells_max * 2)

    def _report(self, shard: int, error: Corrupt) -> None:
        log.error(
            "shard is not tailed",
            datastore=self._datastore.name,
            shard=shard,
            error=str(error),
            retry_s=CORRUPT_RETRY_S,
        )
        self._shards.put_aside(shard, CORRUPT_RETRY_S)

    def _source(self, shard: int) -> ClusterSource:
        return self._shared.sources[self._datastore.home(shard)]
