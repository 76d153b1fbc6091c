"""Driver errors become ours here, for both drivers: they raise the same numbers under names of their own (I15)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import asyncmy.errors
import pymysql.err

from schemaless.errors import Busy, DuplicateKey, Misconfigured, SchemalessError, StorageUnavailable

DRIVER_ERRORS = (pymysql.err.MySQLError, asyncmy.errors.MySQLError)

# Numbers: MySQL 9 error reference; MariaDB has the same ones.
_DUPLICATE = {1062}
_BUSY = {1205, 1213, 1614, 3572}
_AWAY = {
    1021,  # disk full
    1026,  # error writing file
    1030,  # error from the storage engine, disk full included
    1040,  # too many connections
    1053,  # server shutdown in progress
    1114,  # table is full: the disk or the tablespace is
    1158, 1159, 1160, 1161,  # network errors
    1180,  # error during COMMIT
    1290, 1836,  # read only: a minion, or a master being taken out
    1317,  # query interrupted
    1927,  # connection was killed (MariaDB)
    2002, 2003, 2006, 2013, 2014, 2055,  # can't connect, gone away, lost
    3024, 1969,  # statement timeout (MySQL, MariaDB)
    3675,  # can't create tablespace: disk full
    4031,  # disconnected by the server
}  # fmt: skip
# 1048 is an added_id of NULL, where the shard has no head on this server, or a created_at: insertion.py sees to it.
_FIT = {1044, 1045, 1048, 1049, 1054, 1142, 1146, 1193, 1231}


@contextmanager
def translated(node: str) -> Iterator[None]:
    """Raises our error for whatever a driver raises inside; `node` names the server in its text."""
    try:
        yield
    except DRIVER_ERRORS as error:
        raise translate(error, node) from error
    except (OSError, EOFError, TimeoutError) as error:
        raise StorageUnavailable(f"{node}: {error or type(error).__name__}") from error


def translate(error: Exception, node: str) -> SchemalessError:
    number = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    text = f"{node}: {error}"
    if number in _DUPLICATE:
        return DuplicateKey(text)
    if number in _BUSY:
        return Busy(text)
    if number in _FIT:
        return Misconfigured(text)
    if number in _AWAY or isinstance(error, pymysql.err.InterfaceError | asyncmy.errors.InterfaceError):
        return StorageUnavailable(text)
    return SchemalessError(text)
