"""How cells get behind the heads of their shards: one script, which is one transaction (I3, I4).

The heads are in user variables of the session. So they are locked no longer than the server works, and no process
holds a lock while it waits for a round trip.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog

from schemaless.cell import CellKey, ColumnName, Placed, PutStatus, RowKey
from schemaless.errors import (
    Busy,
    ClockAhead,
    LockTimeout,
    NeedsLockedHeads,
    NodeRefuses,
    ShardsLocked,
    StatementTimeout,
)
from schemaless.storage import appointment_table, shard_head
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS, Head
from schemaless.storage.sql import Name, Script, commas, literal, sql, time_literal
from schemaless.topology import Datastore

if TYPE_CHECKING:
    from schemaless.storage.entity_table import ShardCell

log = structlog.get_logger()

CLOCK_BEHIND_MAX_US = 60_000_000
"""A master's clock further behind the last created_at than this is a loud warning (I4)."""

SHARDS_MAX = 64
"""Shards of one transaction: the locking SELECT has two expressions for each, evaluated for each."""

_COLUMNS = "(added_id, generation, row_key, column_name, ref_key, body, cause, created_at)"


class NewRow(msgspec.Struct, frozen=True, gc=False):
    """A row to insert: `values` are its row_key, column_name, ref_key, body and cause in SQL."""

    shard: int
    values: Script


class TransactionSteps(msgspec.Struct, frozen=True, gc=False):
    """What else a transaction does: `first`, while no head is locked yet, `locked`, before the cells are inserted, each
    with the shard whose table it reads, and `last`. All are single statements. `numbers` are integers in SQL that it
    returns.
    """

    first: Sequence[Script] = ()
    locked: Sequence[tuple[int, Script]] = ()
    last: Sequence[Script] = ()
    numbers: Sequence[Script] = ()


NOTHING_ELSE = TransactionSteps()


def insert_new(
    datastore: Datastore, cells: Sequence[ShardCell], before: Sequence[Script] = (), latest: int | None = None
) -> Operation[list[Placed]]:
    """Inserts cells of at most SHARDS_MAX shards, of which none exists yet, and returns their places, in order.

    `before` runs first in the same transaction, while no head is locked yet. Idempotency-Keys of cells are written in
    it, too. Raises DuplicateKey when a cell exists, with nothing written, and what `insert` does.
    """
    keys = answers_of(datastore.name, ((cell.key, cell.idempotency_key) for cell in cells))
    steps = TransactionSteps(first=before, last=keys) if before or keys else NOTHING_ELSE
    placed, _ = yield from insert(datastore, [NewRow(cell.shard, _values(cell)) for cell in cells], steps, latest)
    return placed


def insert(
    datastore: Datastore,
    rows: Sequence[NewRow],
    steps: TransactionSteps = NOTHING_ELSE,
    latest: int | None = None,
) -> Operation[tuple[list[Placed], list[int]]]:
    """Inserts rows behind the heads of at most SHARDS_MAX shards. Returns their places, in order, and the numbers.

    `latest` is the latest created_at that is believed, in microseconds since the epoch.

    Raises ClockAhead for a master whose clock is later, Misconfigured when a shard doesn't live on this cluster,
    StaleTopology when the server's epoch is another one than this process believes, ShardsLocked when another session
    held heads or a table for too long, LockTimeout when it held what a `first` step needs, and NeedsLockedHeads when a
    step made a NULL.
    """
    shards = sorted({row.shard for row in rows})
    try:
        try:
            times = _one_time(shards, latest)
            script, offsets = _script(datastore, shards, rows, steps, times)
            results = yield script
        except NeedsLockedHeads:
            times = _own_times(shards, latest)
            try:
                script, offsets = _script(datastore, shards, rows, steps, times)
                results = yield script
            except NeedsLockedHeads:
                yield from shard_head.verify_home(datastore.name, shards)
                yield from appointment_table.verify_none_newer()
                yield from _verify_clock(latest)
                raise
    except (LockTimeout, StatementTimeout) as error:
        statement = error.statement if isinstance(error, LockTimeout) else 0
        if 0 < statement <= len(steps.first):
            raise
        if (shard := _tables(shards, steps).get(statement)) is not None:
            why = f"another session locks the table {datastore.database(shard)}.entity"
            raise ShardsLocked(why, [shard]) from error
        locked = yield from shard_head.locked(datastore.name, shards)
        if locked:
            why = f"datastore {datastore.name}: another transaction holds the heads of shards {locked[:10]}"
            raise ShardsLocked(why, locked) from error
        raise Busy(str(error)) from error
    ((text,),) = results[-1].rows
    numbers = [int(number) for number in text.split()]
    clock, own, numbers = numbers[0], numbers[1 : len(times.shown)], numbers[len(times.shown) :]
    heads = {
        shard: Head(shard, numbers[2 * n], numbers[2 * n + 1], own[n] if own else clock)
        for n, shard in enumerate(shards)
    }
    for head in heads.values():
        if head.last_created_at - clock > CLOCK_BEHIND_MAX_US:
            log.warning(
                "a master's clock is behind the last created_at of a shard",
                datastore=datastore.name,
                shard=head.shard,
                behind_s=(head.last_created_at - clock) / 1e6,
            )
    placed = [_placed(heads[row.shard], offset) for row, offset in zip(rows, offsets, strict=True)]
    return placed, numbers[2 * len(shards) :]


