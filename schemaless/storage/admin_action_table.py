"""admin_action: who changed what, when, and from where (I17). Each cluster has the actions that were written to it."""

from __future__ import annotations

import msgspec

from schemaless.errors import TableMissing
from schemaless.storage.operation import Operation
from schemaless.storage.sql import NOW
from schemaless.storage.table import Table

KEPT_DAYS = 400
WHAT_CHARACTERS_MAX = 255
_DELETED_AT_ONCE = 100


class AdminAction(msgspec.Struct, frozen=True, order=True):
    """`at` is in microseconds since the epoch, UTC. `who` is a token's name, or a user of the machine `peer`."""

    at: int
    who: str
    what: str
    peer: str
    outcome: str


_TABLE = Table("schemaless.admin_action", AdminAction)


def insert(action: AdminAction) -> Operation[None]:
    """Adds an action, and deletes some that are older than KEPT_DAYS."""
    cut = AdminAction(0, action.who[:96], action.what[:WHAT_CHARACTERS_MAX], action.peer[:64], action.outcome[:64])
    yield _TABLE.insert([cut], at=NOW)
    yield (
        f"DELETE FROM {_TABLE.name} WHERE at < UTC_TIMESTAMP() - INTERVAL {KEPT_DAYS} DAY"
        f" ORDER BY action_id LIMIT {_DELETED_AT_ONCE}"
    )


def newest(limit: int) -> Operation[list[AdminAction]]:
    """Returns the last actions that this server has, newest first."""
    try:
        return (yield from _TABLE.rows("ORDER BY action_id DESC LIMIT %s", limit))
    except TableMissing:
        return []
