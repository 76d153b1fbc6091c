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
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import structlog
from msgspec.structs import replace

from indexer.build_load import BuildLoad
from indexer.maintainer import Maintainer
from indexer.refused_writes import RefusedWrites
from schemaless.consume.ports import Advance, CheckpointStore, Script, ShardCheckpoint
from schemaless.errors import Corrupt, Fenced, RefusedForGood, SchemalessError, TableMissing
from schemaless.index.definition import IndexDefinition
from schemaless.location import Location, generation_at, kept_until
from schemaless.position import Position
from schemaless.runtime.batching import all_or_first_error
from schemaless.runtime.lifecycle import pause
from schemaless.storage import (
    checkpoint_table,
    entity_walk,
    index_definition_table,
    index_walk_table,
    shard_head,
    shard_log,
)
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_walk_table import RowWalk
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
        async with self._load.page(entity_walk.COLUMNS_AT_ONCE) if has_cells else nullcontext(1) as columns_max:
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
                index_walk_table.move,
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
        masters = {cluster: self._storage.master(cluster) for cluster in self._datastore.clusters}
        answers = await all_or_first_error(
            master.run(index_walk_table.of_shards, self._version, self._definition.consumer, [shard])
            for master in masters.values()
        )
        walks = {cluster: found[shard] for cluster, found in zip(masters, answers, strict=True) if shard in found}
        home = masters[self._datastore.home(shard)]
        head, starts = await home.run(shard_head.history, self._datastore.name, shard)
        if len(walks) < len(masters):
            name, number = self._version.name, self._version.number
            noted = await all_or_first_error(
                master.run(index_definition_table.build_until, self._datastore.name, name, number)
                for master in masters.values()
            )
            known = [found[shard] for found in noted if shard in found] + [walk.until for walk in walks.values()]
            begun = RowWalk(head.generation, min([*known, head.added_id]))
            await all_or_first_error(
                master.run(index_walk_table.begin, self._version, shard, begun) for master in masters.values()
            )
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
                index_walk_table.supersede, self._version, self._definition.consumer, shard, walk, anew
            )
            for cluster, walk in walks.items()
        )

        async def write(cluster: str, script: Script) -> None:
            if not await masters[cluster].run(index_walk_table.write_superseded, self._version, shard, anew, script):
                raise Fenced(f"another process walks shard {shard}")

        if not all(begun):
            raise Fenced(f"another process began the walk of shard {shard} anew")
        known = await self._maintainer.generations(shard, anew.generation)
        scripts = await self._maintainer.take_back(shard, anew.until + 1, known, masters, write)
        await all_or_first_error(write(cluster, script) for cluster, script in scripts.items() if script)
        await all_or_first_error(
            master.run(index_walk_table.resume, self._version, shard, anew) for master in masters.values()
        )

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
