"""Idle transactions of our own account: they hold row locks and run nothing.

No operation leaves a transaction open between two scripts for long. So such a transaction belongs to a process that
stands still, or to a person who forgot it. Other accounts' transactions are not touched. It needs the right PROCESS.
"""

from __future__ import annotations

from contextlib import suppress

from schemaless.errors import NodeRefuses
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import sql


def end(idle_s: int) -> Operation[list[int]]:
    """Ends connections whose transaction holds rows and has been idle for `idle_s`. Returns their ids."""
    rows = yield from query(
        sql(
            "SELECT process.id FROM information_schema.innodb_trx AS trx"
            " JOIN information_schema.processlist AS process ON process.id = trx.trx_mysql_thread_id"
            " WHERE process.user = SUBSTRING_INDEX(CURRENT_USER(), '@', 1) AND process.command = 'Sleep'"
            " AND process.time >= %s AND trx.trx_rows_locked > 0",
            idle_s,
        )
    )
    ended = []
    for (connection,) in rows:
        with suppress(NodeRefuses):  # it ended by itself
            yield f"KILL {int(connection)}"
            ended.append(int(connection))
    return ended
