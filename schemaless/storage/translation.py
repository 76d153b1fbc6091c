"""Driver errors become ours here, for both drivers: they raise the same numbers under names of their own (I15)."""

from __future__ import annotations

import asyncmy.errors
import pymysql.err

from schemaless.errors import Busy, DuplicateKey, Misconfigured, NeedsLockedHeads, SchemalessError, StorageUnavailable

FAILURES = (pymysql.err.MySQLError, asyncmy.errors.MySQLError, OSError, EOFError)
"""What a driver raises when a connection can't be made, or a script can't be executed."""

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
_NULL = {1048}
_MISFIT = {1044, 1045, 1049, 1054, 1142, 1146, 1193, 1231}


def translate(error: Exception, node: str) -> SchemalessError:
    """Returns our error for one of FAILURES, without its cause. `node` names the server in its text."""
    if isinstance(error, OSError | EOFError):
        return StorageUnavailable(f"{node}: {error or type(error).__name__}")
    number = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    text = f"{node}: {error}"
    if number in _DUPLICATE:
        return DuplicateKey(text)
    if number in _BUSY:
        return Busy(text)
    if number in _NULL:
        return NeedsLockedHeads(text)
    if number in _MISFIT:
        return Misconfigured(text)
    if number in _AWAY or isinstance(error, pymysql.err.InterfaceError | asyncmy.errors.InterfaceError):
        return StorageUnavailable(text)
    return SchemalessError(text)
