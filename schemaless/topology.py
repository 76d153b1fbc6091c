"""Which clusters, nodes and datastores there are, and which cluster is home to a shard. Keeps the shard's half of I2.

The addresses and accounts are a JSON file with a version, written by those who run the servers (`schemaless up`, or an
operator):

    {"version": 2, "clusters": {"a": [NODE, ...], ...}, "replication": {"user": "...", "password": "..."}}
    NODE = {"name": "a1", "host": "127.0.0.1", "port": 3306, "socket": "/path" or null,
            "user": "...", "password": "...", "tls": {"ca": "/path", "certificate": "/path", "key": "/path"}}

With `tls` a connection is encrypted, and the server's certificate must be of that CA and for that host. The node has no
socket then. `certificate` and `key` are ours, for servers that ask for one. Other keys of a node are passed over.
`replication` is the account with which servers receive from one another. Only a controller needs it.

Which node is a cluster's master isn't in the file. The servers have a row that says so (`Appointment`). Without one it
is the first node of the cluster.

The file may change while processes run: servers and clusters come, minions go, and passwords are rotated. A service
looks at its modification twice a second (`FollowedFile`). Whatever connects looks at once when a server refuses an
account (`present_account`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import structlog

from schemaless.errors import Misconfigured
from schemaless.names import cells_topic_name, progress_topic_name
from schemaless.runtime.tls import Tls
from schemaless.shapes import shape

log = structlog.get_logger()

T = TypeVar("T")
Stamp = tuple[int, int, int]
"""Which contents of a file were read: its inode, its size and when it was changed."""

TOPOLOGY_VERSION = 2
VERSION_SHOWN = 40  # characters of a version that isn't known


class Role(StrEnum):
    MASTER = "master"
    MINION = "minion"


@dataclass(frozen=True, slots=True)
class Node:
    """One MySQL server, with the account that `file` names for it. `password` never appears in a repr."""

    name: str
    cluster: str
    host: str
    port: int
    user: str
    password: str = field(repr=False)
    socket: str | None = None
    tls: Tls | None = None
    file: Path | None = field(default=None, compare=False, repr=False)

    def is_same_server(self, other: Node) -> bool:
        """Returns whether the other one differs in its account at most."""
        return self._without_account() == other._without_account()

    def as_known_to(self, account: Node) -> Node:
        """Returns the server with the account of another one."""
        return replace(self, user=account.user, password=account.password, file=account.file)

    def _without_account(self) -> Node:
        tls = self.tls and replace(self.tls, certificate=None, key=None)
        return replace(self, user="", password="", tls=tls)


@dataclass(frozen=True, slots=True)
class StorageCluster:
    """MySQL servers that replicate asynchronously: a master and its minions, in the order of the file."""

    name: str
    nodes: tuple[Node, ...]


class Ballot(NamedTuple):
    """Orders what controllers decide. `epoch` is one counter of the installation, 0 before anything was decided."""

    epoch: int = 0
    controller: str = ""

    def __str__(self) -> str:
        return f"{self.epoch} of {self.controller}"


class Appointment(msgspec.Struct, frozen=True):
    """Who is master of a cluster, as a controller decided. All servers have it: the one of the highest rank counts.

    `revision` counts the changes under one ballot. `is_open` is false while the master changes. `voters` are the
    minions that must be heard before another master is opened. `generation` begins in each shard at the opening, 0 for
    none. `changed_at` is in microseconds since the epoch.
    """

    cluster: str
    ballot: Ballot
    revision: int
    master: str
    is_open: bool
    voters: tuple[str, ...]
    generation: int
    changed_at: int

    @property
    def rank(self) -> tuple[Ballot, int]:
        return self.ballot, self.revision


class Placement(msgspec.Struct, frozen=True):
    """Where a shard lives that was moved, or is about to be. `number` counts its changes: the highest counts.

    `coming` is the cluster that may become its home at any moment: what the present home shows counts only if it wasn't
    closed for the shard. `changed_at` is in microseconds since the epoch.
    """

    datastore: str
    shard: int
    number: int
    home: str
    coming: str | None
    changed_at: int


class ReplicationAccount(msgspec.Struct, frozen=True):
    """The account with which servers receive from one another."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"ReplicationAccount(user={self.user!r})"


