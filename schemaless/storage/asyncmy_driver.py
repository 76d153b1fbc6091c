"""Runs operations by asyncmy, for the services: its rows come five to nine times faster than PyMySQL's.

The connections to each node are bounded (I14). Time in a process's own queue, and time in which its event loop
stood still, never count against a server.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from types import TracebackType
from typing import Any, TypeVar

import asyncmy

from schemaless.errors import (
    AccountRefused,
    Overloaded,
    SchemalessError,
    ShardsMoved,
    StaleTopology,
    StorageUnavailable,
)
from schemaless.runtime.loop_lag import LiveTimeout, LoopLag
from schemaless.runtime.name_lookup import NameLookups, no_address
from schemaless.storage import placement_table
from schemaless.storage.failover import without_frames
from schemaless.storage.node_core import SESSION, ConnectionPool, Storage, connect_options, on_node, stamp, verify_size
from schemaless.storage.operation import AGAIN_ON, PAUSE, Args, Operation, Result, query, retries, runs_again
from schemaless.storage.server_settings import ServerIds, ServerSettings
from schemaless.storage.sql import Script
from schemaless.storage.translation import FAILURES, connecting_failed
from schemaless.topology import Appointment, Node, Role, Topology, present_account

T = TypeVar("T")


class Traffic(StrEnum):
    """What a connection is used for. Where each kind has a share of its own, none waits for another."""

    WRITE = "write"
    READ = "read"
    PROBE = "probe"
    WATCH = "watch"  # whether the server answers at all


Shares = Mapping[Traffic, int]

HANDOVER_S = 0.25
"""How long a write waits for a master that is about to be opened. A planned change takes less."""
LEASE_S = 1.0
"""How long a master is believed to be one without a word of another server. Who opens another one waits for that."""
_HANDOVER_PAUSE_S = 0.02
_LOOK_PERIOD_S = 0.5
_LOOK_AT_MINION_PERIOD_S = 2.0
_LOOK_WAIT_S = 0.1
"""What a server that answers at all takes at most, when the others don't wait for it."""
_LOOK_TIMEOUT_S = 1.0
_SOON_S = 0.005
_SOON_WAIT_S = 0.02
"""While a shard moves: when the servers are looked at again, and how long such a look waits for one that hangs."""

_lookups = NameLookups()
"""Of this process."""


