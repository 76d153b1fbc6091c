"""Which servers a stack has: names, roles, numbers. Owns the naming `CLUSTER-master`, `CLUSTER-minion-N`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from schemaless.stack.mysql_server import MySQLServer
from schemaless.stack.programs import Flavour
from schemaless.topology import Role


@dataclass(frozen=True, slots=True)
class ServerRole:
    """One server before it has a folder and a port."""

    name: str
    cluster: str
    role: Role
    server_id: int
    cluster_id: int

    def server(self, folder: Path, port: int, sockets: Path, flavour: Flavour, log: Path) -> MySQLServer:
        """`folder` is the server's own; `sockets` holds the sockets of all."""
        return MySQLServer(
            name=self.name,
            cluster=self.cluster,
            role=self.role,
            flavour=flavour,
            folder=folder,
            port=port,
            server_id=self.server_id,
            socket=sockets / f"{self.name}.sock",
            cluster_id=self.cluster_id,
            log=log,
        )


def server_roles(clusters: Sequence[str], minions: int) -> list[ServerRole]:
    """Masters and minions of all clusters, in a fixed order; server ids are unique over all of them."""
    return [role for number, name in enumerate(clusters, 1) for role in _cluster_roles(number, name, minions)]


def _cluster_roles(number: int, name: str, minions: int) -> list[ServerRole]:
    master = ServerRole(f"{name}-master", name, Role.MASTER, number * 100, number)
    return [master] + [
        ServerRole(f"{name}-minion-{n}", name, Role.MINION, number * 100 + n, number) for n in range(1, minions + 1)
    ]
