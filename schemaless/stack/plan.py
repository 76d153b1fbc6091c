"""The home folder of a stack: its format version, and what is decided once, at the first start, and kept.

stack.json holds flavour, ports and passwords, from which everything else follows. Owns the places of all files, how
private files are written, and the datastore that every stack has from its first start.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import socket
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from schemaless.bus.kafka_accounts import KafkaAccounts, KafkaUser, account_file, new_kafka_accounts
from schemaless.config import StackSettings
from schemaless.errors import Misconfigured, SchemalessError
from schemaless.runtime.tls import write_private_text
from schemaless.stack.admin import ADMIN_USER, REPLICATION_USER, Accounts, new_accounts
from schemaless.stack.kafka_broker import KafkaBroker
from schemaless.stack.mysql_server import MySQLServer, PlannedServer, planned_servers, socket_folder
from schemaless.stack.programs import Flavour
from schemaless.topology import (
    TOPOLOGY_VERSION,
    Node,
    ReplicationAccount,
    Topology,
    load_topology,
    parse_topology,
)

FORMAT = 4
CLUSTERS = ("a", "b")
MINIONS = 2
API_PROCESSES = 2
SERVICES = ("controller-0", "tailer-0", "indexer-0", "consumers-0", "cleaner-0")
"""The processes beside the API that every stack has."""
DEFAULT_DATASTORE = "mezzanine"
DEFAULT_SHARDS = 64  # the production default, 4096, takes minutes to create
DEFAULT_PARTITIONS = 8


class UnknownFormat(Misconfigured):
    hint = "use the version of this program that made the folder, or another SCHEMALESS_HOME"


@dataclass(frozen=True, slots=True)
class StackPlan:
    """One stack. `home` is absolute.

    `ports` are by server name, "kafka", "kafka-controller", "api-N", and "NAME-metrics" of the other services.
    `planned` are the storage servers. Those of CLUSTERS come with the stack, others were added. `accounts` are those of
    the newest cluster when it was made. What was rotated since is in the topology's files, but for the reader's.
    """

    home: Path
    flavour: Flavour
    ports: Mapping[str, int]
    accounts: Accounts
    planned: Sequence[PlannedServer]
    kafka_accounts: KafkaAccounts | None = None

    def servers(self) -> list[MySQLServer]:
        sockets = socket_folder(self.run)
        return [
            server.server(
                folder=self.home / "mysql" / server.name,
                port=self.ports[server.name],
                sockets=sockets,
                flavour=self.flavour,
                log=self.log(server.name),
            )
            for server in self.planned
        ]

    def node(self, server: MySQLServer) -> Node:
        """Returns a server as the services see it, with the account that their file names."""
        return _as_rotated(server.node(self.accounts), _topology_of(self.topology_file))

    def administrator(self, server: MySQLServer) -> Node:
        """Returns a server as administrators reach it, with the account that their file names."""
        return _as_rotated(server.administrator(self.accounts), _topology_of(self.admin_topology_file))

    def accounts_of(self, server: MySQLServer) -> Accounts:
        """Returns the accounts that a server is made with, with the passwords that the files name now."""
        administrators = _topology_of(self.admin_topology_file)
        return Accounts(
            admin_password=self.administrator(server).password,
            service_password=self.node(server).password,
            reader_password=self.accounts.reader_password,
            replication_password=self._replication(administrators).password,
        )

    def write_topology(self, servers: Sequence[MySQLServer]) -> None:
        """Writes the services' topology of these servers. Accounts stay as the file names them: whoever rotates a
        password writes it there.
        """
        known = _topology_of(self.topology_file)
        made = (_as_rotated(server.node(self.accounts), known) for server in servers)
        _write_changed(self.topology_file, nodes_document(made), known)

    def write_admin_topology(self, servers: Sequence[MySQLServer]) -> None:
        """Writes the administrators' topology as `write_topology` does the services'."""
        known = _topology_of(self.admin_topology_file)
        made = (_as_rotated(server.administrator(self.accounts), known) for server in servers)
        replication = msgspec.to_builtins(self._replication(known))
        _write_changed(self.admin_topology_file, {**nodes_document(made), "replication": replication}, known)

    def _replication(self, administrators: Topology | None) -> ReplicationAccount:
        made = ReplicationAccount(REPLICATION_USER, self.accounts.replication_password)
        return made if administrators is None else administrators.replication or made

    def with_servers(self, planned: Sequence[PlannedServer]) -> StackPlan:
        """Returns the plan with these servers. New ones get ports that are free now."""
        new = [server.name for server in planned if server.name not in self.ports]
        return replace(self, planned=planned, ports={**self.ports, **dict(zip(new, free_ports(len(new)), strict=True))})

    def broker(self) -> KafkaBroker:
        ports = self.ports
        folder, log = self.home / "kafka", self.log("kafka")
        return KafkaBroker(folder, ports["kafka"], ports["kafka-controller"], log, self.kafka_accounts)

    def kafka_account_file(self, user: KafkaUser) -> Path:
        """The account of a service, for SCHEMALESS_KAFKA_ACCOUNT. It is there if Kafka has accounts."""
        return account_file(self.home, user)

    def log(self, process: str) -> Path:
        return self.home / "logs" / f"{process}.log"

    @property
    def run(self) -> Path:
        return self.home / "run"

    @property
    def topology_file(self) -> Path:
        return self.home / "topology.json"

    @property
    def admin_topology_file(self) -> Path:
        """The servers with the administrators' account, for commands that create datastores. No service reads it."""
        return self.home / "topology.admin.json"

    @property
    def token_file(self) -> Path:
        """The token of this stack's own commands and programs. It is there once access is on."""
        return self.home / "token"

    @property
    def endpoints_file(self) -> Path:
        return self.home / "endpoints.json"

    @property
    def scrape_targets_file(self) -> Path:
        """The processes that serve metrics, as Prometheus' file_sd_configs reads them."""
        return self.home / "scrape-targets.json"

    @property
    def programs_folder(self) -> Path:
        return self.home / "programs"

    @property
    def supervisor_socket(self) -> Path:
        return socket_folder(self.run) / "supervisor.sock"

    @property
    def supervisor_pid_file(self) -> Path:
        return self.run / "supervisor.pid"

    @property
    def supervisor_config(self) -> Path:
        return self.home / "supervisord.conf"

    def api_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{self.ports[name]}" for name in api_names()]


