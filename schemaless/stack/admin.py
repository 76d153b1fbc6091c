"""The storage servers' accounts with their random passwords, and administrators' connections.

The accounts are made while a data folder is initialised, before there is a binary log. No other account that can log in
is left: every server of a stack knows the same four, and a minion needs nothing but the master's log. Services can't
write to a minion, read accounts or touch files (I17). Connections are the stack's one use of a driver.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schemaless.errors import StorageUnavailable
from schemaless.stack.programs import Flavour
from schemaless.storage.sql import SERVICE_PRIVILEGES

ADMIN_USER = "admin"
SERVICE_USER = "schemaless"
READER_USER = "reader"
REPLICATION_USER = "replication"


@dataclass(frozen=True, slots=True)
class Accounts:
    """The passwords of the accounts. They are letters and digits only, so they need no quoting anywhere."""

    admin_password: str = field(repr=False)
    service_password: str = field(repr=False)
    reader_password: str = field(repr=False)
    replication_password: str = field(repr=False)


def new_accounts() -> Accounts:
    return Accounts(*(secrets.token_hex(16) for _ in range(4)))


_MONITOR = {
    Flavour.MARIADB: "BINLOG MONITOR, REPLICA MONITOR",
    Flavour.MYSQL: "REPLICATION CLIENT",
}
_NOBODY_ELSE = {
    # Under --bootstrap the grant tables are not loaded yet: rows first, then FLUSH.
    Flavour.MARIADB: ("DELETE FROM mysql.global_priv WHERE User IN ('', 'root')", "FLUSH PRIVILEGES"),
    Flavour.MYSQL: ("DROP USER IF EXISTS 'root'@'localhost', 'root'@'%'",),
}


def account_statements(flavour: Flavour, accounts: Accounts) -> tuple[str, ...]:
    """Returns the SQL that leaves exactly our four accounts on a new server. On MySQL it can be repeated.

    The services' account gets a datastore's databases when the datastore is created. PROCESS shows it its own idle
    transactions. As it has neither SUPER nor a right to write in spite of it, `read_only` binds it.
    """
    return (
        *(_NOBODY_ELSE[flavour] if flavour is Flavour.MARIADB else ()),
        f"CREATE USER IF NOT EXISTS '{ADMIN_USER}'@'%' IDENTIFIED BY '{accounts.admin_password}'",
        f"GRANT ALL PRIVILEGES ON *.* TO '{ADMIN_USER}'@'%' WITH GRANT OPTION",
        f"CREATE USER IF NOT EXISTS '{SERVICE_USER}'@'%' IDENTIFIED BY '{accounts.service_password}'",
        f"GRANT PROCESS ON *.* TO '{SERVICE_USER}'@'%'",
        f"GRANT {SERVICE_PRIVILEGES} ON schemaless.* TO '{SERVICE_USER}'@'%'",
        f"CREATE USER IF NOT EXISTS '{READER_USER}'@'%' IDENTIFIED BY '{accounts.reader_password}'",
        f"GRANT SELECT, PROCESS, SHOW DATABASES, {_MONITOR[flavour]} ON *.* TO '{READER_USER}'@'%'",
        f"CREATE USER IF NOT EXISTS '{REPLICATION_USER}'@'%' IDENTIFIED BY '{accounts.replication_password}'",
        f"GRANT REPLICATION SLAVE ON *.* TO '{REPLICATION_USER}'@'%'",
        *(_NOBODY_ELSE[flavour] if flavour is Flavour.MYSQL else ()),
    )


if TYPE_CHECKING:  # the command line finds a stack without a driver
    import pymysql
    from pymysql.cursors import DictCursor

TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address and the account of a connection. It uses the socket where there is one."""

    socket: str | None
    user: str
    password: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 3306

    def __str__(self) -> str:
        return self.socket or f"{self.host}:{self.port}"


class Session:
    """One open connection with autocommit."""

    def __init__(self, connection: pymysql.Connection[DictCursor]) -> None:
        self._connection = connection

    def query(self, statement: str) -> list[dict[str, Any]]:
        """Runs one statement, and returns its rows by column name."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())


@contextmanager
def session(address: ServerAddress) -> Iterator[Session]:
    """Opens a connection. Raises StorageUnavailable when the server is unreachable or refuses a statement."""
    import pymysql
    from pymysql.cursors import DictCursor

    try:
        connection = pymysql.connect(
            host=address.host,
            port=address.port,
            unix_socket=address.socket,
            user=address.user,
            password=address.password,
            autocommit=True,
            cursorclass=DictCursor,
            connect_timeout=2,
            read_timeout=TIMEOUT_S,
            write_timeout=TIMEOUT_S,
            ssl_disabled=True,  # the servers' own certificates prove nothing, and passwords go by RSA
        )
        try:
            yield Session(connection)
        finally:
            connection.close()
    except pymysql.MySQLError as error:
        raise StorageUnavailable(f"server at {address}: {error}") from error


def answers(address: ServerAddress) -> bool:
    """True if the server accepts connections and queries now."""
    try:
        with session(address) as connected:
            return bool(connected.query("SELECT 1"))
    except StorageUnavailable:
        return False
