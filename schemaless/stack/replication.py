"""Replication of one minion from its master, by GTIDs, from the very beginning of the master's log.

A minion starts empty and reads the log from its first transaction, so it must be attached before the first log
file expires. Either side may be killed and started again at any time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from schemaless.errors import StorageUnavailable
from schemaless.stack.admin import REPLICATION_USER, Accounts, Session, session
from schemaless.stack.mysql_server import MySQLServer
from schemaless.stack.programs import Flavour

HEALTHY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ReplicationStatus:
    """The replication status of a minion. `lag_s` is None while it isn't connected."""

    receiving: bool
    applying: bool
    lag_s: int | None
    error: str

    @property
    def healthy(self) -> bool:
        return self.receiving and self.applying


@dataclass(frozen=True, slots=True)
class _Dialect:
    attach: str
    start: str
    show: str
    receiving: str
    applying: str
    lag: str


_DIALECTS = {
    Flavour.MARIADB: _Dialect(
        attach="CHANGE MASTER TO MASTER_HOST='{host}', MASTER_PORT={port}, MASTER_USER='{user}', "
        "MASTER_PASSWORD='{password}', MASTER_USE_GTID=slave_pos, MASTER_CONNECT_RETRY=1, "
        "MASTER_HEARTBEAT_PERIOD=2",
        start="START SLAVE",
        show="SHOW SLAVE STATUS",
        receiving="Slave_IO_Running",
        applying="Slave_SQL_Running",
        lag="Seconds_Behind_Master",
    ),
    Flavour.MYSQL: _Dialect(
        attach="CHANGE REPLICATION SOURCE TO SOURCE_HOST='{host}', SOURCE_PORT={port}, "
        "SOURCE_USER='{user}', SOURCE_PASSWORD='{password}', SOURCE_AUTO_POSITION=1, "
        "SOURCE_CONNECT_RETRY=1, SOURCE_RETRY_COUNT=0, SOURCE_HEARTBEAT_PERIOD=2, GET_SOURCE_PUBLIC_KEY=1",
        start="START REPLICA",
        show="SHOW REPLICA STATUS",
        receiving="Replica_IO_Running",
        applying="Replica_SQL_Running",
        lag="Seconds_Behind_Source",
    ),
}

# MariaDB commits a DDL statement and its replication position one after the other. Killed in between, a minion
# would get the statement again and stop. Its own log knows better what it has executed, so that one wins if later.
RESUME_MARIADB = (
    "BEGIN NOT ATOMIC IF CAST(SUBSTRING_INDEX(@@global.gtid_binlog_pos, '-', -1) AS UNSIGNED) > "
    "CAST(SUBSTRING_INDEX(@@global.gtid_slave_pos, '-', -1) AS UNSIGNED) "
    "THEN SET GLOBAL gtid_slave_pos = @@global.gtid_binlog_pos; END IF; END;\n"
    "START SLAVE;\n"
)


def attach(minion: MySQLServer, master: MySQLServer, accounts: Accounts) -> None:
    """Point a minion at its master and wait until both halves run. Attached before: only waits."""
    with session(minion.address(accounts)) as connected:
        if not is_attached(connected, minion.flavour):
            name_master(connected, minion.flavour, "127.0.0.1", master.port, accounts)
        if minion.flavour is Flavour.MARIADB:
            minion.init_file.write_text(RESUME_MARIADB)
        start(connected, minion.flavour, minion.name)


def is_attached(connected: Session, flavour: Flavour) -> bool:
    """True if the minion has a master."""
    return status(connected, flavour) is not None


def name_master(connected: Session, flavour: Flavour, host: str, port: int, accounts: Accounts) -> None:
    """Tell a minion where its master is. Nothing moves before `start`."""
    connected.query(
        _DIALECTS[flavour].attach.format(
            host=host, port=port, user=REPLICATION_USER, password=accounts.replication_password
        )
    )


def start(connected: Session, flavour: Flavour, name: str) -> None:
    """Start both halves and wait until they run. Raises StorageUnavailable, saying what stands in the way."""
    connected.query(_DIALECTS[flavour].start)  # runs already: a note, no error
    _wait_healthy(name, connected, _DIALECTS[flavour])


def replication_status(minion: MySQLServer, accounts: Accounts) -> ReplicationStatus | None:
    """Returns the status, or None if the minion was never attached. Raises StorageUnavailable."""
    with session(minion.address(accounts)) as connected:
        return status(connected, minion.flavour)


def status(connected: Session, flavour: Flavour) -> ReplicationStatus | None:
    """Returns the status over an open connection, or None if the minion was never attached."""
    return _status(connected, _DIALECTS[flavour])


def _wait_healthy(name: str, connected: Session, dialect: _Dialect) -> None:
    deadline = time.monotonic() + HEALTHY_TIMEOUT_S
    while True:
        said = _status(connected, dialect)
        if said is not None and said.healthy:
            return
        if time.monotonic() > deadline:
            raise StorageUnavailable(f"minion {name} does not replicate: {said and said.error}")
        time.sleep(0.05)


def _status(connected: Session, dialect: _Dialect) -> ReplicationStatus | None:
    rows = connected.query(dialect.show)
    if not rows:
        return None
    row = rows[0]
    return ReplicationStatus(
        receiving=row[dialect.receiving] == "Yes",
        applying=row[dialect.applying] == "Yes",
        lag_s=row[dialect.lag],
        error=row["Last_IO_Error"] or row["Last_SQL_Error"],
    )
