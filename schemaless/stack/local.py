"""Servers without a supervisor, for tests and benchmarks. They end with this process, whatever ends it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from schemaless.bus import kafka_accounts
from schemaless.bus.kafka_accounts import KafkaAccounts
from schemaless.errors import StorageUnavailable
from schemaless.stack import kafka_broker, mysql_server
from schemaless.stack.admin import REPLICATION_USER, Accounts, new_accounts, session
from schemaless.stack.kafka_broker import BrokerTls, KafkaBroker
from schemaless.stack.mysql_server import MySQLServer, planned_servers
from schemaless.stack.plan import admin_document, free_ports, topology_document, write_private_json
from schemaless.stack.programs import Flavour
from schemaless.storage.admin_session import AdminSession
from schemaless.topology import Role, Topology, parse_topology

STOP_TIMEOUT_S = 30


class LocalServer:
    """Handle of one server process. It ends with the thread that started it, so the main thread should."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, wait_ready: Callable[[LocalServer], None]) -> None:
        self.name = name
        self.log = log
        setpriv = shutil.which("setpriv")  # the kernel kills the server when its starter ends
        self._argv = [setpriv, "--pdeathsig", "KILL", *argv] if setpriv else list(argv)
        self._wait_ready = wait_ready
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> None:
        """Starts it, also again after a kill, and waits until it answers."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        self._wait_ready(self)

    def kill(self) -> None:
        """Sends SIGKILL, and waits until it is gone."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """Sends SIGTERM for an orderly shutdown, and returns when it is gone."""
        self._end(signal.SIGTERM)

    def stop(self) -> None:
        """Sends SIGSTOP: it hangs with its port open until `cont`. It answers nothing once this returns."""
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
    """Running storage servers by node name ("a1", "a2", …). `path` is the topology file.

    `administrators` is the same topology with the administrators' account.
    """

    topology: Topology
    administrators: Topology
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
    *,
    options: str = "",
    controlled: bool = False,
) -> Iterator[RunningTopology]:
    """Runs storage clusters that replicate, on free ports. They are killed at the end. Their data goes, logs stay.

    `options` are further lines of every server's option file. `controlled`: the servers wait for a controller.
    """
    accounts = new_accounts()
    root, planned = folder.resolve(), planned_servers(clusters, minions, controlled=controlled)
    sockets = mysql_server.socket_folder(root / "run")
    described = [
        server.server(root / server.name, port, sockets, flavour, root / server.name / "server.log")
        for server, port in zip(planned, free_ports(len(planned)), strict=True)
    ]
    template = root / "template"
    mysql_server.make_template(template, flavour, accounts)
    for server in described:
        mysql_server.prepare(server, template)
        with server.option_file.open("a") as file:
            file.write(options)
    shutil.rmtree(template)
    with ExitStack() as stack:
        servers = {server.name: _start_mysql(server, accounts, stack) for server in described}
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(LocalServer.wait_ready, servers.values()))
            list(pool.map(lambda pair: attach(pair[0], pair[1], accounts), minions_with_masters(described)))
        document = topology_document(described, accounts)
        path = folder / "topology.json"
        write_private_json(path, document)
        by_name = {server.name: server for server in described}
        administrators = parse_topology(admin_document(document, accounts))
        yield RunningTopology(parse_topology(document), administrators, path, accounts, servers, by_name)


@contextmanager
def running_broker(folder: Path) -> Iterator[str]:
    """Runs a Kafka broker on a free port, and yields its bootstrap address."""
    with running_kafka(folder) as (bootstrap, _server):
        yield bootstrap


@contextmanager
def running_kafka(
    folder: Path, accounts: KafkaAccounts | None = None, tls: BrokerTls | None = None
) -> Iterator[tuple[str, LocalServer]]:
    """Runs a Kafka broker, and yields its bootstrap address and the handle of its process.

    With accounts, the address is the administrators', and every account has its rights.
    """
    port, controller_port = free_ports(2)
    broker = KafkaBroker(folder, port, controller_port, folder / "server.log", accounts, tls)
    kafka_broker.prepare(broker)
    server = LocalServer("kafka", broker.argv(), broker.log, lambda me: kafka_broker.wait_ready(broker, alive=me.alive))
    with ExitStack() as stack:
        stack.callback(server.kill)
        server.start()
        if accounts is not None:
            kafka_accounts.grant(broker.bootstrap)
        yield broker.bootstrap, server


def minions_with_masters(servers: Sequence[MySQLServer]) -> list[tuple[MySQLServer, MySQLServer]]:
    """Returns every minion beside its master, none where a controller attaches them."""
    masters = {server.cluster: server for server in servers if server.role is Role.MASTER}
    return [(server, masters[server.cluster]) for server in servers if server.role is Role.MINION]


def _start_mysql(server: MySQLServer, accounts: Accounts, stack: ExitStack) -> LocalServer:
    handle = LocalServer(
        server.name,
        server.argv(),
        server.log,
        lambda me: mysql_server.wait_ready(server, server.administrator(accounts), alive=me.alive),
    )
    stack.callback(shutil.rmtree, server.data, ignore_errors=True)
    stack.callback(handle.kill)
    handle.start(wait=False)
    return handle


HALT_TIMEOUT_S = 10.0
POLL_S = 0.002


def halt(pid: int) -> None:
    """Sends SIGSTOP, and returns once no thread of the process runs.

    The kernel stops a process thread by thread, after the signal was sent. Raises TimeoutError after HALT_TIMEOUT_S.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + HALT_TIMEOUT_S
    while not halted(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} still runs {HALT_TIMEOUT_S} s after SIGSTOP")
        time.sleep(POLL_S)


def halted(pid: int) -> bool:
    """True if every thread is stopped. A process that has ended is not halted."""
    return {_state(thread) for thread in Path(f"/proc/{pid}/task").glob("*")} - {None} == {"T"}


def _state(thread: Path) -> str | None:
    """Returns the kernel's letter of a thread's state (proc(5)), or None if it has ended."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


# Replication of one minion from its master, by GTIDs, from the very beginning of the master's log.
#
# A minion starts empty and reads the log from its first transaction, so it must be attached before the first log file
# expires. Either side may be killed and started again at any time.

HEALTHY_TIMEOUT_S = 30.0


def attach(minion: MySQLServer, master: MySQLServer, accounts: Accounts) -> None:
    """Point a minion at its master and wait until both halves run. Attached before: only waits."""
    with session(minion.administrator(accounts)) as connected:
        if not connected.replication():
            connected.follow("127.0.0.1", master.port, REPLICATION_USER, accounts.replication_password)
        if minion.flavour is Flavour.MARIADB:
            minion.init_file.write_text(f"{mysql_server.RESUME_MARIADB}START SLAVE;\n")
        start(connected)


def start(connected: AdminSession) -> None:
    """Start both halves and wait until they run. Raises StorageUnavailable, saying what stands in the way."""
    connected.query("START REPLICA")  # runs already: a note, no error
    deadline = time.monotonic() + HEALTHY_TIMEOUT_S
    while not ((status := connected.replication()) and status.healthy):
        if time.monotonic() > deadline:
            raise StorageUnavailable(f"minion {connected.node.name} does not replicate: {status and status.error}")
        time.sleep(0.05)
