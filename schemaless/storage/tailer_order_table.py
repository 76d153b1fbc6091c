"""tailer_order: what an operator ordered of the tailers of a datastore. On every cluster: the latest row counts.

A stack made before this table has none until somebody orders something.
"""

from __future__ import annotations

import msgspec

from schemaless.errors import TableMissing
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Time, sql


class TailerCommand(msgspec.Struct, frozen=True):
    """`paused`: nothing more is published. `seeks`: how often an operator has moved progress: a tailer that opened its
    logs before reads it again. `changed_at` in microseconds since the epoch.
    """

    paused: bool
    seeks: int
    changed_at: int


NO_COMMAND = TailerCommand(paused=False, seeks=0, changed_at=0)


def put(datastore: str, command: TailerCommand) -> Operation[None]:
    """Writes what an operator ordered, unless a later order is stored."""
    newer = "VALUES(changed_at) > changed_at"
    yield sql(
        "INSERT INTO schemaless.tailer_order (datastore, paused, seeks, changed_at) VALUES (%s, %s, %s, %s)"
        f" ON DUPLICATE KEY UPDATE paused = IF({newer}, VALUES(paused), paused),"
        f" seeks = IF({newer}, VALUES(seeks), seeks), changed_at = GREATEST(changed_at, VALUES(changed_at))",
        datastore,
        command.paused,
        command.seeks,
        Time(command.changed_at),
    )


def all_of() -> Operation[dict[str, TailerCommand]]:
    """Returns the orders by datastore."""
    columns = f"datastore, paused, seeks, {MICROSECONDS.format('changed_at')}"
    try:
        rows = yield from query(f"SELECT {columns} FROM schemaless.tailer_order")
    except TableMissing:
        return {}
    return {name: TailerCommand(bool(paused), seeks, changed_at) for name, paused, seeks, changed_at in rows}
