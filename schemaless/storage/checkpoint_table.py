"""checkpoint: how far a consumer has finished a shard. Owns the compare-and-set that I10 asks for.

MySQL is not fenced by Kafka: two processes may believe that a shard is theirs. A process that moves a checkpoint names
the version of the row that it read. If the row has another one, nothing of the transaction stays, and the process
learns that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from operator import add

import msgspec

from schemaless.errors import NeedsLockedHeads
from schemaless.location import Location
from schemaless.position import BEGINNING_DIGEST, Position
from schemaless.storage import shard_head
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import NOW, Script, commas, literal, literals, sql, where
from schemaless.storage.table import Table

REASON_CHARACTERS_MAX = 2000
_TABLE = "schemaless.checkpoint"


class State(StrEnum):
    """A row of a shard that went to another cluster is `moved`: it can't move, and no operation returns it."""

    RUNNING = "running"
    STOPPED = "stopped"
    MOVED = "moved"
    """The shard went to another cluster, and the checkpoint that counts is there."""


_HERE = " AND state <> 'moved'"


class CellCounts(msgspec.Struct, frozen=True, gc=False):
    """What became of the cells that a trigger program has seen of a shard. As a change, a count may be negative.

    `filtered`: no function wanted them. `skipped`: functions said so. `waiting`: their next attempt is due later, or
    they wait behind a parked cell of their row.
    """

    called: int = 0
    filtered: int = 0
    skipped: int = 0
    parked: int = 0
    waiting: int = 0

    @property
    def seen(self) -> int:
        return self.called + self.filtered + self.skipped + self.parked + self.waiting

    def __add__(self, other: CellCounts) -> CellCounts:
        return CellCounts(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


NO_COUNTS = CellCounts()


class Checkpoint(msgspec.Struct, frozen=True, gc=False):
    """`position` is the last one finished. `reason` says why a shard stopped. `updated_at` is in microseconds.

    `finished` cells were finished since `counted_from`, an added_id, and `counts` says what became of them. `finished`
    is None for an index, which doesn't count.

    `worker` moved it last, None if that process gave the shard away. `begun`: it began the call of the next cell, which
    had ended as many processes as `kills` says.
    """

    consumer: str
    position: Position
    counted_from: int
    finished: int | None
    version: int
    state: State
    reason: str | None
    updated_at: int
    worker: int | None = None
    begun: bool = False
    kills: int = 0
    counts: CellCounts = NO_COUNTS

    @property
    def shard(self) -> int:
        return self.position.shard

    @property
    def location(self) -> Location:
        return self.position.location


_ROWS = Table(_TABLE, Checkpoint, position=Table("", Position, offset="NULL"), counts=Table("", CellCounts))


class Move(msgspec.Struct, frozen=True, gc=False):
    """From the version of the row that was read to a position. With a reason the shard stops there.

    `at` is the location of the row that was read, if that is known. A version alone may come again: in a row that is
    made anew, and on a node that is promoted.
    `finished` and `counts` are added to the row's. `restart`: the move goes back, and counting begins there.
    `begun` and `kills` are as in a checkpoint. `counts_before` are those of the row that was read, if that is known.
    """

    consumer: str
    version: int
    to: Position
    finished: int = 0
    stop_reason: str | None = None
    restart: bool = False
    begun: bool = False
    kills: int = 0
    counts: CellCounts = NO_COUNTS
    counts_before: CellCounts | None = None
    holds: bool = False
    """The checkpoint stays where it is. So another process that held it, too, can't be told from ourselves."""
    at: Location | None = None

    @property
    def counts_after(self) -> CellCounts | None:
        """What the row counts after the move, None if that isn't known."""
        if self.counts_before is None:
            return None
        return NO_COUNTS if self.restart else self.counts_before + self.counts


def make(datastore: str, consumer: str, starts: Iterable[Position], *, counts: bool = True) -> Operation[None]:
    """Makes checkpoints for shards that have none yet, at least one. The others stay as they are."""
    yield making(datastore, consumer, starts, counts=counts)


def making(datastore: str, consumer: str, starts: Iterable[Position], *, counts: bool) -> Script:
    """Returns the statement of `make`, for a script that does more."""
    rows = [
        literals(
            datastore,
            consumer,
            start.shard,
            start.generation,
            start.added_id,
            start.digest if start.added_id else BEGINNING_DIGEST,
            start.added_id,
            0 if counts else None,
            NOW,
        )
        for start in starts
    ]
    return (
        f"INSERT IGNORE INTO {_TABLE}"
        " (datastore, consumer, shard, generation, added_id, digest, counted_from, finished, updated_at)"
        f" VALUES {commas(rows)}"
    )


def of_consumer(datastore: str, consumer: str, shards: Iterable[int] = ()) -> Operation[list[Checkpoint]]:
    """Returns a consumer's checkpoints on this server, by shard. Where `shards` are named, others are left out."""
    only = {"shard": named} if (named := list(shards)) else {}
    return (yield from _ROWS.rows(where(datastore=datastore, consumer=consumer, **only) + _HERE + " ORDER BY shard"))


def of_shard(datastore: str, shard: int) -> Operation[list[Checkpoint]]:
    """Returns the checkpoints of one shard on this server, by consumer."""
    consumers = yield from query(f"SELECT DISTINCT consumer FROM {_TABLE} {where(datastore=datastore)}")
    if not consumers:
        return []
    which = where(datastore=datastore, shard=shard, consumer=[name for (name,) in consumers])
    return (yield from _ROWS.rows(f"{which}{_HERE} ORDER BY consumer"))


def reached(datastore: str, consumer: str, shard: int) -> Script:
    """Returns a SELECT of one checkpoint's generation and added_id, for a script that asks for more."""
    return f"SELECT generation, added_id FROM {_TABLE} {where(datastore=datastore, consumer=consumer, shard=shard)}"


def locations(datastore: str, consumer: str) -> Operation[dict[int, Location]]:
    """Returns by shard how far a consumer has finished, as this server has it."""
    which = where(datastore=datastore, consumer=consumer)
    rows = yield from query(f"SELECT shard, generation, added_id FROM {_TABLE} {which}")
    return {shard: Location(generation, added_id) for shard, generation, added_id in rows}


def added_ids_sum(datastore: str, consumer: str) -> Script:
    """Returns a SELECT of the sum of a consumer's checkpoints: it says which of two states of a server is later."""
    return f"SELECT COALESCE(SUM(added_id), 0) FROM {_TABLE} {where(datastore=datastore, consumer=consumer)}"


class MoveResult(msgspec.Struct, frozen=True, gc=False):
    """What did not move. `overtaken`: another process moved the row, or the shard is stopped. `away`: the shard went to
    another cluster. `undone`: nothing is against the move, but others of its transaction were overtaken.
    """

    overtaken: Sequence[Move] = ()
    away: Sequence[Move] = ()
    undone: Sequence[Move] = ()


def move(
    datastore: str, moves: Sequence[Move], effect: Script = "", worker: int | None = None
) -> Operation[MoveResult]:
    """Moves checkpoints of any consumers, at least one, in one transaction with `effect`. `worker` is the process.

    With an effect, one move that is overtaken undoes the whole transaction. Without one, each move is for itself.
    """
    update = _compare_and_set(datastore, moves, worker)
    try:
        if not effect:
            (result,) = yield update
            if result.affected == len(moves):
                return MoveResult()
        else:
            yield f"BEGIN;{update};SET @moved = ROW_COUNT();{UNDO.format(len(moves))};{effect};COMMIT"
            return MoveResult()
    except NeedsLockedHeads:  # a NULL where none may be: the transaction is undone
        pass
    found: dict[tuple[str, int], Checkpoint] = {}
    for consumer in {move.consumer for move in moves}:
        shards = [move.to.shard for move in moves if move.consumer == consumer]
        found |= {(consumer, row.shard): row for row in (yield from of_consumer(datastore, consumer, shards))}
    missing = {move.to.shard for move in moves if (move.consumer, move.to.shard) not in found}
    gone = (yield from shard_head.moved(datastore, missing)) if missing else set()
    overtaken, undone = [], []
    away = [move for move in moves if move.to.shard in gone]
    for move in [move for move in moves if move.to.shard not in gone]:
        row = found.get((move.consumer, move.to.shard))
        state = State.RUNNING if move.stop_reason is None else State.STOPPED
        moved = (move.version + 1, move.to.location, worker, move.begun, move.kills, state)
        known = row and (row.version, row.location, row.worker, row.begun, row.kills, row.state)
        # Our own COMMIT may have succeeded before its answer was lost. But if the move has more to store by now, then
        # what came later isn't stored.
        if row is not None and known == moved and not move.holds and move.counts_after in (None, row.counts):
            continue
        is_as_read = row is not None and row.version == move.version and move.at in (None, row.location)
        if is_as_read and row is not None and row.state is State.RUNNING:
            undone.append(move)
        else:
            overtaken.append(move)
    return MoveResult(overtaken, away, undone)


UNDO = "INSERT INTO schemaless.format SELECT NULL FROM DUAL WHERE @moved <> {}"
"""Fails, and so undoes its transaction, where another number of rows was moved: that column takes no NULL."""


def write_at(datastore: str, checkpoint: Checkpoint, script: Script) -> Operation[bool]:
    """Runs a script in one transaction while a checkpoint can't move, and leaves the checkpoint as it is.

    Returns False, and nothing of the script stays, if the checkpoint has moved since it was read. The script must be
    one that may be repeated.
    """
    # A match counts, though nothing changes: every connection has CLIENT_FOUND_ROWS.
    lock = f"UPDATE {_TABLE} SET version = version " + where(
        datastore=datastore,
        consumer=checkpoint.consumer,
        shard=checkpoint.shard,
        version=checkpoint.version,
        generation=checkpoint.location.generation,  # a version comes again in a row that is made anew
        added_id=checkpoint.location.added_id,
    )
    return (yield from change_one(lock, script))


def change_one(change: Script, script: Script) -> Operation[bool]:
    """Changes a row and runs a script in one transaction. Returns False, and nothing stays, if it changes no row."""
    try:
        yield f"BEGIN;{change};SET @moved = ROW_COUNT();{UNDO.format(1)};{script}{';' if script else ''}COMMIT"
    except NeedsLockedHeads:  # a NULL where none may be: the transaction is undone
        return False
    return True


def resume(datastore: str, consumer: str, shards: Iterable[int] = ()) -> Operation[int]:
    """Lets stopped shards run again, all or those named, and returns how many."""
    only = {"shard": named} if (named := list(shards)) else {}
    (result,) = yield (
        f"UPDATE {_TABLE} SET state = 'running', reason = NULL, worker = NULL, begun = 0, kills = 0,"
        f" updated_at = UTC_TIMESTAMP(6), version = version + 1"
        f" {where(datastore=datastore, consumer=consumer, state=State.STOPPED, **only)}"
    )
    return result.affected


def give_away(datastore: str, consumer: str, shards: Iterable[int], worker: int) -> Operation[None]:
    """Notes that a process gave these shards away, at least one, and that none of its calls are to blame."""
    which = where(datastore=datastore, consumer=consumer, worker=worker, shard=list(shards))
    yield f"UPDATE {_TABLE} SET worker = NULL, begun = 0 {which}"


def remove(datastore: str, consumer: str, seen_within_s: float) -> Operation[bool]:
    """Deletes the checkpoints of a consumer and all that belongs to them, unless a worker was seen lately.

    That is its parked cells with their history, jobs and orders, and the rows of its workers. Returns whether they are
    gone.
    """
    which = where(datastore=datastore, consumer=consumer)
    running = (
        f"SELECT * FROM schemaless.worker {which}"
        f" AND seen_at >= UTC_TIMESTAMP(6) - INTERVAL {round(seen_within_s)} SECOND"
    )
    yield f"DELETE FROM {_TABLE} {which} AND NOT EXISTS ({running})"
    rows = yield from query(f"SELECT 1 FROM {_TABLE} {which} LIMIT 1")
    if rows:
        return False
    for table in ("parked", "parked_history", "job", "trigger_order", "trigger_program", "worker"):
        yield f"DELETE FROM schemaless.{table} {which}"
    return True


def delete_all(datastore: str, consumer: str) -> Operation[None]:
    """Deletes the checkpoints of a consumer that is gone for good."""
    yield f"DELETE FROM {_TABLE} {where(datastore=datastore, consumer=consumer)}"


def _compare_and_set(datastore: str, moves: Sequence[Move], worker: int | None) -> Script:
    """Returns one statement, whatever the number of consumers and shards. A shard that is stopped doesn't move."""
    rows: list[Script] = []
    for move in sorted(moves, key=lambda move: (move.consumer, move.to.shard)):
        to, reason = move.to, move.stop_reason and move.stop_reason[:REASON_CHARACTERS_MAX]
        values: tuple[object, ...] = (
            to.shard,
            move.version,
            None if move.at is None else move.at.generation,
            None if move.at is None else move.at.added_id,
            to.generation,
            to.added_id,
            BEGINNING_DIGEST if to.added_id == 0 else to.digest,
            move.finished,
            int(move.restart),
            reason,
            int(move.begun),
            move.kills,
            *msgspec.structs.astuple(move.counts),
        )
        consumer = f"_ascii x'{move.consumer.encode().hex()}' COLLATE ascii_bin"  # so that rows are found by their keys
        rendered = [consumer, *map(literal, values)]
        if not rows:  # a union takes the names of its first part
            rendered = [f"{text} AS {name}" for name, text in zip(_MOVED, rendered, strict=True)]
        rows.append("SELECT " + commas(rendered))
    return (
        f"UPDATE ({' UNION ALL '.join(rows)}) AS moved STRAIGHT_JOIN {_TABLE} AS rows_"
        + sql(" ON rows_.datastore = %s", datastore.encode())
        + " AND rows_.consumer = moved.consumer AND rows_.shard = moved.shard SET"
        " rows_.counted_from = IF(moved.restarted, moved.added_id, rows_.counted_from),"
        " rows_.finished = IF(moved.restarted, rows_.finished * 0, rows_.finished + moved.cells),"
        f" {_COUNTED},"
        " rows_.generation = moved.generation, rows_.added_id = moved.added_id, rows_.digest = moved.digest,"
        " rows_.state = IF(moved.reason IS NULL, 'running', 'stopped'), rows_.reason = moved.reason,"
        " rows_.begun = moved.begun, rows_.kills = moved.kills,"
        + sql(" rows_.worker = %s,", worker)
        + " rows_.updated_at = UTC_TIMESTAMP(6), rows_.version = rows_.version + 1"
        " WHERE rows_.version = moved.read_version AND rows_.state = 'running' AND (moved.read_added_id IS NULL"
        " OR (rows_.generation = moved.read_generation AND rows_.added_id = moved.read_added_id))"
    )


_MOVED = (
    "consumer", "shard", "read_version", "read_generation", "read_added_id", "generation", "added_id", "digest",
    "cells", "restarted", "reason", "begun", "kills", "called", "filtered", "skipped", "parked", "waiting",
)  # fmt: skip
_COUNTED = ", ".join(
    f"rows_.{name} = IF(moved.restarted, 0, rows_.{name} + moved.{name})" for name in CellCounts.__struct_fields__
)