def _verify_clock(latest: int | None) -> Operation[None]:
    ((clock,),) = yield from query(f"SELECT {MICROSECONDS.format('UTC_TIMESTAMP(6)')}")
    if latest is not None and clock > latest:
        raise ClockAhead(f"the clock of this master is {(clock - latest) / 1e6:.0f} s ahead of what is believed")


class _Times(msgspec.Struct, frozen=True):
    """How the cells of a transaction get their created_at: what is selected with the heads into which variables, what
    is computed under the lock, the variable of each shard, and what is shown: the clock, then the shards' own times.
    """

    selected: list[Script]
    into: list[Script]
    computed: Script
    of_shards: list[Script]
    shown: list[Script]


def _one_time(shards: Sequence[int], latest: int | None) -> _Times:
    """Returns the usual way: one time, the master's clock. It is NULL if it is behind a head, or not believed."""
    believed = "" if latest is None else f" AND UTC_TIMESTAMP(6)<={time_literal(latest)}"
    return _Times(
        ["MAX(last_created_at)"],
        ["@now"],
        f"SET @now=IF(CAST(@now AS DATETIME(6))<=UTC_TIMESTAMP(6){believed},UTC_TIMESTAMP(6),NULL)",
        ["@now"] * len(shards),
        [MICROSECONDS.format("@now")],
    )


def _own_times(shards: Sequence[int], latest: int | None) -> _Times:
    """Returns the way for a clock that is behind a head: each shard's time is at least its last one (I4)."""
    names = [f"@t{n}" for n in range(len(shards))]
    clock = "UTC_TIMESTAMP(6)"
    if latest is not None:
        clock = f"IF({clock}<={time_literal(latest)},{clock},NULL)"
    later = commas([f"{name}=GREATEST(CAST({name} AS DATETIME(6)),{clock})" for name in names])
    return _Times(
        [f"MAX(CASE heads.shard WHEN {shard} THEN last_created_at END)" for shard in shards],
        names,
        f"SET {later}",
        names,
        [MICROSECONDS.format(moment) for moment in ("UTC_TIMESTAMP(6)", *names)],
    )


def _script(
    datastore: Datastore, shards: Sequence[int], rows: Sequence[NewRow], steps: TransactionSteps, times: _Times
) -> tuple[Script, list[int]]:
    """Returns the whole transaction as one script, and how far behind its shard's head each row gets.

    The nth shard has its head in @hn and its generation in @gn. Columns of a cell take no NULL, so the script fails
    with NeedsLockedHeads where one of them is NULL: @hn and @gn of a head that isn't on this server, and a time that
    can't be given.

    The last statement returns one text of numbers: the times in microseconds since the epoch, then generation and head
    of each shard. As columns they would cost drivers a description each, more than all else of this statement.
    """
    variables = {shard: n for n, shard in enumerate(shards)}
    values: dict[int, list[Script]] = {shard: [] for shard in shards}
    offsets = []
    for row in rows:
        n, here = variables[row.shard], values[row.shard]
        offset = len(here) + 1
        offsets.append(offset)
        here.append(f"(@h{n}+{offset},@g{n},{row.values},{times.of_shards[n]})")
    columns = [
        f"MAX(CASE heads.shard WHEN {shard} THEN {column} END)" for shard in shards for column in ("head", "generation")
    ]
    name = sql("%s", datastore.name.encode())
    moved = [
        f"({name},{shard},@g{n},@h{n}+{len(values[shard])},{times.of_shards[n]})" for shard, n in variables.items()
    ]
    shown = [*times.shown, *(f"@g{n},@h{n}" for n in variables.values()), *steps.numbers]
    script = ";".join(
        [
            "BEGIN",
            *steps.first,
            f"SELECT {shard_head.LOCK_WAIT} {commas(times.selected)},{commas(columns)}"
            f" INTO {commas(times.into)},{commas([f'@h{n},@g{n}' for n in variables.values()])}"
            f" {shard_head.from_exactly(datastore.name, shards)}{shard_head.OF_EPOCH} FOR UPDATE",
            times.computed,
            *(statement for _, statement in steps.locked),
            *(_insert(datastore, shard, here) for shard, here in values.items()),
            *steps.last,
            shard_head.MOVE.format(commas(moved)),
            "COMMIT",
            f"SELECT CONCAT_WS(' ',{commas(shown)})",
        ]
    )
    return script, offsets