def shares_of(connections_max: int) -> Shares:
    """Divides the connections to one node: nearly half of them for reads, one in eight for probes, one to watch it."""
    probes = max(1, connections_max // 8)
    writes = max(1, connections_max * 3 // 8)
    reads = max(1, connections_max - writes - probes - 1)
    return {Traffic.WRITE: writes, Traffic.READ: reads, Traffic.PROBE: probes, Traffic.WATCH: 1}


class _Lane:
    """The connections of one share."""

    __slots__ = ("pool", "slots")

    def __init__(self, connections_max: int) -> None:
        self.pool: ConnectionPool[Any] = ConnectionPool(
            lambda connection: connection.close(), lambda connection: bool(connection.get_transaction_status())
        )
        self.slots = asyncio.BoundedSemaphore(connections_max)


class NodeCounts:
    """What one server was asked for since the start: operations, how long they took in all, and what failed."""

    __slots__ = ("errors", "operations", "seconds")

    def __init__(self) -> None:
        self.operations = 0
        self.seconds = 0.0
        self.errors: Counter[str] = Counter()
        """By the name of the error's class."""


class AsyncNode(ABC):
    """A MySQL server to run operations on: one of them, or the master of a cluster, whichever it is now."""

    node: Node
    settings: ServerSettings
    counts: NodeCounts
    refused: AccountRefused | None
    """How the server refused our account, None where the last connection failed otherwise or was made."""

    @property
    def role(self) -> Role:
        return self.settings.role

    @abstractmethod
    async def run(
        self,
        operation: Callable[[*Args], Operation[T]],
        *args: *Args,
        timeout_s: float | None = None,
        again_on: tuple[type[SchemalessError], ...] = AGAIN_ON,
        traffic: Traffic = Traffic.READ,
    ) -> T:
        """Runs `operation(*args)` within `timeout_s` seconds, all attempts together, and returns its value.

        It is run again from its start after the errors of `again_on`. An operation that isn't idempotent gives
        `again_on=(Busy,)`: after Busy MySQL has rolled back, after a lost connection the outcome is unknown.

        Raises StorageUnavailable (also when the time is over: the outcome is unknown then), Busy, NotDurable for a put
        to a master whose settings may lose it, NotWhole for a read from a minion that may lack cells, or what the
        operation raises. Raises Overloaded when no connection was free in that time, or when the event loop was too
        late to see an answer: neither says anything about the server.
        """


class AsyncServer(AsyncNode):
    """One MySQL server, reached through at most `connections_max` connections. Lives on one event loop.

    With `shares` each kind of traffic has connections of its own, else all kinds share them. `settings` says what the
    server's own settings promise. A master that breaks them takes no write, and a minion is not read. Probes go on.
    """

    def __init__(
        self,
        node: Node,
        *,
        connections_max: int = 16,
        shares: Shares | None = None,
        connect_timeout_s: float = 1.0,
        timeout_s: float = 10.0,
        loop_lag: LoopLag | None = None,
        settings: ServerSettings | None = None,
    ) -> None:
        self.node = node
        self.stamp = stamp(0, 0)
        self.settings = settings or ServerSettings(node)
        self.counts = NodeCounts()
        self.refused = None
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._loop_lag = LoopLag() if loop_lag is None else loop_lag
        if shares is None:
            self._lanes = dict.fromkeys(Traffic, _Lane(connections_max))
        else:
            self._lanes = {traffic: _Lane(share) for traffic, share in shares.items()}

    async def run(
        self,
        operation: Callable[[*Args], Operation[T]],
        *args: *Args,
        timeout_s: float | None = None,
        again_on: tuple[type[SchemalessError], ...] = AGAIN_ON,
        traffic: Traffic = Traffic.READ,
    ) -> T:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        lane = self._lanes[traffic]
        if lane.slots.locked():
            await self._wait_for_slot(lane, traffic, limit_s)
        else:
            await lane.slots.acquire()
        timeout = LiveTimeout(limit_s, self._loop_lag)
        began = self._loop_lag.clock()
        try:
            async with timeout:
                try:
                    return await self._attempt(traffic, operation, args)  # the usual case pays nothing for the retries
                except again_on as error:
                    self.counts.errors[type(error).__name__] += 1
                    if not runs_again(error, again_on):
                        raise
                async for attempt in retries(again_on, limit_s):
                    with attempt:
                        return await self._attempt(traffic, operation, args)
        except TimeoutError as error:
            self.counts.errors["TimeoutError"] += 1
            if timeout.server_had_its_time:
                raise StorageUnavailable(f"{self.node.name}: no answer within {limit_s} s") from error
            raise self._too_late() from error
        finally:
            lane.slots.release()
            self.counts.operations += 1
            self.counts.seconds += self._loop_lag.clock() - began
        raise AssertionError("stamina returns or raises")

    def appoint(self, role: Role) -> None:
        self.settings.appoint(role)

    async def close(self) -> None:
        for lane in self._lanes.values():
            while (connection := lane.pool.take()) is not None:
                await connection.ensure_closed()

    async def _wait_for_slot(self, lane: _Lane, traffic: Traffic, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await lane.slots.acquire()
        except TimeoutError as error:
            why = f"{self.node.name}: no connection for {traffic} was free for {limit_s} s"
            raise Overloaded(why) from error

    async def _attempt(self, traffic: Traffic, operation: Callable[[*Args], Operation[T]], args: tuple[*Args]) -> T:
        lane = self._lanes[traffic]
        connection = lane.pool.take() or await self._connect()
        try:
            if connection.stamp is not self.stamp:
                wanted = self.stamp
                await _drive(connection, on_node(query(wanted), self.node.name))
                connection.stamp = wanted
            if self.settings.due():
                await _drive(connection, on_node(self.settings.ask(), self.node.name))
            if self.settings.faults and traffic in (Traffic.WRITE, Traffic.READ):
                self.settings.require_usable(writes=traffic is Traffic.WRITE)
            value = await _drive(connection, on_node(operation(*args), self.node.name))
        except ConnectionClosed as error:
            lane.pool.give_after(connection, error)
            raise StorageUnavailable(f"{self.node.name}: {error}") from error
        except BaseException as error:
            lane.pool.give_after(connection, error)
            raise
        lane.pool.give(connection)
        return value

    def _too_late(self) -> Overloaded:
        return Overloaded(f"{self.node.name}: this process was too late to see an answer")

    async def _connect(self) -> Any:
        """Opens a connection, with the account of the node's file if that changed."""
        asked, refused = self.node, None
        try:
            try:
                return await self._connect_as(asked)
            except AccountRefused:
                if (present := present_account(asked)) is None:
                    raise
            connection = await self._connect_as(present)
            self.node = present
            return connection
        except AccountRefused as error:
            refused = without_frames(error)
            raise
        finally:
            self.refused = refused

    async def _connect_as(self, node: Node) -> Any:
        limit_s = self._connect_timeout_s
        timeout = LiveTimeout(limit_s, self._loop_lag)
        task = asyncio.current_task()
        assert task is not None, "only tasks connect"
        try:
            async with timeout:
                if not node.socket:
                    # The driver looks the name up again, in one of four threads that all nodes share. One that hangs
                    # must not get that far.
                    found = _lookups.begin(node.host)
                    if not found.done():
                        await asyncio.wrap_future(found)
                cancels = task.cancelling()
                # The driver's own time-out knows nothing of a loop that is late, so it comes last.
                connection = await asyncmy.connect(**connect_options(node), connect_timeout=limit_s * 4)
                if task.cancelling() > cancels:  # Python 3.11's wait_for drops a cancellation that meets its result
                    connection.close()
                    raise asyncio.CancelledError
            try:
                *_, packet = await _execute(connection, SESSION)
                connection.packet_max = packet.rows[0][0]
                connection.stamp = None
            except BaseException:  # nobody else knows of it, so it would stay open
                connection.close()
                raise
        except TimeoutError as error:
            if timeout.server_had_its_time:
                if _lookups.is_under_way(node.host):
                    raise StorageUnavailable(f"{node.name}: {no_address(node.host, limit_s)}") from error
                raise StorageUnavailable(f"{node.name}: no connection within {limit_s} s") from error
            raise self._too_late() from error
        except FAILURES as error:
            raise connecting_failed(error, node) from error
        except RuntimeError as error:  # asyncmy's, on uvloop: the server closed the connection as it was made
            raise StorageUnavailable(f"{node.name}: {error}") from error
        return connection


class AsyncMaster(AsyncNode):
    """The master of a cluster, whichever server it is at each call. It may be kept.

    A call that another server should have got is refused with StaleTopology. Then the servers are asked at once who is
    master, and the call goes there. So a process that is late goes on. A write waits for a master that is just being
    opened, for `HANDOVER_S` at most. ShardsMoved goes to the caller at once: another cluster has to be asked.
    """

    def __init__(self, storage: AsyncStorage, cluster: str) -> None:
        self._storage = storage
        self._cluster = cluster

    @property
    def present(self) -> AsyncServer:
        return self._storage.present_master(self._cluster)

    @property
    def node(self) -> Node:  # type: ignore[override]  # read only
        return self.present.node

    @property
    def settings(self) -> ServerSettings:  # type: ignore[override]
        return self.present.settings

    @property
    def counts(self) -> NodeCounts:  # type: ignore[override]
        return self.present.counts

    @property
    def refused(self) -> AccountRefused | None:  # type: ignore[override]
        return self.present.refused

    async def run(
        self,
        operation: Callable[[*Args], Operation[T]],
        *args: *Args,
        timeout_s: float | None = None,
        again_on: tuple[type[SchemalessError], ...] = AGAIN_ON,
        traffic: Traffic = Traffic.READ,
    ) -> T:
        try:
            return await self._run_once(operation, args, timeout_s, again_on, traffic)
        except ShardsMoved:
            raise
        except StaleTopology as error:
            refusal = error
        waits_until = self._storage.loop_lag.clock() + (HANDOVER_S if traffic is Traffic.WRITE else 0.0)
        while True:
            asked, believed = self.present, self.present.stamp
            await self._storage.look()
            if self.present is not asked or self.present.stamp is not believed or traffic is Traffic.WRITE:
                try:
                    return await self._run_once(operation, args, timeout_s, again_on, traffic)
                except ShardsMoved:
                    raise
                except StaleTopology as error:
                    refusal = error
            if self._storage.loop_lag.clock() >= waits_until:
                raise refusal
            await asyncio.sleep(_HANDOVER_PAUSE_S)

    async def _run_once(
        self,
        operation: Callable[[*Args], Operation[T]],
        args: tuple[*Args],
        timeout_s: float | None,
        again_on: tuple[type[SchemalessError], ...],
        traffic: Traffic,
    ) -> T:
        if traffic is Traffic.WRITE and not self._storage.is_open(self._cluster):
            raise StaleTopology(f"cluster {self._cluster} gets another master")
        return await self.present.run(operation, *args, timeout_s=timeout_s, again_on=again_on, traffic=traffic)


class AsyncStorage(Storage[AsyncServer]):
    """All nodes of a topology, by name. Each has at most `connections_max` connections, in `shares` if these are given.

    `lossy_masters` allows writes to masters whose settings may lose them.

    While it is open it measures how late the event loop is, so that no time-out takes a late loop for a dead server. It
    asks all masters twice a second who is master of which cluster, minions every two seconds, and looks whether the
    topology's file was changed.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        connections_max: int = 16,
        shares: Shares | None = None,
        connect_timeout_s: float = 1.0,
        timeout_s: float = 10.0,
        lossy_masters: bool = False,
    ) -> None:
        self.loop_lag = LoopLag()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks: dict[AsyncServer, asyncio.Task[None]] = {}
        self._confirmed_at: dict[str, float] = {}
        self._numbers_seen: dict[str, int] = {}
        self._server_ids: ServerIds = {}
        self._soon: asyncio.Task[None] | None = None
        super().__init__(
            topology,
            lambda node: AsyncServer(
                node,
                connections_max=connections_max,
                shares=shares,
                connect_timeout_s=connect_timeout_s,
                timeout_s=timeout_s,
                loop_lag=self.loop_lag,
                settings=ServerSettings(node, lossy_allowed=lossy_masters, ids=self._server_ids),
            ),
        )

    def _take(self, topology: Topology) -> None:
        before = dict(self.nodes)
        super()._take(topology)
        for gone in self._server_ids.keys() - self.nodes.keys():
            del self._server_ids[gone]
        self._of_cluster = {cluster: AsyncMaster(self, cluster) for cluster in topology.clusters}
        if self._tasks:
            self._watch([node for node in self.nodes.values() if node not in before.values()])

    async def __aenter__(self) -> AsyncStorage:
        self._tasks.add(asyncio.create_task(self.loop_lag.run()))
        await self.look(_LOOK_TIMEOUT_S)
        self._tasks.add(asyncio.create_task(self._keep_reading()))
        self._watch(self.nodes.values())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ending = [*self._tasks, *self._looks.values(), *([self._soon] if self._soon else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for node in self.nodes.values():
            await node.close()

    def master(self, cluster: str) -> AsyncMaster:
        """Raises Misconfigured when the topology has no such cluster."""
        return self._of_cluster[self.topology.cluster(cluster).name]

    @property
    def masters(self) -> list[AsyncMaster]:
        """The masters of all clusters, in the order of the clusters' names."""
        return [self.master(cluster) for cluster in sorted(self.topology.clusters)]

    async def look(self, wait_s: float = _LOOK_WAIT_S) -> None:
        """Asks all servers who is master of which cluster. Returns when all have answered, or after `wait_s`.

        Who comes while a server is being asked waits for the same answer. A server that is away, or has no tables yet,
        tells nothing, and one that hangs holds up nobody.
        """
        self.read_again()
        if self.nodes:
            await asyncio.wait(list(map(self._ask, self.nodes.values())), timeout=wait_s)

    async def look_soon(self) -> None:
        """Looks in a few ms, once for all who wait for it: where a shard lives that is moving."""
        if self._soon is None or self._soon.done():
            self._soon = asyncio.create_task(self._look_soon())
        await asyncio.wait([self._soon])

    async def _look_soon(self) -> None:
        await asyncio.sleep(_SOON_S)
        await self.look(_SOON_WAIT_S)

    def _ask(self, node: AsyncServer) -> asyncio.Task[None]:
        """Returns the task that asks a server, or the one that does already."""
        if node not in self._looks:
            self._looks[node] = asyncio.create_task(self._ask_once(node))
            self._looks[node].add_done_callback(lambda _: self._looks.pop(node))
        return self._looks[node]

    async def _ask_once(self, node: AsyncServer) -> None:
        asked_at, seen = _awake_s(), self._numbers_seen.get(node.node.name, 0)
        with suppress(SchemalessError):
            found, numbers_sum, placements = await node.run(
                placement_table.look, seen, timeout_s=_LOOK_TIMEOUT_S, again_on=(), traffic=Traffic.PROBE
            )
            self.learn(found)
            placement_table.learn(self.placements, placements)
            self._numbers_seen[node.node.name] = numbers_sum
            self._confirm(node.node, found, asked_at)

    async def is_leased(self, cluster: str) -> bool:
        """Returns whether the master is still one, as far as a server said that must know of another one.

        It asks again before it says no.
        """
        asked = set[asyncio.Task[None]]()
        if not self._is_confirmed(cluster):
            asked = set(map(self._ask, self.nodes.values()))
        while asked and not self._is_confirmed(cluster):
            _, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        return self._is_confirmed(cluster)

    def _is_confirmed(self, cluster: str) -> bool:
        confirmed_at = self._confirmed_at.get(cluster, 0.0)
        is_alone = self.epoch(cluster) == 0 and len(self.topology.clusters) == 1  # nothing of it can be elsewhere
        return is_alone or _awake_s() - confirmed_at <= LEASE_S

    def _confirm(self, node: Node, found: Sequence[Appointment], asked_at: float) -> None:
        """A server that would know of a later master knows none: a voter, or the master of another cluster.

        Where no controller appoints masters, it knows of shards that are about to move.
        """
        for cluster in self.topology.clusters.keys() - self.appointments.keys():
            if node.cluster == cluster or self._masters[node.cluster] == node.name:
                self._confirmed_at[cluster] = max(asked_at, self._confirmed_at.get(cluster, 0.0))
        for one in found:
            known = self.appointments.get(one.cluster)
            if known is None or one.rank != known.rank or node.name == known.master:
                continue
            if node.name in known.voters or self._masters[node.cluster] == node.name:
                self._confirmed_at[one.cluster] = max(asked_at, self._confirmed_at.get(one.cluster, 0.0))

    def _watch(self, nodes: Iterable[AsyncServer]) -> None:
        for node in nodes:
            task = asyncio.create_task(self._keep_looking(node))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _keep_looking(self, node: AsyncServer) -> None:
        """Asks a server for as long as the file has it. Who still uses one that is gone uses its open connections."""
        while self.nodes.get(node.node.name) is node:
            await asyncio.sleep(_LOOK_PERIOD_S if self._is_told_first(node.node) else _LOOK_AT_MINION_PERIOD_S)
            await asyncio.wait([self._ask(node)])
        await node.close()

    def _is_told_first(self, node: Node) -> bool:
        """All masters know of another one before it is opened. Where there is one cluster, its voters do."""
        return self._masters[node.cluster] == node.name or len(self.topology.clusters) == 1

    async def _keep_reading(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_PERIOD_S)
            self.read_again()


def _awake_s() -> float:
    """A clock that goes on while the machine sleeps, unlike `time.monotonic`: what it measured before is old then."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def _drive(connection: Any, operation: Operation[T]) -> T:
    try:
        script = next(operation)
        while True:
            try:
                verify_size(script, connection.packet_max)
                results = await _execute(connection, script)
            except FAILURES as error:
                script = operation.throw(error)
            else:
                script = operation.send(results)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class ConnectionClosed(OSError):
    """The transport of a connection was closed while it was used."""


async def _execute(connection: Any, script: Script) -> list[Result]:
    """Executes by the connection itself: a cursor would cost half as much again, for each statement."""
    if script is PAUSE:
        await asyncio.sleep(0)
        return []
    results: list[Result] = []
    try:
        await connection.query(script)
        results.append(_result(connection._result))
        while connection._result.has_next:
            await connection.next_result()
            results.append(_result(connection._result))
    except asyncmy.errors.MySQLError as error:
        error.statement = len(results)  # translation.py: which one failed
        raise
    except RuntimeError as error:  # asyncmy's, on uvloop: the transport was closed meanwhile
        raise ConnectionClosed(str(error)) from error
    return results


def _result(found: Any) -> Result:
    return Result(found.rows or (), found.affected_rows)
