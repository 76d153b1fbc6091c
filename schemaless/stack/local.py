"""Servers without a supervisor, for tests and benchmarks: gone with this process, whatever ends it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from schemaless.stack import kafka_broker, mysql_server
from schemaless.stack.accounts import Accounts, new_accounts
from schemaless.stack.halting import halt
from schemaless.stack.kafka_broker import KafkaBroker
from schemaless.stack.layout import server_roles
from schemaless.stack.mysql_server import MySQLServer
from schemaless.stack.ports import free_ports
from schemaless.stack.programs import Flavour
from schemaless.stack.replication import attach
from schemaless.stack.topology_file import topology_document, write_private_json
from schemaless.topology import Topology, parse_topology

STOP_TIMEOUT_S = 30


class LocalServer:
    """Handle of one server process. It ends with the thread that started it: start it from the main one."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, wait_ready: Callable[[LocalServer], None]) -> None:
        self.name = name
        self.log = log
        self._argv = _dying_with_us(argv)
        self._wait_ready = wait_ready
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> None:
        """Start it, again after a kill too, and wait until it answers."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        self._wait_ready(self)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: an orderly shutdown; returns when it is gone."""
        self._end(signal.SIGTERM)

    def stop(self) -> None:
        """SIGSTOP: hangs, its port still open, until `cont`. Once this returns it answers nothing more."""
        halt(self.pid)

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(number)
        self._process.send_signal(signal.SIGCONT)  # a stopped process takes no SIGTERM
        self._process.wait(STOP_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class RunningTopology:
    """`servers` by node name ("a-master", "a-minion-1", …); `path` is the topology file."""

    topology: Topology
    path: Path
    accounts: Accounts
    servers: Mapping[str, LocalServer]
    descriptions: Mapping[str, MySQLServer]


@contextmanager
def running_topology(
    folder: Path,
    clusters: Sequence[str] = ("a", "b"),
    minions: int = 1,
    flavour: Flavour = Flavour.MARIADB,
) -> Iterator[RunningTopology]:
    """Storage clusters that replicate, on free ports; killed at the end, their data left in `folder`."""
    accounts = new_accounts()
    described = _describe(folder, clusters, minions, flavour)
    _prepare(folder, described, flavour, accounts)
    with ExitStack() as stack:
        servers = {server.name: _start_mysql(server, accounts, stack) for server in described}
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(LocalServer.wait_ready, servers.values()))
            list(pool.map(lambda pair: attach(pair[0], pair[1], accounts), minions_with_masters(described)))
        document = topology_document(described, accounts)
        path = folder / "topology.json"
        write_private_json(path, document)
        by_name = {server.name: server for server in described}
        yield RunningTopology(parse_topology(document), path, accounts, servers, by_name)


@contextmanager
def running_broker(folder: Path) -> Iterator[str]:
    """A Kafka broker on a free port; gives its bootstrap address. For its process: `running_kafka`."""
    with running_kafka(folder) as (bootstrap, _server):
        yield bootstrap


@contextmanager
def running_kafka(folder: Path) -> Iterator[tuple[str, LocalServer]]:
    """As `running_broker`, with the handle of its process."""
    port, controller_port = free_ports(2)
    broker = KafkaBroker(folder, port, controller_port, folder / "server.log")
    kafka_broker.prepare(broker)
    server = LocalServer("kafka", broker.argv(), broker.log, lambda me: kafka_broker.wait_ready(broker, alive=me.alive))
    with ExitStack() as stack:
        stack.callback(server.kill)
        server.start()
        yield broker.bootstrap, server


def minions_with_masters(servers: Sequence[MySQLServer]) -> list[tuple[MySQLServer, MySQLServer]]:
    """Every minion beside its master."""
    masters = {server.cluster: server for server in servers if server.role == "master"}
    return [(server, masters[server.cluster]) for server in servers if server.role == "minion"]


def _describe(folder: Path, clusters: Sequence[str], minions: int, flavour: Flavour) -> list[MySQLServer]:
    roles = server_roles(clusters, minions)
    sockets = mysql_server.socket_folder(folder.resolve() / "run")
    return [
        role.server(own := folder.resolve() / role.name, port, sockets, flavour, own / "server.log")
        for role, port in zip(roles, free_ports(len(roles)), strict=True)
    ]


def _prepare(folder: Path, servers: Sequence[MySQLServer], flavour: Flavour, accounts: Accounts) -> None:
    template = folder.resolve() / "template"
    mysql_server.make_template(template, flavour, accounts)
    for server in servers:
        mysql_server.prepare(server, template)
    shutil.rmtree(template)


def _start_mysql(server: MySQLServer, accounts: Accounts, stack: ExitStack) -> LocalServer:
    handle = LocalServer(
        server.name,
        server.argv(),
        server.log,
        lambda me: mysql_server.wait_ready(server, accounts, alive=me.alive),
    )
    stack.callback(handle.kill)
    handle.start(wait=False)
    return handle


def _dying_with_us(argv: Sequence[str]) -> list[str]:
    """The kernel kills the server when its starter ends: no server outlives a killed test run."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", *argv] if setpriv else list(argv)
