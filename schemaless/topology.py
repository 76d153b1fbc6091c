"""Which clusters, nodes and datastores there are, and which cluster is home to a shard. Keeps the shard's half of I2.

A topology is data: a JSON file with a version, written by those who run the servers (`schemaless up`, or an operator):

    {"version": 1, "clusters": {"a": {"master": NODE, "minions": [NODE, ...]}, ...}}
    NODE = {"name": "a-master", "host": "127.0.0.1", "port": 3306, "socket": "/path" or null,
            "user": "...", "password": "...", "tls": {"ca": "/path", "certificate": "/path", "key": "/path"}}

With `tls` a connection is encrypted, and the server's certificate must be of that CA and for that host. The node has no
socket then. `certificate` and `key` are ours, for servers that ask for one. Other keys of a node are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from schemaless.errors import Misconfigured
from schemaless.names import cells_topic_name, progress_topic_name
from schemaless.runtime.tls import Tls

T = TypeVar("T")

TOPOLOGY_VERSION = 1
VERSION_SHOWN = 40  # characters of a version that isn't known


class Role(StrEnum):
    MASTER = "master"
    MINION = "minion"


@dataclass(frozen=True, slots=True)
class Node:
    """One MySQL server. `password` never appears in a repr."""

    name: str
    cluster: str
    role: Role
    host: str
    port: int
    user: str
    password: str = field(repr=False)
    socket: str | None = None
    tls: Tls | None = None


@dataclass(frozen=True, slots=True)
class StorageCluster:
    """One master and its minions, which replicate asynchronously."""

    name: str
    master: Node
    minions: tuple[Node, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.master, *self.minions)


@dataclass(frozen=True, slots=True)
class Topology:
    clusters: Mapping[str, StorageCluster]

    def cluster(self, name: str) -> StorageCluster:
        try:
            return self.clusters[name]
        except KeyError:
            raise Misconfigured(f"the topology has no storage cluster {name!r}") from None


@dataclass(frozen=True, slots=True)
class Datastore:
    """A named instance. Shard count, partition count and placement are fixed at creation.

    `placement` lists cluster names. Shard n lives on placement[n mod len(placement)].
    """

    name: str
    shards: int
    partitions: int
    placement: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.shards < 1 or self.partitions < 1 or self.shards % self.partitions:
            raise Misconfigured(
                f"datastore {self.name}: {self.partitions} partitions do not divide {self.shards} shards"
            )

    @property
    def clusters(self) -> tuple[str, ...]:
        """Names of the clusters that are home to its shards, sorted."""
        return tuple(sorted(set(self.placement)))

    def home(self, shard: int) -> str:
        """Name of the primary cluster of a shard."""
        return self.placement[shard % len(self.placement)]

    def by_home(self, items: Iterable[T], shard_of: Callable[[T], int]) -> dict[str, list[T]]:
        """Groups items by the home of their shards. Items of one home keep their order."""
        groups: dict[str, list[T]] = {}
        for item in items:
            groups.setdefault(self.home(shard_of(item)), []).append(item)
        return groups

    def partition(self, shard: int) -> int:
        """The one topic partition that holds a shard (I8)."""
        return shard % self.partitions

    def shards_of_partition(self, partition: int) -> range:
        return range(partition, self.shards, self.partitions)

    def database(self, shard: int) -> str:
        """MySQL database of a shard."""
        return f"{self.name}_{shard:04d}"

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

    def node(self, cluster: str, role: Role) -> Node:
        if self.tls is not None and self.socket is not None:
            raise Misconfigured(f"{self.name} has a socket and TLS, and a socket has none: leave one out")
        tls = None if self.tls is None else Tls(self.tls.ca, self.tls.certificate, self.tls.key)
        return Node(self.name, cluster, role, self.host, self.port, self.user, self.password, self.socket, tls)


class _ClusterEntry(msgspec.Struct):
    master: _NodeEntry
    minions: list[_NodeEntry]

    def cluster(self, name: str) -> StorageCluster:
        minions = tuple(minion.node(name, Role.MINION) for minion in self.minions)
        return StorageCluster(name, self.master.node(name, Role.MASTER), minions)


class _TopologyDocument(msgspec.Struct):
    version: int
    clusters: dict[str, _ClusterEntry]


def parse_topology(document: Any) -> Topology:
    """Raises Misconfigured for a version that is not known or a document that doesn't fit."""
    if isinstance(document, Mapping) and (version := document.get("version")) != TOPOLOGY_VERSION:
        raise Misconfigured(f"topology version {str(version)[:VERSION_SHOWN]!r} is not known to this program")
    try:
        found = msgspec.convert(document, _TopologyDocument)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise Misconfigured(f"the topology does not fit its format: {error}") from error
    return Topology({name: entry.cluster(name) for name, entry in found.clusters.items()})


def load_topology(path: Path) -> Topology:
    """Raises Misconfigured when the file is missing or is no topology."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Misconfigured(f"no topology can be read from {path}: {error}") from error
    return parse_topology(document)
