"""Proof of parked cells: the records of a program beside what its checkpoints count, and beside the entity tables.

For the audit. Each answer is of one statement, so it is of one moment, whatever workers do meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from schemaless.storage.operation import Operation, query
from schemaless.storage.parked_table import Cause
from schemaless.storage.sql import Name, commas, sql
from schemaless.topology import Datastore

_PARKED = f"p.cause <> '{Cause.WAITING.value}'"
_OF_SHARD = "p.datastore = c.datastore AND p.consumer = c.consumer AND p.shard = c.shard"


class ParkedProof(msgspec.Struct, frozen=True):
    """One shard. `counted_parked` and `counted_waiting` are of its checkpoint, since it began to count.

    `parked` and `waiting` records, and the cells `behind` them in their rows, are of the cells since then. `records`
    are all that are parked, the oldest for `oldest_s`. `beyond` have an added_id after the checkpoint. `lost` aren't in
    the entity table, the first at `first_lost`. `versions` are the program's when the cells failed.
    """

    shard: int
    counted_parked: int
    counted_waiting: int
    parked: int
    waiting: int
    behind: int
    records: int
    oldest_s: float
    beyond: int
    lost: int
    first_lost: int | None
    versions: frozenset[str]


def shards_of(datastore: str, consumer: str) -> Operation[list[int]]:
    """Returns the shards here that have a record, or count a cell that is parked or waits."""
    rows = yield from query(
        sql(
            "SELECT shard FROM schemaless.parked WHERE datastore = %s AND consumer = %s UNION"
            " SELECT shard FROM schemaless.checkpoint WHERE datastore = %s AND consumer = %s"
            " AND (parked <> 0 OR waiting <> 0) ORDER BY shard",
            datastore,
            consumer,
            datastore,
            consumer,
        )
    )
    return [shard for (shard,) in rows]


def of_shard(
    datastore: Datastore, consumer: str, shard: int, columns: Collection[str]
) -> Operation[ParkedProof | None]:
    """Returns the proof of one shard, on its home, or None without a checkpoint. `columns` are the program's."""
    entity = sql("%s.entity", Name(datastore.database(shard)))
    since, names = "p.added_id > c.counted_from", commas([sql("%s", name.encode()) for name in columns])
    behind = "0"
    if names:
        behind = (
            f"(SELECT COUNT(*) FROM schemaless.parked AS p STRAIGHT_JOIN {entity} AS e ON e.row_key = p.row_key"
            f" AND e.column_name IN ({names}) AND e.added_id > GREATEST(p.added_id, c.counted_from)"
            f" AND e.added_id <= c.added_id WHERE {_OF_SHARD} AND p.holds_row = 1)"
        )
    is_lost = (
        f"p.added_id IS NOT NULL AND NOT EXISTS (SELECT * FROM {entity} AS e WHERE e.added_id = p.added_id"
        " AND e.generation = p.generation AND e.row_key = p.row_key AND e.column_name = p.column_name"
        " AND e.ref_key = p.ref_key)"
    )
    sums = [
        f"SUM({_PARKED} AND {since})",
        f"SUM(NOT {_PARKED} AND {since})",
        f"SUM({_PARKED})",
        f"MAX(IF({_PARKED}, TIMESTAMPDIFF(MICROSECOND, p.parked_at, UTC_TIMESTAMP(6)), 0)) / 1000000",
        "SUM(p.added_id > c.added_id)",
        f"SUM({is_lost})",
        f"MIN(IF({is_lost}, p.added_id, NULL))",
        "GROUP_CONCAT(DISTINCT p.version SEPARATOR ' ')",
    ]
    rows = yield from query(
        f"SELECT MAX(c.parked), MAX(c.waiting), {behind}, {commas(sums)} FROM schemaless.checkpoint AS c"
        f" LEFT JOIN schemaless.parked AS p ON {_OF_SHARD}"
        + sql(" WHERE c.datastore = %s AND c.consumer = %s AND c.shard = %s", datastore.name, consumer, shard)
        + " GROUP BY c.datastore, c.consumer, c.shard"
    )
    for counted_parked, counted_waiting, held, *found in rows:
        parked, waiting, records, oldest_s, beyond, lost, first_lost, versions = found
        return ParkedProof(
            shard, counted_parked, counted_waiting, int(parked or 0), int(waiting or 0), held, int(records or 0),
            float(oldest_s or 0), int(beyond or 0), int(lost or 0), first_lost, frozenset((versions or "").split()),
        )  # fmt: skip
    return None
