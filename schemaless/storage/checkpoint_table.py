"""checkpoint: how far a consumer has finished a shard. Owns the compare-and-set that I10 asks for.

MySQL is not fenced by Kafka: two processes may believe that a shard is theirs. A process that moves a checkpoint names
the location that it read. If the checkpoint has another one, it doesn't move, and the process is told so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from schemaless.location import Location
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Script, commas, sql

REASON_CHARACTERS_MAX = 2000
_TABLE = "schemaless.checkpoint"


class State(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"


class Checkpoint(msgspec.Struct, frozen=True, gc=False):
    """`location` is the last one finished. `reason` says why a shard stopped. `updated_at` is in microseconds."""

    consumer: str
    shard: int
    location: Location
    state: State
    reason: str | None
    updated_at: int


class Move(msgspec.Struct, frozen=True, gc=False):
    """From the location that was read, forward. With a reason the shard stops there."""

    shard: int
    read: Location
    to: Location
    stop_reason: str | None = None


def make(datastore: str, consumer: str, starts: Mapping[int, Location]) -> Operation[None]:
    """Makes checkpoints for shards that have none yet. The others stay as they are."""
    rows = [
        sql(
            "(%s, %s, %s, %s, %s, 'running', NULL, UTC_TIMESTAMP(6))",
            datastore,
            consumer,
            shard,
            start.generation,
            start.added_id,
        )
        for shard, start in starts.items()
    ]
    yield f"INSERT IGNORE INTO {_TABLE} VALUES {commas(rows)}"


def of_consumer(datastore: str, consumer: str, shards: Iterable[int] = ()) -> Operation[list[Checkpoint]]:
    """Returns a consumer's checkpoints on this server, by shard. Where `shards` are named, others are left out."""
    numbers = commas([str(shard) for shard in shards])
    only = f"AND shard IN ({numbers}) " if numbers else ""
    where = sql(f"WHERE datastore = %s AND consumer = %s {only}ORDER BY shard", datastore, consumer)
    return (yield from _select(where))


def all_of(datastore: str) -> Operation[list[Checkpoint]]:
    """Returns the checkpoints of all consumers on this server, by consumer and shard."""
    return (yield from _select(sql("WHERE datastore = %s ORDER BY consumer, shard", datastore)))


def reached(datastore: str, consumer: str, shard: int) -> Script:
    """Returns a SELECT of one checkpoint's generation and added_id, for a script that asks for more."""
    return sql(
        f"SELECT generation, added_id FROM {_TABLE} WHERE datastore = %s AND consumer = %s AND shard = %s",
        datastore,
        consumer,
        shard,
    )


def move(datastore: str, consumer: str, moves: Sequence[Move], effect: Script = "") -> Operation[list[Move]]:
    """Moves checkpoints, at least one and each for itself, in one transaction with `effect`. Returns the moves that
    failed, because another process moved the checkpoint meanwhile.

    The effect stays also then, which saves a round trip. So it must be one that may be repeated and come late (I11).
    """
    compare_and_set = _compare_and_set(datastore, consumer, moves)
    results = yield f"BEGIN;{effect};{compare_and_set};COMMIT" if effect else compare_and_set
    moved = results[-2 if effect else -1].affected
    if moved == len(moves):
        return []
    # Our own COMMIT may have succeeded before its answer was lost: a checkpoint that is at its goal has moved.
    found = yield from of_consumer(datastore, consumer, [move.shard for move in moves])
    locations = {checkpoint.shard: checkpoint.location for checkpoint in found}
    return [move for move in moves if locations.get(move.shard) != move.to]


def resume(datastore: str, consumer: str, shards: Iterable[int] = ()) -> Operation[int]:
    """Lets stopped shards run again, all or those named, and returns how many."""
    numbers = commas([str(shard) for shard in shards])
    only = f" AND shard IN ({numbers})" if numbers else ""
    (result,) = yield sql(
        f"UPDATE {_TABLE} SET state = 'running', reason = NULL, updated_at = UTC_TIMESTAMP(6)"
        f" WHERE datastore = %s AND consumer = %s AND state = 'stopped'{only}",
        datastore,
        consumer,
    )
    return result.affected


def _compare_and_set(datastore: str, consumer: str, moves: Sequence[Move]) -> Script:
    """Returns one statement, whatever the number of shards. A shard that is stopped doesn't move."""
    shards = commas([str(move.shard) for move in moves])
    read = commas([f"({move.shard},{move.read.generation},{move.read.added_id})" for move in moves])
    sets = [
        f"generation = {_by_shard({m.shard: str(m.to.generation) for m in moves})}",
        f"added_id = {_by_shard({m.shard: str(m.to.added_id) for m in moves})}",
        "updated_at = UTC_TIMESTAMP(6)",
    ]
    if any(move.stop_reason is not None for move in moves):
        states = {m.shard: "'running'" if m.stop_reason is None else "'stopped'" for m in moves}
        reasons = {m.shard: sql("%s", m.stop_reason and m.stop_reason[:REASON_CHARACTERS_MAX]) for m in moves}
        sets += [f"state = {_by_shard(states)}", f"reason = {_by_shard(reasons)}"]
    where = sql("WHERE datastore = %s AND consumer = %s AND state = 'running'", datastore, consumer)
    return (
        f"UPDATE {_TABLE} SET {commas(sets)} {where}"
        f" AND shard IN ({shards}) AND (shard, generation, added_id) IN ({read})"
    )


def _by_shard(rendered: Mapping[int, str]) -> Script:
    if len(set(rendered.values())) == 1:
        return next(iter(rendered.values()))
    return "CASE shard " + " ".join(f"WHEN {shard} THEN {text}" for shard, text in rendered.items()) + " END"


def _select(where: Script) -> Operation[list[Checkpoint]]:
    rows = yield from query(
        f"SELECT consumer, shard, generation, added_id, state, reason, {MICROSECONDS.format('updated_at')}"
        f" FROM {_TABLE} {where}"
    )
    return [
        Checkpoint(consumer, shard, Location(generation, added_id), State(state), reason, updated_at)
        for consumer, shard, generation, added_id, state, reason, updated_at in rows
    ]
