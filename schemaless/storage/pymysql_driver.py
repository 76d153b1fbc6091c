"""Runs operations by PyMySQL: for jobs that have a thread of their own. One pool a node, bounded (I14)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TypeVar

import pymysql
import stamina
from pymysql.constants import CLIENT, SERVER_STATUS

from schemaless.errors import SchemalessError, StorageUnavailable
from schemaless.storage.idle_connections import IdleConnections
from schemaless.storage.operation import AGAIN_ON, ATTEMPTS_MAX, Args, Operation, Result, Start
from schemaless.storage.session import SESSION
from schemaless.storage.sql import Script
from schemaless.storage.translation import DRIVER_ERRORS, translate, translated
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
        self._idle: IdleConnections[pymysql.Connection] = IdleConnections(_drop)
        self._slots = threading.BoundedSemaphore(connections_max)

    def run(self, operation: Callable[[*Args], Operation[T]], *args: *Args) -> T:
        """Runs `operation(*args)`, again from its start after Busy or a lost connection.

        Raises StorageUnavailable, Busy, Misconfigured, or what the operation raises.
        """
        for attempt in stamina.retry_context(
            on=AGAIN_ON,
            attempts=ATTEMPTS_MAX,
            timeout=self._timeout_s,
            wait_initial=0.01,
            wait_max=0.2,
        ):
            with attempt:
                return self._run_once(partial(operation, *args))
        raise AssertionError("stamina returns or raises")

    def close(self) -> None:
        while (connection := self._idle.take()) is not None:
            connection.close()

    def _run_once(self, start: Start[T]) -> T:
        if not self._slots.acquire(timeout=self._timeout_s):
            raise StorageUnavailable(f"{self.node.name}: no connection became free in {self._timeout_s} s")
        connection = None
        try:
            connection = self._idle.take() or self._connect()
            value = _drive(connection, start(), self.node.name)
            self._idle.give(connection)
            connection = None
            return value
        except StorageUnavailable:
            self._idle.close_all()
            raise
        except SchemalessError:
            if connection is not None and not _in_transaction(connection):
                self._idle.give(connection)  # a refusal left it as it was
                connection = None
            raise
        finally:
            if connection is not None:  # it may be in any state
                _drop(connection)
            self._slots.release()

    def _connect(self) -> pymysql.Connection:
        node = self.node
        with translated(node.name):
            connection = pymysql.connect(
                host=node.host,
                port=node.port,
                unix_socket=node.socket,
                user=node.user,
                password=node.password,
                charset="utf8mb4",
                autocommit=True,
                client_flag=CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS,
                connect_timeout=max(1, round(self._connect_timeout_s)),
                read_timeout=self._timeout_s,
                write_timeout=self._timeout_s,
                ssl_disabled=True,
            )
            _execute(connection, SESSION)
            return connection


class SyncStorage:
    """All nodes of a topology, by name."""

    def __init__(self, topology: Topology, *, timeout_s: float = 10.0) -> None:
        self.topology = topology
        self.nodes = {
            node.name: SyncNode(node, timeout_s=timeout_s)
            for cluster in topology.clusters.values()
            for node in cluster.nodes
        }

    def master(self, cluster: str) -> SyncNode:
        return self.nodes[self.topology.cluster(cluster).master.name]

    @property
    def masters(self) -> list[SyncNode]:
        """The master of every cluster, by the cluster's name."""
        return [self.master(cluster) for cluster in sorted(self.topology.clusters)]

    def minions(self, cluster: str) -> list[SyncNode]:
        return [self.nodes[node.name] for node in self.topology.cluster(cluster).minions]

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
    """Without a word to the server: it may hang, and close() would wait for it."""
    connection._force_close()  # type: ignore[attr-defined]


def _drive(connection: pymysql.Connection, operation: Operation[T], node: str) -> T:
    try:
        script = next(operation)
        while True:
            try:
                results = _execute(connection, script)
            except (*DRIVER_ERRORS, OSError) as error:
                script = _refused(connection, operation, error, node)
            else:
                script = operation.send(results)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def _refused(connection: pymysql.Connection, operation: Operation[T], error: Exception, node: str) -> Script:
    """Tells the operation of a failed script. A server that answered can roll back; a lost one has."""
    ours = translate(error, node) if isinstance(error, DRIVER_ERRORS) else StorageUnavailable(f"{node}: {error}")
    ours.__cause__ = error
    if not isinstance(ours, StorageUnavailable):
        try:
            connection.query("ROLLBACK")
        except (*DRIVER_ERRORS, OSError) as failure:  # nobody knows what state it is in
            raise StorageUnavailable(f"{node}: {failure}") from failure
    return operation.throw(ours)


def _execute(connection: pymysql.Connection, script: Script) -> list[Result]:
    with connection.cursor() as cursor:
        cursor.execute(script)
        results = [Result(cursor.fetchall(), cursor.rowcount)]
        while cursor.nextset():
            results.append(Result(cursor.fetchall(), cursor.rowcount))
        return results
