"""Runs operations by PyMySQL, for jobs that have a thread of their own: command line, audit, tests.

Each node has one pool of connections, which is bounded (I14).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import pymysql
from pymysql.constants import SERVER_STATUS

from schemaless.errors import SchemalessError, StorageUnavailable
from schemaless.storage.node_core import SESSION, ConnectionPool, Storage, connect_options, on_node
from schemaless.storage.operation import AGAIN_ON, PAUSE, Args, Operation, Result, retries, runs_again
from schemaless.storage.sql import Script
from schemaless.storage.translation import FAILURES, connecting_failed
from schemaless.topology import Node, Topology

T = TypeVar("T")


class SyncNode:
    """One MySQL server, reached through at most `connections_max` connections. Safe to share between threads."""

    def __init__(
        self, node: Node, *, connections_max: int = 8, connect_timeout_s: float = 1.0, timeout_s: float = 10.0
    ) -> None:
        self.node = node
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._pool: ConnectionPool[pymysql.Connection] = ConnectionPool(_drop, _in_transaction)
        self._slots = threading.BoundedSemaphore(connections_max)

    def run(
        self,
        operation: Callable[[*Args], Operation[T]],
        *args: *Args,
        again_on: tuple[type[SchemalessError], ...] = AGAIN_ON,
    ) -> T:
        """Runs `operation(*args)` and returns its value. It is run again from its start after the errors of
        `again_on`, while the node's `timeout_s` isn't over.

        Raises StorageUnavailable, Busy, or what the operation raises.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            return self._attempt(operation, args)
        except again_on as error:
            if not runs_again(error, again_on) or time.monotonic() >= deadline:
                raise
        for attempt in retries(again_on, deadline - time.monotonic()):
            with attempt:
                return self._attempt(operation, args)
        raise AssertionError("stamina returns or raises")

    def close(self) -> None:
        while (connection := self._pool.take()) is not None:
            connection.close()

    def _attempt(self, operation: Callable[[*Args], Operation[T]], args: tuple[*Args]) -> T:
        if not self._slots.acquire(timeout=self._timeout_s):
            raise StorageUnavailable(f"{self.node.name}: no connection became free in {self._timeout_s} s")
        try:
            connection = self._pool.take() or self._connect()
            try:
                value = _drive(connection, on_node(operation(*args), self.node.name))
            except BaseException as error:
                self._pool.give_after(connection, error)
                raise
            self._pool.give(connection)
            return value
        finally:
            self._slots.release()

    def _connect(self) -> pymysql.Connection:
        try:
            connection = pymysql.connect(
                **connect_options(self.node),
                connect_timeout=max(1, round(self._connect_timeout_s)),
                read_timeout=self._timeout_s,
                write_timeout=self._timeout_s,
                ssl_disabled=self.node.tls is None,  # else it would encrypt what it can, and verify nothing
            )
            try:
                _execute(connection, SESSION)
            except BaseException:
                _drop(connection)
                raise
        except FAILURES as error:
            raise connecting_failed(error, self.node.name) from error
        return connection


class SyncStorage(Storage[SyncNode]):
    """All nodes of a topology, by name."""

    def __init__(self, topology: Topology, *, timeout_s: float = 10.0) -> None:
        super().__init__(topology, lambda node: SyncNode(node, timeout_s=timeout_s))

    def __enter__(self) -> SyncStorage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes.values():
            node.close()


def _in_transaction(connection: pymysql.Connection) -> bool:
    return bool(connection.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS)  # type: ignore[attr-defined]


def _drop(connection: pymysql.Connection) -> None:
    """Closes without a word to the server: it may hang, and close() would wait for it."""
    connection._force_close()  # type: ignore[attr-defined]


def _drive(connection: pymysql.Connection, operation: Operation[T]) -> T:
    try:
        script = next(operation)
        while True:
            try:
                results = _execute(connection, script)
            except FAILURES as error:
                script = operation.throw(error)
            else:
                script = operation.send(results)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def _execute(connection: pymysql.Connection, script: Script) -> list[Result]:
    if script is PAUSE:
        return []
    with connection.cursor() as cursor:
        cursor.execute(script)
        results = [Result(cursor.fetchall(), cursor.rowcount)]
        while cursor.nextset():
            results.append(Result(cursor.fetchall(), cursor.rowcount))
        return results
