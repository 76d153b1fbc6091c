"""Reader: which node a read goes to, and what the answer says about it.

Without a read preference the master answers, so a caller reads its own writes. A minion answers when the master is
unreachable.

A shard that is about to move is read at its home as before, and then the node is asked whether it was closed for the
shard. If it was, another cluster may have newer cells: the read waits for that, and is made again there. A process that
stood still meanwhile has no lease, so it looks at the placements before it asks.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from api.http.response import Header
from schemaless.cell import CellKey, ColumnName, RefKey, RowKey, StoredCell
from schemaless.errors import (
    CellMissing,
    LocationGone,
    NodeRefuses,
    NotWhole,
    SchemalessError,
    ShardsMoved,
    StaleTopology,
    StorageUnavailable,
    TooLarge,
)
from schemaless.runtime.batching import Batcher, BatchLimits, chunks
from schemaless.sharding import shard_of
from schemaless.storage import entity_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.failover import first_answer
from schemaless.storage.operation import Args, Operation
from schemaless.storage.replica_lag import ReplicaLag
from schemaless.topology import Datastore, Role

T = TypeVar("T")

_ROLES = {None: (Role.MASTER, Role.MINION), Role.MASTER: (Role.MASTER,), Role.MINION: (Role.MINION,)}


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
        return await self._at_home(
            datastore, shard, lambda node: self._batcher.exact(node, datastore, (shard, key)), read_from
        )

    async def newest(
        self, datastore: Datastore, row_key: RowKey, column_name: ColumnName, read_from: Role | None
    ) -> tuple[StoredCell | None, Served]:
        """Returns the newest version of a column, or None. Raises StorageUnavailable."""
        shard = shard_of(row_key, datastore.shards)
        return await self._at_home(
            datastore,
            shard,
            lambda node: self._batcher.newest(node, datastore, (shard, row_key, column_name)),
            read_from,
        )

    async def read_shard(
        self,
        datastore: Datastore,
        shard: int,
        operation: Callable[[*Args], Operation[T]],
        *args: *Args,
        read_from: Role | None = None,
    ) -> tuple[T, Served]:
        """Runs an operation about one shard on a node of its home. Raises what `read` does."""
        return await self._at_home(
            datastore, shard, lambda node: node.run(operation, *args, timeout_s=self._timeout_s), read_from
        )

    async def read(
        self,
        cluster: str,
        operation: Callable[[*Args], Operation[T]],
        *args: *Args,
        read_from: Role | None = None,
        without: Collection[str] = (),
        of: tuple[Datastore, Collection[int]] | None = None,
    ) -> tuple[T, Served]:
        """Runs an operation on a node of the cluster, not on those named in `without`.

        Raises StorageUnavailable when no node that may answer does, and ShardsMoved where the cluster may not be home
        any longer to the shards that the operation is `of`.
        """
        value, node = await first_answer(
            self._candidates(cluster, read_from, without),
            self._noting_failures(lambda node: node.run(operation, *args, timeout_s=self._timeout_s), of),
            skipped=self._skipped(cluster, read_from),
        )
        return value, self._served(node)

    async def following(self, datastore: Datastore, read: Callable[[], Awaitable[T]]) -> T:
        """Reads again as long as shards turn out to have moved, each time when all of these have an open home."""
        deadline = self._breaker.clock() + self._timeout_s
        while True:
            try:
                return await read()
            except ShardsMoved as error:
                while await self._closed_at_home(datastore, error.shards):
                    if self._breaker.clock() >= deadline:
                        raise
                    await self._storage.look_soon()

    async def _at_home(
        self, datastore: Datastore, shard: int, ask: Callable[[AsyncNode], Awaitable[T]], read_from: Role | None
    ) -> tuple[T, Served]:
        async def read() -> tuple[T, AsyncNode]:
            home = datastore.home(shard)
            return await first_answer(
                self._candidates(home, read_from),
                self._noting_failures(ask, (datastore, (shard,))),
                skipped=self._skipped(home, read_from),
            )

        value, node = await self.following(datastore, read)
        return value, self._served(node)

    async def _closed_at_home(self, datastore: Datastore, shards: Collection[int]) -> set[int]:
        """Returns the shards whose home is closed, or says nothing."""
        closed = set[int]()
        for cluster, here in datastore.by_home(shards, lambda shard: shard).items():
            try:
                closed |= await self._batcher.moved(self._storage.master(cluster), datastore, here)
            except SchemalessError:
                closed |= set(here)
        return closed

    async def _verify_home(self, node: AsyncNode, datastore: Datastore, shards: Collection[int]) -> None:
        """Raises ShardsMoved for a node that isn't their home, or may not have been when it was read."""
        moves = [move for shard in shards if (move := datastore.moves.get(shard)) is not None]
        moved = {move.shard for move in moves if move.home != node.node.cluster}
        if coming := [move.shard for move in moves if move.coming is not None]:
            moved |= await self._batcher.moved(node, datastore, coming)
        if moved:
            raise ShardsMoved(f"{node.node.name} is closed for shards {sorted(moved)[:5]}, which move", moved)

    def is_refused(self, cluster: str) -> bool:
        """Returns whether the master refuses our account, as far as it was asked last."""
        return self._storage.master(cluster).refused is not None

    def minions(self, cluster: str) -> frozenset[str]:
        """Returns the names of a cluster's minions."""
        return frozenset(minion.node.name for minion in self._storage.minions(cluster))

    def _candidates(self, cluster: str, read_from: Role | None, without: Collection[str] = ()) -> Iterator[AsyncNode]:
        """Yields the nodes that may answer, best first."""
        for role in _ROLES[read_from]:
            yield from (node for node in self._answering(cluster, role) if node.node.name not in without)

    def _skipped(self, cluster: str, read_from: Role | None) -> Iterator[StorageUnavailable]:
        """Yields why the nodes are not asked for which the breaker is open."""
        for node in (self._storage.master(cluster), *self._storage.minions(cluster)):
            if node.role in _ROLES[read_from] and not self._breaker.answers(node):
                yield node.refused or StorageUnavailable(f"{node.node.name} does not answer")

    def _noting_failures(
        self, ask: Callable[[AsyncNode], Awaitable[T]], of: tuple[Datastore, Collection[int]] | None
    ) -> Callable[[AsyncNode], Awaitable[T]]:
        """Lets the breaker know which node gave no answer, and a LocationGone name its node.

        A node that refuses this read may answer others. What a master says counts as its word while it is known that no
        other one was opened. What it says `of` shards counts while it is their home.
        """

        async def asked(node: AsyncNode) -> T:
            began = self._breaker.clock()
            try:
                answer = await ask(node)
                if node.role is Role.MASTER and not await self._storage.is_leased(node.node.cluster):
                    raise StaleTopology(f"{node.node.name} was the master, and nobody confirms that it still is")
                if of is not None and of[0].moves:
                    await self._verify_home(node, *of)
                return answer
            except LocationGone as gone:
                said_by(gone, self._served(node))
                raise
            except NodeRefuses as error:
                if isinstance(error, NotWhole):
                    self._lag.suspect(node, error)
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
        return Served(node.role, node.node.cluster, self._lag.lag_s(node))


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