def _topology_of(file: Path) -> Topology | None:
    return load_topology(file) if file.exists() else None


def _as_rotated(made: Node, known: Topology | None) -> Node:
    """Returns a server with the account that a file names for it, or for others of its cluster, of which it is a copy.
    Without one it is the account that it was made with.
    """
    if known is None:
        return made
    others = known.clusters[made.cluster].nodes if made.cluster in known.clusters else (made,)
    return made.as_known_to(known.nodes.get(made.name, others[0]))


def _write_changed(file: Path, document: dict[str, Any], known: Topology | None) -> None:
    """Writes a topology that differs from what was read just now. Each write may undo one of somebody else."""
    if parse_topology(document) != known:
        write_private_json(file, document)


def first_servers() -> list[PlannedServer]:
    """Returns the storage servers that a new stack has."""
    return planned_servers(CLUSTERS, MINIONS, controlled=True)


def port_names() -> list[str]:
    """Returns the names of the ports of a new stack."""
    servers = [server.name for server in first_servers()]
    return [*servers, "kafka", "kafka-controller", *api_names(), *(f"{name}-metrics" for name in SERVICES)]


def api_names() -> list[str]:
    return [f"api-{number}" for number in range(API_PROCESSES)]


def home_folder(settings: StackSettings) -> Path:
    return settings.home.expanduser().absolute()


_OF_A_PATH = re.compile(r"[A-Za-z0-9/._+@~ -]*")


def verify_paths(*paths: Path) -> None:
    """Raises Misconfigured for a path that the files of supervisord, MySQL, Kafka or Java can't hold as it is."""
    for path in paths:
        text = str(path)
        good = _OF_A_PATH.match(text)
        at = good.end() if good else 0
        if at < len(text):
            raise Misconfigured(
                f"{text!r} has {text[at]!r} in its name, and a stack can't use such a folder: take one whose path has"
                " only letters and digits of ASCII, blanks and . _ + @ ~ -"
            )


