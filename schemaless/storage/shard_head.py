"""shard_head: one small row a shard, whose lock makes added_ids dense and in commit order (I3, I4, I13).

Every inserting transaction locks the rows of its shards, in shard order, before it gives out an added_id, and moves
the head in the same transaction. So whoever sees head n can read every cell up to n, on the master and on minions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from schemaless.errors import Misconfigured
from schemaless.location import GenerationStart, Location
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Script, commas, sql, time_literal

MICROSECONDS = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {})"
"""SQL for a DATETIME(6) as an integer: drivers read it several times faster than a datetime."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """Highest added_id of a shard. `last_created_at` in microseconds since the epoch."""

    shard: int
    generation: int
    added_id: int
    last_created_at: int

    @property
    def location(self) -> Location:
        return Location(self.generation, self.added_id)


class Movement(msgspec.Struct, frozen=True, gc=False):
    """Changes whenever any head of a datastore on a server moves; cheap to read.

    Within its generation a head only grows, and a generation only grows: no two moves cancel out.
    """

    heads_sum: int
    generations_sum: int


BLOCK_SHARDS = 128
"""Shards whose heads are read together. 4096 shards: 32 sums, and one head that moved costs 128 heads at most."""

_HEAD_COLUMNS = f"heads.shard, generation, head, {MICROSECONDS.format('last_created_at')}"


def movement(datastore: str) -> Operation[Movement]:
    return (yield from movements()).get(datastore, Movement(0, 0))


def movements() -> Operation[dict[str, Movement]]:
    """What a tailer asks each server in a turn, whatever the number of its shards and datastores."""
    rows = yield from query(
        "SELECT datastore, SUM(head), SUM(generation) FROM schemaless.shard_head GROUP BY datastore"
    )
    return {name: Movement(int(heads), int(generations)) for name, heads, generations in rows}


def heads(datastore: str) -> Operation[list[Head]]:
    """Heads of the shards whose home is this server's cluster, as this server shows them."""
    rows = yield from query(
        sql(
            f"SELECT {_HEAD_COLUMNS} FROM schemaless.shard_head AS heads WHERE datastore = %s ORDER BY shard",
            datastore,
        )
    )
    return [Head(*row) for row in rows]


def block_of(shard: int) -> int:
    return shard // BLOCK_SHARDS


def block_movements(datastore: str) -> Operation[dict[int, Movement]]:
    """As `movements`, for each block of shards: finer and dearer, to find which heads are worth reading."""
    rows = yield from query(
        sql(
            "SELECT shard DIV %s AS block, SUM(head), SUM(generation) FROM schemaless.shard_head"
            " WHERE datastore = %s GROUP BY block",
            BLOCK_SHARDS,
            datastore,
        )
    )
    return {int(block): Movement(int(heads), int(generations)) for block, heads, generations in rows}


def heads_in_blocks(datastore: str, blocks: Sequence[int]) -> Operation[list[Head]]:
    """Heads of all shards of these blocks, found by their keys."""
    ranges = " OR ".join(
        f"shard BETWEEN {block * BLOCK_SHARDS} AND {(block + 1) * BLOCK_SHARDS - 1}" for block in blocks
    )
    rows = yield from query(
        sql(f"SELECT {_HEAD_COLUMNS} FROM schemaless.shard_head AS heads WHERE datastore = %s", datastore)
        + f" AND ({ranges})"
    )
    return [Head(*row) for row in rows]


def heads_of(datastore: str, shards: Collection[int]) -> Operation[list[Head]]:
    """As `heads`, of some shards only; those that don't live here are left out."""
    if not shards:
        return []
    rows = yield from query(
        sql(f"SELECT {_HEAD_COLUMNS} FROM schemaless.shard_head AS heads WHERE datastore = %s", datastore)
        + f" AND shard IN ({commas([str(shard) for shard in shards])})"
    )
    return [Head(*row) for row in rows]


class Moved(msgspec.Struct, frozen=True):
    """Sums, and heads that are at least as new. `blocks` only where many shards are watched."""

    total: Movement
    blocks: Mapping[int, Movement] = {}
    heads: Sequence[Head] = ()


NOTHING_SEEN = Moved(Movement(-1, -1))


def moved_since(seen: Mapping[str, Moved], watched: Mapping[str, Collection[int]]) -> Operation[dict[str, Moved]]:
    """By datastore, heads of the `watched` shards that may have moved since `seen`; nothing where surely none did.

    One node answers all questions, the heads last: what moves between them is told twice, never missed.
    """
    now = yield from movements()
    moved = {}
    for name, shards in watched.items():
        before, total = seen.get(name, NOTHING_SEEN), now.get(name, Movement(0, 0))
        if total != before.total:
            blocks = (yield from block_movements(name)) if len(shards) > BLOCK_SHARDS else {}
            changed = [shard for shard in shards if not blocks or _changed(shard, before.blocks, blocks)]
            moved[name] = Moved(total, blocks, (yield from heads_of(name, changed)))
    return moved


def _changed(shard: int, before: Mapping[int, Movement], now: Mapping[int, Movement]) -> bool:
    block = block_of(shard)
    return before.get(block) != now.get(block)


def generations(datastore: str, shard: int) -> Operation[list[GenerationStart]]:
    rows = yield from query(
        sql(
            "SELECT generation, starts_at FROM schemaless.shard_generation"
            " WHERE datastore = %s AND shard = %s ORDER BY generation",
            datastore,
            shard,
        )
    )
    return [GenerationStart(*row) for row in rows]


