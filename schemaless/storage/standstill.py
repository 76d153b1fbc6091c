"""Why a server stands still: replication that stopped or waits, and who holds what it waits for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from schemaless.errors import (
    AccountRefused,
    LockTimeout,
    Misconfigured,
    NodeRefuses,
    NotWhole,
    Overloaded,
    ShardsLocked,
)
from schemaless.names import Stall
from schemaless.storage.operation import Operation, Row, query
from schemaless.storage.sql import Script
from schemaless.topology import Role


class Standstill(msgspec.Struct, frozen=True):
    """Why a server doesn't continue, in one word and in a sentence."""

    stall: Stall
    why: str


def stall_after(error: Exception) -> Stall:
    """Returns the word for a server that couldn't be asked: it is away, or it runs and refuses."""
    if isinstance(error, LockTimeout | ShardsLocked | Overloaded):
        return Stall.BLOCKED
    if isinstance(error, NotWhole):
        return Stall.NOT_DENSE
    return Stall.REFUSED if isinstance(error, AccountRefused | Misconfigured | NodeRefuses) else Stall.MASTER_DOWN


SHOW_REPLICATION = "SHOW REPLICA STATUS"
_REPLICATION_OF_ALL: Script = "/*!80000 SHOW REPLICA STATUS */ /*M! SHOW ALL REPLICAS STATUS */"
"""MariaDB shows one source otherwise. Here its rows have two more columns before the others."""
_IO_STATE, _IO_RUNS, _APPLIER_RUNS, _LAST_ERROR, _LAST_IO_ERROR = 0, 10, 11, 19, 35
"""Columns of SHOW REPLICA STATUS, on both kinds of server."""
_DELAYS = 42, 47
"""The column SQL_Delay, on MySQL and on MariaDB, which has a word in the 42nd."""


def of_server(role: Role) -> Operation[Standstill | None]:
    """Returns why a server doesn't continue, None if nothing is known to hold it."""
    sources = (yield from replication()) if role is Role.MINION else None
    if sources is not None and not sources:
        return Standstill(Stall.REFUSED, "it replicates from nobody")
    for row in sources or ():
        if row[_APPLIER_RUNS] != "Yes":
            return Standstill(Stall.BLOCKED, f"replication stands: {row[_LAST_ERROR] or 'its applier was stopped'}")
        if row[_IO_RUNS] != "Yes":
            why = row[_LAST_IO_ERROR] or row[_IO_STATE] or "its receiver was stopped"
            return Standstill(Stall.MASTER_DOWN, f"replication receives nothing: {why}")
        if delay_s := next((int(row[column]) for column in _DELAYS if str(row[column]).isdigit()), 0):
            return Standstill(Stall.REFUSED, f"replication waits on purpose: SQL_Delay is {delay_s} s")
    waiting = yield from _if_allowed(
        "SELECT user, state, time FROM information_schema.processlist"
        " WHERE state LIKE 'Waiting for %lock' ORDER BY time DESC LIMIT 1"
    )
    for user, state, seconds in waiting or ():
        who = "replication" if user == "system user" else f"an account ({user})"
        holder = yield from lock_holder()
        return Standstill(Stall.BLOCKED, f"{who} is {state[0].lower()}{state[1:]} for {int(seconds)} s. {holder}")
    return None


def lock_holder() -> Operation[str]:
    """Returns a sentence about the connection that probably holds a lock: the one whose transaction is idle longest."""
    rows = yield from _if_allowed(
        "SELECT process.id, process.user, process.host, process.time FROM information_schema.innodb_trx AS trx"
        " JOIN information_schema.processlist AS process ON process.id = trx.trx_mysql_thread_id"
        " WHERE process.user <> 'system user' AND process.command = 'Sleep' ORDER BY process.time DESC LIMIT 1"
    )
    for connection, user, host, seconds in rows or ():
        return f"Connection {connection} of {user} at {host} has an open transaction and is idle for {int(seconds)} s"
    return "No transaction is idle: SHOW FULL PROCESSLIST has the session that locks tables"


def replication() -> Operation[Sequence[Row] | None]:
    """Returns a row of SHOW REPLICA STATUS for each source, None without the right."""
    rows = yield from _if_allowed(_REPLICATION_OF_ALL)
    is_mariadb = rows and isinstance(rows[0][_IO_RUNS], int)  # a position, where MySQL has a word
    return [row[2:] for row in rows] if rows and is_mariadb else rows


def _if_allowed(script: Script) -> Operation[Sequence[Row] | None]:
    """Returns the rows, None without the right: server_settings.py tells which one is missing."""
    try:
        return (yield from query(script))
    except NodeRefuses:
        return None
