"""shard_move: shards that come to a cluster, on its master. Owns the transactions of a switch.

The row decides whether a switch counts. Whoever closes the former home, opens the new one or takes the switch back
locks it and names the attempt, so a process that is late changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from schemaless.errors import Corrupt, StateConflict
from schemaless.location import GenerationStart
from schemaless.storage import shard_copy, shard_head
from schemaless.storage.checkpoint_table import State
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_copy import CopiedPage, Texts
from schemaless.storage.shard_head import MICROSECONDS, Head
from schemaless.storage.sql import NOW, Expression, Name, Script, Time, commas, literal, matching, sql, where
from schemaless.storage.table import Table
from schemaless.topology import Datastore

LAG_MAX_MS = 2000
COMMIT_MAX_MS = 100
READY_BEHIND_CELLS = 200


class MoveState(StrEnum):
    COPYING = "copying"
    READY = "ready"
    CLOSING = "closing"
    OPEN = "open"
    """The target is the home. The move can be reversed."""
    COMPLETE = "complete"


class ShardMove(msgspec.Struct, frozen=True):
    """How far a shard came to `target`. `docs/growth.md` has the states. Times are in microseconds.

    `epoch` is of the source's master when it was to be closed.
    `is_back`: the target is the former home, to which cells are copied in case that the switch is reversed.
    `generation` and `head` are the source's. Cells up to `copied` are at the target, with this `digest`.
    """

    datastore: str
    shard: int
    source: str
    target: str
    state: MoveState
    begun_at: int
    is_back: bool = False
    attempt: int = 0
    epoch: int = 0
    generation: int = 1
    copied: int = 0
    digest: str = shard_copy.NO_CELLS
    head: int = 0
    cells_s: int = 0
    lag_max_ms: int = LAG_MAX_MS
    commit_max_ms: int = COMMIT_MAX_MS
    pause_us: int | None = None
    told: str = ""
    changed_at: int = 0


def state_at(copied: int, head: int) -> MoveState:
    return MoveState.READY if head - copied < READY_BEHIND_CELLS else MoveState.COPYING


TABLE = Table("schemaless.shard_move", ShardMove)
_BEFORE_OPEN = (MoveState.COPYING.value, MoveState.READY.value, MoveState.CLOSING.value)


def moves() -> Operation[list[ShardMove]]:
    """Returns what comes to this server's cluster, or came."""
    return (yield from TABLE.rows("ORDER BY datastore, shard"))


def homes() -> Operation[set[tuple[str, int]]]:
    """Returns the shards, as (datastore, shard), that came to this server's cluster and live there now."""
    rows = yield from query(
        f"SELECT datastore, shard FROM {TABLE.name} JOIN schemaless.shard_head USING (datastore, shard)"
        " WHERE moved_to IS NULL"
    )
    return set(rows)


def left(datastore: str) -> Operation[set[int]]:
    """Returns the shards that lived on this server's cluster, and live on another one now."""
    rows = yield from query(
        f"SELECT shard FROM schemaless.shard_head {where(datastore=datastore)} AND moved_to IS NOT NULL"
    )
    return {shard for (shard,) in rows}


def of_shard(datastore: str, shard: int) -> Operation[ShardMove | None]:
    found = yield from TABLE.rows(where(datastore=datastore, shard=shard))
    return found[0] if found else None


def unchanged_s(move: ShardMove) -> Operation[int]:
    """Returns for how long nobody has changed a row, by the clock that wrote it."""
    which = where(datastore=move.datastore, shard=move.shard)
    ((seconds,),) = yield from query(
        f"SELECT TIMESTAMPDIFF(SECOND, changed_at, UTC_TIMESTAMP(6)) FROM {TABLE.name} {which}"
    )
    return int(seconds)


def under_way(datastore: str) -> Operation[dict[int, ShardMove]]:
    """Returns by shard what comes to this server's cluster, and isn't there yet."""
    return (yield from TABLE.by("shard", where(datastore=datastore, is_back=0, state=_BEFORE_OPEN)))


def put(move: ShardMove) -> Operation[None]:
    """Writes a row anew."""
    yield TABLE.insert([move], "REPLACE", changed_at=NOW)


def change(move: ShardMove, **columns: object) -> Operation[None]:
    """Changes columns of a row. Raises StateConflict unless it is in the state and the attempt of `move`."""
    (result,) = yield _change(move, columns)
    if result.affected != 1:
        raise _overtaken(move)


def set_limits(datastore: str, shards: Sequence[int], **limits: int) -> Operation[int]:
    """Changes the limits of moves, also while they run. Returns how many there are."""
    (result,) = yield f"UPDATE {TABLE.name} SET {_assignments({**limits})} {where(datastore=datastore, shard=shards)}"
    return result.affected


def delete(datastore: str, shard: int) -> Operation[None]:
    yield f"DELETE FROM {TABLE.name} {where(datastore=datastore, shard=shard)}"


