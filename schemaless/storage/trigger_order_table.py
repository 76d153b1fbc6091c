"""trigger_order: pauses and seeks that people ordered for a trigger program. trigger_program: what it is.

People only order. The owner of a shard carries a seek out in the transaction that moves the checkpoint, because only it
knows what is in flight. The row of the whole program is on every cluster, and the latest counts. So a cluster that is
away keeps nobody from pausing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from schemaless.position import BEGINNING_DIGEST, Position
from schemaless.storage import everywhere, shard_head
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import NOW, Script, commas, literals, matching, sql, where
from schemaless.storage.table import Table

REASON_CHARACTERS_MAX = 300
WHOLE_PROGRAM = -1
_TABLE = "schemaless.trigger_order"


class ProgramPause(msgspec.Struct, frozen=True):
    """Whether the whole program is paused, and why. `changed_at` is in microseconds."""

    paused: bool
    reason: str | None
    changed_at: int


_PROGRAMS = Table(_TABLE, ProgramPause)
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
    only = {} if consumer is None else {"consumer": consumer}
    rows = yield from query(
        "SELECT consumer, shard, paused, reason, seek, generation, added_id, digest,"
        f" {MICROSECONDS.format('changed_at')} FROM {_TABLE}"
        f" {where(datastore=datastore, **only)} AND (paused OR seek OR shard = {WHOLE_PROGRAM})"
        f" AND {shard_head.not_moved(datastore)}"
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
    return everywhere.latest(one.program for one in orders) or NOT_PAUSED


def put_program(datastore: str, consumer: str, pause: ProgramPause) -> Operation[None]:
    """Stores whether the whole program is paused, unless a later order is stored."""
    cut = msgspec.structs.replace(pause, reason=_cut(pause.reason))
    yield _PROGRAMS.newest(cut, datastore=datastore, consumer=consumer, shard=WHOLE_PROGRAM)


def pause_shards(datastore: str, consumer: str, shards: Sequence[int], reason: str | None) -> Operation[None]:
    """Pauses shards whose home is this server's cluster, at least one. To be run `at_home`."""
    rows = [sql("(%s, %s, %s, 1, %s, %s)", datastore, consumer, shard, _cut(reason), NOW) for shard in sorted(shards)]
    yield (
        f"INSERT INTO {_TABLE} (datastore, consumer, shard, paused, reason, changed_at) VALUES {commas(rows)}"
        " ON DUPLICATE KEY UPDATE paused = 1, reason = VALUES(reason), changed_at = VALUES(changed_at)"
    )


def resume_shards(datastore: str, consumer: str, shards: Sequence[int] = ()) -> Operation[int]:
    """Ends the pauses of single shards, all or those named, and returns how many there were."""
    only = matching(shard=shards) if shards else f"shard <> {WHOLE_PROGRAM}"
    (result,) = yield (
        f"UPDATE {_TABLE} SET paused = 0, reason = NULL, changed_at = UTC_TIMESTAMP(6)"
        f" {where(datastore=datastore, consumer=consumer)} AND paused AND {only}"
    )
    return result.affected


def seek(datastore: str, consumer: str, targets: Sequence[Position], number: int) -> Operation[None]:
    """Orders that checkpoints of shards whose home is here go to these positions, at least one. To be run `at_home`.

    A later seek replaces one that isn't carried out yet. `number` grows from seek to seek.
    """
    rows = [
        literals(
            datastore,
            consumer,
            to.shard,
            number,
            to.generation,
            to.added_id,
            to.digest if to.added_id else BEGINNING_DIGEST,
            NOW,
        )
        for to in sorted(targets, key=lambda to: to.shard)
    ]
    yield (
        f"INSERT INTO {_TABLE} (datastore, consumer, shard, seek, generation, added_id, digest, changed_at)"
        f" VALUES {commas(rows)} ON DUPLICATE KEY UPDATE seek = GREATEST(seek + 1, VALUES(seek)),"
        " generation = VALUES(generation), added_id = VALUES(added_id), digest = VALUES(digest),"
        " changed_at = VALUES(changed_at)"
    )


def seek_done(datastore: str, consumer: str, shard: int, number: int) -> Script:
    """Ends a seek, in the transaction that moves the checkpoint. A later seek of the shard stays ordered."""
    return f"UPDATE {_TABLE} SET seek = 0 " + where(datastore=datastore, consumer=consumer, shard=shard, seek=number)


def _cut(reason: str | None) -> str | None:
    return reason and reason[:REASON_CHARACTERS_MAX]


# trigger_program: which program owns a name, and its functions by column, as the worker that started last has them.
#
# Who lists parked cells needs them: what waits behind a parked cell are cells of the program's columns, and a function
# that the program no longer has can't be called again. The latest row of all clusters counts.

ORIGIN_CHARACTERS_MAX = 500


class ProgramFunctions(msgspec.Struct, frozen=True):
    """Names of functions by column, in the order in which they are called. `changed_at` is in microseconds.

    `origin` is the module or file of the program, empty where nobody said so.
    """

    functions: Mapping[str, Sequence[str]]
    version: str
    changed_at: int = 0
    origin: str = ""

    @property
    def names(self) -> set[str]:
        return {name for names in self.functions.values() for name in names}


_FUNCTIONS = Table("schemaless.trigger_program", ProgramFunctions)


def claim(
    datastore: str, consumer: str, program: ProgramFunctions, seen: ProgramFunctions | None = None
) -> Operation[bool]:
    """Stores what a worker that starts has. Returns False if the name belongs to another program than its own.

    `seen` is the owner that the worker knows of, and replaces. So of two programs that start at once, one gets False.
    """
    origins = sql("origin IN (%s, %s)", program.origin, program.origin if seen is None else seen.origin)
    columns = ("functions", "version", "changed_at", "origin")  # the last one last: the condition reads it
    cut = msgspec.structs.replace(program, version=program.version[:64])
    insert = _FUNCTIONS.insert([cut], datastore=datastore, consumer=consumer, changed_at=NOW)
    changed = ", ".join(f"{column} = IF({origins}, VALUES({column}), {column})" for column in columns)
    yield f"{insert} ON DUPLICATE KEY UPDATE {changed}"
    stored = yield from functions_of(datastore, consumer)
    return stored is not None and stored.origin == program.origin


def functions_of(datastore: str, consumer: str) -> Operation[ProgramFunctions | None]:
    """Returns what this server knows of a program, None if no worker has said so."""
    rows = yield from _FUNCTIONS.rows(where(datastore=datastore, consumer=consumer))
    return rows[0] if rows else None


def functions_by_program(datastore: str) -> Operation[dict[str, ProgramFunctions]]:
    """Returns by consumer what this server knows of all programs."""
    return (yield from _FUNCTIONS.by("consumer", where(datastore=datastore) + " ORDER BY consumer"))