# ReadBatcher: concurrent reads of single cells from one node become one script, as puts become one transaction.
#
# A read that is alone is sent at once. A round trip costs this process more than MySQL's answer. Batching halves that.

Key = TypeVar("Key")
ExactKey = tuple[int, CellKey]
ColumnKey = tuple[int, RowKey, ColumnName]
Read = Callable[[Datastore, Sequence[Key]], Operation[list[StoredCell | None]]]

LIMITS = BatchLimits(lanes=3, items_max=64, queued_bytes_max=1 << 40)  # its keys are small: units bound the queue
KEY_BYTES = 100  # of one that waits, about


class CellBatcher(Batcher[Key, StoredCell | None]):
    """Where cells are large, fewer of them share a script: each counts as much as the largest of late (I14)."""

    def __init__(self, read: Callable[[list[Key]], Awaitable[list[StoredCell | None]]]) -> None:
        super().__init__(self._read_and_measure, LIMITS)
        self._read = read
        self._expected_bytes = KEY_BYTES

    async def one(self, key: Key) -> StoredCell | None:
        return (await self.submit((key,), self._expected_bytes))[0]

    async def _read_and_measure(self, keys: list[Key]) -> list[StoredCell | None]:
        cells = await self._read(keys)
        largest = max([len(cell.body) for cell in cells if cell is not None], default=0)
        self._expected_bytes = max(KEY_BYTES, largest, self._expected_bytes // 2)
        return cells


class ReadBatcher:
    """Holds one batcher for each node, datastore and kind of read."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._exact: dict[tuple[str, str], CellBatcher[ExactKey]] = {}
        self._newest: dict[tuple[str, str], CellBatcher[ColumnKey]] = {}
        self._moved: dict[tuple[str, str], Batcher[int, bool]] = {}

    async def exact(self, node: AsyncNode, datastore: Datastore, key: ExactKey) -> StoredCell | None:
        """Raises StorageUnavailable."""
        batcher = self._exact.get((node.node.name, datastore.name))
        if batcher is None:
            batcher = self._exact[node.node.name, datastore.name] = self._batcher(node, datastore, entity_table.get)
        return await batcher.one(key)

    async def newest(self, node: AsyncNode, datastore: Datastore, key: ColumnKey) -> StoredCell | None:
        """Raises StorageUnavailable."""
        batcher = self._newest.get((node.node.name, datastore.name))
        if batcher is None:
            batcher = self._newest[node.node.name, datastore.name] = self._batcher(node, datastore, entity_table.newest)
        return await batcher.one(key)

    async def moved(self, node: AsyncNode, datastore: Datastore, shards: Collection[int]) -> set[int]:
        """Returns the shards for which a node is closed after this call began. Raises StorageUnavailable."""
        batcher = self._moved.get((node.node.name, datastore.name))
        if batcher is None:

            async def flush(asked: list[int]) -> list[bool]:
                moved = await node.run(shard_head.moved, datastore.name, set(asked), timeout_s=self._timeout_s)
                return [shard in moved for shard in asked]

            batcher = self._moved[node.node.name, datastore.name] = Batcher(flush, LIMITS)
        are_moved = await batcher.submit(list(shards), KEY_BYTES)
        return {shard for shard, is_moved in zip(shards, are_moved, strict=True) if is_moved}

    def _batcher(self, node: AsyncNode, datastore: Datastore, read: Read[Key]) -> CellBatcher[Key]:
        async def flush(keys: list[Key]) -> list[StoredCell | None]:
            return await node.run(read, datastore, keys, timeout_s=self._timeout_s)

        return CellBatcher(flush)


# Reads the cells under many keys from all their homes concurrently, within a bound of bytes (I14).

CHUNK_KEYS = 100  # of one script
Found = dict[int, StoredCell | None]


class WantedCell(msgspec.Struct, frozen=True):
    """A key to read. Without a ref_key it asks for the newest version."""

    row_key: RowKey
    column_name: ColumnName
    ref_key: RefKey | None


async def read_many(
    reader: Reader, datastore: Datastore, wanted: Sequence[WantedCell], read_from: Role | None, bytes_max: int
) -> tuple[list[StoredCell | None], Served]:
    """Returns the cells in order, None for a missing one. Raises TooLarge or StorageUnavailable.

    All clusters together never hold more than `bytes_max`. Each has an equal share first. Those whose cells need more
    are read again one after the other, within what the others left.
    """
    return await reader.following(
        datastore, lambda: _read_many(reader, datastore, wanted, read_from=read_from, bytes_max=bytes_max)
    )


async def _read_many(
    reader: Reader, datastore: Datastore, wanted: Sequence[WantedCell], *, read_from: Role | None, bytes_max: int
) -> tuple[list[StoredCell | None], Served]:
    shards = [shard_of(key.row_key, datastore.shards) for key in wanted]
    by_cluster = datastore.by_home(range(len(wanted)), lambda position: shards[position])
    found: Found = {}
    served: list[Served] = []

    async def read_cluster(cluster: str, positions: Sequence[int], within: int) -> int:
        """Returns how many bytes of bodies it read."""
        here: Found = {}
        left = within
        for chunk in chunks(positions, count_max=CHUNK_KEYS):
            keys = [(shards[position], *msgspec.structs.astuple(wanted[position])) for position in chunk]
            of = datastore, {shards[position] for position in chunk}
            cells, by = await reader.read(
                cluster, entity_table.get_or_newest, datastore, keys, left, read_from=read_from, of=of
            )
            here.update(zip(chunk, cells, strict=True))
            served.append(by)
            left -= sum(len(cell.body) for cell in cells if cell is not None)
        found.update(here)
        return within - left

    share = bytes_max // len(by_cluster)
    names = list(by_cluster)
    results = await asyncio.gather(
        *(read_cluster(name, by_cluster[name], share) for name in names), return_exceptions=True
    )
    left = bytes_max
    too_large = []
    for name, result in zip(names, results, strict=True):
        if isinstance(result, TooLarge) and len(names) > 1:
            too_large.append(name)
        elif isinstance(result, BaseException):
            raise result
        else:
            left -= result
    for name in too_large:
        left -= await read_cluster(name, by_cluster[name], left)
    return [found[position] for position in range(len(wanted))], served_together(served)


# ReadBreaker: the circuit breaker of reads, for all MySQL servers.
#
# One failed read opens it for a server, so a dead or hung server costs one time-out. The sampler in replica_lag.py
# asks every server once a second and closes it. It differs from the write breaker (api/write/queue.py), which has no
# sampler and lets single puts through as probes: a read is never a probe. A server that answered the sampler after the
# read began is only slow. Leaving it would send callers that read their own writes to a minion that may not have them
# yet.


class ReadBreaker:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._unreachable: set[str] = set()
        self._answered_at: dict[str, float] = {}

    def sampled(self, node: str, answered: bool) -> None:
        """Records whether a node answered the sampler."""
        if answered:
            self._answered_at[node] = self.clock()
            self._unreachable.discard(node)
        else:
            self._unreachable.add(node)

    def read_failed(self, node: AsyncNode, began: float) -> None:
        """Records that a read got no answer. It began at `began`, by this breaker's clock."""
        if self._answered_at.get(node.node.name, began) <= began:
            self._unreachable.add(node.node.name)

    def answers(self, node: AsyncNode) -> bool:
        return self.has_answered(node.node.name)

    def has_answered(self, node: str) -> bool:
        """Returns whether a server, by name, answered when it was last asked."""
        return node not in self._unreachable

    def answering(self, nodes: Iterable[AsyncNode]) -> list[AsyncNode]:
        return [node for node in nodes if self.answers(node)]
