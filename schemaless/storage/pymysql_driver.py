"""Runs operations by PyMySQL, for jobs that have a thread of their own: command line, audit, tests.

Each node has one pool of connections, which is bounded (I14).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

import pymysql
from pymysql.constants import SERVER_STATUS

from schemaless.errors import AccountRefused, Busy, SchemalessError, StorageUnavailable
from schemaless.runtime.name_lookup import NameLookups, no_address
from schemaless.storage import placement_table
from schemaless.storage.node_core import SESSION, ConnectionPool, Storage, connect_options, on_node, stamp, verify_size
from schemaless.storage.operation import AGAIN_ON, PAUSE, Args, Operation, Result, query, retries, runs_again
from schemaless.storage.sql import Script
from schemaless.storage.translation import FAILURES, connecting_failed
from schemaless.topology import Appointment, Node, Placement, Role, Topology, present_account

T = TypeVar("T")

_lookups = NameLookups()
"""Of this process."""


def connect(node: Node, connect_timeout_s: float, timeout_s: float) -> pymysql.Connection:
    """Opens a connection and sets its session up, with the account of the node's file if that changed.

    Raises StorageUnavailable.
    """
    try:
        return _connect(node, connect_timeout_s, timeout_s)
    except AccountRefused:
        if (present := present_account(node)) is None:
            raise
        return _connect(present, connect_timeout_s, timeout_s)


def _connect(node: Node, connect_timeout_s: float, timeout_s: float) -> pymysql.Connection:
    try:
        if not node.socket:  # the C library waits half a minute for a name server that is away
            _look_up(node.host, connect_timeout_s)
        connection = pymysql.connect(
            **connect_options(node),
            connect_timeout=max(1, round(connect_timeout_s)),
            read_timeout=timeout_s,
            write_timeout=timeout_s,
            ssl_disabled=node.tls is None,  # else it would encrypt what it can, and verify nothing
        )
        try:
            connection.packet_max = _execute(connection, SESSION)[-1].rows[0][0]  # type: ignore[attr-defined]
            connection.stamp = None  # type: ignore[attr-defined]
            connection.node = node  # type: ignore[attr-defined]
        except BaseException:
            _drop(connection)
            raise
    except FAILURES as error:
        raise connecting_failed(error, node) from error
    return connection


def _look_up(host: str, timeout_s: float) -> None:
    try:
        _lookups.begin(host).result(timeout_s)
    except TimeoutError as error:
        raise no_address(host, timeout_s) from error


def _drop(connection: pymysql.Connection) -> None:
    """Closes without a word to the server: it may hang, and close() would wait for it."""
    connection._force_close()  # type: ignore[attr-defined]


class SyncNode:
    """One MySQL server, reached through at most `connections_max` connections. Safe to share between threads."""

    def __init__(
        self, node: Node, *, connections_max: int = 8, connect_timeout_s: float = 1.0, timeout_s: float = 10.0
    ) -> None:
        self.node = node
        self.role = Role.MINION
        self.stamp = stamp(0, 0)
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

    def appoint(self, role: Role) -> None:
        self.role = role

    def close(self) -> None:
        while (connection := self._pool.take()) is not None:
            connection.close()

    def _attempt(self, operation: Callable[[*Args], Operation[T]], args: tuple[*Args]) -> T:
        if not self._slots.acquire(timeout=self._timeout_s):
            raise StorageUnavailable(f"{self.node.name}: no connection became free in {self._timeout_s} s")
        try:
            connection = self._pool.take()
            if connection is None:
                connection = connect(self.node, self._connect_timeout_s, self._timeout_s)
                self.node = connection.node  # type: ignore[attr-defined]
            try:
                if connection.stamp is not self.stamp:  # type: ignore[attr-defined]
                    wanted = self.stamp
                    _drive(connection, on_node(query(wanted), self.node.name))
                    connection.stamp = wanted  # type: ignore[attr-defined]
                value = _drive(connection, on_node(operation(*args), self.node.name))
            except BaseException as error:
                self._pool.give_after(connection, error)
                raise
            self._pool.give(connection)
            return value
        finally:
            self._slots.release()


class SyncSession:
    """One connection to a server, which is never made again: what it holds there, such as a lock, it holds until it
    ends. It is for one thread.
    """

    def __init__(self, node: SyncNode, *, timeout_s: float = 10.0) -> None:
        self.node = node.node
        self._connection = connect(node.node, 1.0, timeout_s)
        self.run(query, node.stamp)

    def run(self, operation: Callable[[*Args], Operation[T]], *args: *Args) -> T:
        """Runs `operation(*args)`, again after Busy. Raises StorageUnavailable for good once the connection is lost."""

        def attempt() -> T:
            return _drive(self._connection, on_node(operation(*args), self.node.name))

        try:
            return attempt()
        except Busy:
            for again in retries((Busy,), 1.0):
                with again:
                    return attempt()
            raise

    def close(self) -> None:
        _drop(self._connection)


class SyncStorage(Storage[SyncNode]):
    """All nodes of a topology, by name. The servers are asked once who is master, when the first master is wanted."""

    def __init__(self, topology: Topology, *, timeout_s: float = 10.0) -> None:
        super().__init__(topology, lambda node: SyncNode(node, timeout_s=timeout_s))
        self._looked = False

    def __enter__(self) -> SyncStorage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes.values():
            node.close()

    def master(self, cluster: str) -> SyncNode:
        """Raises Misconfigured when the topology has no such cluster."""
        self._look_once()
        return self.present_master(cluster)

    @property
    def masters(self) -> list[SyncNode]:
        """The masters of all clusters, in the order of the clusters' names."""
        return [self.master(cluster) for cluster in sorted(self.topology.clusters)]

    def minions(self, cluster: str) -> list[SyncNode]:
        self._look_once()
        return super().minions(cluster)

    def look(self) -> None:
        """Asks all servers who is master of which cluster. One that is away, or has no tables yet, tells nothing."""

        def ask(node: SyncNode) -> tuple[list[Appointment], int, list[Placement]]:
            with suppress(SchemalessError):
                return node.run(placement_table.look, again_on=())
            return [], 0, []

        self._looked = True
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            for found, _, placements in pool.map(ask, self.nodes.values()):
                self.learn(found)
                placement_table.learn(self.placements, placements)

    def _look_once(self) -> None:
        if not self._looked:
            self.look()


def _in_transaction(connection: pymysql.Connection) -> bool:
    return bool(connection.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS)  # type: ignore[attr-defined]


def _drive(connection: pymysql.Connection, operation: Operation[T]) -> T:
    try:
        script = next(operation)
        while True:
            try:
                verify_size(script, connection.packet_max)  # type: ignore[attr-defined]
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
    results: list[Result] = []
    try:
        with connection.cursor() as cursor:
            cursor.execute(script)
            results.append(Result(cursor.fetchall(), cursor.rowcount))
            while cursor.nextset():
                results.append(Result(cursor.fetchall(), cursor.rowcount))
            return results
    except pymysql.err.MySQLError as error:
        error.statement = len(results)  # type: ignore[attr-defined]  # translation.py: which one failed
        raise
