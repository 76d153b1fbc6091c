"""The two ways in which cells get behind the heads of their shards (I3, I4). Each is one transaction.

`insert_new` is the usual one, a single round trip: heads stay in user variables of the session, so they are locked no
longer than the server works. `append` is for a caller that has locked the heads to look at something first. Both raise
DuplicateKey, with nothing written, when one of the cells exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from schemaless.cell import Placed, PutStatus
from schemaless.errors import NeedsLockedHeads
from schemaless.storage import shard_head
from schemaless.storage.operation import Operation
from schemaless.storage.shard_head import MICROSECONDS, Head
from schemaless.storage.sql import Name, Script, commas, literal, sql, time_literal
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
    """Inserts cells of which none exists yet and returns their places, in order.

    `before` runs first in the same transaction, while no head is locked yet. Raises DuplicateKey when a cell exists,
    and Misconfigured when a shard doesn't live on this cluster.
    """
    shards = sorted({cell.shard for cell in cells})
    if len(shards) <= _VARIABLE_HEADS_MAX:
        script, offsets = _insertion_with_variables(datastore, shards, cells, before)
        try:
            results = yield script
        except NeedsLockedHeads:
            pass
        else:
            ((numbers_text,),) = results[-1].rows
            now, *numbers = map(int, numbers_text.split())
            heads = {shard: Head(shard, numbers[2 * n], numbers[2 * n + 1], now) for n, shard in enumerate(shards)}
            return [_placed(heads[cell.shard], offset) for cell, offset in zip(cells, offsets, strict=True)]
    heads, now = yield from shard_head.lock(datastore.name, shards, before)
    return (yield from append(datastore, heads, now, cells))


def append(
    datastore: Datastore, heads: Mapping[int, Head], now: int, cells: Sequence[ShardCell], also: Sequence[Script] = ()
) -> Operation[list[Placed]]:
    """Inserts cells behind locked heads, runs `also`, moves the heads and commits, in one round trip.

    `heads` and `now` are what shard_head.lock returned in this transaction. Returns the places of the cells, in order.
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
    for head in moved.values():
        if head.last_created_at - now > CLOCK_BEHIND_MAX_US:
            log.warning(
                "the master's clock is behind the last created_at of a shard",
                datastore=datastore.name,
                shard=head.shard,
                behind_s=(head.last_created_at - now) / 1e6,
            )
    return placed


def _insertion_with_variables(
    datastore: Datastore, shards: Sequence[int], cells: Sequence[ShardCell], before: Sequence[Script]
) -> tuple[Script, list[int]]:
    """Returns the whole transaction as one script, and how far behind its shard's head each cell gets.

    The nth shard has its head in @hn and its generation in @gn, and @now is created_at: the master's clock under the
    lock. Columns of a cell take no NULL, so the script fails with NeedsLockedHeads where one of them is NULL: @hn and
    @gn of a head that isn't on this server, and @now where the clock is behind the last created_at of a head.

    The last statement returns one text of numbers: @now in microseconds since the epoch, then generation and head of
    each shard. As columns they would cost drivers a description each, more than all else of this statement.
    """
    variables = {shard: n for n, shard in enumerate(shards)}
    rows: dict[int, list[Script]] = {shard: [] for shard in shards}
    offsets = []
    for cell in cells:
        n, values = variables[cell.shard], rows[cell.shard]
        offset = len(values) + 1
        offsets.append(offset)
        values.append(f"(@h{n}+{offset},@g{n},{_row_values(cell)},@now)")
    columns = [
        f"MAX(CASE heads.shard WHEN {shard} THEN {column} END)" for shard in shards for column in ("head", "generation")
    ]
    name = sql("%s", datastore.name.encode())
    moved = [f"({name},{shard},@g{n},@h{n}+{len(rows[shard])},@now)" for shard, n in variables.items()]
    script = ";".join(
        [
            "BEGIN",
            *before,
            f"SELECT MAX(last_created_at),{commas(columns)}"
            f" INTO @now,{commas([f'@h{n},@g{n}' for n in variables.values()])}"
            f" {shard_head.from_exactly(datastore.name, shards)} FOR UPDATE",
            "SET @now=IF(CAST(@now AS DATETIME(6))<=UTC_TIMESTAMP(6),UTC_TIMESTAMP(6),NULL)",
            *(_insert(datastore, shard, values) for shard, values in rows.items()),
            shard_head.MOVE.format(commas(moved)),
            "COMMIT",
            f"SELECT CONCAT_WS(' ',{MICROSECONDS.format('@now')},"
            f"{commas([f'@g{n},@h{n}' for n in variables.values()])})",
        ]
    )
    return script, offsets


def _insert(datastore: Datastore, shard: int, rows: list[Script]) -> Script:
    return f"INSERT INTO {literal(Name(datastore.database(shard)))}.entity {_COLUMNS} VALUES {commas(rows)}"


def _row_values(cell: ShardCell) -> Script:
    key = cell.key
    return f"x'{key.row_key.hex()}',x'{key.column_name.encode().hex()}',{key.ref_key},x'{cell.body.hex()}'"


def _placed(head: Head, offset: int) -> Placed:
    return Placed(PutStatus.STORED, head.shard, head.generation, head.added_id + offset, head.last_created_at)
