"""What both drivers share of a node: everything but the I/O.

It decides how a session is set up, how an operation learns that its script failed, and what becomes of the connection.
A driver connects, executes scripts and waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import asyncmy.errors
import structlog
from pymysql.constants import CLIENT

from schemaless.errors import Misconfigured, NodeRefuses, PacketTooLarge, SchemalessError, StorageUnavailable
from schemaless.storage import placement_table
from schemaless.storage.operation import Operation
from schemaless.storage.placement_table import Placements
from schemaless.storage.sql import Script
from schemaless.storage.translation import FAILURES, PACKET_TOO_LARGE, translate
from schemaless.topology import Appointment, Datastore, FollowedFile, Node, Role, Topology

log = structlog.get_logger()

T = TypeVar("T")
Connection = TypeVar("Connection")

SESSION = (
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;SET NAMES utf8mb4;"
    "SET autocommit = 1, time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION',"
    " innodb_lock_wait_timeout = 1, lock_wait_timeout = 1, wait_timeout = 60, net_read_timeout = 30,"
    " net_write_timeout = 60, completion_type = 0, unique_checks = 1, sql_safe_updates = 0, sql_auto_is_null = 0,"
    " sql_select_limit = 18446744073709551615, max_join_size = 18446744073709551615, sql_big_selects = 1,"
    " max_sort_length = 65536, group_concat_max_len = 1048576, div_precision_increment = 4"
    " /*M! , idle_transaction_timeout = 5, idle_write_transaction_timeout = 0, idle_readonly_transaction_timeout = 0,"
    " max_statement_time = 0, max_session_mem_used = 9223372036854775807,"
    " tmp_disk_table_size = 18446744073709551615 */ /*!80000 , max_execution_time = 0 */;"
    "SELECT @@SESSION.max_allowed_packet"
)
"""The first script of every connection. Its last statement tells how large a script may be.

READ COMMITTED: a statement after the lock must see what the lock protects, and not an older snapshot (I3). UTC:
created_at is UTC (I4). Strict: a value that doesn't fit is an error and is never cut. A lock is waited for a second, a
table's as well as a row's. The other time-outs end the locks of a client that vanished or hangs (I14): MySQL's default
is eight hours, here it is a minute. MariaDB has a time-out for idle transactions of its own, and there it is seconds.
A session takes over all else from the server. What would change an answer or a commit is set here, such as how many
bytes of a string ORDER BY compares, how many rows a SELECT returns or looks at, whether a transaction may write, and
what bytes a text has.
"""

_SCRIPT_ROOM_BYTES = 1024
"""What a packet holds beside its script."""


class ScriptTooLarge(asyncmy.errors.OperationalError):  # type: ignore[misc]
    """What the server would say of a script, before it closes the connection."""

    def __init__(self, size: int, packet_max: int) -> None:
        super().__init__(PACKET_TOO_LARGE, f"max_allowed_packet is {packet_max} bytes, the script has {size}")


def verify_size(script: Script, packet_max: int) -> None:
    """Raises ScriptTooLarge, so that no connection is lost to a packet that the server won't take."""
    if len(script) > packet_max - _SCRIPT_ROOM_BYTES:
        raise ScriptTooLarge(len(script), packet_max)


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
        if not answered(error) or isinstance(error, PacketTooLarge):  # a new one learns of a bound that was raised
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


def stamp(epoch: int | None, version: int) -> Script:
    """Returns the statement that tells a session what its process believes: the epoch of the server's cluster, None
    while its master changes, and the highest epoch of all clusters. Scripts that write cells or buffer rows, and the
    cleaner's looks, compare them with the server's own.
    """
    return f"SET @epoch = {'NULL' if epoch is None else epoch}, @version = {version}"


class StorageNode(Protocol):
    """What a driver's node has for `Storage`."""

    node: Node
    stamp: Script

    def appoint(self, role: Role) -> None: ...


NodeT = TypeVar("NodeT", bound=StorageNode)


