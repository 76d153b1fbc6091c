"""shard_head: one small row a shard, whose lock makes added_ids dense and in commit order (I3, I4, I13).

Every inserting transaction locks the rows of its shards, in shard order, before it gives out an added_id, and moves
the head in the same transaction. So whoever sees head n can read every cell up to n, on the master and on minions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from schemaless.errors import Misconfigured
from schemaless.location import GenerationStart
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Script, Time, commas, sql

MICROSECONDS = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {})"
"""SQL for a DATETIME(6) as an integer: drivers read it several times faster than a datetime."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """Highest added_id of a shard. `last_created_at` in microseconds since the epoch."""

    shard: int
    generation: int
    added_id: int
    last_created_at: int


class Movement(msgspec.Struct, frozen=True, gc=False):
    """Changes whenever any head of a datastore on a server moves; cheap to read.

    Within its generation a head only grows, and a generation only grows: no two moves cancel out.
    """

    heads_sum: int
    generations_sum: int


_HEAD_COLUMNS = f"shard, generation, head, {MICROSECONDS.format('last_created_at')}"


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
            f"SELECT {_HEAD_COLUMNS} FROM schemaless.shard_head WHERE datastore = %s ORDER BY shard",
            datastore,
        )
    )
    return [Head(*row) for row in rows]


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
        f"SELECT {_HEAD_COLUMNS} FROM schemaless.shard_head {where};"
        f"SELECT generation, starts_at FROM schemaless.shard_generation {where} ORDER BY generation"
    )
    if not found.rows:
        raise Misconfigured(f"datastore {datastore}: shard {shard} does not live on this cluster")
    return Head(*found.rows[0]), [GenerationStart(*row) for row in starts.rows]


def lock(datastore: str, shards: Iterable[int]) -> Operation[tuple[dict[int, Head], int]]:
    """Begins a transaction and locks the heads, in shard order. Returns them and the master's clock under the lock."""
    wanted = sorted(set(shards))
    found = yield (
        sql(
            f"BEGIN; SELECT {_HEAD_COLUMNS} FROM schemaless.shard_head WHERE datastore = %s AND shard IN ",
            datastore,
        )
        + f"({commas([str(shard) for shard in wanted])}) ORDER BY shard FOR UPDATE;"
        + f"SELECT {MICROSECONDS.format('UTC_TIMESTAMP(6)')}"
    )
    locked = {row[0]: Head(*row) for row in found[1].rows}
    if len(locked) != len(wanted):
        missing = sorted(set(wanted) - locked.keys())
        raise Misconfigured(f"datastore {datastore}: shards {missing[:5]} do not live on this cluster")
    return locked, int(found[2].rows[0][0])


def move(datastore: str, moved: Mapping[int, Head]) -> Script:
    """Part of the transaction that inserted the cells: all the new heads in one statement."""
    rows = [
        sql("(%s, %s, %s, %s, %s)", datastore, h.shard, h.generation, h.added_id, Time(h.last_created_at))
        for h in moved.values()
    ]
    return (
        "INSERT INTO schemaless.shard_head (datastore, shard, generation, head, last_created_at) VALUES "
        + commas(rows)
        + " ON DUPLICATE KEY UPDATE head = VALUES(head), last_created_at = VALUES(last_created_at)"
    )


class Position(msgspec.Struct, frozen=True, gc=False):
    """How far a server has come, all datastores together. `last_created_at` in microseconds since the epoch."""

    heads_sum: int
    last_created_at: int


def position() -> Operation[Position]:
    """Comparing a minion's with its master's tells whether it lags, also where replication can't be asked."""
    ((total, moment),) = yield from query(
        f"SELECT COALESCE(SUM(head), 0), COALESCE(MAX({MICROSECONDS.format('last_created_at')}), 0)"
        " FROM schemaless.shard_head"
    )
    return Position(int(total), int(moment))
