"""The log of each shard in MySQL, and the heads, as the home's master has them. It holds what the topic lacks (I9)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from schemaless.batching import all_or_first_error
from schemaless.cell import StoredCell
from schemaless.errors import StorageUnavailable
from schemaless.location import GenerationStart
from schemaless.storage import entity_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.shard_head import Head, Movement
from schemaless.topology import Datastore


class ShardLogs:
    """Reads the logs of a datastore's shards from the masters of their homes."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore) -> None:
        self._storage = storage
        self._datastore = datastore

    async def read_after(self, positions: Mapping[int, int], limit: int) -> dict[int, list[StoredCell]]:
        """Returns by shard at most `limit` cells after an added_id. Raises StorageUnavailable."""
        pages = await all_or_first_error(
            self._master(shard).run(entity_table.read_after, self._datastore, shard, after, limit)
            for shard, after in positions.items()
        )
        return dict(zip(positions, pages, strict=True))

    async def generations(self, shard: int) -> list[GenerationStart]:
        """Returns the starts of a shard's generations. Raises StorageUnavailable."""
        return await self._master(shard).run(shard_head.generations, self._datastore.name, shard)

    def _master(self, shard: int) -> AsyncNode:
        return self._storage.master(self._datastore.home(shard))


class ShardHeads:
    """Knows the heads of all shards. A look costs one small query for each cluster while nothing moved."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, *, timeout_s: float = 2.0) -> None:
        self._storage = storage
        self._datastore = datastore
        self._timeout_s = timeout_s
        self._movements: dict[str, Movement] = {}
        self._heads: dict[int, Head] = {}

    async def look(self) -> Mapping[int, Head]:
        """Returns the heads by shard, as far as known: a cluster that is unreachable keeps its last heads."""
        await asyncio.gather(*(self._look_at(cluster) for cluster in self._datastore.clusters))
        return self._heads

    async def _look_at(self, cluster: str) -> None:
        master = self._storage.master(cluster)
        name = self._datastore.name
        try:
            movement = await master.run(shard_head.movement, name, timeout_s=self._timeout_s)
            if movement != self._movements.get(cluster):
                heads = await master.run(shard_head.heads, name, timeout_s=self._timeout_s)
                self._heads.update({head.shard: head for head in heads})
                self._movements[cluster] = movement
        except StorageUnavailable:
            return