class Storage(Generic[NodeT]):
    """All nodes of a topology, and which of them are masters now. `nodes` maps their names to the driver's nodes.

    Where no server knows an appointment, the first node of a cluster is its master.
    """

    def __init__(self, topology: Topology, open_node: Callable[[Node], NodeT]) -> None:
        self.nodes: Mapping[str, NodeT] = {}
        self.appointments: dict[str, Appointment] = {}
        self.placements: Placements = {}
        self._masters: dict[str, str] = {}
        self._unknown: set[str] = set()
        self._first = topology.clusters.keys()
        self._open_node = open_node
        self._file = FollowedFile(topology)
        self._take(topology)

    def _take(self, topology: Topology) -> None:
        """Takes over which clusters and nodes there are. A node that is described otherwise now is another one. With
        another account it is the same one, and its connections stay.
        """
        self.topology, nodes = topology, topology.nodes
        same = {
            name: node for name, node in self.nodes.items() if name in nodes and nodes[name].is_same_server(node.node)
        }
        for name, node in same.items():
            node.node = nodes[name]
        self.nodes = {name: same.get(name) or self._open_node(node) for name, node in nodes.items()}
        self._masters = {name: cluster.nodes[0].name for name, cluster in topology.clusters.items()} | self._masters
        self._announce()

    def read_again(self) -> bool:
        """Takes over the topology's file if it was changed. Returns whether it was."""
        found = self._file.changed(self._masters)
        if found is not None:
            self._take(found)
        return found is not None

    @property
    def version(self) -> int:
        """The highest epoch that is known."""
        return max((known.ballot.epoch for known in self.appointments.values()), default=0)

    def epoch(self, cluster: str) -> int:
        """The epoch of a cluster's master: 0 while it is the one of the topology's file."""
        return known.ballot.epoch if (known := self.appointments.get(cluster)) else 0

    def is_open(self, cluster: str) -> bool:
        """False while the cluster's master changes."""
        return known.is_open if (known := self.appointments.get(cluster)) else True

    def has_lost(self, cluster: str) -> bool:
        """True where the master was promoted, so that its predecessor's last writes may wait in buffers."""
        return known.generation > 0 if (known := self.appointments.get(cluster)) else False

    def is_joining(self, cluster: str) -> bool:
        """True for a cluster that came while this process ran, until a controller has appointed its master."""
        return cluster not in self._first and self.has_no_master(cluster)

    def state(self, cluster: str) -> str:
        return "joining" if self.has_no_master(cluster) else "healthy" if self.is_open(cluster) else "closed"

    def has_no_master(self, cluster: str) -> bool:
        """True where a controller appoints masters, and has appointed none yet."""
        return cluster not in self.appointments and bool(self.appointments)

    def present_master(self, cluster: str) -> NodeT:
        """Raises Misconfigured when the topology has no such cluster."""
        return self.nodes[self._masters[self.topology.cluster(cluster).name]]

    def minions(self, cluster: str) -> list[NodeT]:
        """The servers that may be read beside the master. A former master that came back isn't one until the controller
        lets it follow: it may have a history of its own. Raises Misconfigured when the topology has no such cluster.
        """
        known = self.appointments.get(cluster)
        return [node for node in self.others(cluster) if known is None or node.node.name in known.voters]

    def others(self, cluster: str) -> list[NodeT]:
        """All servers of a cluster but its master. Raises Misconfigured when the topology has no such cluster."""
        master = self.present_master(cluster).node.name
        return [self.nodes[node.name] for node in self.topology.cluster(cluster).nodes if node.name != master]

    def learn(self, found: Iterable[Appointment]) -> bool:
        """Takes over what counts of these appointments. Returns whether anything is new. It never goes back."""
        new = False
        for appointment in found:
            name = appointment.cluster
            known = self.appointments.get(name)
            if known is not None and appointment.rank <= known.rank:
                continue
            cluster = self.topology.clusters.get(name)
            if cluster is None or appointment.master not in {node.name for node in cluster.nodes}:
                if appointment.master not in self._unknown:  # once: servers are asked twice a second
                    log.warning("the topology's file lacks a master", cluster=name, node=appointment.master)
                self._unknown.add(appointment.master)
                continue
            self.appointments[name] = appointment
            self._masters[name] = appointment.master
            new = True
            if known is not None:
                log.info("another master", cluster=name, node=appointment.master, epoch=appointment.ballot.epoch)
        if new:
            self._announce()
        return new

    def live(self, datastore: Datastore) -> Datastore:
        """Returns the datastore as one that sees every move which this storage learns of."""
        moves = self.placements.setdefault(datastore.name, {})
        placement_table.learn(self.placements, list(datastore.moves.values()))
        return replace(datastore, moves=moves)

    def _announce(self) -> None:
        for node in self.nodes.values():
            cluster = node.node.cluster
            node.stamp = stamp(self.epoch(cluster) if self.is_open(cluster) else None, self.version)
            is_master = self._masters[cluster] == node.node.name and not self.is_joining(cluster)
            node.appoint(Role.MASTER if is_master else Role.MINION)
