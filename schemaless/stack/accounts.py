"""The accounts of the storage servers and their random passwords. Owns who may do what on a server.

They are made while a data folder is initialised, before there is a binary log, and no other account that can
log in is left: every server of a stack knows the same three, and a minion needs nothing but the master's log.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from schemaless.stack.programs import Flavour

SERVICE_USER = "schemaless"
READER_USER = "reader"
REPLICATION_USER = "replication"


@dataclass(frozen=True, slots=True)
class Accounts:
    """One password for each account. Letters and digits only, so they need no quoting anywhere."""

    service_password: str = field(repr=False)
    reader_password: str = field(repr=False)
    replication_password: str = field(repr=False)


def new_accounts() -> Accounts:
    return Accounts(secrets.token_hex(16), secrets.token_hex(16), secrets.token_hex(16))


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
    """SQL that leaves exactly our three accounts on a new server. On MySQL it may be run again after a cut."""
    return (
        *(_NOBODY_ELSE[flavour] if flavour is Flavour.MARIADB else ()),
        f"CREATE USER IF NOT EXISTS '{SERVICE_USER}'@'%' IDENTIFIED BY '{accounts.service_password}'",
        f"GRANT ALL PRIVILEGES ON *.* TO '{SERVICE_USER}'@'%' WITH GRANT OPTION",
        f"CREATE USER IF NOT EXISTS '{READER_USER}'@'%' IDENTIFIED BY '{accounts.reader_password}'",
        f"GRANT SELECT, PROCESS, SHOW DATABASES, {_MONITOR[flavour]} ON *.* TO '{READER_USER}'@'%'",
        f"CREATE USER IF NOT EXISTS '{REPLICATION_USER}'@'%' IDENTIFIED BY '{accounts.replication_password}'",
        f"GRANT REPLICATION SLAVE ON *.* TO '{REPLICATION_USER}'@'%'",
        *(_NOBODY_ELSE[flavour] if flavour is Flavour.MYSQL else ()),
    )
