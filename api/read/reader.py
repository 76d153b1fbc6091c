"""Reader: which node a read goes to, and what the answer says about it.

Without a wish the master answers (a caller reads its own writes), or a minion when the master can't be reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from api.http.response import Header
from api.read.batching import GatheredReads
from api.read.read_breaker import NodeHealth
from api.read.replica_lag import LagMeter
from schemaless.cell import CellKey, ColumnName, RowKey, StoredCell
from schemaless.errors import StorageUnavailable
from schemaless.sharding import shard_of
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.operation import Args, Operation
from schemaless.topology import Datastore, Role

T = TypeVar("T")


class Served(msgspec.Struct, frozen=True, gc=False):
    """Who answered, and how many seconds its answer may be behind."""

    role: Role
    cluster: str
    lag_s: float

    @property
    def headers(self) -> tuple[Header, ...]:
        return (
            (b"schemaless-served-by", self.role.encode()),
            (b"schemaless-cluster", self.cluster.encode()),
            (b"schemaless-lag", b"0" if self.lag_s == 0 else b"%.3f" % self.lag_s),
        )


class Reader:
    def __init__(self, storage: AsyncStorage, health: NodeHealth, lag: LagMeter, *, timeout_s: float) -> None:
        self._storage = storage
        self._health = health
        self._lag = lag
        self._timeout_s = timeout_s
        self._gathered = GatheredReads(timeout_s)
        self._turn = itertools.count()

    async def exact(
        self, datastore: Datastore, key: CellKey, read_from: Role | None
    ) -> tuple[StoredCell | None, Served]:
        """One cell. Raises StorageUnavailable."""
        shard = shard_of(key.row_key, datastore.shards)
        return await self._ask(
            datastore.home(shard), read_from, lambda node: self._gathered.exact(node, datastore, (shard, key))
        )

    async def newest(
        self, datastore: Datastore, row_key: RowKey, column_name: ColumnName, read_from: Role | None
    ) -> tuple[StoredCell | None, Served]:
        """The newest version of a column. Raises StorageUnavailable."""
        shard = shard_of(row_key, datastore.shards)
        return await self._ask(
            datastore.home(shard),
            read_from,
            lambda node: self._gathered.newest(node, datastore, (shard, row_key, column_name)),
        )

    async def read(
        self, cluster: str, operation: Callable[[*Args], Operation[T]], *args: *Args, read_from: Role | None = None
    ) -> tuple[T, Served]:
        """Runs an operation on a node of the cluster. Raises StorageUnavailable when no node that may answer does."""
        return await self._ask(cluster, read_from, lambda node: node.run(operation, *args, timeout_s=self._timeout_s))

    async def _ask(
        self, cluster: str, read_from: Role | None, question: Callable[[AsyncNode], Awaitable[T]]
    ) -> tuple[T, Served]:
        failure: StorageUnavailable | None = None
        for node in self._candidates(cluster, read_from):
            began = self._health.clock()
            try:
                value = await question(node)
            except StorageUnavailable as error:
                self._health.read_failed(node, began)
                failure = error
            else:
                return value, Served(node.node.role, cluster, self._lag.lag_s(node))
        raise failure or StorageUnavailable(f"cluster {cluster}: no {read_from or 'node'} answers at the moment")

    def _candidates(self, cluster: str, read_from: Role | None) -> Iterable[AsyncNode]:
        """Those that answered last time, in the order in which they are to be asked; looked at one by one."""
        if read_from is not Role.MINION:
            yield from self._health.answering([self._storage.master(cluster)])
        if read_from is not Role.MASTER:
            minions = self._health.answering(self._storage.minions(cluster))
            first = next(self._turn) % len(minions) if minions else 0
            yield from minions[first:] + minions[:first]


def served_together(parts: Sequence[Served]) -> Served:
    """Of an answer that several clusters had a part in: the worst of all."""
    roles = {part.role for part in parts}
    clusters = sorted({part.cluster for part in parts})
    return Served(
        Role.MINION if Role.MINION in roles else Role.MASTER,
        ",".join(clusters),
        max((part.lag_s for part in parts), default=0.0),
    )
