"""The checkpoints of one consumer: where they are kept, and how they move (I10).

A trigger program keeps the checkpoint of a shard on the shard's home. An index keeps it on every cluster, and moves
each in the transaction that writes the entries of that cluster. What all clusters have reached is what counts.

All consumers of a process share one CommitLane for each cluster, so what is busy together shares a transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum

import msgspec

from schemaless.consume.ports import Advance, Mark, Predecessor, Script, ShardCheckpoint
from schemaless.consume.start_at import Start, StartAt, start_positions
from schemaless.consume.worker import Worker
from schemaless.errors import StorageUnavailable
from schemaless.position import Position
from schemaless.runtime.batching import Batcher, BatchLimits, all_or_first_error
from schemaless.runtime.pace import Pace
from schemaless.storage import checkpoint_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.checkpoint_table import NO_COUNTS, CellCounts, Checkpoint, Move, State
from schemaless.topology import Datastore

_BATCH_LIMITS = BatchLimits(items_max=256, bytes_max=8 << 20, gather_s=0.002)  # one fetch is cells of all clusters
_MOVE_BYTES = 200  # of a move as SQL, about


def _pace() -> Pace:
    """Returns the pace of a lane: under load its transactions are few and large, and an idle lane doesn't wait."""
    return Pace(usual_min_s=0.004, pause_min_s=0.0, pause_max_s=0.05)


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
        self._batcher: Batcher[_Change, Sequence[Move]] = Batcher(self._flush, _BATCH_LIMITS, _pace())

    async def move(self, moves: Sequence[Move], effect: Script = "") -> Sequence[Move]:
        """Returns the moves that another process has overtaken, when the transaction is committed.

        If there are any, nothing of the effect stays. The effect must be one that may be repeated and be late (I11).
        Raises StorageUnavailable, or Unavailable when too much waits.
        """
        (lost,) = await self._batcher.submit([_Change(moves, effect)], len(effect) + _MOVE_BYTES * len(moves))
        return lost

    async def _flush(self, changes: list[_Change]) -> list[Sequence[Move]]:
        """Commits all changes. An overtaken one that has an effect is taken out, and the others are committed again."""
        overtaken: list[list[Move]] = [[] for _ in changes]
        waiting = [list(change.moves) for change in changes]
        while any(waiting):
            moves = [move for found in waiting for move in found]
            effect = ";".join([c.effect for c, found in zip(changes, waiting, strict=True) if c.effect and found])
            result = await self._master.run(checkpoint_table.move, self._datastore, moves, effect, self._worker)
            if len(result.undone) == len(moves):
                raise StorageUnavailable("checkpoints neither moved nor were overtaken")
            for n, change in enumerate(changes):
                lost = [move for move in waiting[n] if move in result.overtaken]
                overtaken[n] += lost
                waiting[n] = [] if lost and change.effect else [move for move in waiting[n] if move in result.undone]
        return list(overtaken)


class CommitLanes:
    """The lanes of one process and datastore, by cluster. Checkpoints name its worker, if it runs a trigger program."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, worker: Worker | None = None) -> None:
        self.storage = storage
        self.datastore = datastore
        self.worker = worker
        number = None if worker is None else worker.number
        self._lanes = {
            cluster: CommitLane(storage.master(cluster), datastore.name, number) for cluster in datastore.clusters
        }

    def __getitem__(self, cluster: str) -> CommitLane:
        return self._lanes[cluster]


class Checkpoints:
    """The checkpoints of one consumer, as this process knows them."""

    def __init__(
        self,
        lanes: CommitLanes,
        consumer: str,
        placement: CheckpointPlacement,
        start_at: Start | None = StartAt.BEGINNING,
    ) -> None:
        """`start_at`: where shards begin that have no checkpoint. None: somebody else makes them."""
        self.consumer = consumer
        self._lanes = lanes
        self._datastore = lanes.datastore
        self._placement = placement
        self._start_at = start_at
        self._known: dict[str, dict[int, _Known]] = {cluster: {} for cluster in self._datastore.clusters}

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
        lost = await all_or_first_error(
            self._move_on(cluster, {shard: advances[shard] for shard in shards}, effects.get(cluster, ""))
            for cluster, shards in self._by_cluster(advances).items()
        )
        return frozenset().union(*lost)

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
            return {cluster: numbers for cluster in self._datastore.clusters} if numbers else {}
        return self._datastore.by_home(numbers, lambda shard: shard)

    async def _read_on(self, cluster: str, shards: Sequence[int]) -> tuple[list[Checkpoint], set[int]]:
        """Returns the rows, and the workers that didn't stop properly, or that run."""
        master = self._lanes.storage.master(cluster)
        name = self._datastore.name
        workers = set[int]() if self._lanes.worker is None else await self._lanes.worker.others(cluster)
        found = await master.run(checkpoint_table.of_consumer, name, self.consumer, shards)
        missing = set(shards) - {row.shard for row in found}
        if missing and self._start_at is not None:
            starts = await master.run(start_positions, self._datastore, self._start_at, missing)
            counts = self._placement is CheckpointPlacement.HOME
            await master.run(lambda: checkpoint_table.make(name, self.consumer, starts, counts=counts))
            found = await master.run(checkpoint_table.of_consumer, name, self.consumer, shards)
        self._known[cluster].update({row.shard: _Known(row.version, row.position, row.counts) for row in found})
        return found, workers

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
        moves = []
        for shard, to in sorted(advances.items()):
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
            return frozenset()
        lost = frozenset(move.to.shard for move in await self._lanes[cluster].move(moves, script))
        if not (lost and script):
            for move in moves:
                if move.to.shard not in lost:
                    known[move.to.shard] = _Known(move.version + 1, move.to, move.counts_after or NO_COUNTS)
        return lost


def _move(consumer: str, known: _Known, to: Advance) -> Move:
    mark = to.mark or _NO_MARK
    return Move(
        consumer, known.version, to.to, to.finished, to.stop_reason, to.restart, mark.begun, mark.kills, to.counts,
        known.counts, at=known.position.location,
    )  # fmt: skip


_NO_MARK = Mark(begun=False)
