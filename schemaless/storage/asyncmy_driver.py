"""Runs operations by asyncmy: the API's and the tailer's hot paths. One pool a node, bounded (I14)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import asyncmy
import stamina
from asyncmy.constants.CLIENT import FOUND_ROWS, MULTI_STATEMENTS

from schemaless.errors import SchemalessError, StorageUnavailable
from schemaless.storage.idle_connections import IdleConnections
from schemaless.storage.operation import AGAIN_ON, ATTEMPTS_MAX, Args, Operation, Result, Start
from schemaless.storage.session import SESSION
from schemaless.storage.sql import Script
from schemaless.storage.translation import DRIVER_ERRORS, translate, translated
from schemaless.topology import Node, Topology

T = TypeVar("T")


class AsyncNode:
    """One MySQL server, reached through at most `connections_max` connections."""

    def __init__(
        self,
        node: Node,
        *,
        connections_max: int = 16,
        connect_timeout_s: float = 1.0,
        timeout_s: float = 10.0,
    ) -> None:
        self.node = node
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._idle: IdleConnections[Any] = IdleConnections(lambda connection: connection.close())
        self._slots = asyncio.BoundedSemaphore(connections_max)

    async def run(
        self,
        operation: Callable[[*Args], Operation[T]],
        *args: *Args,
        timeout_s: float | None = None,
        again_on: tuple[type[SchemalessError], ...] = AGAIN_ON,
    ) -> T:
        """Runs `operation(*args)` within `timeout_s`, again from its start after Busy or a lost connection.

        An operation that isn't idempotent gives `again_on=(Busy,)`: what MySQL rolled back may be run again, what was
        lost with the outcome unknown may not.

        Raises StorageUnavailable (also when the time is over: the outcome is then unknown), Busy, Misconfigured, or
        what the operation raises.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._run_with_retries(partial(operation, *args), again_on)
        except TimeoutError as error:
            raise StorageUnavailable(f"{self.node.name}: no answer within {limit_s} s") from error

    async def close(self) -> None:
        while (connection := self._idle.take()) is not None:
            await connection.ensure_closed()

    async def _run_with_retries(self, start: Start[T], again_on: tuple[type[SchemalessError], ...]) -> T:
        try:
            return await self._run_once(start)  # the usual case pays nothing for the retries
        except again_on:
            pass
        async for attempt in stamina.retry_context(
            on=again_on,
            attempts=ATTEMPTS_MAX - 1,
            timeout=None,
            wait_initial=0.01,
            wait_max=0.2,
        ):
            with attempt:
                return await self._run_once(start)
        raise AssertionError("stamina returns or raises")

    async def _run_once(self, start: Start[T]) -> T:
        async with self._slots:
            connection = self._idle.take() or await self._connect()
            try:
                value = await _drive(connection, start(), self.node.name)
            except SchemalessError as error:
                self._put_away(connection, error)
                raise
            except BaseException:  # cancelled: it may be in any state
                connection.close()
                raise
            self._idle.give(connection)
            return value

    def _put_away(self, connection: Any, error: SchemalessError) -> None:
        """After a refusal the connection is as good as before, unless the operation gave up within a transaction."""
        if isinstance(error, StorageUnavailable):
            connection.close()
            self._idle.close_all()
        elif connection.get_transaction_status():
            connection.close()
        else:
            self._idle.give(connection)

    async def _connect(self) -> Any:
        node = self.node
        with translated(node.name):
            try:
                connection = await asyncmy.connect(
                    host=node.host,
                    port=node.port,
                    unix_socket=node.socket,
                    user=node.user,
                    password=node.password,
                    charset="utf8mb4",
                    autocommit=True,
                    client_flag=MULTI_STATEMENTS | FOUND_ROWS,
                    connect_timeout=self._connect_timeout_s,
                )
            except RuntimeError as error:  # asyncmy's, on uvloop: the server closed the connection as it was made
                raise StorageUnavailable(f"{node.name}: {error}") from error
            await _execute(connection, SESSION)
            return connection


class AsyncStorage:
    """All nodes of a topology, by name."""

    def __init__(self, topology: Topology, *, connections_max: int = 16, timeout_s: float = 10.0) -> None:
        self.topology = topology
        self.nodes = {
            node.name: AsyncNode(node, connections_max=connections_max, timeout_s=timeout_s)
            for cluster in topology.clusters.values()
            for node in cluster.nodes
        }

    def master(self, cluster: str) -> AsyncNode:
        return self.nodes[self.topology.cluster(cluster).master.name]

    @property
    def masters(self) -> list[AsyncNode]:
        """The master of every cluster, by the cluster's name."""
        return [self.master(cluster) for cluster in sorted(self.topology.clusters)]

    def minions(self, cluster: str) -> list[AsyncNode]:
        return [self.nodes[node.name] for node in self.topology.cluster(cluster).minions]

    async def __aenter__(self) -> AsyncStorage:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes.values():
            await node.close()


async def _drive(connection: Any, operation: Operation[T], node: str) -> T:
    try:
        script = next(operation)
        while True:
            try:
                results = await _execute(connection, script)
            except (*DRIVER_ERRORS, OSError, EOFError) as error:
                script = await _refused(connection, operation, error, node)
            else:
                script = operation.send(results)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def _refused(connection: Any, operation: Operation[T], error: Exception, node: str) -> Script:
    """Tells the operation of a failed script. A server that answered can roll back; a lost one has."""
    ours = translate(error, node) if isinstance(error, DRIVER_ERRORS) else StorageUnavailable(f"{node}: {error}")
    ours.__cause__ = error
    if not isinstance(ours, StorageUnavailable):
        try:
            await _execute(connection, "ROLLBACK")
        except (*DRIVER_ERRORS, OSError, EOFError) as failure:  # nobody knows what state it is in
            raise StorageUnavailable(f"{node}: {failure}") from failure
    return operation.throw(ours)


async def _execute(connection: Any, script: Script) -> list[Result]:
    """By the connection itself: a cursor would cost half as much again, for each statement."""
    await connection.query(script)
    results = [_result(connection._result)]
    while connection._result.has_next:
        await connection.next_result()
        results.append(_result(connection._result))
    return results


def _result(found: Any) -> Result:
    return Result(found.rows or (), found.affected_rows)