def latest() -> Operation[int]:
    """Returns when something was written here that replicates, as far as this table and the heads know."""
    ((moment,),) = yield from query(
        f"SELECT GREATEST((SELECT COALESCE(MAX({MICROSECONDS.format('last_created_at')}), 0)"
        f" FROM schemaless.shard_head), (SELECT COALESCE(MAX({MICROSECONDS.format('changed_at')}), 0)"
        f" FROM {TABLE.name}))"
    )
    return int(moment)


# Cells at the target.


def copy_page(datastore: Datastore, move: ShardMove, texts: Texts, page: CopiedPage, head: Head) -> Operation[float]:
    """Writes a page with the progress, and compares what is stored then. Returns how long the commit took, in seconds.

    Raises StateConflict where another process changed the move, and Corrupt where the cells differ.
    """
    script = shard_copy.inserting(datastore, move.shard, texts, page)
    progress: dict[str, object] = {
        "copied": page.until,
        "generation": head.generation,
        "head": max(head.added_id, page.until),
        "cells_s": move.cells_s,
        "state": state_at(page.until, head.added_id),
        "told": "",
    }
    yield from _transaction(datastore, move, progress, script, page)
    began = time.monotonic()
    yield "COMMIT"
    return time.monotonic() - began


def cut_back(datastore: Datastore, move: ShardMove, until: int, generation: int) -> Operation[None]:
    """Deletes the cells above an added_id: the source opened a generation behind it."""
    ((part,),) = yield from query(shard_copy.digest(datastore, move.shard, until, move.copied))
    progress: dict[str, object] = {
        "copied": until,
        "digest": Expression(shard_copy.joined("digest", literal(part))),
        "generation": generation,
        "state": MoveState.COPYING,
    }
    table = sql("%s.entity", Name(datastore.database(move.shard)))
    posts = (
        f"DELETE schemaless.idempotency FROM {table} AS cell STRAIGHT_JOIN schemaless.idempotency"
        f" ON idempotency.datastore = {literal(datastore.name.encode())} AND idempotency.row_key = cell.row_key"
        " AND idempotency.column_name = cell.column_name AND idempotency.ref_key = cell.ref_key"
        f" WHERE cell.added_id > {until}"
    )
    script = [posts, f"DELETE FROM {table} WHERE added_id > {until}"]
    yield from _transaction(datastore, move, progress, script, CopiedPage(move.copied, move.copied))
    yield "COMMIT"


def open_target(
    datastore: Datastore,
    move: ShardMove,
    texts: Texts,
    page: CopiedPage,
    head: Head,
    starts: Sequence[GenerationStart],
    beside: Sequence[Script],
) -> Operation[None]:
    """Makes the target the home, with the last cells, in one transaction.

    Raises StateConflict where the attempt isn't the present one, and Corrupt where cells differ.
    """
    progress: dict[str, object] = {
        "copied": page.until,
        "generation": head.generation,
        "head": head.added_id,
        "state": MoveState.OPEN,
        "is_back": False,
        "told": "",
    }
    generations = [
        f"({literal(datastore.name)},{move.shard},{start.generation},{start.starts_at},UTC_TIMESTAMP(6))"
        for start in starts
    ]
    script = [
        *shard_copy.inserting(datastore, move.shard, texts, page),
        *beside,
        f"DELETE FROM schemaless.shard_generation {where(datastore=datastore.name, shard=move.shard)}",
        f"INSERT INTO schemaless.shard_generation VALUES {commas(generations)}",
        sql(
            "INSERT INTO schemaless.shard_head SELECT %s, %s, %s, %s, %s, COALESCE(MAX(epoch), 0), NULL"
            " FROM schemaless.appointment WHERE cluster = %s"
            " ON DUPLICATE KEY UPDATE generation = VALUES(generation), head = VALUES(head),"
            " last_created_at = VALUES(last_created_at), epoch = VALUES(epoch), moved_to = NULL",
            datastore.name,
            move.shard,
            head.generation,
            head.added_id,
            Time(head.last_created_at),
            move.target,
        ),
    ]
    yield from _transaction(datastore, move, progress, script, page)
    yield "COMMIT"


def take_back(move: ShardMove, told: str) -> Operation[bool]:
    """Ends the present attempt of a switch, unless it counts already. Returns whether it is ended."""
    row = where(datastore=move.datastore, shard=move.shard, source=move.source)
    which = f"{row} AND state IN ({_COPIED_STATES},'closing')"
    columns = {"state": MoveState.COPYING, "told": told[:300]}
    (result,) = yield f"UPDATE {TABLE.name} SET attempt = attempt + 1, {_assignments(columns)} {which}"
    return result.affected == 1


