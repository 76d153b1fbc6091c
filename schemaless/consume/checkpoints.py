"""The checkpoints of one consumer: where they are kept, and how they move (I10).

A trigger program keeps the checkpoint of a shard on the shard's home. An index keeps it on every cluster, and moves
each in the transaction that writes the entries of that cluster. What all clusters have reached is what counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import msgspec

from schemaless.batching import Batcher, BatchLimits, all_or_first_error
from schemaless.consume.ports import Advance, Script, ShardCheckpoint
from schemaless.errors import Fenced
from schemaless.location import BEGINNING, Location
from schemaless.storage import checkpoint_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.checkpoint_table import Checkpoint, Move, State
from schemaless.topology import Datastore

_BATCH_LIMITS = BatchLimits(items_max=256, bytes_max=1 << 20)
_MOVE_BYTES = 100  # of a move as SQL, about


class CheckpointPlacement(Enum):
    """The clusters that keep the checkpoint of a shard."""

    HOME = "home"
    EVERYWHERE = "everywhere"


class StartAt(Enum):
    """Where a shard without a checkpoint begins."""

    BEGINNING = "beginning"
    END = "end"


class Checkpoints:
    """Reads and moves the checkpoints of one consumer. Belongs to one event loop."""

    def __init__(
        self,
        storage: AsyncStorage,
        datastore: Datastore,
        consumer: str,
        placement: CheckpointPlacement,
        start_at: StartAt = StartAt.BEGINNING,
    ) -> None:
        self.consumer = consumer
        self._storage = storage
        self._datastore = datastore
        self._placement = placement
        self._start_at = start_at
        self._locations: dict[str, dict[int, Location]] = {cluster: {} for cluster in datastore.clusters}
        self._batchers = {
            cluster: CheckpointBatcher(storage.master(cluster), datastore.name, consumer)
            for cluster in datastore.clusters
        }

    async def read(self, shards: Iterable[int]) -> dict[int, ShardCheckpoint]:
        """Returns the checkpoints of these shards, and makes those that are missing. Raises StorageUnavailable."""
        by_cluster = self._by_cluster(shards)
        answers = await all_or_first_error(self._read_on(cluster, numbers) for cluster, numbers in by_cluster.items())
        found: dict[int, ShardCheckpoint] = {}
        for checkpoint in (checkpoint for answer in answers for checkpoint in answer):
            others = found.get(checkpoint.shard, ShardCheckpoint(checkpoint.location))
            found[checkpoint.shard] = ShardCheckpoint(
                min(others.location, checkpoint.location), others.running and checkpoint.state is State.RUNNING
            )
        return found

    async def move(self, advances: Mapping[int, Advance], effects: Mapping[str, Script]) -> None:
        """Moves checkpoints, on each cluster in one transaction with its effect.

        Raises Fenced or StorageUnavailable. Some clusters may have moved by then, so read again before the next move.
        """
        await all_or_first_error(
            self._move_on(cluster, {shard: advances[shard] for shard in shards}, effects.get(cluster, ""))
            for cluster, shards in self._by_cluster(advances).items()
        )

    def _by_cluster(self, shards: Iterable[int]) -> dict[str, list[int]]:
        numbers = list(shards)
        if self._placement is CheckpointPlacement.EVERYWHERE:
            return {cluster: numbers for cluster in self._datastore.clusters} if numbers else {}
        return self._datastore.by_home(numbers, lambda shard: shard)

    async def _read_on(self, cluster: str, shards: Sequence[int]) -> list[Checkpoint]:
        master = self._storage.master(cluster)
        name = self._datastore.name
        found = await master.run(checkpoint_table.of_consumer, name, self.consumer, shards)
        missing = set(shards) - {checkpoint.shard for checkpoint in found}
        if missing:
            starts = dict.fromkeys(missing, BEGINNING)
            if self._start_at is StartAt.END:
                heads = await master.run(shard_head.heads, name)
                starts = {head.shard: head.location for head in heads if head.shard in missing}
            await master.run(checkpoint_table.make, name, self.consumer, starts)
            found = await master.run(checkpoint_table.of_consumer, name, self.consumer, shards)
        self._locations[cluster].update({checkpoint.shard: checkpoint.location for checkpoint in found})
        return found

    async def _move_on(self, cluster: str, advances: Mapping[int, Advance], effect: Script) -> None:
        known = self._locations[cluster]
        # A cluster may be ahead: a process ended between two clusters. Its effects are there, guarded by versions.
        moves = [
            Move(shard, known[shard], advance.to, advance.stop_reason)
            for shard, advance in sorted(advances.items())
            if known[shard] < advance.to or advance.stop_reason is not None
        ]
        if not moves:
            return
        await self._batchers[cluster].move(moves, effect)
        known.update({move.shard: move.to for move in moves})


class _Change(msgspec.Struct, frozen=True, gc=False):
    moves: Sequence[Move]
    effect: Script


class CheckpointBatcher:
    """Moves the checkpoints of one consumer on one cluster, with their effects, in as few transactions as it can (I10).

    While one transaction is in flight the next moves collect, so shards that are busy together share a commit. A move
    that meets no other goes at once. Each has an outcome of its own. Belongs to one event loop.
    """

    def __init__(self, master: AsyncNode, datastore: str, consumer: str) -> None:
        self._master = master
        self._datastore = datastore
        self._consumer = consumer
        self._batcher: Batcher[_Change, Fenced | None] = Batcher(self._flush, _BATCH_LIMITS)

    async def move(self, moves: Sequence[Move], effect: Script = "") -> None:
        """Returns when the transaction is committed. The effect must be one that may be repeated and be late (I11).

        Raises Fenced when another process moved one of the checkpoints, StorageUnavailable, or Unavailable when too
        much waits.
        """
        size_bytes = len(effect) + _MOVE_BYTES * len(moves)
        (failure,) = await self._batcher.submit([_Change(moves, effect)], size_bytes)
        if failure is not None:
            raise failure

    async def _flush(self, changes: list[_Change]) -> list[Fenced | None]:
        moves = [move for change in changes for move in change.moves]
        effect = ";".join([change.effect for change in changes if change.effect])
        missed = await self._master.run(checkpoint_table.move, self._datastore, self._consumer, moves, effect)
        failures: list[Fenced | None] = []
        for change in changes:
            lost = next((move.shard for move in change.moves if move in missed), None)
            if lost is None:
                failures.append(None)
            else:
                failures.append(Fenced(f"{self._consumer}: another process moved the checkpoint of shard {lost}"))
        return failures
