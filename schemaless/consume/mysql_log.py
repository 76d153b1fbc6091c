"""The log of each shard in MySQL, and the heads, as the home's master has them. It holds what the topic lacks (I9)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from schemaless.errors import LocationGone, SchemalessError
from schemaless.position import Position
from schemaless.shard_cursor import ProvenPage
from schemaless.storage import shard_head, shard_log
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.shard_head import Head, Movement
from schemaless.storage.shard_log import Following
from schemaless.topology import Datastore

READ_BYTES_MAX = 4 << 20
"""Bodies of one read, all its shards together. One larger cell is read alone (I14)."""


class HomeLog:
    """Reads the logs of the shards whose home is one cluster, from its master."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, cluster: str) -> None:
        self._master = storage.master(cluster)
        self._datastore = datastore

    async def read(self, wanted: Mapping[int, Position], limit: int) -> Mapping[int, ProvenPage | LocationGone]:
        pages = [Following(position, limit) for position in wanted.values()]
        return await self._master.run(shard_log.follow, self._datastore, pages, READ_BYTES_MAX)


class ShardHeads:
    """Knows the heads of all shards. A look costs one small query for each cluster while nothing moved."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, *, timeout_s: float = 2.0) -> None:
        self._storage = storage
        self._datastore = datastore
        self._timeout_s = timeout_s
        self._movements: dict[str, Movement] = {}
        self._blocks: dict[str, Mapping[int, Movement]] = {}
        self.known: dict[int, Head] = {}
        """The heads by shard, as far as known: a cluster that is unreachable keeps its last heads."""

    async def look(self) -> set[int]:
        """Reads the heads that moved. Returns their shards."""
        moved = await asyncio.gather(*(self._look_at(cluster) for cluster in self._datastore.clusters))
        return set().union(*moved)

    async def _look_at(self, cluster: str) -> set[int]:
        """Asks for the sum of the heads, then for the sums of blocks, then for the heads of blocks that moved."""
        master = self._storage.master(cluster)
        name = self._datastore.name
        try:
            movement = await master.run(shard_head.movement, name, timeout_s=self._timeout_s)
            if movement == self._movements.get(cluster):
                return set()
            blocks = await master.run(shard_head.block_movements, name, timeout_s=self._timeout_s)
            known = self._blocks.get(cluster, {})
            moved = [block for block, sums in blocks.items() if sums != known.get(block)]
            heads = (
                await master.run(shard_head.heads_in_blocks, name, moved, timeout_s=self._timeout_s) if moved else []
            )
            changed = {head.shard: head for head in heads if self.known.get(head.shard) != head}
            self.known.update(changed)
            self._blocks[cluster] = blocks
            self._movements[cluster] = movement
            return set(changed)
        except SchemalessError:
            return set()
