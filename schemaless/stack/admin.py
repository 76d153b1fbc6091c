"""Administrator's connections to the storage servers: the stack's one place with a driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schemaless.errors import StorageUnavailable

if TYPE_CHECKING:  # the command line finds a stack without a driver
    import pymysql
    from pymysql.cursors import DictCursor

TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where and as whom to connect: by the socket where there is one."""

    socket: str | None
    user: str
    password: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 3306

    def __str__(self) -> str:
        return self.socket or f"{self.host}:{self.port}"


class Session:
    """One open connection, autocommit."""

    def __init__(self, connection: pymysql.Connection[DictCursor]) -> None:
        self._connection = connection

    def query(self, statement: str) -> list[dict[str, Any]]:
        """Run one statement; its rows by column name, none for a statement that gives none."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())


@contextmanager
def session(address: ServerAddress) -> Iterator[Session]:
    """Raises StorageUnavailable when the server can't be reached or refuses a statement."""
    import pymysql

    try:
        connection = _connect(address)
        try:
            yield Session(connection)
        finally:
            connection.close()
    except pymysql.MySQLError as error:
        raise StorageUnavailable(f"server at {address}: {error}") from error


def answers(address: ServerAddress) -> bool:
    """Whether the server takes connections and queries now."""
    try:
        with session(address) as connected:
            return bool(connected.query("SELECT 1"))
    except StorageUnavailable:
        return False


def _connect(address: ServerAddress) -> pymysql.Connection[DictCursor]:
    import pymysql
    from pymysql.cursors import DictCursor

    return pymysql.connect(
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
        ssl_disabled=True,  # the servers' own certificates prove nothing; passwords go by RSA
    )
