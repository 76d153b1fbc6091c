"""The home folder of a stack: its format version, and what is decided once, at the first start, and kept.

stack.json holds flavour, ports and passwords, from which everything else follows. Owns the places of all files, how
private files are written, and the datastore that every stack has from its first start.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from schemaless.bus.kafka_accounts import KafkaAccounts, KafkaUser, account_file, new_kafka_accounts
from schemaless.config import StackSettings
from schemaless.errors import Misconfigured, SchemalessError
from schemaless.runtime.private_file import write_private_text
from schemaless.stack.admin import ADMIN_USER, Accounts, new_accounts
from schemaless.stack.kafka_broker import KafkaBroker
from schemaless.stack.mysql_server import MySQLServer, server_roles, socket_folder
from schemaless.stack.ports import free_ports, take_usual_ports
from schemaless.stack.programs import Flavour
from schemaless.topology import TOPOLOGY_VERSION, Node, Role, Topology

FORMAT = 3
CLUSTERS = ("a", "b")
MINIONS = 2
API_PROCESSES = 2
SERVICES = ("tailer-0", "indexer-0", "consumers-0", "cleaner-0")
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
    """

    home: Path
    flavour: Flavour
    ports: Mapping[str, int]
    accounts: Accounts
    kafka_accounts: KafkaAccounts | None = None

    def servers(self) -> list[MySQLServer]:
        sockets = socket_folder(self.run)
        return [
            role.server(
                folder=self.home / "mysql" / role.name,
                port=self.ports[role.name],
                sockets=sockets,
                flavour=self.flavour,
                log=self.log(role.name),
            )
            for role in server_roles(CLUSTERS, MINIONS)
        ]

    def masters(self) -> list[MySQLServer]:
        return [server for server in self.servers() if server.role is Role.MASTER]

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


def port_names() -> list[str]:
    """Returns the names of all ports of a stack."""
    servers = [role.name for role in server_roles(CLUSTERS, MINIONS)]
    return [*servers, "kafka", "kafka-controller", *api_names(), *(f"{name}-metrics" for name in SERVICES)]


def api_names() -> list[str]:
    return [f"api-{number}" for number in range(API_PROCESSES)]


def home_folder(settings: StackSettings) -> Path:
    return settings.home.expanduser().absolute()


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
        return StackPlan(home, Flavour(document["flavour"]), document["ports"], accounts, kafka_accounts)
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
        plan = StackPlan(home, flavour, ports, new_accounts(), kafka_accounts)
        _keep(plan)
    elif lacking := [name for name in port_names() if name not in plan.ports]:  # a stack from before they had one
        more = dict(zip(lacking, free_ports(len(lacking)), strict=True))
        plan = replace(plan, ports={**plan.ports, **more})
        _keep(plan)
    if settings.mysql_flavour and plan.flavour != settings.mysql_flavour:
        raise Misconfigured(f"the data in {home} is {plan.flavour}'s; SCHEMALESS_MYSQL_FLAVOUR asks for another")
    return plan


def _keep(plan: StackPlan) -> None:
    document = {
        "format": FORMAT,
        "flavour": plan.flavour,
        "ports": dict(plan.ports),
        "accounts": asdict(plan.accounts),
        "kafka_accounts": plan.kafka_accounts and dict(plan.kafka_accounts.passwords),
    }
    write_private_json(plan.home / "stack.json", document)


def topology_document(servers: Sequence[MySQLServer], accounts: Accounts) -> dict[str, Any]:
    """Returns the topology of a stack's own servers, with the services' account."""
    return nodes_document(server.node(accounts) for server in servers)


def admin_document(topology: Mapping[str, Any], accounts: Accounts) -> dict[str, Any]:
    """Returns a topology document with the administrators' account."""

    def entry(node: Mapping[str, Any]) -> dict[str, Any]:
        return {**node, "user": ADMIN_USER, "password": accounts.admin_password}

    clusters = {
        name: {"master": entry(cluster["master"]), "minions": [entry(minion) for minion in cluster["minions"]]}
        for name, cluster in topology["clusters"].items()
    }
    return {**topology, "clusters": clusters}


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
        cluster = clusters.setdefault(node.cluster, {"master": None, "minions": []})
        if node.role is Role.MASTER:
            cluster["master"] = entry
        else:
            cluster["minions"].append(entry)
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
