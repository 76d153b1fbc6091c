"""The home folder of a stack: its format version, and what is decided once, at the first start, and kept.

stack.json holds flavour, ports and passwords; everything else follows from it. Owns the places of all files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from schemaless.config import StackSettings
from schemaless.errors import Misconfigured
from schemaless.stack.accounts import Accounts, new_accounts
from schemaless.stack.kafka_broker import KafkaBroker
from schemaless.stack.layout import server_roles
from schemaless.stack.mysql_server import MySQLServer, socket_folder
from schemaless.stack.ports import free_ports
from schemaless.stack.programs import Flavour
from schemaless.stack.topology_file import write_private_json
from schemaless.topology import Role

FORMAT = 1
CLUSTERS = ("a", "b")
MINIONS = 2
API_PROCESSES = 2


class UnknownFormat(Misconfigured):
    hint = "use the version of this program that made the folder, or another SCHEMALESS_HOME"


@dataclass(frozen=True, slots=True)
class StackPlan:
    """One stack. `ports` by server name, "kafka", "kafka-controller" and "api-N"; `home` is absolute."""

    home: Path
    flavour: Flavour
    ports: Mapping[str, int]
    accounts: Accounts

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
        return KafkaBroker(self.home / "kafka", ports["kafka"], ports["kafka-controller"], self.log("kafka"))

    def log(self, process: str) -> Path:
        return self.home / "logs" / f"{process}.log"

    @property
    def run(self) -> Path:
        return self.home / "run"

    @property
    def topology_file(self) -> Path:
        return self.home / "topology.json"

    @property
    def endpoints_file(self) -> Path:
        return self.home / "endpoints.json"

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


def api_names() -> list[str]:
    return [f"api-{number}" for number in range(API_PROCESSES)]


def home_folder(settings: StackSettings) -> Path:
    return settings.home.expanduser().absolute()


def load_plan(home: Path) -> StackPlan | None:
    """None: no stack was ever made there. Raises UnknownFormat, or Misconfigured when the file is damaged."""
    path = home / "stack.json"
    try:
        document = json.loads(path.read_bytes())
        found = document["format"]
        if found != FORMAT:
            raise UnknownFormat(f"{home} has format version {found!r}; this program knows version {FORMAT}")
        accounts = Accounts(**document["accounts"])
        return StackPlan(home, Flavour(document["flavour"]), document["ports"], accounts)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise Misconfigured(f"{path} is damaged: {error!r}") from error


def require_plan(home: Path) -> StackPlan:
    plan = load_plan(home)
    if plan is None:
        raise Misconfigured(f"there is no stack in {home}: `schemaless up` makes one")
    return plan


def load_or_make_plan(settings: StackSettings) -> StackPlan:
    """Raises Misconfigured when the settings ask for other servers than those whose data is there."""
    home = home_folder(settings)
    plan = load_plan(home)
    if plan is None:
        plan = _new_plan(home, settings)
        write_private_json(home / "stack.json", _document(plan))
    if settings.mysql_flavour and plan.flavour != settings.mysql_flavour:
        raise Misconfigured(f"the data in {home} is {plan.flavour}'s; SCHEMALESS_MYSQL_FLAVOUR asks for another")
    return plan


def _new_plan(home: Path, settings: StackSettings) -> StackPlan:
    servers = [role.name for role in server_roles(CLUSTERS, MINIONS)]
    names = [*servers, "kafka", "kafka-controller", *api_names()]
    first = settings.first_port
    ports = free_ports(len(names)) if first is None else [first + number for number in range(len(names))]
    flavour = Flavour(settings.mysql_flavour or Flavour.MARIADB)
    return StackPlan(home, flavour, dict(zip(names, ports, strict=True)), new_accounts())


def _document(plan: StackPlan) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "flavour": plan.flavour,
        "ports": dict(plan.ports),
        "accounts": asdict(plan.accounts),
    }
