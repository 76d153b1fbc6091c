"""Checkpoints of all consumers beside the heads, added up on the server: one small row for each consumer.

A datastore has as many checkpoints as consumers times shards. Who only asks how far the consumers are reads none of
them.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from schemaless.names import TRIGGER_PREFIX
from schemaless.storage.checkpoint_table import CellCounts, State
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import sql, where

STOPPED_MAX = 100
"""How many stopped shards one server names."""

_KEPT = (
    "IF(c.generation = h.generation, c.added_id, LEAST(c.added_id, COALESCE((SELECT MIN(g.starts_at) - 1"
    " FROM schemaless.shard_generation AS g WHERE g.datastore = c.datastore AND g.shard = c.shard"
    " AND g.generation > c.generation), c.added_id)))"
)
"""SQL: how far a checkpoint counts. What a later generation superseded isn't finished (I13)."""


_HEAD = "schemaless.shard_head AS h ON h.datastore = c.datastore AND h.shard = c.shard AND h.moved_to IS NULL"
_HERE = " AND state <> 'moved'"


class ConsumerSummary(msgspec.Struct, frozen=True, gc=False):
    """The checkpoints of one consumer on one server. `lag` is in cells.

    An index has checkpoints on every cluster, also of shards that live elsewhere. Their heads aren't known here, so
    `lag` leaves them out: they are `away_shards`, and `away_finished` is the sum of their added_ids.
    """

    consumer: str
    shards: int
    stopped: int
    lag: int
    away_shards: int
    away_finished: int


class StoppedShard(msgspec.Struct, frozen=True, gc=False):
    consumer: str
    shard: int
    reason: str | None


def names(datastore: str) -> Operation[list[str]]:
    """Returns the consumers that have a checkpoint on this server."""
    rows = yield from query(f"SELECT DISTINCT consumer FROM schemaless.checkpoint {where(datastore=datastore)}{_HERE}")
    return sorted(name for (name,) in rows)


def summaries(datastore: str) -> Operation[list[ConsumerSummary]]:
    """Returns one summary for each consumer with a checkpoint on this server, by name."""
    rows = yield from query(
        "SELECT c.consumer, COUNT(*), SUM(c.state = 'stopped'),"
        f" SUM(IF(h.shard IS NULL, 0, GREATEST(h.head, {_KEPT}) - {_KEPT})),"
        " SUM(h.shard IS NULL), SUM(IF(h.shard IS NULL, c.added_id, 0))"
        f" FROM schemaless.checkpoint AS c LEFT JOIN {_HEAD}"
        + sql(f" WHERE c.datastore = %s{_HERE} GROUP BY c.consumer ORDER BY c.consumer", datastore)
    )
    return [ConsumerSummary(row[0], *map(int, row[1:])) for row in rows]


def stopped(datastore: str, consumers: Collection[str]) -> Operation[list[StoppedShard]]:
    """Returns stopped shards of these consumers on this server, at most STOPPED_MAX, by consumer and shard."""
    if not consumers:
        return []
    which = where(datastore=datastore, consumer=list(consumers), state=State.STOPPED)
    rows = yield from query(
        f"SELECT consumer, shard, reason FROM schemaless.checkpoint {which} ORDER BY consumer, shard"
        f" LIMIT {STOPPED_MAX}"
    )
    return [StoppedShard(*row) for row in rows]


# Progress of trigger programs, added up on the server: what became of their cells, and which shards are behind.

BEHIND_MAX = 256
"""Shards that are behind whose next cell a server looks up for one program, those that moved longest ago."""


class TriggerProgress(msgspec.Struct, frozen=True):
    """The counts of one program on this server, and the sum of where counting began."""

    counts: CellCounts
    counted_from: int


def programs(datastore: str) -> Operation[dict[str, TriggerProgress]]:
    """Returns the trigger programs that have a checkpoint on this server, by consumer."""
    sums = ", ".join(f"SUM({name})" for name in CellCounts.__struct_fields__)
    rows = yield from query(
        f"SELECT consumer, SUM(counted_from), {sums} FROM schemaless.checkpoint"
        + sql(" WHERE datastore = %s AND consumer LIKE ", datastore)
        + f"'{TRIGGER_PREFIX}%'{_HERE} GROUP BY consumer"
    )
    return {name: TriggerProgress(CellCounts(*map(int, counts)), int(start)) for name, start, *counts in rows}


def behind(datastore: str, consumer: str) -> Operation[dict[int, int]]:
    """Returns the added_ids of checkpoints that are behind their heads, by shard, at most BEHIND_MAX."""
    rows = yield from query(
        f"SELECT c.shard, c.added_id FROM schemaless.checkpoint AS c JOIN {_HEAD}"
        + sql(" WHERE c.datastore = %s AND c.consumer = %s AND h.head > c.added_id", datastore, consumer)
        + f" ORDER BY c.updated_at LIMIT {BEHIND_MAX}"
    )
    return {shard: added_id for shard, added_id in rows}


def lags(datastore: str) -> Operation[dict[int, int]]:
    """Returns how many cells the slowest consumer is behind, by shard that lives here. Finished shards are left out."""
    rows = yield from query(
        f"SELECT c.shard, MAX(h.head - c.added_id) FROM schemaless.checkpoint AS c JOIN {_HEAD}"
        + sql(" WHERE c.datastore = %s AND h.head > c.added_id GROUP BY c.shard", datastore)
    )
    return {shard: int(lag) for shard, lag in rows}
