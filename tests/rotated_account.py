"""RotatedAccount: an account of services that a test may rotate, with a topology's file of its own that names it.

The accounts of a session's servers are everybody's.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schemaless.stack.local import RunningTopology
from schemaless.stack.plan import nodes_document, write_private_json
from schemaless.storage.admin_session import AdminSession
from schemaless.storage.sql import SERVICE_PRIVILEGES
from schemaless.topology import load_topology


class RotatedAccount:
    """Made on the masters, so minions get it. `write` is the operator's half, and `rotate` the servers'."""

    def __init__(self, running: RunningTopology, path: Path) -> None:
        self.path = path
        self.user = f"r_{uuid.uuid4().hex[:12]}"
        self._nodes = list(running.topology.nodes.values())
        self._administrators = list(running.administrators.nodes.values())
        self._masters = [cluster.nodes[0] for cluster in running.administrators.clusters.values()]

    def sql(self, statement: str) -> None:
        for master in self._masters:
            with AdminSession(master) as session:
                session.query(statement)

    def rotate(self, password: str) -> None:
        self.sql(f"ALTER USER '{self.user}'@'%' IDENTIFIED BY '{password}'")

    def write(self, password: str) -> None:
        """Replaces the file at once."""
        document = nodes_document(self._nodes)
        for cluster in document["clusters"].values():
            for entry in cluster:
                entry |= {"user": self.user, "password": password}
        fresh = self.path.with_suffix(".new")
        write_private_json(fresh, document)
        os.rename(fresh, self.path)

    def node(self, name: str) -> Any:
        """As a process knows it that reads the file now."""
        return load_topology(self.path).nodes[name]

    def connections(self, name: str) -> list[int]:
        with AdminSession(next(node for node in self._administrators if node.name == name)) as session:
            rows = session.query("SELECT id AS it FROM information_schema.processlist WHERE user = %s", self.user)
        return [row["it"] for row in rows]

    def cut(self) -> None:
        """Ends all its connections, as a restart of the servers does."""
        for node in self._administrators:
            with AdminSession(node) as session:
                for number in self.connections(node.name):
                    session.query(f"KILL {number}")


@contextmanager
def rotated_account(running: RunningTopology, path: Path) -> Iterator[RotatedAccount]:
    """Its password is "first"."""
    account = RotatedAccount(running, path)
    account.sql(f"CREATE USER '{account.user}'@'%' IDENTIFIED BY 'first'")
    account.sql(f"GRANT PROCESS, REPLICATION CLIENT, {SERVICE_PRIVILEGES} ON *.* TO '{account.user}'@'%'")
    account.write("first")
    try:
        yield account
    finally:
        account.sql(f"DROP USER '{account.user}'@'%'")