@dataclass(frozen=True, slots=True)
class Topology:
    """`replication` is in the administrators' file where there is a controller. `file` is where it was read from, with
    its stamp.
    """

    clusters: Mapping[str, StorageCluster]
    replication: ReplicationAccount | None = None
    file: tuple[Path, Stamp | None] | None = field(default=None, compare=False)

    @property
    def nodes(self) -> dict[str, Node]:
        """All nodes by name, in the order of the file."""
        return {node.name: node for cluster in self.clusters.values() for node in cluster.nodes}

    def cluster(self, name: str) -> StorageCluster:
        try:
            return self.clusters[name]
        except KeyError:
            raise Misconfigured(f"the topology has no storage cluster {name!r}") from None


def shard_database(datastore: str, shard: int) -> str:
    """Returns the name of a shard's MySQL database."""
    return f"{datastore}_{shard:04d}"


@dataclass(frozen=True, slots=True)
class Datastore:
    """A named instance. Shard count, partition count and placement are fixed at creation.

    `placement` lists cluster names. Shard n lives on placement[n mod len(placement)], unless `moves` has it. A
    storage's `live` datastores see each later move. `installation` is the id of the databases that have it (I20).
    """

    name: str
    shards: int
    partitions: int
    placement: tuple[str, ...]
    moves: Mapping[int, Placement] = field(default_factory=dict, compare=False, repr=False)
    installation: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.shards < 1 or self.partitions < 1 or self.shards % self.partitions:
            raise Misconfigured(
                f"datastore {self.name}: {self.partitions} partitions do not divide {self.shards} shards"
            )

    @property
    def clusters(self) -> tuple[str, ...]:
        """Names of the clusters that are, or were, home to its shards, sorted."""
        return tuple(sorted({*self.placement, *(move.home for move in self.moves.values())}))

    def home(self, shard: int) -> str:
        """Name of the primary cluster of a shard."""
        move = self.moves.get(shard)
        return self.placement[shard % len(self.placement)] if move is None else move.home

    @property
    def homes(self) -> list[str]:
        """The present home of every shard, in order."""
        return [self.home(shard) for shard in range(self.shards)]

    def by_home(self, items: Iterable[T], shard_of: Callable[[T], int]) -> dict[str, list[T]]:
        """Groups items by the home of their shards. Items of one home keep their order."""
        groups: dict[str, list[T]] = {}
        for item in items:
            groups.setdefault(self.home(shard_of(item)), []).append(item)
        return groups

    def of_home(self, found: Mapping[str, Iterable[T]], shard_of: Callable[[T], int]) -> list[T]:
        """Returns what clusters told of the shards that they are home to. A former home still has the shard's head."""
        return [item for name, items in found.items() for item in items if self.home(shard_of(item)) == name]

    def partition(self, shard: int) -> int:
        """The one topic partition that holds a shard (I8)."""
        return shard % self.partitions

    def shards_of_partition(self, partition: int) -> range:
        """The shards of a partition: none of one beyond the datastore's count, which somebody added to the topic."""
        return range(partition, self.shards if partition < self.partitions else 0, self.partitions)

    def database(self, shard: int) -> str:
        """MySQL database of a shard."""
        return shard_database(self.name, shard)

    @property
    def topic(self) -> str:
        return cells_topic_name(self.name)

    @property
    def progress_topic(self) -> str:
        return progress_topic_name(self.name)


class _TlsEntry(msgspec.Struct):
    ca: str
    certificate: str | None = None
    key: str | None = None


class _NodeEntry(msgspec.Struct):
    name: str
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    user: str
    password: str
    socket: str | None = None
    tls: _TlsEntry | None = None

    def node(self, cluster: str, file: Path | None) -> Node:
        if self.tls is not None and self.socket is not None:
            raise Misconfigured(f"{self.name} has a socket and TLS, and a socket has none: leave one out")
        tls = None if self.tls is None else Tls(self.tls.ca, self.tls.certificate, self.tls.key)
        return Node(self.name, cluster, self.host, self.port, self.user, self.password, self.socket, tls, file)


