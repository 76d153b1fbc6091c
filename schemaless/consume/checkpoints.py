"""Checkpoints: where those of one consumer stand, and how they move (I10).

A trigger program's stand on the home of their shard. An index's stand on every cluster, each moved in the transaction
that writes the entries of that cluster; what all clusters have reached is what counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from schemaless.consume.checkpoint_batching import GatheredMoves
from schemaless.consume.ports import Advance, Script, Standing
from schemaless.location import BEGINNING, Location
from schemaless.storage import checkpoint_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.checkpoint_table import Checkpoint, Move, State
from schemaless.topology import Datastore

T = TypeVar("T")


class Stand(Enum):
    """On which clusters the checkpoint of a shard stands."""

    HOME = "home"
    EVERYWHERE = "everywhere"


class StartAt(Enum):
    """Where a shard without a checkpoint begins."""

    BEGINNING = "beginning"
    END = "end"


class Checkpoints:
    def __init__(
        self,
        storage: AsyncStorage,
        datastore: Datastore,
        consumer: str,
        stand: Stand,
        start_at: StartAt = StartAt.BEGINNING,
    ) -> None:
        self.consumer = consumer
        self._storage = storage
        self._datastore = datastore
        self._stand = stand
        self._start_at = start_at
        self._read: dict[str, dict[int, Location]] = {cluster: {} for cluster in datastore.clusters}
        self._gathered = {
            cluster: GatheredMoves(storage.master(cluster), datastore.name, consumer) for cluster in self._read
        }

    async def read(self, shards: Iterable[int]) -> dict[int, Standing]:
        """Makes those that are missing. Raises StorageUnavailable."""
        by_cluster = self._by_cluster(shards)
        found = await all_or_first_error(self._read_on(cluster, numbers) for cluster, numbers in by_cluster.items())
        standings: dict[int, Standing] = {}
        for checkpoint in (checkpoint for answers in found for checkpoint in answers):
            standing = standings.get(checkpoint.shard, Standing(checkpoint.location))
            standings[checkpoint.shard] = Standing(
                min(standing.location, checkpoint.location), standing.running and checkpoint.state is State.RUNNING
            )
        return standings

    async def move(self, advances: Mapping[int, Advance], effects: Mapping[str, Script]) -> None:
        """Moves the checkpoints, on each cluster in one transaction with its effect.

        Raises Fenced or StorageUnavailable; some clusters may have moved by then: read again before going on.
        """
        await all_or_first_error(
            self._move_on(cluster, {shard: advances[shard] for shard in shards}, effects.get(cluster, ""))
            for cluster, shards in self._by_cluster(advances).items()
        )

    def _by_cluster(self, shards: Iterable[int]) -> dict[str, list[int]]:
        numbers = list(shards)
        if self._stand is Stand.EVERYWHERE:
            return {cluster: numbers for cluster in self._read} if numbers else {}
        return self._datastore.by_home(numbers, lambda shard: shard)

    async def _read_on(self, cluster: str, shards: Sequence[int]) -> list[Checkpoint]:
        master = self._storage.master(cluster)
        name = self._datastore.name
        found = await master.run(checkpoint_table.of_consumer, name, self.consumer, shards)
        missing = set(shards) - {checkpoint.shard for checkpoint in found}
        if missing:
            starts = await self._starts(cluster, missing)
            await master.run(checkpoint_table.make, name, self.consumer, starts)
            found = await master.run(checkpoint_table.of_consumer, name, self.consumer, shards)
        self._read[cluster].update({checkpoint.shard: checkpoint.location for checkpoint in found})
        return found

    async def _starts(self, cluster: str, shards: Iterable[int]) -> dict[int, Location]:
        if self._start_at is StartAt.BEGINNING:
            return dict.fromkeys(shards, BEGINNING)
        heads = await self._storage.master(cluster).run(shard_head.heads, self._datastore.name)
        wanted = set(shards)
        return {head.shard: head.location for head in heads if head.shard in wanted}

    async def _move_on(self, cluster: str, advances: Mapping[int, Advance], effect: Script) -> None:
        stands = self._read[cluster]
        # A cluster may be ahead: a process ended between two clusters. Its effects are there, guarded by versions.
        moves = [
            Move(shard, stands[shard], advance.to, advance.stop_reason)
            for shard, advance in sorted(advances.items())
            if stands[shard] < advance.to or advance.stop_reason is not None
        ]
        if not moves:
            return
        await self._gathered[cluster].move(moves, effect)
        stands.update({move.shard: move.to for move in moves})


async def all_or_first_error(work: Iterable[Awaitable[T]]) -> list[T]:
    """Waits for all, also after one failed: nothing goes on behind the caller's back."""
    pending = list(work)
    if len(pending) == 1:  # the usual case needs no task of its own
        return [await pending[0]]
    results = await asyncio.gather(*pending, return_exceptions=True)
    values: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values
