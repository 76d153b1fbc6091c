"""trigger_order: pauses and seeks that people ordered for a trigger program.

People only order. The owner of a shard carries a seek out in the transaction that moves the checkpoint, because only it
knows what is in flight. The row of the whole program is on every cluster, and the latest counts. So a cluster that is
away keeps nobody from pausing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from schemaless.position import BEGINNING_DIGEST, Position
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Script, Time, commas, sql

REASON_CHARACTERS_MAX = 300
WHOLE_PROGRAM = -1
_TABLE = "schemaless.trigger_order"


class ProgramPause(msgspec.Struct, frozen=True):
    """Whether the whole program is paused, and why. `changed_at` is in microseconds."""

    paused: bool
    reason: str | None
    changed_at: int


NOT_PAUSED = ProgramPause(paused=False, reason=None, changed_at=0)


class SeekOrder(msgspec.Struct, frozen=True):
    """Where the checkpoint of a shard is to go. `number` tells it from other seeks of the shard."""

    to: Position
    number: int


class TriggerOrders(msgspec.Struct, frozen=True):
    """The orders for one program that a server has. `paused` has the reasons of single shards."""

    program: ProgramPause = NOT_PAUSED
    paused: dict[int, str | None] = {}
    seeks: dict[int, SeekOrder] = {}


def of_consumer(datastore: str, consumer: str) -> Operation[TriggerOrders]:
    """Returns the orders of this server for one program."""
    return (yield from of_datastore(datastore, consumer)).get(consumer, TriggerOrders())


def of_datastore(datastore: str, consumer: str | None = None) -> Operation[dict[str, TriggerOrders]]:
    """Returns the orders of this server by program, of all programs or of one."""
    only = "" if consumer is None else sql(" AND consumer = %s", consumer)
    rows = yield from query(
        "SELECT consumer, shard, paused, reason, seek, generation, added_id, digest,"
        f" {MICROSECONDS.format('changed_at')} FROM {_TABLE}"
        + sql(" WHERE datastore = %s", datastore)
        + f"{only} AND (paused OR seek OR shard = {WHOLE_PROGRAM})"
    )
    found: dict[str, TriggerOrders] = {}
    for name, shard, paused, reason, seek, generation, added_id, digest, changed_at in rows:
        orders = found.get(name) or TriggerOrders(NOT_PAUSED, {}, {})
        if shard == WHOLE_PROGRAM:
            orders = msgspec.structs.replace(orders, program=ProgramPause(bool(paused), reason, changed_at))
        elif paused:
            orders.paused[shard] = reason
        if seek:
            orders.seeks[shard] = SeekOrder(Position(shard, generation, added_id, digest=digest), seek)
        found[name] = orders
    return found


def latest(orders: Iterable[TriggerOrders]) -> ProgramPause:
    """Returns what counts of the answers of several clusters."""
    return max((one.program for one in orders), key=lambda program: program.changed_at, default=NOT_PAUSED)


def put_program(datastore: str, consumer: str, pause: ProgramPause) -> Operation[None]:
    """Stores whether the whole program is paused, unless a later order is stored."""
    newer = "VALUES(changed_at) > changed_at"
    yield sql(
        f"INSERT INTO {_TABLE} (datastore, consumer, shard, paused, reason, changed_at) VALUES (%s, %s, %s, %s, %s, %s)"
        f" ON DUPLICATE KEY UPDATE paused = IF({newer}, VALUES(paused), paused),"
        f" reason = IF({newer}, VALUES(reason), reason), changed_at = GREATEST(changed_at, VALUES(changed_at))",
        datastore,
        consumer,
        WHOLE_PROGRAM,
        pause.paused,
        _cut(pause.reason),
        Time(pause.changed_at),
    )


def pause_shards(datastore: str, consumer: str, shards: Sequence[int], reason: str | None) -> Operation[None]:
    """Pauses shards whose home is this server's cluster, at least one."""
    rows = commas(
        [
            sql("(%s, %s, %s, 1, %s, UTC_TIMESTAMP(6))", datastore, consumer, shard, _cut(reason))
            for shard in sorted(shards)
        ]
    )
    yield (
        f"INSERT INTO {_TABLE} (datastore, consumer, shard, paused, reason, changed_at) VALUES {rows}"
        " ON DUPLICATE KEY UPDATE paused = 1, reason = VALUES(reason), changed_at = VALUES(changed_at)"
    )


def resume_shards(datastore: str, consumer: str, shards: Iterable[int] = ()) -> Operation[int]:
    """Ends the pauses of single shards, all or those named, and returns how many there were."""
    numbers = commas([str(shard) for shard in shards])
    only = f"shard IN ({numbers})" if numbers else f"shard <> {WHOLE_PROGRAM}"
    (result,) = yield (
        f"UPDATE {_TABLE} SET paused = 0, reason = NULL, changed_at = UTC_TIMESTAMP(6)"
        + sql(" WHERE datastore = %s AND consumer = %s", datastore, consumer)
        + f" AND paused AND {only}"
    )
    return result.affected


def seek(datastore: str, consumer: str, targets: Sequence[Position], number: int) -> Operation[None]:
    """Orders that checkpoints of shards whose home is here go to these positions, at least one.

    A later seek replaces one that isn't carried out yet. `number` grows from seek to seek.
    """
    rows = commas(
        [
            sql(
                "(%s, %s, %s, %s, %s, %s, %s, UTC_TIMESTAMP(6))",
                datastore,
                consumer,
                to.shard,
                number,
                to.generation,
                to.added_id,
                to.digest if to.added_id else BEGINNING_DIGEST,
            )
            for to in sorted(targets, key=lambda to: to.shard)
        ]
    )
    yield (
        f"INSERT INTO {_TABLE} (datastore, consumer, shard, seek, generation, added_id, digest, changed_at)"
        f" VALUES {rows} ON DUPLICATE KEY UPDATE seek = GREATEST(seek + 1, VALUES(seek)),"
        " generation = VALUES(generation), added_id = VALUES(added_id), digest = VALUES(digest),"
        " changed_at = VALUES(changed_at)"
    )


def seek_done(datastore: str, consumer: str, shard: int, number: int) -> Script:
    """Ends a seek, in the transaction that moves the checkpoint. A later seek of the shard stays ordered."""
    return sql(
        f"UPDATE {_TABLE} SET seek = 0 WHERE datastore = %s AND consumer = %s AND shard = %s AND seek = %s",
        datastore,
        consumer,
        shard,
        number,
    )


def _cut(reason: str | None) -> str | None:
    return reason and reason[:REASON_CHARACTERS_MAX]
