"""The storage servers' accounts with their random passwords, and administrators' connections.

The accounts are made while a data folder is initialised, before there is a binary log. No other account that can log in
is left: every server of a stack knows the same four, and a minion needs nothing but the master's log. Services can't
write to a minion, read accounts or touch files (I17).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schemaless.errors import StorageUnavailable
from schemaless.stack.programs import Flavour
from schemaless.storage.sql import SERVICE_PRIVILEGES
from schemaless.topology import Node

if TYPE_CHECKING:
    from schemaless.storage.admin_session import AdminSession

ADMIN_USER = "admin"
SERVICE_USER = "schemaless"
READER_USER = "reader"
REPLICATION_USER = "replication"


@dataclass(frozen=True, slots=True)
class Accounts:
    """The passwords of the accounts. Those of a stack are letters and digits until somebody rotates them."""

    admin_password: str = field(repr=False)
    service_password: str = field(repr=False)
    reader_password: str = field(repr=False)
    replication_password: str = field(repr=False)


def new_accounts() -> Accounts:
    return Accounts(*(secrets.token_hex(16) for _ in range(4)))


_REPLICA = {Flavour.MARIADB: "REPLICA MONITOR", Flavour.MYSQL: "REPLICATION CLIENT"}
_MONITOR = _REPLICA | {Flavour.MARIADB: "BINLOG MONITOR, REPLICA MONITOR"}
_NOBODY_ELSE = {
    # Under --bootstrap the grant tables are not loaded yet: rows first, then FLUSH.
    Flavour.MARIADB: ("DELETE FROM mysql.global_priv WHERE User IN ('', 'root')", "FLUSH PRIVILEGES"),
    Flavour.MYSQL: ("DROP USER IF EXISTS 'root'@'localhost', 'root'@'%'",),
}


def account_statements(flavour: Flavour, accounts: Accounts) -> tuple[str, ...]:
    """Returns the SQL that leaves exactly our four accounts on a new server. On MySQL it can be repeated.

    The services' account gets a datastore's databases when the datastore is created. PROCESS shows it its own idle
    transactions, and the right beside it the filters of replication. As it has neither SUPER nor a right to write in
    spite of it, `read_only` binds it.
    """

    def account(user: str, password: str) -> str:
        quoted = password.replace("\\", "\\\\").replace("'", "''")
        return f"CREATE USER IF NOT EXISTS '{user}'@'%' IDENTIFIED BY '{quoted}'"

    return (
        *(_NOBODY_ELSE[flavour] if flavour is Flavour.MARIADB else ()),
        account(ADMIN_USER, accounts.admin_password),
        f"GRANT ALL PRIVILEGES ON *.* TO '{ADMIN_USER}'@'%' WITH GRANT OPTION",
        account(SERVICE_USER, accounts.service_password),
        f"GRANT PROCESS, {_REPLICA[flavour]} ON *.* TO '{SERVICE_USER}'@'%'",
        f"GRANT {SERVICE_PRIVILEGES} ON schemaless.* TO '{SERVICE_USER}'@'%'",
        account(READER_USER, accounts.reader_password),
        f"GRANT SELECT, PROCESS, SHOW DATABASES, {_MONITOR[flavour]} ON *.* TO '{READER_USER}'@'%'",
        account(REPLICATION_USER, accounts.replication_password),
        f"GRANT REPLICATION SLAVE ON *.* TO '{REPLICATION_USER}'@'%'",
        *(_NOBODY_ELSE[flavour] if flavour is Flavour.MYSQL else ()),
    )


def session(server: Node) -> AdminSession:
    """Opens a connection. Raises StorageUnavailable."""
    from schemaless.storage.admin_session import AdminSession  # the command line finds a stack without a driver

    return AdminSession(server)


def answers(server: Node) -> bool:
    """True if the server accepts connections and queries now."""
    try:
        with session(server) as connected:
            return bool(connected.query("SELECT 1"))
    except StorageUnavailable:
        return False
