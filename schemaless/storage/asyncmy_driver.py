"""Runs operations by asyncmy, for the services: its rows come five to nine times faster than PyMySQL's.

The connections to each node are bounded (I14). Time in a process's own queue, and time in which its event loop
stood still, never count against a server.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import TracebackType
from typing import Any, TypeVar

import asyncmy

from schemaless.errors import Overloaded, SchemalessError, StorageUnavailable
from schemaless.runtime.loop_lag import LiveTimeout, LoopLag
from schemaless.storage.node_core import SESSION, ConnectionPool, Storage, connect_options, on_node
from schemaless.storage.operation import AGAIN_ON, PAUSE, Args, Operation, Result, retries, runs_again
from schemaless.storage.server_settings import ServerSettings
from schemaless.storage.sql import Script
from schemaless.storage.translation import FAILURES, connecting_failed
from schemaless.topology import Node, Topology

T = TypeVar("T")


class Traffic(StrEnum):
    """What a connection is used for. Where each kind has a share of its own, none waits for another."""

    WRITE = "write"
    READ = "read"
    PROBE = "probe"


Shares = Mapping[Traffic, int]


def shares_of(connections_max: int) -> Shares:
    """Divides the connections to one node: half of them for reads, one in eight for probes."""
    probes = max(1, connections_max // 8)
    writes = max(1, connections_max * 3 // 8)
    return {Traffic.WRITE: writes, Traffic.READ: max(1, connections_max - writes - probes), Traffic.PROBE: probes}


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


class AsyncNode:
    """One MySQL server, reached through at most `connections_max` connections. Lives on one event loop.

    With `shares` each kind of traffic has connections of its own, else all kinds share them. `settings` says what the
    server's own settings promise. A master that breaks them takes no write.
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
        self.settings = settings or ServerSettings(node)
        self.counts = NodeCounts()
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
        """Runs `operation(*args)` within `timeout_s` seconds, all attempts together, and returns its value.

        It is run again from its start after the errors of `again_on`. An operation that isn't idempotent gives
        `again_on=(Busy,)`: after Busy MySQL has rolled back, after a lost connection the outcome is unknown.

        Raises StorageUnavailable (also when the time is over: the outcome is unknown then), Busy, NotDurable for a put
        to a master whose settings may lose it, or what the operation raises. Raises Overloaded when no connection was
        free in that time, or when the event loop was too late to see an answer: neither says anything about the server.
        """
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
            if self.settings.due():
                await _drive(connection, on_node(self.settings.ask(), self.node.name))
            if traffic is Traffic.WRITE and self.settings.faults:
                self.settings.require_durable()
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
        limit_s = self._connect_timeout_s
        timeout = LiveTimeout(limit_s, self._loop_lag)
        task = asyncio.current_task()
        assert task is not None, "only tasks connect"
        try:
            async with timeout:
                cancels = task.cancelling()
                # The driver's own time-out knows nothing of a loop that is late, so it comes last.
                connection = await asyncmy.connect(**connect_options(self.node), connect_timeout=limit_s * 4)
                if task.cancelling() > cancels:  # Python 3.11's wait_for drops a cancellation that meets its result
                    connection.close()
                    raise asyncio.CancelledError
            try:
                await _execute(connection, SESSION)
            except BaseException:  # nobody else knows of it, so it would stay open
                connection.close()
                raise
        except TimeoutError as error:
            if timeout.server_had_its_time:
                raise StorageUnavailable(f"{self.node.name}: no connection within {limit_s} s") from error
            raise self._too_late() from error
        except FAILURES as error:
            raise connecting_failed(error, self.node.name) from error
        except RuntimeError as error:  # asyncmy's, on uvloop: the server closed the connection as it was made
            raise StorageUnavailable(f"{self.node.name}: {error}") from error
        return connection


class AsyncStorage(Storage[AsyncNode]):
    """All nodes of a topology, by name. Each has at most `connections_max` connections, in `shares` if these are given.

    `lossy_masters` allows writes to masters whose settings may lose them.

    While it is open it measures how late the event loop is, so that no time-out takes a late loop for a dead server.
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
        self._ticking: asyncio.Task[None] | None = None
        super().__init__(
            topology,
            lambda node: AsyncNode(
                node,
                connections_max=connections_max,
                shares=shares,
                connect_timeout_s=connect_timeout_s,
                timeout_s=timeout_s,
                loop_lag=self.loop_lag,
                settings=ServerSettings(node, lossy_allowed=lossy_masters),
            ),
        )

    async def __aenter__(self) -> AsyncStorage:
        self._ticking = asyncio.create_task(self.loop_lag.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        for node in self.nodes.values():
            await node.close()


async def _drive(connection: Any, operation: Operation[T]) -> T:
    try:
        script = next(operation)
        while True:
            try:
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
    try:
        await connection.query(script)
        results = [_result(connection._result)]
        while connection._result.has_next:
            await connection.next_result()
            results.append(_result(connection._result))
    except RuntimeError as error:  # asyncmy's, on uvloop: the transport was closed meanwhile
        raise ConnectionClosed(str(error)) from error
    return results


def _result(found: Any) -> Result:
    return Result(found.rows or (), found.affected_rows)
