"""The checkpoints of one consumer: where they are kept, and how they move (I10).

A trigger program keeps the checkpoint of a shard on the shard's home. An index keeps it on every cluster, and moves
each in the transaction that writes the entries of that cluster. What all clusters have reached is what counts.

All consumers of a process share one CommitLane for each cluster, so what is busy together shares a transaction.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum

import msgspec

from schemaless.consume.ports import Advance, Mark, Predecessor, Script, ShardCheckpoint
from schemaless.consume.start_at import Start, StartAt, start_positions
from schemaless.consume.worker import Worker
from schemaless.errors import SchemalessError, ShardsMoved, StorageUnavailable
from schemaless.position import Position
from schemaless.runtime.batching import Batcher, BatchLimits, all_or_first_error
from schemaless.runtime.pace import Pace
from schemaless.storage import checkpoint_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.checkpoint_table import NO_COUNTS, CellCounts, Checkpoint, Move, MoveResult, State
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore

_BATCH_LIMITS = BatchLimits(items_max=256, bytes_max=8 << 20, gather_s=0.002)  # one fetch is cells of all clusters
_MOVE_BYTES = 200  # of a move as SQL, about


class CheckpointPlacement(Enum):
    """The clusters that keep the checkpoint of a shard."""

    HOME = "home"
    EVERYWHERE = "everywhere"


class _Known(msgspec.Struct, frozen=True, gc=False):
    """A row as this process read or moved it last."""

    version: int
    position: Position
    counts: CellCounts


class _Change(msgspec.Struct, frozen=True, gc=False):
    moves: Sequence[Move]
    effect: Script


class CommitLane:
    """Moves checkpoints on one cluster, with their effects, in as few transactions as it can (I10).

    While one transaction is in flight the next moves collect. A move that meets no other goes at once. Belongs to one
    event loop.
    """

    def __init__(self, master: AsyncNode, datastore: str, worker: int | None = None) -> None:
        self._master = master
        self._datastore = datastore
        self._worker = worker
        # Under load the transactions of a lane are few and large, and an idle lane doesn't wait.
        self._batcher: Batcher[_Change, MoveResult] = Batcher(
            self._flush, _BATCH_LIMITS, Pace(usual_min_s=0.004, pause_min_s=0.0, pause_max_s=0.05)
        )

    async def move(self, moves: Sequence[Move], effect: Script = "") -> MoveResult:
        """Returns the moves that another process has overtaken, and those of shards that went to another cluster, when
        the transaction is committed.

        If there are any, nothing of the effect stays. The effect must be one that may be repeated and be late (I11).
        Raises StorageUnavailable, or Unavailable when too much waits.
        """
        (refused,) = await self._batcher.submit([_Change(moves, effect)], len(effect) + _MOVE_BYTES * len(moves))
        return refused

    async def _flush(self, changes: list[_Change]) -> list[MoveResult]:
        """Commits all changes. A refused one that has an effect is taken out, and the others are committed again."""
        refused = [MoveResult() for _ in changes]
        waiting = [list(change.moves) for change in changes]
        while any(waiting):
            moves = [move for found in waiting for move in found]
            effect = ";".join([c.effect for c, found in zip(changes, waiting, strict=True) if c.effect and found])
            result = await self._master.run(checkpoint_table.move, self._datastore, moves, effect, self._worker)
            if len(result.undone) == len(moves):
                raise StorageUnavailable("checkpoints neither moved nor were overtaken")
            for n, change in enumerate(changes):
                lost = [move for move in waiting[n] if move in result.overtaken]
                away = [move for move in waiting[n] if move in result.away]
                refused[n] = MoveResult([*refused[n].overtaken, *lost], [*refused[n].away, *away])
                is_undone = change.effect and (lost or away)
                waiting[n] = [] if is_undone else [move for move in waiting[n] if move in result.undone]
        return refused


class CommitLanes:
    """The lanes of one process and datastore, by cluster. Checkpoints name its worker, if it runs a trigger program."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, worker: Worker | None = None) -> None:
        self.storage = storage
        self.datastore = datastore
        self.worker = worker
        self._lanes: dict[str, CommitLane] = {}

    def __getitem__(self, cluster: str) -> CommitLane:
        if cluster not in self._lanes:
            number = None if self.worker is None else self.worker.number
            self._lanes[cluster] = CommitLane(self.storage.master(cluster), self.datastore.name, number)
        return self._lanes[cluster]


