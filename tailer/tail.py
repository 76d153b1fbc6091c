"""One partition: reads after the last published cell of each shard that is behind, and publishes (I7).

Holds at most one batch at a time, so a broker that is away costs no memory. A shard with a hole is put aside and
reported, again and again; the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from schemaless.bus.partition_log import PartitionLog
from schemaless.bus.progress import Progress
from schemaless.cell import StoredCell
from schemaless.errors import BusUnavailable, Corrupt, Misconfigured, StorageUnavailable
from schemaless.location import Location
from schemaless.storage import shard_head, shard_log
from schemaless.storage.shard_log import Wanted
from schemaless.topology import Datastore
from tailer.shard_tail import ShardTail
from tailer.shared import Shared, in_thread, pause
from tailer.source import ClusterSource
from tailer.turn import shares

log = structlog.get_logger()

SHARDS_MAX = 64  # of one transaction
RETRY_S = 1.0  # after a failure that may pass
CORRUPT_RETRY_S = 10.0  # somebody has to repair the shard first


class Tail:
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
        self._progress = progress
        self._shared = shared
        self._cells_max = shared.settings.batch_cells_max
        self._shards: dict[int, ShardTail] = {}
        self._behind: dict[int, None] = {}  # in the order of their turns
        self._aside: set[int] = set()
        self._news = asyncio.Event()
        self._stopping = asyncio.Event()

    def heads_moved(self, heads: Mapping[int, Location]) -> None:
        """Takes note of heads of this partition's shards."""
        for shard, head in heads.items():
            known = self._shards.get(shard)
            if known is not None:
                known.head = head
                self._queue(known)
            elif shard not in self._aside:
                self._begin(shard, head)

    async def run(self) -> None:
        """Until `stop`; at most as many tails as there are slots hold a batch.

        Raises BusUnavailable, Fenced or Misconfigured when the log is not usable any more.
        """
        while not self._stopping.is_set():
            if not self._behind:
                self._news.clear()
                await self._news.wait()
                continue
            try:
                async with self._shared.slots:
                    await self.step()
            except (StorageUnavailable, BusUnavailable, Misconfigured) as error:
                if not self._log.usable:
                    raise
                log.warning("tailing pauses", datastore=self._datastore.name, error=str(error))
                await pause(RETRY_S, self._stopping)

    def stop(self) -> None:
        """Lets `run` return after the transaction in hand."""
        self._stopping.set()
        self._news.set()

    async def step(self) -> int:
        """One transaction with the next cells of some shards of one cluster; how many cells.

        Raises StorageUnavailable, BusUnavailable, Fenced, or Misconfigured.
        """
        turn = self._next_turn()
        try:
            await self._cross_generations(turn)
            cells = await self._read(turn)
            if cells:
                for shard, location in (
                    await in_thread(self._shared.publishing, lambda: self._log.publish(cells))
                ).items():
                    self._shards[shard].published = location
            return len(cells)
        finally:
            for shard_tail in turn:
                self._queue(shard_tail)

    def _begin(self, shard: int, head: Location) -> None:
        try:
            published = self._progress.location(shard, head.added_id)
        except Misconfigured as error:
            self._aside.add(shard)  # until progress says more: whoever writes it makes us open the log anew
            log.error("shard is not tailed", datastore=self._datastore.name, shard=shard, error=str(error))
            return
        self._shards[shard] = ShardTail(shard, published, head)
        self._queue(self._shards[shard])

    def _queue(self, shard_tail: ShardTail) -> None:
        if shard_tail.behind and shard_tail.shard not in self._aside:
            self._behind.setdefault(shard_tail.shard)
            self._news.set()

    def _next_turn(self) -> list[ShardTail]:
        """Takes the shards that wait longest and share a cluster out of the queue."""
        first = next(iter(self._behind), None)
        if first is None:
            return []
        home = self._datastore.home(first)
        turn = [shard for shard in self._behind if self._datastore.home(shard) == home][:SHARDS_MAX]
        for shard in turn:
            del self._behind[shard]
        return [self._shards[shard] for shard in turn]

    async def _cross_generations(self, turn: Sequence[ShardTail]) -> None:
        for shard_tail in turn:
            if shard_tail.must_look_for_generation:
                await self._look_for_generation(shard_tail)
            following = shard_tail.following
            if following is not None and shard_tail.waiting == 0:
                announce = partial(self._log.announce, shard_tail.shard, following)
                shard_tail.published = await in_thread(self._shared.publishing, announce)
                shard_tail.following = None

    async def _look_for_generation(self, shard_tail: ShardTail) -> None:
        name, shard = self._datastore.name, shard_tail.shard
        starts = await self._source(shard).run(lambda: shard_head.generations(name, shard))
        later = [start for start in starts if start.generation > shard_tail.published.generation]
        if later:
            shard_tail.following = later[0]
        else:
            error = Corrupt(f"nothing tells where generation {shard_tail.head.generation} begins")
            self._put_aside(shard, error, CORRUPT_RETRY_S)

    async def _read(self, turn: Sequence[ShardTail]) -> list[StoredCell]:
        """The next cells of the shards, proven to be the next ones."""
        waiting = {tail.shard: tail.waiting for tail in turn if tail.waiting and tail.shard not in self._aside}
        if not waiting:
            return []
        wanted = [
            Wanted(shard, self._shards[shard].published.added_id, limit)
            for shard, limit in shares(waiting, self._cells_max).items()
        ]
        settings = self._shared.settings
        batch = await self._source(wanted[0].shard).run(
            lambda: shard_log.read(self._datastore, wanted, settings.batch_bytes_max),
            timeout_s=settings.statement_timeout_s,
        )
        proven = [self._proven(part.shard, cells) for part, cells in zip(wanted, batch.cells, strict=True)]
        if not batch.cut:
            self._report_missing(wanted, batch.cells)
        cells = [cell for part in proven for cell in part]
        self._adapt(len(cells), cut=batch.cut)
        return cells

    def _proven(self, shard: int, cells: Sequence[StoredCell]) -> Sequence[StoredCell]:
        try:
            return self._shards[shard].proven(cells)
        except Corrupt as error:
            self._put_aside(shard, error, CORRUPT_RETRY_S)
            return []

    def _report_missing(self, wanted: Sequence[Wanted], found: Sequence[Sequence[StoredCell]]) -> None:
        """A head without its cells: for a moment after changing over to a minion, else cells were lost."""
        for part, cells in zip(wanted, found, strict=True):
            if not cells:
                head = self._shards[part.shard].head
                self._put_aside(part.shard, Corrupt(f"the head is {head}, but no cell follows {part.after}"), RETRY_S)

    def _adapt(self, cells: int, *, cut: bool) -> None:
        """Bodies that are large on the average come in smaller batches, and are not read in vain."""
        if cut:
            self._cells_max = max(1, cells // 2)
        elif cells >= self._cells_max:
            self._cells_max = min(self._shared.settings.batch_cells_max, self._cells_max * 2)

    def _put_aside(self, shard: int, error: Corrupt, retry_s: float) -> None:
        log.error("shard is not tailed", datastore=self._datastore.name, shard=shard, error=str(error), retry_s=retry_s)
        self._aside.add(shard)
        asyncio.get_running_loop().call_later(retry_s, self._take_back, shard)

    def _take_back(self, shard: int) -> None:
        self._aside.discard(shard)
        self._queue(self._shards[shard])

    def _source(self, shard: int) -> ClusterSource:
        return self._shared.sources[self._datastore.home(shard)]