class _TopologyDocument(msgspec.Struct):
    version: int
    clusters: dict[str, Annotated[list[_NodeEntry], msgspec.Meta(min_length=1)]]
    replication: ReplicationAccount | None = None


def parse_topology(document: Any, file: Path | None = None) -> Topology:
    """`file` is where the document is. Raises Misconfigured for a version that isn't known, or what doesn't fit it."""
    if isinstance(document, Mapping) and (version := document.get("version")) != TOPOLOGY_VERSION:
        raise Misconfigured(
            f"topology version {str(version)[:VERSION_SHOWN]!r} is not known to this program",
            hint=f"write version {TOPOLOGY_VERSION}: each cluster is a list of servers, the first master first",
        )
    try:
        found = msgspec.convert(document, shape(_TopologyDocument))
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise Misconfigured(f"the topology does not fit its format: {error}") from error
    clusters = {
        name: StorageCluster(name, tuple(entry.node(name, file) for entry in entries))
        for name, entries in found.clusters.items()
    }
    names = Counter(node.name for cluster in clusters.values() for node in cluster.nodes)
    if twice := [name for name, count in names.items() if count > 1]:
        raise Misconfigured(f"the topology has more than one server that is called {twice[0]!r}")
    return Topology(clusters, found.replication)


def load_topology(path: Path) -> Topology:
    """Raises Misconfigured when the file is missing or is no topology."""
    stamp = _stamp(path)  # before it is read: what is written meanwhile is read again
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Misconfigured(f"no topology can be read from {path}: {error}") from error
    return replace(parse_topology(document, path), file=(path, stamp))


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class FollowedFile:
    """The file of a topology, which is looked at again and again. A topology of no file never changes."""

    def __init__(self, topology: Topology) -> None:
        self._path: Path | None = None
        self._seen: Stamp | None = None
        if topology.file is not None:
            self._path, self._seen = topology.file
        self._refused = self._seen

    def changed(self, masters: Mapping[str, str]) -> Topology | None:
        """Returns the topology once after each change of the file.

        One that can't be used is logged once, and what was read before stays. It can't be used without one of
        `masters`, by cluster, either: a master is made a minion before it goes, and clusters stay. It is looked at
        again, because who is master may be learned later than the file.
        """
        if self._path is None or (stamp := _stamp(self._path)) == self._seen:
            return None
        try:
            found = load_topology(self._path)
            for cluster, master in masters.items():
                if cluster not in found.clusters or master not in {node.name for node in found.clusters[cluster].nodes}:
                    raise Misconfigured(f"{self._path} lacks {master}, which is the master of cluster {cluster}")
        except Misconfigured as error:
            if stamp != self._refused:
                log.error("the topology's file was changed, and isn't used", why=str(error))
            self._refused = stamp
            return None
        if self._seen is not None:
            log.info("the topology's file was changed", clusters=sorted(found.clusters), nodes=list(found.nodes))
        self._seen = self._refused = stamp
        return found


# Accounts are rotated while processes run. Their files are read again when a server refuses one, by whoever connects.

_PERIOD_S = 1.0
"""How long a process looks at a file no second time."""


class AccountFile:
    """The servers that a topology's file names now, as far as a process has looked. Safe to share between threads."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = FollowedFile(Topology({}, file=(path, None)))
        self._clock = clock
        self._nodes: Mapping[str, Node] = {}
        self._looked_at: float | None = None
        self._looking = threading.Lock()

    def present(self, node: Node) -> Node | None:
        """Returns a server that refused its account with the one that it has now, or None if that is the same."""
        with self._looking:
            now = self._clock()
            if self._looked_at is None or now - self._looked_at >= _PERIOD_S:
                self._looked_at = now
                if (found := self._file.changed({})) is not None:
                    self._nodes = found.nodes
        present = self._nodes.get(node.name)
        return present if present is not None and present != node and present.is_same_server(node) else None


_account_files: dict[Path, AccountFile] = {}
"""Of this process."""


def present_account(refused: Node) -> Node | None:
    """Returns what `AccountFile.present` does, None for a server of no file."""
    if refused.file is None:
        return None
    return _account_files.setdefault(refused.file, AccountFile(refused.file)).present(refused)
