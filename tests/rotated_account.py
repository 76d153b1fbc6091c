"""RotatedAccount: an account of services that a test may rotate, with a topology's file of its own that names it.

The accounts of a session's servers are everybody's.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from schemaless.errors import SchemalessError
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
        self._administrators = running.administrators.nodes
        self._replication = msgspec.to_builtins(running.administrators.replication)

    def sql(self, statement: str) -> None:
        """On the masters, whichever these are."""
        for node in self._administrators.values():
            with AdminSession(node) as session:
                if session.query("SELECT @@GLOBAL.read_only AS it") == [{"it": 0}]:
                    session.query(statement)

    def rotate(self, password: str) -> None:
        self.sql(f"ALTER USER '{self.user}'@'%' IDENTIFIED BY '{password}'")

    def rotate_at(self, name: str, password: str) -> None:
        """On this server alone, and ends its connections."""
        with AdminSession(self._administrators[name]) as session:
            session.query(f"SET sql_log_bin = 0; ALTER USER '{self.user}'@'%' IDENTIFIED BY '{password}'")
        self.cut(name)

    def write(self, password: str) -> None:
        """Replaces the file at once."""
        document = nodes_document(self._nodes) | {"replication": self._replication}
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
        with AdminSession(self._administrators[name]) as session:
            rows = session.query("SELECT id AS it FROM information_schema.processlist WHERE user = %s", self.user)
        return [row["it"] for row in rows]

    def cut(self, *names: str) -> None:
        """Ends its connections to these servers, or to all, as a restart does."""
        for name in names or self._administrators:
            with AdminSession(self._administrators[name]) as session:
                for number in self.connections(name):
                    with suppress(SchemalessError):  # it ended by itself
                        session.query(f"KILL {number}")


@contextmanager
def rotated_account(
    running: RunningTopology, path: Path, rights: str = f"PROCESS, REPLICATION CLIENT, {SERVICE_PRIVILEGES}"
) -> Iterator[RotatedAccount]:
    """Its password is "first", and its rights are those of services."""
    account = RotatedAccount(running, path)
    account.sql(f"CREATE USER '{account.user}'@'%' IDENTIFIED BY 'first'")
    account.sql(f"GRANT {rights} ON *.* TO '{account.user}'@'%'")
    account.write("first")
    try:
        yield account
    finally:
        account.sql(f"DROP USER '{account.user}'@'%'")