def load_plan(home: Path) -> StackPlan | None:
    """Returns the plan, or None if there is no stack. Raises UnknownFormat, or Misconfigured for a damaged file."""
    path = home / "stack.json"
    try:
        document = json.loads(path.read_bytes())
        found = document["format"]
        if found != FORMAT:
            raise UnknownFormat(f"{home} has format version {found!r}; this program knows version {FORMAT}")
        accounts = Accounts(**document["accounts"])
        passwords = document["kafka_accounts"]
        kafka_accounts = None if passwords is None else KafkaAccounts(passwords)
        entries = document.get("servers")
        planned = first_servers() if entries is None else [PlannedServer(role=None, **entry) for entry in entries]
        return StackPlan(home, Flavour(document["flavour"]), document["ports"], accounts, planned, kafka_accounts)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Misconfigured(f"{path} is damaged: {error!r}") from error


def require_plan(home: Path) -> StackPlan:
    """Returns the plan. Raises Misconfigured if there is no stack."""
    plan = load_plan(home)
    if plan is None:
        raise Misconfigured(
            f"there is no embedded stack in {home}",
            hint="`schemaless up` makes one. Processes in containers are shown by `docker compose ps`",
        )
    return plan


def load_or_make_plan(settings: StackSettings) -> StackPlan:
    """Returns the plan, which the first call makes. Raises Misconfigured if the data is of another flavour."""
    home = home_folder(settings)
    plan = load_plan(home)
    if plan is None:
        names = port_names()
        first = settings.first_port
        picked = free_ports(len(names)) if first is None else range(first, first + len(names))
        ports = dict(zip(names, picked, strict=True))
        if first is None and settings.usual_ports:
            ports |= take_usual_ports(settings.cache.expanduser() / "usual-ports", home)
        flavour = Flavour(settings.mysql_flavour or Flavour.MARIADB)
        kafka_accounts = new_kafka_accounts() if settings.kafka_accounts else None
        plan = StackPlan(home, flavour, ports, new_accounts(), first_servers(), kafka_accounts)
        keep_plan(plan)
    if settings.mysql_flavour and plan.flavour != settings.mysql_flavour:
        raise Misconfigured(f"the data in {home} is {plan.flavour}'s; SCHEMALESS_MYSQL_FLAVOUR asks for another")
    return plan


def keep_plan(plan: StackPlan) -> None:
    """Writes the plan. A reader sees the old one or the whole new one."""
    fields = ("name", "cluster", "server_id", "cluster_id")
    document = {
        "format": FORMAT,
        "flavour": plan.flavour,
        "ports": dict(plan.ports),
        "servers": [{name: getattr(server, name) for name in fields} for server in plan.planned],
        "accounts": asdict(plan.accounts),
        "kafka_accounts": plan.kafka_accounts and dict(plan.kafka_accounts.passwords),
    }
    write_private_json(plan.home / "stack.json", document)


def keep_servers(plan: StackPlan) -> None:
    """Writes the servers of a plan. Passwords stay as stack.json has them by now."""
    keep_plan(replace(require_plan(plan.home), planned=plan.planned, ports=plan.ports))


def topology_document(servers: Sequence[MySQLServer], accounts: Accounts) -> dict[str, Any]:
    """Returns the topology of a stack's own servers, with the services' account."""
    return nodes_document(server.node(accounts) for server in servers)


def admin_document(topology: Mapping[str, Any], accounts: Accounts) -> dict[str, Any]:
    """Returns a topology document with the administrators' account, and that of replication."""

    def entry(node: Mapping[str, Any]) -> dict[str, Any]:
        return {**node, "user": ADMIN_USER, "password": accounts.admin_password}

    clusters = {name: list(map(entry, cluster)) for name, cluster in topology["clusters"].items()}
    replication = {"user": REPLICATION_USER, "password": accounts.replication_password}
    return {**topology, "clusters": clusters, "replication": replication}


