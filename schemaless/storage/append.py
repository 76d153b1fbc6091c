"""Insertion: the two ways in which cells get behind the heads of their shards (I3, I4), each one transaction.

`insert_new` is the usual one, a single round trip: heads travel in user variables instead of to us and back, so they
are locked no longer than the server works. `append` is for whoever has locked the heads to look at something first.
Both raise DuplicateKey, with nothing written, when a cell exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from schemaless.cell import Placed, PutStatus
from schemaless.errors import Misconfigured
from schemaless.storage import shard_head
from schemaless.storage.operation import Operation
from schemaless.storage.shard_head import Head
from schemaless.storage.sql import Name, Script, commas, literal, time_literal
from schemaless.topology import Datastore

if TYPE_CHECKING:
    from schemaless.storage.entity_table import ShardCell

log = structlog.get_logger()

CLOCK_BEHIND_MAX_US = 60_000_000
"""A master's clock further behind the last created_at than this is a loud warning (I4)."""

_VARIABLE_HEADS_MAX = 64  # the locking SELECT has two expressions for each, evaluated for each
_COLUMNS = "(added_id, generation, row_key, column_name, ref_key, body, created_at)"


def insert_new(
    datastore: Datastore, cells: Sequence[ShardCell], before: Sequence[Script] = ()
) -> Operation[list[Placed]]:
    """Inserts cells of which none exists yet; their places, in order. `before` runs in the same transaction, while no
    head is locked yet.
    """
    shards = sorted({cell.shard for cell in cells})
    if len(shards) <= _VARIABLE_HEADS_MAX:
        try:
            return (yield from _insert_by_variables(datastore, shards, cells, before))
        except Misconfigured:
            pass  # a head isn't here, or the clock is behind it: under the lock it is seen which
    heads, now = yield from shard_head.lock(datastore.name, shards, before)
    return (yield from append(datastore, heads, now, cells))


def _insert_by_variables(
    datastore: Datastore, shards: Sequence[int], cells: Sequence[ShardCell], before: Sequence[Script]
) -> Operation[list[Placed]]:
    variables = {shard: n for n, shard in enumerate(shards)}
    counts = dict.fromkeys(shards, 0)
    values: dict[int, list[Script]] = {shard: [] for shard in shards}
    offsets = []
    for cell in cells:
        shard, n = cell.shard, variables[cell.shard]
        counts[shard] += 1
        offsets.append(counts[shard])
        values[shard].append(f"(@h{n}+{counts[shard]},@g{n},{_row_values(cell)},@now)")
    results = yield ";".join(
        [
            "BEGIN",
            *before,
            shard_head.lock_into_variables(datastore.name, shards),
            *(_insert(datastore, shard, rows) for shard, rows in values.items()),
            shard_head.move_by_variables(datastore.name, counts),
            "COMMIT",
            shard_head.select_variables(len(shards)),
        ]
    )
    ((numbers_text,),) = results[-1].rows
    now, *numbers = map(int, numbers_text.split())
    heads = {shard: Head(shard, numbers[2 * n], numbers[2 * n + 1], now) for shard, n in variables.items()}
    return [_placed(heads[cell.shard], offset) for cell, offset in zip(cells, offsets, strict=True)]


def append(
    datastore: Datastore, heads: Mapping[int, Head], now: int, cells: Sequence[ShardCell], also: Sequence[Script] = ()
) -> Operation[list[Placed]]:
    """Inserts cells behind locked heads, runs `also`, moves the heads and commits: one round trip.

    `heads` and `now` are what shard_head.lock gave in this transaction.
    """
    shards = {cell.shard for cell in cells}
    moved = {n: Head(n, heads[n].generation, heads[n].added_id, max(now, heads[n].last_created_at)) for n in shards}
    rows: dict[int, list[Script]] = {shard: [] for shard in shards}
    placed = []
    for cell in cells:
        head = moved[cell.shard]
        at = _placed(head, len(rows[cell.shard]) + 1)
        placed.append(at)
        rows[cell.shard].append(f"({at.added_id},{at.generation},{_row_values(cell)},{time_literal(at.created_at)})")
    ends = [Head(n, h.generation, h.added_id + len(rows[n]), h.last_created_at) for n, h in moved.items()]
    inserts = [_insert(datastore, shard, values) for shard, values in rows.items()]
    yield ";".join([*inserts, *also, shard_head.move(datastore.name, ends), "COMMIT"])
    _warn_if_behind(datastore, moved.values(), now)
    return placed


def _insert(datastore: Datastore, shard: int, rows: list[Script]) -> Script:
    return f"INSERT INTO {literal(Name(datastore.database(shard)))}.entity {_COLUMNS} VALUES {commas(rows)}"


def _row_values(cell: ShardCell) -> Script:
    key = cell.key
    return f"x'{key.row_key.hex()}',x'{key.column_name.encode().hex()}',{key.ref_key},x'{cell.body.hex()}'"


def _placed(head: Head, offset: int) -> Placed:
    return Placed(PutStatus.STORED, head.shard, head.generation, head.added_id + offset, head.last_created_at)


def _warn_if_behind(datastore: Datastore, heads: Iterable[Head], clock: int) -> None:
    for head in heads:
        if head.last_created_at - clock > CLOCK_BEHIND_MAX_US:
            log.warning(
                "the master's clock is behind the last created_at of a shard",
                datastore=datastore.name,
                shard=head.shard,
                behind_s=(head.last_created_at - clock) / 1e6,
            )