class Checkpoints:
    """The checkpoints of one consumer, as this process knows them."""

    def __init__(
        self,
        lanes: CommitLanes,
        consumer: str,
        placement: CheckpointPlacement,
        start_at: Start | None = StartAt.BEGINNING,
        placed: Datastore | None = None,
    ) -> None:
        """`start_at`: where shards begin that have no checkpoint. None: somebody else makes them.

        `placed`: the datastore as the entries of an index lie, whose clusters are everywhere.
        """
        self.consumer = consumer
        self._lanes = lanes
        self._datastore = lanes.datastore
        self._placement = placement
        self._placed = placed or lanes.datastore
        self._start_at = start_at
        self._known: dict[str, dict[int, _Known]] = defaultdict(dict)

    async def read(self, shards: Iterable[int]) -> dict[int, ShardCheckpoint]:
        by_cluster = self._by_cluster(shards)
        answers = await all_or_first_error(self._read_on(cluster, numbers) for cluster, numbers in by_cluster.items())
        by_shard: dict[int, list[Checkpoint]] = {}
        present: set[int] = set()
        for found, workers in answers:
            present |= workers
            for row in found:
                by_shard.setdefault(row.shard, []).append(row)
        return {
            shard: self._on_all_clusters(rows, present)
            for shard, rows in by_shard.items()
            if self._placement is CheckpointPlacement.HOME or len(rows) == len(by_cluster)
        }

    async def move(self, advances: Mapping[int, Advance], effects: Mapping[str, Script]) -> frozenset[int]:
        by_cluster = self._by_cluster(advances)
        moving = [
            self._move_on(cluster, {shard: advances[shard] for shard in shards}, effects.get(cluster, ""))
            for cluster, shards in by_cluster.items()
        ]
        if self._placement is CheckpointPlacement.EVERYWHERE or len(moving) == 1:
            return frozenset().union(*await all_or_first_error(moving))
        # Shards that were together until one of them moved: what is stored must not be stored again.
        lost, waiting = set[int](), set[int]()
        results = await asyncio.gather(*moving, return_exceptions=True)
        for shards, result in zip(by_cluster.values(), results, strict=True):
            if isinstance(result, SchemalessError):
                waiting |= result.shards if isinstance(result, ShardsMoved) else set(shards)
            elif isinstance(result, BaseException):
                raise result
            else:
                lost |= result
        if waiting:
            raise ShardsMoved(f"{self.consumer}: shards {sorted(waiting)[:5]} can't be stored now", waiting)
        return frozenset(lost)

    async def give_away(self, shards: Iterable[int]) -> None:
        if (worker := self._lanes.worker) is None:
            return
        await all_or_first_error(
            self._lanes.storage.master(cluster).run(
                checkpoint_table.give_away, self._datastore.name, self.consumer, numbers, worker.number
            )
            for cluster, numbers in self._by_cluster(shards).items()
        )

    def _by_cluster(self, shards: Iterable[int]) -> dict[str, list[int]]:
        numbers = list(shards)
        if self._placement is CheckpointPlacement.EVERYWHERE:
            return {cluster: numbers for cluster in self._placed.clusters} if numbers else {}
        return self._datastore.by_home(numbers, lambda shard: shard)

    async def _read_on(self, cluster: str, shards: Sequence[int]) -> tuple[list[Checkpoint], set[int]]:
        """Returns the rows, and the workers that didn't stop properly, or that run."""
        master = self._lanes.storage.master(cluster)
        name = self._datastore.name
        workers = set[int]() if self._lanes.worker is None else await self._lanes.worker.others(cluster)
        found = await master.run(checkpoint_table.of_consumer, name, self.consumer, shards)
        missing = set(shards) - {row.shard for row in found}
        if missing and self._start_at is not None:
            with suppress(ShardsMoved):  # they have checkpoints at their new home
                await master.run(self._make, missing)
            found = await master.run(checkpoint_table.of_consumer, name, self.consumer, shards)
        if self._placement is CheckpointPlacement.HOME:
            self._forget_others(cluster, shards)
        self._known[cluster].update({row.shard: _Known(row.version, row.position, row.counts) for row in found})
        return found, workers

    def _make(self, missing: Collection[int]) -> Operation[None]:
        assert self._start_at is not None
        starts = yield from start_positions(self._datastore, self._start_at, missing)
        name, counts = self._datastore.name, self._placement is CheckpointPlacement.HOME
        make = checkpoint_table.make(name, self.consumer, starts, counts=counts)
        yield from shard_head.at_home(name, missing, make) if counts else make

    def _forget_others(self, cluster: str, shards: Iterable[int]) -> dict[int, _Known]:
        """Returns what was known of shards at their former homes, for the last time."""
        others = [known for name, known in self._known.items() if name != cluster]
        return {shard: known.pop(shard) for known in others for shard in shards if shard in known}

    async def _follow(self, cluster: str, shards: Collection[int]) -> frozenset[int]:
        """Takes over, at their new home, the checkpoints that this process moved last. Returns the other shards.

        What is finished and isn't stored yet can be stored there then.
        """
        former = self._forget_others(cluster, shards)
        rows = await self._lanes.storage.master(cluster).run(
            checkpoint_table.of_consumer, self._datastore.name, self.consumer, shards
        )
        worker = self._lanes.worker
        for row in rows:
            before = former.get(row.shard)
            if before is None or worker is None or (row.worker, row.state) != (worker.number, State.RUNNING):
                continue
            if (row.location, row.counts) == (before.position.location, before.counts):
                self._known[cluster][row.shard] = _Known(row.version, row.position, row.counts)
        return frozenset(shards) - self._known[cluster].keys()

    def _on_all_clusters(self, rows: Sequence[Checkpoint], present: Collection[int]) -> ShardCheckpoint:
        """Returns what all clusters have reached of a shard, where some are further, and who had it before."""
        lowest = min(rows, key=lambda row: row.location)
        stopped = [row.reason or "no reason is known" for row in rows if row.state is State.STOPPED]
        ahead = tuple(row.position for row in rows if row.location != lowest.location)
        worker = self._lanes.worker
        if worker is None or lowest.worker == worker.number:
            predecessor, kills = Predecessor.OURSELVES, lowest.kills
        elif lowest.worker in present:
            predecessor, kills = Predecessor.DIED, lowest.kills + lowest.begun
        else:
            predecessor, kills = Predecessor.LEFT, lowest.kills
        return ShardCheckpoint(
            lowest.position, stopped[0] if stopped else None, ahead, predecessor, kills, lowest.counted_from
        )

    async def _move_on(self, cluster: str, advances: Mapping[int, Advance], effect: Script) -> frozenset[int]:
        script = ";".join(filter(None, [effect, *(to.effect for to in advances.values())]))
        known = self._known[cluster]
        unknown = advances.keys() - known.keys()
        unread = await self._follow(cluster, unknown) if unknown else frozenset()
        if unread and script:
            return unread
        moves = []
        for shard, to in sorted((shard, to) for shard, to in advances.items() if shard not in unread):
            if (
                known[shard].position.location < to.to.location
                or to.stop_reason is not None
                or to.restart
                or to.mark is not None
                or to.counts != NO_COUNTS
                or to.effect
            ):
                moves.append(_move(self.consumer, known[shard], to))
            elif effect:
                # This cluster is ahead: a process ended between two clusters. Its effects are there, guarded by
                # versions. They are written again, so they need the comparison too. The checkpoint stays.
                held = _move(self.consumer, known[shard], Advance(known[shard].position))
                moves.append(msgspec.structs.replace(held, holds=True))
        if not moves:
            return unread
        refused = await self._lanes[cluster].move(moves, script)
        lost = frozenset(move.to.shard for move in refused.overtaken)
        away = frozenset(move.to.shard for move in refused.away)
        if not (script and (lost or away)):
            for move in moves:
                if move.to.shard not in lost | away:
                    known[move.to.shard] = _Known(move.version + 1, move.to, move.counts_after or NO_COUNTS)
        if away:
            raise ShardsMoved(f"{self.consumer}: shards {sorted(away)[:5]} went to another cluster", away)
        return lost | unread


def _move(consumer: str, known: _Known, to: Advance) -> Move:
    mark = to.mark or _NO_MARK
    return Move(
        consumer, known.version, to.to, to.finished, to.stop_reason, to.restart, mark.begun, mark.kills, to.counts,
        known.counts, at=known.position.location,
    )  # fmt: skip


_NO_MARK = Mark(begun=False)
