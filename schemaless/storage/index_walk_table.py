"""index_walk: how far the walk over the rows of a source shard has written a version of an index, on each cluster.

The position moves by compare-and-set in the transaction that writes the entries. So a process that wakes up late
changes nothing, and the position is as exact as the entries.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from schemaless.cell import RowKey
from schemaless.errors import NeedsLockedHeads
from schemaless.storage.checkpoint_table import UNDO
from schemaless.storage.index_problem_table import IndexVersion, versions_in
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Script, commas, sql

_TABLE = "schemaless.index_walk"


class RowWalk(msgspec.Struct, frozen=True):
    """The walk of one shard, as one cluster has it. It is over where the shard has a checkpoint (`is_over`).

    `until` is the fixed head, in `generation`. Rows up to `row_key` are written, and have `walked` cells. `superseded`:
    what an earlier walk wrote must be taken back first.
    """

    generation: int
    until: int
    row_key: RowKey = RowKey(b"")
    walked: int = 0
    superseded: bool = False
    is_over: bool = False


def of_shards(of: IndexVersion, consumer: str, shards: Collection[int]) -> Operation[dict[int, RowWalk]]:
    """Returns the walks of these shards, at least one, that were begun here."""
    over = sql(
        "SELECT COUNT(*) FROM schemaless.checkpoint AS reached WHERE reached.datastore = %s AND reached.consumer = %s"
        " AND reached.shard = walk.shard",
        of.datastore,
        consumer,
    )
    rows = yield from query(
        f"SELECT shard, generation, until, row_key, walked, superseded, ({over}) FROM {_TABLE} AS walk"
        f" WHERE {_of(of)} AND shard IN ({commas([str(shard) for shard in shards])})"
    )
    return {
        shard: RowWalk(generation, until, row_key, walked, bool(superseded), bool(is_over))
        for shard, generation, until, row_key, walked, superseded, is_over in rows
    }


def begin(of: IndexVersion, shard: int, walk: RowWalk) -> Operation[None]:
    """Begins a walk, unless one was begun."""
    yield sql(
        f"INSERT IGNORE INTO {_TABLE} (datastore, name, number, shard, generation, until, row_key, walked, superseded)"
        " VALUES (%s, %s, %s, %s, %s, %s, '', 0, 0)",
        of.datastore,
        of.name,
        of.number,
        shard,
        walk.generation,
        walk.until,
    )


def supersede(of: IndexVersion, consumer: str, shard: int, at: RowWalk, walk: RowWalk) -> Operation[bool]:
    """Begins a walk anew with an earlier head, from a later generation on. It may write nothing until `resume`.

    Returns False, and changes nothing, if another process began the walk `at` anew since it was read.
    """
    begins = (
        f"UPDATE {_TABLE} SET generation = {walk.generation}, until = {walk.until}, row_key = '', walked = 0,"
        f" superseded = 1 WHERE {_of(of)} AND shard = {shard} AND generation = {at.generation}"
        f" AND until = {at.until} AND superseded = {int(at.superseded)}"
    )
    ends = sql(
        "DELETE FROM schemaless.checkpoint WHERE datastore = %s AND consumer = %s AND shard = %s",
        of.datastore,
        consumer,
        shard,
    )
    try:
        yield f"BEGIN;{begins};SET @moved = ROW_COUNT();{UNDO.format(1)};{ends};COMMIT"
    except NeedsLockedHeads:
        return False
    return True


def write_superseded(of: IndexVersion, shard: int, anew: RowWalk, script: Script) -> Operation[bool]:
    """Runs a script that takes back what was walked, in one transaction, while the walk that begins anew waits for it.

    Returns False, and nothing of the script stays, if it doesn't wait any more.
    """
    hold = f"UPDATE {_TABLE} SET superseded = 1 WHERE {_is_superseded(of, shard, anew)}"
    try:
        yield f"BEGIN;{hold};SET @moved = ROW_COUNT();{UNDO.format(1)};{script};COMMIT"
    except NeedsLockedHeads:
        return False
    return True


def resume(of: IndexVersion, shard: int, walk: RowWalk) -> Operation[None]:
    """Lets a walk write that was begun anew with this head and generation, once everything is taken back."""
    yield f"UPDATE {_TABLE} SET superseded = 0 WHERE {_is_superseded(of, shard, walk)}"


def lowering(of: IndexVersion, shard: int, until: int) -> Script:
    """Returns a statement that notes that the walk of a shard stands for no cells behind an added_id."""
    return f"UPDATE {_TABLE} SET until = LEAST(until, {until}) WHERE {_of(of)} AND shard = {shard}"


def move(of: IndexVersion, shard: int, at: RowWalk, to: RowWalk, effect: Script) -> Operation[bool]:
    """Moves a walk in one transaction with `effect`. Returns False, and nothing of it stays, if it isn't at `at`."""
    update = sql(
        f"UPDATE {_TABLE} SET row_key = %s, walked = %s WHERE {_of(of)} AND shard = %s AND generation = %s"
        " AND until = %s AND row_key = %s AND walked = %s AND superseded = 0",
        to.row_key,
        to.walked,
        shard,
        at.generation,
        at.until,
        at.row_key,
        at.walked,
    )
    try:
        yield f"BEGIN;{update};SET @moved = ROW_COUNT();{UNDO.format(1)};{effect + ';' if effect else ''}COMMIT"
    except NeedsLockedHeads:  # a NULL where none may be: the transaction is undone
        rows = yield from query(
            f"SELECT generation, until, row_key, walked FROM {_TABLE} WHERE {_of(of)} AND shard = {shard}"
        )
        ours = (at.generation, at.until, to.row_key, to.walked)
        return [tuple(row) for row in rows] == [ours]  # our own COMMIT had succeeded before its answer was lost
    return True


def walked_sum(of: IndexVersion) -> Operation[int]:
    """Returns how many cells are walked, as this server has it. A minion that lags has fewer than its master."""
    ((total,),) = yield from query(f"SELECT COALESCE(SUM(walked), 0) FROM {_TABLE} WHERE {_of(of)}")
    return int(total)


def delete(of: IndexVersion) -> Operation[None]:
    """Deletes the walks of a version."""
    yield f"DELETE FROM {_TABLE} WHERE {_of(of)}"


def versions(datastore: str) -> Operation[set[tuple[str, int]]]:
    """Returns the names and numbers of the versions that have walks here."""
    return (yield from versions_in(_TABLE, datastore))


def _is_superseded(of: IndexVersion, shard: int, anew: RowWalk) -> Script:
    return (
        f"{_of(of)} AND shard = {shard} AND superseded = 1 AND generation = {anew.generation} AND until = {anew.until}"
    )


def _of(of: IndexVersion) -> Script:
    return sql("datastore = %s AND name = %s AND number = %s", of.datastore, of.name, of.number)