def _transaction(
    datastore: Datastore, move: ShardMove, columns: dict[str, object], script: Sequence[Script], page: CopiedPage
) -> Operation[None]:
    """Runs a script in a transaction with a change of the row, and compares the page as it is stored then. The caller
    commits. Raises StateConflict or Corrupt, and then nothing is left of it.

    An erasure may empty cells here while they are copied, so the digest is changed as the row has it.
    """
    compared = shard_copy.digest(datastore, move.shard, page.after, page.until)
    erased, change = shard_copy.erasing(datastore, move.shard, page)
    part = shard_copy.joined(literal(page.digest), change)
    _, changed, *_, stored = yield ";".join(
        [
            "BEGIN",
            _change(move, columns),
            *script,
            *erased,
            f"UPDATE {TABLE.name} SET digest = {shard_copy.joined('digest', part)}"
            f" {where(datastore=move.datastore, shard=move.shard)}",
            compared,
        ]
    )
    if changed.affected != 1:
        yield "ROLLBACK"
        raise _overtaken(move)
    if stored.rows[0][0] != page.digest:
        yield "ROLLBACK"
        raise Corrupt(
            f"{datastore.database(move.shard)}: cells {page.after + 1} to {page.until} are others on {move.source} than"
            f" on {move.target}"
        )


_COPIED_STATES: Script = "'copying','ready'"


def _change(move: ShardMove, columns: dict[str, object]) -> Script:
    states = _COPIED_STATES if move.state in (MoveState.COPYING, MoveState.READY) else literal(move.state)
    which = where(datastore=move.datastore, shard=move.shard, attempt=move.attempt)
    return f"UPDATE {TABLE.name} SET {_assignments(columns)} {which} AND state IN ({states})"


def _assignments(columns: Mapping[str, object]) -> Script:
    return commas([f"{name} = {literal(value)}" for name, value in columns.items()] + ["changed_at = UTC_TIMESTAMP(6)"])


def _overtaken(move: ShardMove) -> StateConflict:
    return StateConflict(
        f"the move of shard {move.shard} of {move.datastore} to {move.target} was changed by another process",
        hint="look at `schemaless topology moves`",
    )


# The source.


def close_source(move: ShardMove) -> Operation[Head]:
    """Closes the present home: no cell is added from then on, and no worker moves a checkpoint. Returns the head.

    Raises what `shard_head.lock` does.
    """
    locked, _ = yield from shard_head.lock(move.datastore, [move.shard])
    which = where(datastore=move.datastore, shard=move.shard)
    yield ";".join(
        [
            f"UPDATE schemaless.shard_head SET moved_to = {literal(move.target)} {which}",
            f"UPDATE schemaless.checkpoint SET version = version + 1, state = {literal(State.MOVED)} {which}"
            " AND finished IS NOT NULL",
            "COMMIT",
        ]
    )
    return locked[move.shard]


def reopen_source(move: ShardMove) -> Operation[None]:
    """Opens the present home again, if it was closed for this target.

    A master that was opened since may lack cells that came after an earlier reopening. So it begins a generation (I13).
    """
    which = where(datastore=move.datastore, shard=move.shard)
    closed = f"{which} AND {matching(moved_to=move.target)}"
    _, found = yield f"BEGIN;SELECT generation, head, epoch FROM schemaless.shard_head {closed} FOR UPDATE"
    script = []
    if found.rows:
        generation, head, epoch = found.rows[0]
        if epoch != move.epoch:
            opened = max(epoch, generation + 1)
            starts = [
                f"({literal(move.datastore)},{move.shard},{number},{head + 1},UTC_TIMESTAMP(6))"
                for number in range(generation + 1, opened + 1)
            ]
            script += [
                f"INSERT INTO schemaless.shard_generation VALUES {commas(starts)}",
                f"UPDATE schemaless.shard_head SET generation = {opened} {which}",
            ]
        script += [
            f"UPDATE schemaless.checkpoint SET version = version + 1, state = IF(reason IS NULL, 'running', 'stopped')"
            f" {which} AND {matching(state=State.MOVED)}",
            f"UPDATE schemaless.shard_head SET moved_to = NULL {which}",
        ]
    yield ";".join([*script, "COMMIT"])


_IDLE_MAX_S = 28_800  # a shard takes long, and the session of another source is idle meanwhile


class HomeHead(msgspec.Struct, frozen=True):
    """A head and where the shard went."""

    head: Head
    moved_to: str | None


def home_head(datastore: str, shard: int) -> Operation[HomeHead | None]:
    """Returns a head as this server has it, None where the shard never lived here."""
    rows = yield from query(
        f"SELECT shard, generation, head, {MICROSECONDS.format('last_created_at')}, moved_to FROM schemaless.shard_head"
        f" {where(datastore=datastore, shard=shard)}"
    )
    return HomeHead(Head(*rows[0][:4]), rows[0][4]) if rows else None


def lock_mover(name: str) -> Operation[bool]:
    """Takes a lock of this session, which ends with it. Returns False where another session has it."""
    _, taken = yield f"SET SESSION wait_timeout = {_IDLE_MAX_S};SELECT GET_LOCK({literal(name)}, 1)"
    return bool(taken.rows[0][0])


def mover_session(name: str) -> Operation[int]:
    """Returns the session that has this lock, 0 while nobody has it."""
    ((session,),) = yield from query(f"SELECT COALESCE(IS_USED_LOCK({literal(name)}), 0)")
    return int(session)
