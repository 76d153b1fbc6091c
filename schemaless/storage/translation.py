"""Driver errors become ours here, for both drivers: they raise the same numbers under names of their own (I15).

A number that isn't listed means that the server can't do this now. Such refusals are counted and logged.
"""

from __future__ import annotations

import time
from collections import Counter

import asyncmy.errors
import pymysql.err
import structlog

from schemaless.errors import (
    AccountRefused,
    Busy,
    DuplicateKey,
    LockTimeout,
    NeedsLockedHeads,
    NodeRefuses,
    PacketTooLarge,
    RefusedForGood,
    SchemalessError,
    StaleTopology,
    StatementTimeout,
    StorageUnavailable,
    TableMissing,
)
from schemaless.runtime.tls import certificate_refusal
from schemaless.topology import Node

log = structlog.get_logger()

FAILURES = (pymysql.err.MySQLError, asyncmy.errors.MySQLError, OSError, EOFError)
"""What a driver raises when a connection can't be made, or a script can't be executed."""

# Numbers: MySQL 9 error reference. MariaDB has the same ones.
_DUPLICATE = {1062}
_BUSY = {1213, 1614}
_LOCK_TIMEOUT = {1205, 3572}
PACKET_TOO_LARGE = 1153
_AWAY = {
    1021,  # disk full
    1026,  # error writing file
    1030,  # error from the storage engine, disk full included
    1040,  # too many connections
    1053,  # server shutdown in progress
    1114,  # table is full: the disk or the tablespace is
    1158, 1159, 1160, 1161,  # network errors
    1180,  # error during COMMIT
    1317,  # query interrupted
    1927,  # connection was killed (MariaDB)
    2002, 2003, 2006, 2013, 2014, 2055,  # can't connect, gone away, lost
    3675,  # can't create tablespace: disk full
    4031,  # disconnected by the server
}  # fmt: skip
_EXPIRED = {1820, 1862}
_ACCOUNT = {
    1045, 1698,  # no such account, or another password
    1130,  # not from this host
    1251, 1524,  # it has another way to log in than we know
    3118, 4151,  # it is locked (MySQL, MariaDB)
    3955, 4150,  # too many wrong passwords (MySQL, MariaDB)
    *_EXPIRED,
}  # fmt: skip
"""Refusals of an account, where a connection is made. In a statement 1045 is about a right."""
_NULL = {1048}
_STATEMENT_TIMEOUT = {1969, 3024}  # MariaDB, MySQL
_TABLE_MISSING = {1049, 1146}
_FOR_GOOD = {
    1044, 1142, 1143, 1227, 1370,  # a right is missing
    1054, 1136,  # the table has other columns
    1059, 1064, 1103,  # a name is too long, or the statement is no SQL
    1071, 1074, 1117, 1118,  # a key, a column or a row is too long, or there are too many columns
    1264, 1292, 1366, 1406,  # a value doesn't fit its column
}  # fmt: skip
"""Refusals that don't pass by themselves."""
_REFUSALS: dict[int, type[NodeRefuses]] = {
    **dict.fromkeys(_FOR_GOOD, RefusedForGood),
    **dict.fromkeys(_TABLE_MISSING, TableMissing),
    **dict.fromkeys(_STATEMENT_TIMEOUT, StatementTimeout),
    **dict.fromkeys((1290, 1836), StaleTopology),  # read only
    PACKET_TOO_LARGE: PacketTooLarge,
}

_LOG_PAUSE_S = 1.0  # between two lines about one number of one node


class Refusals:
    """Counts by (node, number) what servers refused. Logs each at most once a second."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()
        self._logged_at: dict[tuple[str, int], float] = {}

    def note(self, node: str, number: int, text: str) -> None:
        kind = (node, number)
        self.counts[kind] += 1
        now = time.monotonic()
        if now - self._logged_at.get(kind, -_LOG_PAUSE_S) >= _LOG_PAUSE_S:
            self._logged_at[kind] = now
            level = log.info if number in _TABLE_MISSING else log.warning  # usual while a datastore is made
            level("a server refuses", node=node, number=number, error=text, times=self.counts[kind])


refusals = Refusals()
"""Of this process."""


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
    if number in _AWAY or isinstance(error, pymysql.err.InterfaceError | asyncmy.errors.InterfaceError):
        return StorageUnavailable(text)
    refusals.note(node, number, text)
    if number in _LOCK_TIMEOUT:
        return LockTimeout(text, getattr(error, "statement", 0))
    return _REFUSALS.get(number, NodeRefuses)(text)


def connecting_failed(error: Exception, node: Node) -> StorageUnavailable:
    """Returns the error of a connection that can't be made. The server can't do anything then, whatever it says."""
    if refusal := certificate_refusal(error):
        return StorageUnavailable(f"{node.name}: {refusal}")
    ours = translate(error, node.name)
    if error.args and (number := error.args[0]) in _ACCOUNT:
        why = "its password has expired" if number in _EXPIRED else error.args[-1]
        shown = f"{node.name} refuses the account {node.user!r}"
        return AccountRefused(f"{shown}: {why}", shown)
    return StorageUnavailable(str(ours))
