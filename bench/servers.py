"""Servers and processes of a benchmark: storage clusters, a datastore, and the real services beside the comparator."""

from __future__ import annotations

import http.client
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pymysql
from pymysql.constants import CLIENT

from bench import plain_tier
from bench.scale import PARTITIONS, SHARDS
from schemaless.bus.topics import ensure_topics
from schemaless.errors import StorageUnavailable
from schemaless.ops.datastores import create_shards
from schemaless.stack.admin import SERVICE_USER
from schemaless.stack.local import LocalServer, running_topology
from schemaless.stack.plan import free_ports
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.shard_head import movement
from schemaless.topology import Datastore, Node, Topology

DATASTORE = "bench"
NO_BROKER = "127.0.0.1:9"
"""For stacks whose benchmark writes no log: the API asks Kafka for nothing."""
READY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class BenchStack:
    """Running storage clusters with one datastore. `copies`: on how many masters a put is to be durable.

    `administrators` is the topology with an account that may do everything. What is compared with us uses it.
    """

    topology: Topology
    administrators: Topology
    topology_file: Path
    datastore: Datastore
    folder: Path
    kafka: str = NO_BROKER

    @property
    def copies(self) -> int:
        return min(2, len(self.topology.clusters))

    @property
    def prefix(self) -> str:
        """The prefix of every path of the datastore in our API."""
        return f"/v1/{self.datastore.name}"

    def masters(self) -> list[Node]:
        return [cluster.nodes[0] for cluster in self.topology.clusters.values()]

    def cells(self) -> int:
        """How many the datastore holds: added_ids are dense (I3)."""
        name = self.datastore.name
        with SyncStorage(self.topology) as storage:
            nodes = [storage.master(cluster) for cluster in self.topology.clusters]
            return sum(node.run(movement, name).heads_sum for node in nodes)


@contextmanager
def storage_stack(
    folder: Path,
    clusters: Sequence[str],
    *,
    minions: int = 0,
    shards: int = SHARDS,
    partitions: int = PARTITIONS,
    kafka: str = NO_BROKER,
    options: str = "",
) -> Iterator[BenchStack]:
    """Durable masters, `minions` for each, one datastore of ours and the tables of the plain tier.

    `options` are further lines of every server's option file.
    """
    with running_topology(folder, clusters, minions, options=options) as running:
        wanted = Datastore(DATASTORE, shards, partitions, tuple(clusters))
        datastore = make_shards(running.topology, running.administrators, wanted)
        if kafka != NO_BROKER:
            ensure_topics(kafka, datastore)
        stack = BenchStack(running.topology, running.administrators, running.path, datastore, folder, kafka)
        for cluster in stack.administrators.clusters.values():
            _make_plain_tables(cluster.nodes[0])
        yield stack


def make_shards(topology: Topology, administrators: Topology, datastore: Datastore) -> Datastore:
    with SyncStorage(topology) as storage:
        return create_shards(storage, datastore, administrators=administrators)


@contextmanager
def our_api(stack: BenchStack) -> Iterator[int]:
    """Runs one API process, and yields its port."""
    with api_process(stack) as (_, port):
        yield port


@contextmanager
def api_process(stack: BenchStack) -> Iterator[tuple[LocalServer, int]]:
    """Runs one API process, and yields it and its port."""
    (port,) = free_ports(1)
    with service(stack, "api", ["api"], {"SCHEMALESS_API_PORT": str(port)}) as process:
        wait_for_http(process, port, "/readyz")
        yield process, port


@contextmanager
def plain_api(stack: BenchStack) -> Iterator[int]:
    """Runs one process of the comparator, which writes as many durable copies, and yields its port."""
    (port,) = free_ports(1)
    options = ["--topology", str(stack.topology_file), "--port", str(port), "--copies", str(stack.copies)]
    with service(stack, "plain", ["bench.plain_tier", *options]) as process:
        wait_for_http(process, port, "/docs")
        yield port


@contextmanager
def service(
    stack: BenchStack, name: str, arguments: Sequence[str], env: Mapping[str, str] | None = None
) -> Iterator[LocalServer]:
    """Runs `python -m ARGUMENTS` with the stack's settings. Its output is in NAME.log of the stack's folder."""
    settings = {
        "SCHEMALESS_TOPOLOGY": str(stack.topology_file),
        "SCHEMALESS_KAFKA": stack.kafka,
        "SCHEMALESS_LOG_LEVEL": "warning",
        "PYTHONUNBUFFERED": "1",
        **(env or {}),
    }
    assignments = [f"{key}={value}" for key, value in settings.items()]
    argv = ["/usr/bin/env", *assignments, sys.executable, "-m", *arguments]
    process = LocalServer(name, argv, stack.folder / f"{name}.log", lambda me: None)
    process.start()
    try:
        yield process
        if not process.alive():
            raise StorageUnavailable(f"{name} ended by itself; its log: {process.log}")
    finally:
        process.terminate()


def wait_for_http(process: LocalServer, port: int, path: str) -> None:
    """Returns on a 200. Raises TimeoutError, with the log's place, when there is none."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while _status(port, path) != 200:
        if time.monotonic() > deadline or not process.alive():
            raise TimeoutError(f"{process.name} does not answer {path}; its log: {process.log}")
        time.sleep(0.05)


def cpu_seconds(process: LocalServer) -> float:
    """Returns the CPU time of the process so far, user and system."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status(port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def _make_plain_tables(master: Node) -> None:
    connection: pymysql.Connection = plain_tier.connect(master, client_flag=CLIENT.MULTI_STATEMENTS)
    with connection, connection.cursor() as cursor:
        cursor.execute(plain_tier.CREATE % SERVICE_USER)
        while cursor.nextset():
            pass
