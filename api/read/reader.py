"""Reader: which node a read goes to, and what the answer says about it.

Without a read preference the master answers, so a caller reads its own writes. A minion answers when the master is
unreachable.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import TypeVar

import msgspec

from api.http.response import Header
from api.read.batching import ReadBatcher
from api.read.read_breaker import ReadBreaker
from api.read.replica_lag import ReplicaLag
from schemaless.cell import CellKey, ColumnName, RowKey, StoredCell
from schemaless.errors import CellMissing, LocationGone, NodeRefuses, SchemalessError, StorageUnavailable
from schemaless.sharding import shard_of
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.failover import first_answer
from schemaless.storage.operation import Args, Operation
from schemaless.topology import Datastore, Role

T = TypeVar("T")

_ROLES = {None: (Role.MASTER, Role.MINION), Role.MASTER: (Role.MASTER,), Role.MINION: (Role.MINION,)}
_NOBODY = "no node that may answer this read is reachable"


class Served(msgspec.Struct, frozen=True, gc=False):
    """Names the role and cluster that answered, and how many seconds the answer may be behind."""

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
    def __init__(self, storage: AsyncStorage, breaker: ReadBreaker, lag: ReplicaLag, *, timeout_s: float) -> None:
        self._storage = storage
        self._breaker = breaker
        self._lag = lag
        self._timeout_s = timeout_s
        self._batcher = ReadBatcher(timeout_s)
        self._round_robin = itertools.count()

    async def exact(
        self, datastore: Datastore, key: CellKey, read_from: Role | None
    ) -> tuple[StoredCell | None, Served]:
        """Returns one cell, or None. Raises StorageUnavailable."""
        shard = shard_of(key.row_key, datastore.shards)
        cell, node = await first_answer(
            self._candidates(datastore.home(shard), read_from),
            self._noting_failures(lambda node: self._batcher.exact(node, datastore, (shard, key))),
            nobody=_NOBODY,
        )
        return cell, self._served(node)

    async def newest(
        self, datastore: Datastore, row_key: RowKey, column_name: ColumnName, read_from: Role | None
    ) -> tuple[StoredCell | None, Served]:
        """Returns the newest version of a column, or None. Raises StorageUnavailable."""
        shard = shard_of(row_key, datastore.shards)
        cell, node = await first_answer(
            self._candidates(datastore.home(shard), read_from),
            self._noting_failures(lambda node: self._batcher.newest(node, datastore, (shard, row_key, column_name))),
            nobody=_NOBODY,
        )
        return cell, self._served(node)

    async def read(
        self,
        cluster: str,
        operation: Callable[[*Args], Operation[T]],
        *args: *Args,
        read_from: Role | None = None,
        without: Collection[str] = (),
    ) -> tuple[T, Served]:
        """Runs an operation on a node of the cluster, not on those named in `without`.

        Raises StorageUnavailable when no node that may answer does.
        """
        value, node = await first_answer(
            self._candidates(cluster, read_from, without),
            self._noting_failures(lambda node: node.run(operation, *args, timeout_s=self._timeout_s)),
            nobody=_NOBODY,
        )
        return value, self._served(node)

    def minions(self, cluster: str) -> frozenset[str]:
        """Returns the names of a cluster's minions."""
        return frozenset(minion.node.name for minion in self._storage.minions(cluster))

    def _candidates(self, cluster: str, read_from: Role | None, without: Collection[str] = ()) -> Iterator[AsyncNode]:
        """Yields the nodes that may answer, best first."""
        for role in _ROLES[read_from]:
            yield from (node for node in self._answering(cluster, role) if node.node.name not in without)

    def _noting_failures(self, ask: Callable[[AsyncNode], Awaitable[T]]) -> Callable[[AsyncNode], Awaitable[T]]:
        """Lets the breaker know which node gave no answer, and a LocationGone name its node.

        A node that refuses this read may answer others.
        """

        async def asked(node: AsyncNode) -> T:
            began = self._breaker.clock()
            try:
                return await ask(node)
            except LocationGone as gone:
                said_by(gone, self._served(node))
                raise
            except NodeRefuses:
                raise
            except StorageUnavailable:
                self._breaker.read_failed(node, began)
                raise

        return asked

    def _answering(self, cluster: str, role: Role) -> list[AsyncNode]:
        if role is Role.MASTER:
            return self._breaker.answering([self._storage.master(cluster)])
        minions = self._breaker.answering(self._storage.minions(cluster))
        first = next(self._round_robin) % len(minions) if minions else 0
        return minions[first:] + minions[:first]

    def _served(self, node: AsyncNode) -> Served:
        return Served(node.node.role, node.node.cluster, self._lag.lag_s(node))


def said_by(error: SchemalessError, served: Served) -> SchemalessError:
    """Returns the error of a response that names who said so."""
    error.headers = served.headers
    return error


def missing(what: str, served: Served, read_from: Role | None) -> SchemalessError:
    """Returns the error for a cell that the node doesn't have. It says why the cell may exist all the same."""
    hint = None
    if served.role is Role.MINION and read_from is None:
        hint = (
            f"the master of cluster {served.cluster} can't be reached, and a minion answered: the cell may wait in a"
            " buffer, or not be replicated yet. Ask again when the master is back"
        )
    elif served.role is Role.MINION:
        hint = "a minion may be behind: ask the master (read_from=master)"
    return said_by(CellMissing(what, hint=hint), served)


def served_together(parts: Sequence[Served]) -> Served:
    """Describes an answer that several clusters had a part in by the worst role and lag among them."""
    roles = {part.role for part in parts}
    clusters = sorted({part.cluster for part in parts})
    return Served(
        Role.MINION if Role.MINION in roles else Role.MASTER,
        ",".join(clusters),
        max((part.lag_s for part in parts), default=0.0),
    )
