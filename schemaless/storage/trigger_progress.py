"""Progress of trigger programs, added up on the server: what became of their cells, and which shards are behind."""

from __future__ import annotations

import msgspec

from schemaless.names import TRIGGER_PREFIX
from schemaless.storage.checkpoint_table import CellCounts
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import sql

BEHIND_MAX = 256
"""Shards that are behind whose next cell a server looks up for one program, those that moved longest ago."""


class TriggerProgress(msgspec.Struct, frozen=True):
    """The counts of one program on this server, and the sum of where counting began."""

    counts: CellCounts
    counted_from: int


def of_datastore(datastore: str) -> Operation[dict[str, TriggerProgress]]:
    """Returns the trigger programs that have a checkpoint on this server, by consumer."""
    sums = ", ".join(f"SUM({name})" for name in CellCounts.__struct_fields__)
    rows = yield from query(
        f"SELECT consumer, SUM(counted_from), {sums} FROM schemaless.checkpoint"
        + sql(" WHERE datastore = %s AND consumer LIKE ", datastore)
        + f"'{TRIGGER_PREFIX}%' GROUP BY consumer"
    )
    return {name: TriggerProgress(CellCounts(*map(int, counts)), int(start)) for name, start, *counts in rows}


def behind(datastore: str, consumer: str) -> Operation[dict[int, int]]:
    """Returns the added_ids of checkpoints that are behind their heads, by shard, at most BEHIND_MAX."""
    rows = yield from query(
        "SELECT c.shard, c.added_id FROM schemaless.checkpoint AS c JOIN schemaless.shard_head AS h"
        " ON h.datastore = c.datastore AND h.shard = c.shard"
        + sql(" WHERE c.datastore = %s AND c.consumer = %s AND h.head > c.added_id", datastore, consumer)
        + f" ORDER BY c.updated_at LIMIT {BEHIND_MAX}"
    )
    return {shard: added_id for shard, added_id in rows}