def history(datastore: str, shard: int) -> Operation[tuple[Head, list[GenerationStart]]]:
    """Head and generations of one shard as this server shows them. Raises Misconfigured: it doesn't live here."""
    where = sql("WHERE datastore = %s AND shard = %s", datastore, shard)
    found, starts = yield (
        f"SELECT {_HEAD_COLUMNS} FROM schemaless.shard_head AS heads {where};"
        f"SELECT generation, starts_at FROM schemaless.shard_generation {where} ORDER BY generation"
    )
    if not found.rows:
        raise Misconfigured(f"datastore {datastore}: shard {shard} does not live on this cluster")
    return Head(*found.rows[0]), [GenerationStart(*row) for row in starts.rows]


def lock(
    datastore: str, shards: Iterable[int], before: Sequence[Script] = ()
) -> Operation[tuple[dict[int, Head], int]]:
    """Begins a transaction, runs `before` in it and locks the heads, in shard order. Returns them and the master's
    clock under the lock.
    """
    wanted = sorted(set(shards))
    *_, found, clock = yield ";".join(
        [
            "BEGIN",
            *before,
            f"SELECT {_HEAD_COLUMNS} {_from_exactly(datastore, wanted)} FOR UPDATE",
            f"SELECT {MICROSECONDS.format('UTC_TIMESTAMP(6)')}",
        ]
    )
    locked = {row[0]: Head(*row) for row in found.rows}
    if len(locked) != len(wanted):
        missing = sorted(set(wanted) - locked.keys())
        raise Misconfigured(f"datastore {datastore}: shards {missing[:5]} do not live on this cluster")
    return locked, int(clock.rows[0][0])


def move(datastore: str, moved: Iterable[Head]) -> Script:
    """Part of the transaction that inserted the cells: all the new heads in one statement, each by its key."""
    name = sql("%s", datastore.encode())
    return _MOVE.format(
        commas([f"({name},{h.shard},{h.generation},{h.added_id},{time_literal(h.last_created_at)})" for h in moved])
    )


def lock_into_variables(datastore: str, shards: Sequence[int]) -> Script:
    """Locks the heads, in shard order. The nth has its head in @hn and its generation in @gn; @now is the master's
    clock under the lock. A head that isn't here leaves NULLs, and @now is NULL where one has a later created_at: no
    column of a cell takes them.
    """
    values = [
        f"MAX(CASE heads.shard WHEN {shard} THEN {column} END)" for shard in shards for column in ("head", "generation")
    ]
    variables = [f"@{letter}{n}" for n in range(len(shards)) for letter in "hg"]
    return (
        f"SELECT MAX(last_created_at),{commas(values)} INTO @now,{commas(variables)} {_from_exactly(datastore, shards)}"
        " FOR UPDATE;"
        "SET @now=IF(CAST(@now AS DATETIME(6))<=UTC_TIMESTAMP(6),UTC_TIMESTAMP(6),NULL)"
    )


def move_by_variables(datastore: str, counts: Mapping[int, int]) -> Script:
    """As `move`, behind `lock_into_variables` of the same shards: `counts` cells were inserted into each."""
    name = sql("%s", datastore.encode())
    return _MOVE.format(
        commas([f"({name},{shard},@g{n},@h{n}+{count},@now)" for n, (shard, count) in enumerate(counts.items())])
    )


def select_variables(count: int) -> Script:
    """One text of numbers: @now in microseconds since the epoch, then (generation, head before) of each. As columns
    they would cost drivers a description each, more than all else of this statement.
    """
    return f"SELECT CONCAT_WS(' ',{MICROSECONDS.format('@now')}," + commas([f"@g{n},@h{n}" for n in range(count)]) + ")"


_MOVE = (
    "INSERT INTO schemaless.shard_head (datastore, shard, generation, head, last_created_at) VALUES {}"
    " ON DUPLICATE KEY UPDATE head = VALUES(head), last_created_at = VALUES(last_created_at)"
)


def _from_exactly(datastore: str, shards: Sequence[int]) -> Script:
    """FROM these heads, found one by one by their keys. A condition `shard IN (…)` may scan the table instead, and
    then waits for the locks of heads that it doesn't want.
    """
    first, *others = shards
    wanted = "".join([f"SELECT {first} AS shard", *(f" UNION ALL SELECT {shard}" for shard in others)])
    name = sql("%s", datastore.encode())
    return (
        f"FROM ({wanted}) AS wanted STRAIGHT_JOIN schemaless.shard_head AS heads"
        f" ON heads.datastore = {name} AND heads.shard = wanted.shard"
    )


class ServerPosition(msgspec.Struct, frozen=True, gc=False):
    """How far a server has come, all datastores together. `last_created_at` in microseconds since the epoch."""

    heads_sum: int
    last_created_at: int


def position() -> Operation[ServerPosition]:
    """Comparing a minion's with its master's tells whether it lags, also where replication can't be asked."""
    ((total, moment),) = yield from query(
        f"SELECT COALESCE(SUM(head), 0), COALESCE(MAX({MICROSECONDS.format('last_created_at')}), 0)"
        " FROM schemaless.shard_head"
    )
    return ServerPosition(int(total), int(moment))
