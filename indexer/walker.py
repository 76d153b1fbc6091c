"""The walker builds an index by row: it writes each row once, as the log makes it up to a fixed head.

Each shard has a head of its own, which is fixed before its walk begins. The walk goes over all keys of the shard in
their order. How far it is moves in the transactions of the entries, on each cluster. At the end the keys that it met
must number what the head says, because the log is dense (I3). Only then the shard gets its checkpoint at the head, and
deliveries follow the log from there.

A generation that starts at or below the head begins the walk anew, with the head just before it (I13).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext

import msgspec
import structlog
from msgspec.structs import replace

from indexer.maintainer import Maintainer
from schemaless.consume.ports import Advance, CheckpointStore, Script, ShardCheckpoint
from schemaless.errors import Corrupt, Fenced, RefusedForGood, SchemalessError, TableMissing
from schemaless.index.definition import IndexDefinition
from schemaless.location import Location, generation_at, kept_until
from schemaless.position import Position
from schemaless.runtime.batching import all_or_first_error
from schemaless.runtime.lifecycle import pause
from schemaless.storage import (
    checkpoint_table,
    entity_table,
    index_definition_table,
    shard_head,
    shard_log,
)
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import all_masters
from schemaless.storage.index_definition_table import NO_LIMITS, IndexLimits, RowWalk, walked_sum
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.topology import Datastore

log = structlog.get_logger()

_SHARDS_AT_ONCE = 8  # their round trips overlap. Each holds a page of some megabytes
_WANTED_S = 5.0  # for how long a shard is walked after it was last asked for
_RETRY_S = 1.0
_IDLE_S = 1.0


class Walker:
    """Walks the shards of one version that deliveries of this process ask for. Belongs to one event loop."""

    def __init__(
        self,
        storage: AsyncStorage,
        datastore: Datastore,
        definition: IndexDefinition,
        maintainer: Maintainer,
        load: BuildLoad,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._datastore = datastore
        self._definition = definition
        self._maintainer = maintainer
        self._load = load
        self._clock = clock
        self._version = maintainer.version
        self._wanted: dict[int, float] = {}
        self._walking: set[int] = set()
        self._known: dict[int, dict[str, RowWalk]] = {}
        self._wake = asyncio.Event()
        self.reason: str | None = None
        """Why the index can't be built."""

    @property
    def is_walking(self) -> bool:
        return bool(self._walking)

    def want(self, shards: Iterable[int]) -> None:
        """Takes note that this process has these shards, and that they have no checkpoint."""
        self._wanted.update(dict.fromkeys(shards, self._clock()))
        self._wake.set()

    async def run(self, writes: RefusedWrites) -> None:
        """Walks what is wanted until it is cancelled, or until the index can't be built."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_SHARDS_AT_ONCE):
                tasks.create_task(self._walk_wanted(writes))

    async def _walk_wanted(self, writes: RefusedWrites) -> None:
        while self.reason is None:
            shard = next((n for n in sorted(self._wanted) if n not in self._walking), None)
            if shard is None:
                self._wake.clear()
                await pause(self._wake, _IDLE_S)
                continue
            self._walking.add(shard)
            try:
                while (
                    self.reason is None and self._clock() - self._wanted[shard] < _WANTED_S and await self.step(shard)
                ):
                    writes.succeeded([shard])
            except SchemalessError as error:
                if isinstance(error, RefusedForGood | TableMissing | Corrupt):
                    writes.note([shard], error)
                log.warning("the build of a shard waits", index=self._definition.name, shard=shard, why=str(error))
                await asyncio.sleep(_RETRY_S)
            finally:
                self._walking.discard(shard)
                self._wanted.pop(shard, None)
                self._known.pop(shard, None)

    async def step(self, shard: int) -> bool:
        """Walks some rows further. Returns whether something of the shard is left. Raises StorageUnavailable."""
        walks = self._known.get(shard) or await self._standing(shard)
        if walks is None:
            return True
        open_walks = {cluster: walk for cluster, walk in walks.items() if not walk.is_over}
        if not open_walks:
            self._known.pop(shard, None)  # a promotion may take it back
            return False
        self._known[shard] = walks
        # A shard without cells has nothing to walk, and queries with `after` wait for its checkpoint.
        has_cells = any(walk.until for walk in open_walks.values())
        async with self._load.page(entity_table.COLUMNS_AT_ONCE) if has_cells else nullcontext(1) as columns_max:
            allowed = self._maintainer.throttle.take(columns_max)
            if allowed:
                return await self._page(shard, walks, open_walks, allowed)
        await asyncio.sleep(self._maintainer.throttle.wait_s)
        return True

    async def _page(
        self, shard: int, walks: dict[str, RowWalk], open_walks: Mapping[str, RowWalk], columns_max: int
    ) -> bool:
        """Walks a page of rows, where the cluster is that is furthest behind. Returns what `step` does."""
        at = min(open_walks.values(), key=lambda walk: walk.row_key)
        part = await self._maintainer.walk(shard, at.until, at.row_key, columns_max)
        self._maintainer.throttle.correct(columns_max, part.keys)
        to = replace(at, row_key=part.last, walked=at.walked + part.keys, is_over=not part.more)
        last: Script = ""
        if to.is_over:
            position = await self._proven(shard, to)
            if position is None:
                self._known.pop(shard)
                return self.reason is None
            last = checkpoint_table.making(self._datastore.name, self._definition.consumer, [position], counts=False)
        behind = {cluster: walk for cluster, walk in open_walks.items() if walk.row_key <= to.row_key}
        began = self._clock()
        moved = await all_or_first_error(
            self._storage.master(cluster).run(
                index_definition_table.move_walk,
                self._version,
                shard,
                walk,
                to,
                ";".join(filter(None, [part.scripts.get(cluster), last])),
            )
            for cluster, walk in behind.items()
        )
        self._load.note(self._clock() - began)
        if all(moved):
            walks.update(dict.fromkeys(behind, to))
        else:
            self._known.pop(shard)  # another process walks it, or began it anew
        return True

    async def _standing(self, shard: int) -> dict[str, RowWalk] | None:
        """Returns the walk of a shard by cluster, all with one head. None: it was begun, or begun anew, just now."""
        placed = self._definition.placed(self._datastore)
        storage, clusters, consumer = self._storage, placed.clusters, self._definition.consumer
        answers = await all_masters(storage, clusters, index_definition_table.walks, self._version, consumer, [shard])
        walks = {cluster: found[shard] for cluster, found in answers.items() if shard in found}
        home = storage.master(self._datastore.home(shard))
        head, starts = await home.run(shard_head.history, self._datastore.name, shard)
        if len(walks) < len(clusters):
            version = self._datastore.name, self._version.name, self._version.number
            noted = await all_masters(storage, clusters, index_definition_table.build_until, *version)
            known = [found[shard] for found in noted.values() if shard in found]
            begun = RowWalk(head.generation, min([*known, *(walk.until for walk in walks.values()), head.added_id]))
            await all_masters(storage, clusters, index_definition_table.begin_walk, self._version, shard, begun)
            return None
        lowest = min(walk.until for walk in walks.values())
        until = kept_until(Location(min(walk.generation for walk in walks.values()), lowest), starts)
        if any(walk.until != until or walk.superseded for walk in walks.values()):
            await self._begin_anew(shard, walks, RowWalk(head.generation, until))
            return None
        return walks

    async def _begin_anew(self, shard: int, walks: Mapping[str, RowWalk], anew: RowWalk) -> None:
        """Begins a walk with an earlier head. Nobody may write to it until what it had written is taken back.

        Raises Fenced if another process did it meanwhile.
        """
        log.info("the build of a shard begins anew", index=self._definition.name, shard=shard, until=anew.until)
        masters = {cluster: self._storage.master(cluster) for cluster in walks}
        begun = await all_or_first_error(
            masters[cluster].run(
                index_definition_table.supersede_walk, self._version, self._definition.consumer, shard, walk, anew
            )
            for cluster, walk in walks.items()
        )

        async def write(cluster: str, script: Script) -> None:
            if not await masters[cluster].run(
                index_definition_table.write_superseded, self._version, shard, anew, script
            ):
                raise Fenced(f"another process walks shard {shard}")

        if not all(begun):
            raise Fenced(f"another process began the walk of shard {shard} anew")
        known = await self._maintainer.generations(shard, anew.generation)
        scripts = await self._maintainer.take_back(shard, anew.until + 1, known, masters, write)
        await all_or_first_error(write(cluster, script) for cluster, script in scripts.items() if script)
        await all_masters(self._storage, masters, index_definition_table.resume_walk, self._version, shard, anew)

    async def _proven(self, shard: int, end: RowWalk) -> Position | None:
        """Returns the checkpoint of a shard that is walked to its end, if the walk met every cell up to its head."""
        home = self._storage.master(self._datastore.home(shard))
        _, starts = await home.run(shard_head.history, self._datastore.name, shard)
        if kept_until(Location(end.generation, end.until), starts) < end.until:
            return None  # the next step begins anew
        if end.walked != end.until:
            self.reason = (
                f"shard {shard} has {end.walked} of the {end.until} cells of its log up to {end.until}: run"
                " `schemaless audit`, and once it is clean drop the index and make it anew"
            )
            return None
        if not end.until:
            return Position(shard, 1, 0)
        digests = await home.run(shard_log.digests, self._datastore, {shard: end.until})
        return Position(shard, generation_at(end.until, starts), end.until, digest=digests[shard])


class WalkedCheckpoints:
    """The checkpoints of an index. A shard that has none yet is walked first."""

    def __init__(self, checkpoints: CheckpointStore, walker: Walker) -> None:
        self._checkpoints = checkpoints
        self._walker = walker

    @property
    def consumer(self) -> str:
        return self._checkpoints.consumer

    async def read(self, shards: Iterable[int]) -> dict[int, ShardCheckpoint]:
        numbers = list(shards)
        found = await self._checkpoints.read(numbers)
        self._walker.want([shard for shard in numbers if shard not in found])
        return found

    async def move(self, advances: Mapping[int, Advance], effects: Mapping[str, Script]) -> frozenset[int]:
        return await self._checkpoints.move(advances, effects)

    async def give_away(self, shards: Iterable[int]) -> None:
        await self._checkpoints.give_away(shards)


# BuildLoad decides when a build has to rest, and how much it may do at once.
#
# It rests while a minion lags behind what it wrote, and when its commits became slow. While cells come in, it takes
# small pages, one at a time, and works a share of the time only: a large commit makes puts wait that come behind it.

LAG_CELLS_MAX = 100_000
COMMIT_MAX_S = 1.0
BUSY_SHARE = 0.1
_LOOK_PAUSE_S = 1.0
_LOOK_TIMEOUT_S = 2.0
_COMMITS_MAX = 100
_COMMITS_MIN = 10  # one that was slow says nothing
_SLOW_REST_S = 2.0
_REST_MAX_S = 1.0  # then it looks whether its limits were changed
_BUSY_COLUMNS_MAX = 256  # of a page while cells come in
_BUSY_REST_MAX_S = 5.0  # the least pace: pages of a server that is slow don't come ever more rarely
_BUSY_CELLS_PER_S = 5.0
_COUNT_PAUSE_S = 0.5
_FIRST_COUNT_PAUSE_S = 0.1  # nobody knows before the second look whether cells come in


class BusyTurns:
    """The turns of all builds of a process while cells come in: one page at a time, and one rest for all of them.

    So ten builds work as little as one. `ended_at` is when the last page ended, on the builds' clock, and `worked_s`
    how long it took.
    """

    def __init__(self) -> None:
        self.one_page = asyncio.Lock()  # it serves builds in the order in which they ask
        self.ended_at = 0.0
        self.worked_s = 0.0


class BuildLoad:
    """The load of one build in this process. `clock` counts seconds, and `sleep` rests for some.

    A build rests while a minion is more than `lag_cells_max` cells behind, 0: it doesn't look. And it rests when one of
    a hundred of its commits takes longer than `commit_max_s`. While cells come in, all builds that share `turns` work
    `busy_share` of the time together. They work more only where a rest would be longer than five seconds. With 1 a
    build doesn't look whether cells come in. Orders go before these limits.
    """

    def __init__(  # noqa: PLR0913  # most of them are named, and have defaults
        self,
        storage: AsyncStorage,
        datastore: Datastore,
        version: IndexVersion,
        *,
        clusters: Collection[str] = (),
        lag_cells_max: int = LAG_CELLS_MAX,
        commit_max_s: float = COMMIT_MAX_S,
        busy_share: float = BUSY_SHARE,
        turns: BusyTurns | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._storage = storage
        self._datastore = datastore
        self._version = version
        self._clusters = clusters or datastore.clusters
        self._by_default = lag_cells_max, commit_max_s, busy_share
        self.limit_to(NO_LIMITS)
        self._clock = clock
        self._sleep = sleep
        self._commits_s: deque[float] = deque(maxlen=_COMMITS_MAX)
        self._looked_at = clock()
        self._turns = turns or BusyTurns()
        self._cells: int | None = None
        self._counted_at = clock() - _COUNT_PAUSE_S
        self._is_busy: bool | None = None

    def limit_to(self, limits: IndexLimits) -> None:
        """Changes the limits from now on. Where they say nothing, the defaults count."""
        lag_cells_max, commit_max_s, busy_share = self._by_default
        self._lag_cells_max = lag_cells_max if limits.build_lag_cells_max is None else limits.build_lag_cells_max
        self._commit_max_s = commit_max_s if limits.build_commit_max_s is None else limits.build_commit_max_s
        self._busy_share = busy_share if limits.build_busy_share is None else limits.build_busy_share

    def note(self, commit_s: float) -> None:
        """Takes note of how long a commit took."""
        self._commits_s.append(commit_s)

    @asynccontextmanager
    async def page(self, columns_max: int) -> AsyncIterator[int]:
        """Waits until a page may be walked. Gives how many columns of rows it may have. Raises StorageUnavailable."""
        await self.rest()
        if self._busy_share >= 1 or not await self._cells_come_in():
            yield columns_max
            return
        turns = self._turns
        async with turns.one_page:
            while (rest_s := turns.ended_at + self._rest_s(turns.worked_s) - self._clock()) > 0:
                await self._sleep(min(rest_s, _REST_MAX_S))
            began = self._clock()
            try:
                yield min(columns_max, _BUSY_COLUMNS_MAX)
            finally:  # a page that failed has cost the servers as much
                turns.ended_at = self._clock()
                turns.worked_s = turns.ended_at - began

    def _rest_s(self, worked_s: float) -> float:
        """Returns how long builds rest after a page that took so long, while cells come in."""
        return min(worked_s * (1 / self._busy_share - 1), _BUSY_REST_MAX_S)

    async def _cells_come_in(self) -> bool:
        """Returns whether the datastore's heads have moved lately, and True while that isn't known."""
        passed_s = self._clock() - self._counted_at
        if passed_s >= (_FIRST_COUNT_PAUSE_S if self._is_busy is None else _COUNT_PAUSE_S):
            self._counted_at = self._clock()
            of = self._datastore
            answers = await all_masters(self._storage, of.clusters, shard_head.movement, of.name)
            cells, before = sum(found.heads_sum for found in answers.values()), self._cells
            self._cells = cells
            if before is not None:
                is_busy = cells - before > _BUSY_CELLS_PER_S * passed_s
                if is_busy and not self._is_busy:
                    log.info("a build gives way to puts", index=self._version.name, busy_share=self._busy_share)
                self._is_busy = is_busy
        return self._is_busy is not False

    async def rest(self) -> None:
        """Returns when the build may go on. A minion that doesn't answer isn't waited for."""
        if len(self._commits_s) >= _COMMITS_MIN:
            slowest_s = sorted(self._commits_s)[-1 - len(self._commits_s) // 100]
            if slowest_s > self._commit_max_s:
                log.info("a build rests: its commits are slow", index=self._version.name, seconds=round(slowest_s, 3))
                self._commits_s.clear()
                await self._sleep(_SLOW_REST_S)
        if not self._lag_cells_max or self._clock() - self._looked_at < _LOOK_PAUSE_S:
            return
        while self._lag_cells_max and (lag := await self._lag_cells()) > self._lag_cells_max:
            log.info("a build rests: a minion lags", index=self._version.name, cells=lag)
            await self._sleep(_LOOK_PAUSE_S)
        self._looked_at = self._clock()

    async def _lag_cells(self) -> int:
        """Returns how many cells the minion that lags most is behind what the build has written on its master."""
        lag = 0
        for cluster in self._clusters:
            master = self._storage.master(cluster)
            minions = self._storage.minions(cluster)
            if minions:
                written = await master.run(walked_sum, self._version, timeout_s=_LOOK_TIMEOUT_S)
            for minion in minions:
                try:
                    there = await minion.run(walked_sum, self._version, timeout_s=_LOOK_TIMEOUT_S)
                except SchemalessError:
                    continue
                lag = max(lag, written - there)
        return lag


# RefusedWrites decides when an index has failed: a server refuses what it writes, and would refuse it again.
#
# A cell that can't be decoded fails a build in the same way.
#
# A transaction carries the writes of several indexes, and its error may be another one's fault. So an index fails only
# where the same source shard is refused again and again, without a success in between. An outage is no refusal.

FAILED_AFTER_S = 3.0
FAILED_AFTER_TIMES = 3


class _Refused(msgspec.Struct):
    since: float
    times: int = 0


class RefusedWrites:
    """The checkpoints of one index, which remember which source shards are refused. `clock` counts seconds."""

    def __init__(self, checkpoints: CheckpointStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._checkpoints = checkpoints
        self._clock = clock
        self._refused: dict[int, _Refused] = {}
        self.reason: str | None = None
        """Why the index has failed."""

    @property
    def consumer(self) -> str:
        return self._checkpoints.consumer

    async def read(self, shards: Iterable[int]) -> dict[int, ShardCheckpoint]:
        return await self._checkpoints.read(shards)

    async def move(self, advances: Mapping[int, Advance], effects: Mapping[str, Script]) -> frozenset[int]:
        try:
            lost = await self._checkpoints.move(advances, effects)
        except (RefusedForGood, TableMissing) as error:
            self.note(advances, error)
            raise
        self.succeeded(advances)
        return lost

    def succeeded(self, shards: Iterable[int]) -> None:
        """Takes note that no server refuses these shards."""
        for shard in shards:
            self._refused.pop(shard, None)

    async def give_away(self, shards: Iterable[int]) -> None:
        await self._checkpoints.give_away(shards)

    def note(self, shards: Iterable[int], error: Exception) -> None:
        """Takes note that these shards can't be written: a server refuses it, or a cell can't be decoded."""
        now = self._clock()
        for shard in shards:
            refused = self._refused.setdefault(shard, _Refused(now))
            refused.times += 1
            if refused.times >= FAILED_AFTER_TIMES and now - refused.since >= FAILED_AFTER_S:
                self.reason = f"the cells of shard {shard} can't be indexed: {error}"
