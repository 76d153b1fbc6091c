"""An administrator's connection to one server, and what MySQL and MariaDB say differently about replication.

It is one session that never reconnects. What the session holds, such as a lock, it holds until it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec
from pymysql.cursors import DictCursor

from schemaless.storage.pymysql_driver import connect
from schemaless.storage.translation import FAILURES, translate
from schemaless.topology import Node

SHOW_REPLICATION = "SHOW REPLICA STATUS"
_FOLLOW_MARIADB = (  # a server that was a master has its position in its own log only: demoting takes it over
    "CHANGE MASTER TO MASTER_HOST=%s, MASTER_PORT=%s, MASTER_USER=%s, MASTER_PASSWORD=%s, MASTER_USE_GTID=slave_pos,"
    " MASTER_DEMOTE_TO_SLAVE=1, MASTER_CONNECT_RETRY=1, MASTER_HEARTBEAT_PERIOD=1"
)
_FOLLOW_MYSQL = (
    "CHANGE REPLICATION SOURCE TO SOURCE_HOST=%s, SOURCE_PORT=%s, SOURCE_USER=%s, SOURCE_PASSWORD=%s,"
    " SOURCE_AUTO_POSITION=1, SOURCE_CONNECT_RETRY=1, SOURCE_RETRY_COUNT=0, SOURCE_HEARTBEAT_PERIOD=1,"
    " GET_SOURCE_PUBLIC_KEY=1"
)


class ReplicationStatus(msgspec.Struct, frozen=True):
    """How a server follows its master.

    `receiving` says whether it tries to receive, and `connected` whether it does. `received` is the position that its
    receiver reached. `seconds_behind` is None while it isn't connected. `failed`: its applier ended with an error.
    """

    host: str
    port: int
    receiving: bool
    connected: bool
    applying: bool
    seconds_behind: int | None
    received: str
    error: str
    failed: bool = False

    @property
    def healthy(self) -> bool:
        return self.connected and self.applying


class AdminSession:
    """One open connection with autocommit. Once it is lost, every query raises StorageUnavailable."""

    def __init__(self, node: Node, *, connect_timeout_s: float = 2.0, timeout_s: float = 10.0) -> None:
        self.node = node
        self._connection = connect(node, connect_timeout_s, timeout_s)
        version: str = self._connection.get_server_info()  # type: ignore[no-untyped-call]  # the stubs leave it out
        self.mariadb = "MariaDB" in version

    def __enter__(self) -> AdminSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._connection.open:
            self._connection.close()

    def fileno(self) -> int:
        return int(self._connection._sock.fileno())  # type: ignore[attr-defined]  # the driver has no other way

    def results(self, script: str, *values: object) -> list[list[dict[str, Any]]]:
        """Runs a script with a value for each %s, and returns the rows of each statement by column name.

        Raises what the server's error is in our tree, and StorageUnavailable for a connection that was lost.
        """
        try:
            with self._connection.cursor(DictCursor) as cursor:
                cursor.execute(script, values or None)
                found = [list(cursor.fetchall())]
                while cursor.nextset():
                    found.append(list(cursor.fetchall()))
                return found
        except FAILURES as error:
            raise translate(error, self.node.name) from error

    def query(self, script: str, *values: object) -> list[dict[str, Any]]:
        """Does so, and returns the rows of the last statement."""
        return self.results(script, *values)[-1]

    def replication(self) -> ReplicationStatus | None:
        """Returns how the server follows its master, or None if it follows nobody."""
        return self.status_of(self.query(SHOW_REPLICATION))

    def status_of(self, shown: Sequence[Mapping[str, Any]]) -> ReplicationStatus | None:
        """Returns what the rows of SHOW_REPLICATION mean."""
        for each in shown:
            row = {name.replace("Slave", "Replica").replace("Master", "Source"): value for name, value in each.items()}
            return ReplicationStatus(
                host=row["Source_Host"],
                port=row["Source_Port"],
                receiving=row["Replica_IO_Running"] != "No",
                connected=row["Replica_IO_Running"] == "Yes",
                applying=row["Replica_SQL_Running"] == "Yes",
                seconds_behind=row["Seconds_Behind_Source"],
                received=row["Gtid_IO_Pos" if self.mariadb else "Retrieved_Gtid_Set"].replace("\n", ""),
                error=row["Last_SQL_Error"] or row["Last_IO_Error"],
                failed=bool(row["Last_SQL_Error"]),
            )
        return None

    def follow(self, host: str, port: int, user: str, password: str) -> None:
        """Names the server's master. Nothing moves before START REPLICA."""
        self.query(_FOLLOW_MARIADB if self.mariadb else _FOLLOW_MYSQL, host, port, user, password)