def _tables(shards: Sequence[int], steps: TransactionSteps) -> dict[int, int]:
    """Returns, by the statements of `_script` that need the table of one shard, counted from 0, that shard."""
    before = 1 + len(steps.first) + 2
    return dict(enumerate([*(shard for shard, _ in steps.locked), *shards], before))


def held(datastore: Datastore, shards: Sequence[int]) -> Operation[list[int]]:
    """Returns the shards, out of those that live here, whose head or table another session holds.

    A table that is locked is waited for, so the ones after it are not looked at and count as held.
    """
    locked = set((yield from shard_head.locked(datastore.name, shards)))
    left = [shard for shard in shards if shard not in locked]
    while left:
        try:
            yield sql("SELECT added_id FROM %s.entity WHERE added_id = 0 FOR UPDATE", Name(datastore.database(left[0])))
        except LockTimeout:
            break
        except NodeRefuses:  # nobody holds what isn't there
            pass
        left.pop(0)
    return sorted(locked | set(left))


def _insert(datastore: Datastore, shard: int, rows: list[Script]) -> Script:
    return f"INSERT INTO {literal(Name(datastore.database(shard)))}.entity {_COLUMNS} VALUES {commas(rows)}"


def _values(cell: ShardCell) -> Script:
    key = cell.key
    return values(key.row_key, key.column_name, str(key.ref_key), cell.body, cell.cause)


def values(row_key: RowKey, column_name: ColumnName, ref_key: Script, body: bytes, cause: str | None) -> Script:
    """Returns the values of a NewRow. `ref_key` is a number or a variable."""
    return f"x'{row_key.hex()}',x'{column_name.encode().hex()}',{ref_key},x'{body.hex()}',{optional(cause)}"


def optional(text: str | None) -> Script:
    return "NULL" if text is None else f"x'{text.encode().hex()}'"


def answer_insertion(
    datastore: str, row_key: RowKey, column_name: ColumnName, idempotency_key: str, ref_key: Script
) -> Script:
    """Returns a statement for the transaction that inserts the cell of a POST. `ref_key` is an expression."""
    return (
        sql(
            "INSERT INTO schemaless.idempotency VALUES (%s, %s, %s, %s, ",
            datastore.encode(),
            row_key,
            column_name.encode(),
            idempotency_key.encode(),
        )
        + f"{ref_key}, UTC_TIMESTAMP(6))"
    )


def answers_of(datastore: str, posted: Iterable[tuple[CellKey, str | None]]) -> list[Script]:
    """Returns statements that write the Idempotency-Keys of cells, where they have one. One that is there stays."""
    return [
        answer_insertion(datastore, key.row_key, key.column_name, idempotency_key, str(key.ref_key))
        + " ON DUPLICATE KEY UPDATE ref_key = idempotency.ref_key"
        for key, idempotency_key in posted
        if idempotency_key is not None
    ]


def idempotency_keys(datastore: str, keys: Sequence[CellKey]) -> Operation[list[str | None]]:
    """Returns the Idempotency-Keys of the POSTs that wrote these cells, at least one, in order."""
    results = yield ";".join(
        sql(
            "SELECT idempotency_key FROM schemaless.idempotency WHERE datastore = %s AND row_key = %s"
            " AND column_name = %s AND ref_key = %s LIMIT 1",
            datastore.encode(),
            key.row_key,
            key.column_name.encode(),
            key.ref_key,
        )
        for key in keys
    )
    return [result.rows[0][0].decode() if result.rows else None for result in results]


def _placed(head: Head, offset: int) -> Placed:
    return Placed(PutStatus.STORED, head.shard, head.generation, head.added_id + offset, head.last_created_at)
