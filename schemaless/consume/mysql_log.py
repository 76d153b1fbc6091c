"""ShardLogs: the log of each shard as its home's master tells it. What the topic didn't bring is read here (I9)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from schemaless.cell import StoredCell
from schemaless.consume.checkpoints import all_or_first_error
from schemaless.errors import StorageUnavailable
from schemaless.location import GenerationStart
from schemaless.storage import entity_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.shard_head import Head, Movement
from schemaless.topology import Datastore


class ShardLogs:
    def __init__(self, storage: AsyncStorage, datastore: Datastore) -> None:
        self._storage = storage
        self._datastore = datastore

    async def read_after(self, positions: Mapping[int, int], limit: int) -> dict[int, list[StoredCell]]:
        """By shard, at most `limit` cells each after an added_id. Raises StorageUnavailable."""
        pages = await all_or_first_error(self._page(shard, after, limit) for shard, after in positions.items())
        return dict(zip(positions, pages, strict=True))

    async def generations(self, shard: int) -> list[GenerationStart]:
        master = self._storage.master(self._datastore.home(shard))
        return await master.run(shard_head.generations, self._datastore.name, shard)

    async def _page(self, shard: int, after: int, limit: int) -> list[StoredCell]:
        master = self._storage.master(self._datastore.home(shard))
        return await master.run(entity_table.read_after, self._datastore, shard, after, limit)


class ShardHeads:
    """Heads of all shards, at the price of one small query for each cluster and look when nothing moved."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, *, timeout_s: float = 2.0) -> None:
        self._storage = storage
        self._datastore = datastore
        self._timeout_s = timeout_s
        self._movements: dict[str, Movement] = {}
        self._heads: dict[int, Head] = {}

    async def look(self) -> Mapping[int, Head]:
        """By shard, as far as known: a cluster that is away keeps its last heads."""
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
