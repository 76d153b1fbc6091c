"""Checkpoints of all consumers beside the heads, added up on the server: one small row for each consumer.

A datastore has as many checkpoints as consumers times shards. Who only asks how far the consumers are reads none of
them.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import commas, sql

STOPPED_MAX = 100
"""How many stopped shards one server names."""

_KEPT = (
    "IF(c.generation = h.generation, c.added_id, LEAST(c.added_id, COALESCE((SELECT MIN(g.starts_at) - 1"
    " FROM schemaless.shard_generation AS g WHERE g.datastore = c.datastore AND g.shard = c.shard"
    " AND g.generation > c.generation), c.added_id)))"
)
"""SQL: how far a checkpoint counts. What a later generation superseded isn't finished (I13)."""


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
    rows = yield from query(sql("SELECT DISTINCT consumer FROM schemaless.checkpoint WHERE datastore = %s", datastore))
    return sorted(name for (name,) in rows)


def summaries(datastore: str) -> Operation[list[ConsumerSummary]]:
    """Returns one summary for each consumer with a checkpoint on this server, by name."""
    rows = yield from query(
        "SELECT c.consumer, COUNT(*), SUM(c.state = 'stopped'),"
        f" SUM(IF(h.shard IS NULL, 0, GREATEST(h.head, {_KEPT}) - {_KEPT})),"
        " SUM(h.shard IS NULL), SUM(IF(h.shard IS NULL, c.added_id, 0))"
        " FROM schemaless.checkpoint AS c LEFT JOIN schemaless.shard_head AS h"
        " ON h.datastore = c.datastore AND h.shard = c.shard"
        + sql(" WHERE c.datastore = %s GROUP BY c.consumer ORDER BY c.consumer", datastore)
    )
    return [ConsumerSummary(row[0], *map(int, row[1:])) for row in rows]


def stopped(datastore: str, consumers: Collection[str]) -> Operation[list[StoppedShard]]:
    """Returns stopped shards of these consumers on this server, at most STOPPED_MAX, by consumer and shard."""
    if not consumers:
        return []
    wanted = commas([sql("%s", consumer) for consumer in consumers])
    rows = yield from query(
        sql("SELECT consumer, shard, reason FROM schemaless.checkpoint WHERE datastore = %s", datastore)
        + f" AND consumer IN ({wanted}) AND state = 'stopped' ORDER BY consumer, shard LIMIT {STOPPED_MAX}"
    )
    return [StoppedShard(*row) for row in rows]
