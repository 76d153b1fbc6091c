"""Ordered checks: the indexers carry out the jobs of people that compare an index with its cells, shard by shard.

A job has a part for each shard (schemaless/storage/index_check_table.py). The process that has a shard carries its part
out. It goes on until it is done, whatever process has the shard then: a part that was begun is done again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from schemaless.errors import SchemalessError
from schemaless.index.check import RowRate, check_index, selections_of
from schemaless.index.definition import IndexDefinition
from schemaless.index.inspection import IndexInspector
from schemaless.index.versions import VersionKey
from schemaless.storage import index_check_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.index_check_table import CheckPart
from schemaless.topology import Datastore

log = structlog.get_logger()

ROWS_PER_S = 5000
"""How many rows and entries a second are compared where an order doesn't say it."""

FAULTS_MAX = 10
"""How many faults of a part are kept. Each has the values of both sides."""

_LOOK_PAUSE_S = 1.0
_AGAIN_AFTER_S = 10.0


class OrderedChecks:
    """Belongs to one datastore of one process. `owned` returns its shards."""

    def __init__(
        self,
        storage: AsyncStorage,
        datastore: Datastore,
        owned: Callable[[], Sequence[int]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._datastore = datastore
        self._owned = owned
        self._clock = clock
        self._complete: dict[VersionKey, IndexDefinition] = {}
        self._put_off: dict[int, float] = {}

    def watch(self, definitions: Iterable[IndexDefinition]) -> None:
        """Takes the versions that can be checked from now on: all that are complete."""
        self._complete = {(definition.name, definition.number): definition for definition in definitions}

    async def run(self) -> None:
        while True:
            if not await self.step():
                await asyncio.sleep(_LOOK_PAUSE_S)

    async def step(self) -> bool:
        """Carries out one part on each cluster. Returns whether there was one."""
        now = self._clock()
        self._put_off = {job: until for job, until in self._put_off.items() if until > now}
        by_home = self._datastore.by_home(self._owned(), lambda shard: shard)
        done = [await self._next(self._storage.master(cluster), shards) for cluster, shards in by_home.items()]
        return any(done)

    async def _next(self, master: AsyncNode, shards: Sequence[int]) -> bool:
        try:
            part = await master.run(index_check_table.due, self._datastore.name, shards, list(self._put_off))
        except SchemalessError as error:
            log.warning("ordered checks can't be read", cluster=master.node.cluster, why=str(error))
            return False
        if part is None:
            return False
        definition = self._complete.get((part.version.name, part.version.number))
        try:
            if definition is None:
                await self._wait(master, part, "the index isn't complete, or is being dropped")
            else:
                await self._carry_out(master, part, definition)
        except SchemalessError as error:  # a server is away
            log.warning("an ordered check waits", index=part.version.name, shard=part.shard, why=str(error))
            try:
                await self._wait(master, part, str(error))
            except SchemalessError:
                return False
        return True

    async def _wait(self, master: AsyncNode, part: CheckPart, why: str) -> None:
        self._put_off[part.job] = self._clock() + _AGAIN_AFTER_S
        await master.run(index_check_table.waits, part, why)

    async def _carry_out(self, master: AsyncNode, part: CheckPart, definition: IndexDefinition) -> None:
        request = part.request
        check = await check_index(
            self._storage,
            IndexInspector(self._storage, self._datastore, definition),
            selections_of(self._datastore, part.shard, request),
            repair=request.repairs,
            minions=request.minions,
            rate=RowRate(ROWS_PER_S if request.rows_per_s is None else request.rows_per_s or None),
        )
        await master.run(index_check_table.done, part, check.result, check.faults[:FAULTS_MAX])
