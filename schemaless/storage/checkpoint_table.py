"""checkpoint: how far a consumer has finished a shard. Owns the compare-and-set that I10 asks for.

MySQL is not fenced by Kafka: two processes may believe that a shard is theirs. Whoever moves a checkpoint names the
location that it read; if another one stands there, the checkpoint doesn't move and the caller is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from schemaless.location import Location
from schemaless.storage.operation import Operation, Row, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Script, commas, sql

REASON_CHARACTERS_MAX = 2000
_TABLE = "schemaless.checkpoint"


class State(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"


class Checkpoint(msgspec.Struct, frozen=True, gc=False):
    """`location` is the last one finished; `reason` says why a shard stopped. `updated_at` in microseconds."""

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
    """Checkpoints for shards that have none yet; the others stay as they are."""
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
    """On this server, by shard; only of `shards` if any are named."""
    numbers = commas([str(shard) for shard in shards])
    only = f"AND shard IN ({numbers}) " if numbers else ""
    where = sql(f"WHERE datastore = %s AND consumer = %s {only}ORDER BY shard", datastore, consumer)
    return (yield from _select(where))


def all_of(datastore: str) -> Operation[list[Checkpoint]]:
    """On this server, of all consumers."""
    return (yield from _select(sql("WHERE datastore = %s ORDER BY consumer, shard", datastore)))


def reached(datastore: str, consumer: str, shard: int) -> Script:
    """One row with the generation and the added_id, for a script that asks for more."""
    return sql(
        f"SELECT generation, added_id FROM {_TABLE} WHERE datastore = %s AND consumer = %s AND shard = %s",
        datastore,
        consumer,
        shard,
    )


def move(datastore: str, consumer: str, moves: Sequence[Move], effect: Script = "") -> Operation[list[Move]]:
    """Moves checkpoints, each for itself, in one transaction with `effect`; at least one. Returns those that another
    process moved meanwhile.

    The effect stays also then, so it must be one that may be repeated and come late (I11): that saves a round trip.
    """
    compare_and_set = _compare_and_set(datastore, consumer, moves)
    results = yield f"BEGIN;{effect};{compare_and_set};COMMIT" if effect else compare_and_set
    moved = results[-2 if effect else -1].affected
    return [] if moved == len(moves) else (yield from _missed(datastore, consumer, moves))


def resume(datastore: str, consumer: str, shards: Iterable[int] = ()) -> Operation[int]:
    """Lets stopped shards run again: all, or those named. Returns how many."""
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
    """One statement, whatever the number of shards; a shard that is stopped doesn't move."""
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


def _missed(datastore: str, consumer: str, moves: Sequence[Move]) -> Operation[list[Move]]:
    """Not those that stand where they were to go: the answer to our own COMMIT may have been lost."""
    found = yield from of_consumer(datastore, consumer, [move.shard for move in moves])
    stands = {checkpoint.shard: checkpoint.location for checkpoint in found}
    return [move for move in moves if stands.get(move.shard) != move.to]


def _select(where: Script) -> Operation[list[Checkpoint]]:
    rows = yield from query(
        f"SELECT consumer, shard, generation, added_id, state, reason, {MICROSECONDS.format('updated_at')}"
        f" FROM {_TABLE} {where}"
    )
    return [_checkpoint(row) for row in rows]


def _checkpoint(row: Row) -> Checkpoint:
    consumer, shard, generation, added_id, state, reason, updated_at = row
    return Checkpoint(consumer, shard, Location(generation, added_id), State(state), reason, updated_at)