def nodes_document(nodes: Iterable[Node]) -> dict[str, Any]:
    """Returns the topology of some nodes in the format of schemaless/topology.py."""
    clusters: dict[str, Any] = {}
    for node in nodes:
        entry = {
            "name": node.name,
            "host": node.host,
            "port": node.port,
            "socket": node.socket,
            "user": node.user,
            "password": node.password,
            "tls": node.tls and asdict(node.tls),
        }
        clusters.setdefault(node.cluster, []).append(entry)
    return {"version": TOPOLOGY_VERSION, "clusters": clusters}


def write_private_json(path: Path, document: Any) -> None:
    """Writes a file that only its owner can read. A reader sees the old file or the whole new one."""
    write_private_text(path, json.dumps(document, indent=2) + "\n")


def create_default_datastore(topology: Topology, kafka_bootstrap: str, administrators: Topology) -> None:
    """Creates the datastore unless it exists, also while a master is unreachable. Raises as `create_datastore` does."""
    from schemaless.ops.datastores import create_datastore

    if DEFAULT_DATASTORE not in known_datastores(topology):
        counts = (DEFAULT_SHARDS, DEFAULT_PARTITIONS)
        create_datastore(topology, kafka_bootstrap, DEFAULT_DATASTORE, *counts, administrators=administrators)


def known_datastores(topology: Topology) -> list[str]:
    """Returns the names of the datastores, none while the catalogue itself isn't made."""
    from schemaless.ops.datastores import list_datastores

    try:
        return list(list_datastores(topology))
    except SchemalessError:
        return []


# Free TCP ports on loopback. Owns how a port is picked, and what is said of one that is taken.

# Below what Linux gives to outgoing connections (32768 and up), so a kept port isn't lost to one of them.
PORTS = range(20000, 32000)
ATTEMPTS_MAX = 200
USUAL_PORTS = {"api-0": 8000, "api-1": 8001, "kafka": 9092}
_reserved: set[int] = set()
"""The ports that this process was given. The kernel doesn't refuse a process its own lock."""


class PortInUse(Misconfigured):
    hint = "stop the program that listens there, or start with another SCHEMALESS_HOME"


def is_free(port: int) -> bool:
    """True if a server could listen on this port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: TIME_WAIT is no obstacle
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def free_ports(count: int) -> list[int]:
    """Different ports that are free now. No other process of this user is given one while this process lives.

    A server takes seconds until it listens. Without that, another stack could pick its port in the meantime.
    """
    chosen: list[int] = []
    for port in random.sample(PORTS, min(ATTEMPTS_MAX, len(PORTS))):
        if len(chosen) < count and is_free(port) and _reserve(port):
            chosen.append(port)
    if len(chosen) < count:
        raise PortInUse(f"no {count} free ports found between {PORTS.start} and {PORTS.stop}")
    return chosen


def _reserve(port: int) -> bool:
    """Returns False if a process has this port already, be it this one. The kernel gives it back when this one ends."""
    if port in _reserved:
        return False
    try:
        fcntl.lockf(_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:
        return False
    _reserved.add(port)
    return True


@lru_cache(maxsize=1)
def _reservations() -> int:
    """A file of this user, of which one byte is locked for each port. It stays open: closing it would give all back."""
    path = Path(tempfile.gettempdir()) / f"schemaless-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def take_usual_ports(record: Path, home: Path) -> dict[str, int]:
    """Returns the ports of USUAL_PORTS that are free, unless another stack of this user has them.

    `record` names the stack that took them. It may be down, and wants them again when it is started.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        owner = file.read().strip()
        if owner and owner != str(home) and (Path(owner) / "stack.json").exists():
            return {}
        file.truncate(0)
        file.write(str(home))
    return {name: port for name, port in USUAL_PORTS.items() if is_free(port)}


def require_free(ports: Mapping[str, int]) -> None:
    """Raises PortInUse with the first port that another program has. `ports` are by purpose."""
    for purpose, port in ports.items():
        if not is_free(port):
            raise PortInUse(f"port {port} ({purpose}) is in use by another program")
