"""What both drivers share of a node: everything but the I/O.

It decides how a session is set up, how an operation learns that its script failed, and what becomes of the connection.
A driver connects, executes scripts and waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import structlog
from pymysql.constants import CLIENT

from schemaless.errors import Misconfigured, NodeRefuses, SchemalessError, StorageUnavailable
from schemaless.storage.operation import Operation
from schemaless.storage.translation import FAILURES, translate
from schemaless.topology import Node, Topology

log = structlog.get_logger()

T = TypeVar("T")
Connection = TypeVar("Connection")

SESSION = (
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;"
    "SET time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', innodb_lock_wait_timeout = 1,"
    " wait_timeout = 60 /*M! , idle_transaction_timeout = 5 */"
)
"""The first script of every connection.

READ COMMITTED: a statement after the lock must see what the lock protects, and not an older snapshot (I3). UTC:
created_at is UTC (I4). Strict: a value that doesn't fit is an error and is never cut. The time-outs end the locks of a
client that vanished or hangs (I14): MySQL's default is eight hours, here it is a minute. MariaDB has a time-out for
idle transactions of its own, and there it is seconds.
"""

IDLE_MAX_S = 30.0
"""Half of the session's wait_timeout: a connection that was idle for longer is closed before the server closes it."""


def connect_options(node: Node) -> dict[str, Any]:
    """Returns the arguments that both drivers connect with.

    With `ssl` both refuse a server that doesn't encrypt, before the password is sent. Its files are read each time, so
    new ones count at once. Raises StorageUnavailable where they can't be read, as they may just be replaced: the node
    can't be used now.
    """
    try:
        encrypted = node.tls and node.tls.context()
    except Misconfigured as error:
        log.warning("a server's TLS files can't be read, so it can't be used", node=node.name, why=str(error))
        raise StorageUnavailable(f"{node.name}: {error}") from error
    return {
        "host": node.host,
        "port": node.port,
        "unix_socket": node.socket,
        "user": node.user,
        "password": node.password,
        "charset": "utf8mb4",
        "autocommit": True,
        "client_flag": CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS,
        "ssl": encrypted,
    }


def on_node(operation: Operation[T], node: str) -> Operation[T]:
    """Wraps an operation so that a driver may throw its own errors into it.

    The error is translated, the transaction is rolled back where the server still answers, and then the operation
    receives our error: it may yield another script, or let the error pass. `node` names the server in messages.
    """
    try:
        script = next(operation)
        while True:
            try:
                results = yield script
            except FAILURES as error:
                ours = translate(error, node)
                if answered(ours):  # a server that was lost has rolled back by itself
                    try:
                        yield "ROLLBACK"
                    except FAILURES as failure:  # nobody knows what state the connection is in
                        raise StorageUnavailable(f"{node}: {failure}") from failure
                ours.__cause__ = error
                script = operation.throw(ours)
            else:
                script = operation.send(results)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def answered(error: BaseException) -> bool:
    """Returns whether the server answered, so that the connection is as good as before."""
    return isinstance(error, NodeRefuses) or not isinstance(error, StorageUnavailable)


class ConnectionPool(Generic[Connection]):
    """The idle connections of one node. The one that was used last is taken first, so a quiet pool shrinks.

    Safe to share between threads: each step is one atomic operation of a deque. The driver bounds how many there are.
    """

    def __init__(
        self,
        close: Callable[[Connection], object],
        in_transaction: Callable[[Connection], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._close = close
        self._in_transaction = in_transaction
        self._clock = clock
        self._idle: deque[tuple[float, Connection]] = deque()  # oldest first

    def take(self) -> Connection | None:
        """Returns an idle connection, or None when the driver has to open a new one."""
        self._close_older_than(self._clock() - IDLE_MAX_S)
        try:
            return self._idle.pop()[1]
        except IndexError:
            return None

    def give(self, connection: Connection) -> None:
        """Keeps a connection for the next operation."""
        self._idle.append((self._clock(), connection))

    def give_after(self, connection: Connection, error: BaseException) -> None:
        """Keeps or closes a connection whose operation ended with an error.

        After a refusal it is as good as before, unless the operation gave up within a transaction. After a loss the
        idle ones are closed, too: they were lost with it and would fail once for each. After anything else, such as a
        cancellation, its state is unknown.
        """
        if not answered(error):
            self._close(connection)
            self.close_all()
        elif isinstance(error, SchemalessError) and not self._in_transaction(connection):
            self.give(connection)
        else:
            self._close(connection)

    def close_all(self) -> None:
        self._close_older_than(float("inf"))

    def _close_older_than(self, moment: float) -> None:
        while self._idle and self._idle[0][0] < moment:
            try:
                self._close(self._idle.popleft()[1])
            except IndexError:  # another thread was faster
                return


NodeT = TypeVar("NodeT")


class Storage(Generic[NodeT]):
    """All nodes of a topology. `nodes` maps their names to the driver's nodes."""

    def __init__(self, topology: Topology, open_node: Callable[[Node], NodeT]) -> None:
        self.topology = topology
        self.nodes = {node.name: open_node(node) for cluster in topology.clusters.values() for node in cluster.nodes}

    def master(self, cluster: str) -> NodeT:
        """Raises Misconfigured when the topology has no such cluster."""
        return self.nodes[self.topology.cluster(cluster).master.name]

    @property
    def masters(self) -> list[NodeT]:
        """The masters of all clusters, in the order of the clusters' names."""
        return [self.master(cluster) for cluster in sorted(self.topology.clusters)]

    def minions(self, cluster: str) -> list[NodeT]:
        """Raises Misconfigured when the topology has no such cluster."""
        return [self.nodes[node.name] for node in self.topology.cluster(cluster).minions]
