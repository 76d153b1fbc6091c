"""parked: the cells that trigger programs set aside, each with its cause (I12). On the home of the shard.

The owner of a shard writes records in the transaction that moves the checkpoint, so these functions return scripts.
People order that records are called again or discarded: an order only marks them, and the owner carries it out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum

import msgspec

from schemaless.location import Location
from schemaless.storage.operation import Operation, Row, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Script, Time, commas, sql

ERROR_CHARACTERS_MAX = 16_000
ATTEMPTS_KEPT = 20
_PAGE = 20_000
_TABLE = "schemaless.parked"
_DUE = "ordered IS NOT NULL AND due_at <= UTC_TIMESTAMP(6)"


class Cause(StrEnum):
    """Why a cell is parked. What waits behind it in its row has no record, and is shown with the cause `behind`."""

    ERROR = "error"  # its last attempt failed
    VERDICT = "verdict"  # the function asked for it
    KILLED = "killed"  # its call ended processes
    HUNG = "hung"  # its call didn't return
    WAITING = "waiting"  # it isn't parked: its next attempt is due later, or its call takes long


class Order(StrEnum):
    """What people order for a record."""

    RETRY = "retry"
    DISCARD = "discard"


class ParkedCell(msgspec.Struct, frozen=True, gc=False):
    """A record. Times are in microseconds. `attempted_at` has those of the last attempts that failed.

    `function_name` and the later functions of the column have not finished the cell. `version` is the program's.
    """

    shard: int
    generation: int
    added_id: int
    row_key: bytes
    column_name: str
    ref_key: int
    function_name: str
    cause: Cause
    holds_row: bool
    error: str
    attempts: int
    attempted_at: Sequence[int]
    version: str
    parked_at: int
    begun: bool = False
    kills: int = 0
    ordered: Order | None = None
    due_at: int | None = None
    job: int | None = None
    order_reason: str | None = None

    @property
    def location(self) -> Location:
        return Location(self.generation, self.added_id)


# What the owner of a shard writes


def put(datastore: str, consumer: str, cell: ParkedCell) -> Script:
    """Makes or replaces a record. A retry of it is done with that. A discard that came meanwhile stays ordered."""
    return sql(
        f"INSERT INTO {_TABLE} ({_WRITTEN}, uncopied) VALUES"
        " (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
        f" ON DUPLICATE KEY UPDATE {_REPLACED}, uncopied = VALUES(uncopied),"
        " due_at = IF(ordered <=> 'discard', due_at, NULL), ordered = IF(ordered <=> 'discard', ordered, NULL)",
        datastore,
        consumer,
        cell.shard,
        cell.added_id,
        cell.generation,
        cell.row_key,
        cell.column_name,
        cell.ref_key,
        cell.function_name,
        cell.cause.value,
        cell.holds_row,
        cell.error[:ERROR_CHARACTERS_MAX],
        cell.attempts,
        msgspec.json.encode(list(cell.attempted_at[-ATTEMPTS_KEPT:])).decode(),
        cell.version,
        Time(cell.parked_at),
        cell.begun,
        cell.kills,
        cell.cause is not Cause.WAITING,
    )


def begin(datastore: str, consumer: str, shard: int, added_id: int) -> Script:
    """Marks that a process begins to call a record's cell again. Where it dies of it, the next one finds the mark."""
    return f"UPDATE {_TABLE} SET begun = 1 WHERE " + _is(datastore, consumer, shard, added_id)


def unmark(datastore: str, consumer: str, shard: int, added_id: int, kills: int) -> Script:
    """Takes the mark away, of a process that ended. What people ordered, and the error of the cell, stay."""
    return f"UPDATE {_TABLE} SET begun = 0, kills = {kills} WHERE " + _is(datastore, consumer, shard, added_id)


def release_row(datastore: str, consumer: str, shard: int, added_id: int) -> Script:
    """Lets the later cells of a record's row pass it."""
    return f"UPDATE {_TABLE} SET holds_row = 0 WHERE " + _is(datastore, consumer, shard, added_id)


def delete(datastore: str, consumer: str, shard: int, added_id: int) -> Script:
    """Deletes a record: its cell is finished, or discarded."""
    return f"DELETE FROM {_TABLE} WHERE " + _is(datastore, consumer, shard, added_id)


def delete_from(datastore: str, consumer: str, shard: int, added_id: int) -> Script:
    """Deletes the records of a shard from an added_id on: those cells come again, or are superseded (I13)."""
    return sql(
        f"DELETE FROM {_TABLE} WHERE datastore = %s AND consumer = %s AND shard = %s AND added_id >= %s",
        datastore,
        consumer,
        shard,
        added_id,
    )


# What the owner of a shard reads


def of_shards(
    datastore: str, consumer: str, shards: Iterable[int], page_rows: int = _PAGE
) -> Operation[list[ParkedCell]]:
    """Returns the records of these shards without their errors, by shard and added_id. Reads pages of `page_rows`."""
    found: list[ParkedCell] = []
    left = sorted(shards)
    after = 0  # of the first shard that is left, the records up to this added_id are found
    while left:
        shard, *others = left
        beyond = f" OR shard IN ({commas([str(other) for other in others])})" if others else ""
        rows = yield from query(
            f"SELECT {_COLUMNS.replace('error', _NO_ERROR)} FROM {_TABLE}"
            + sql(" WHERE datastore = %s AND consumer = %s", datastore, consumer)
            + f" AND ((shard = {shard} AND added_id > {after}){beyond}) ORDER BY shard, added_id LIMIT {page_rows}"
        )
        found += map(_parked_cell, rows)
        if len(rows) < page_rows:
            break
        left, after = [other for other in left if other >= found[-1].shard], found[-1].added_id
    return found


def due(
    datastore: str, consumer: str, limit: int, shards: Collection[int] | None = None
) -> Operation[list[ParkedCell]]:
    """Returns the records here whose orders are due, without their errors, those that are due longest first.

    Records of shards that are paused are left out, and where `shards` are given all others.
    """
    if shards is not None and not shards:
        return []
    only = "" if shards is None else f" AND shard IN ({commas([str(shard) for shard in shards])})"
    rows = yield from query(
        f"SELECT {_COLUMNS.replace('error', _NO_ERROR)} FROM {_TABLE} AS parked"
        + sql(" WHERE datastore = %s AND consumer = %s", datastore, consumer)
        + f" AND {_DUE}{only} AND NOT EXISTS (SELECT * FROM schemaless.trigger_order AS told"
        " WHERE told.datastore = parked.datastore AND told.consumer = parked.consumer"
        " AND told.shard = parked.shard AND told.paused)"
        f" ORDER BY due_at, shard, added_id LIMIT {limit}"
    )
    return [_parked_cell(row) for row in rows]


def uncopied(datastore: str, consumer: str, shards: Collection[int], limit: int) -> Operation[list[ParkedCell]]:
    """Returns parked cells of these shards that are not yet in the topic of parked cells, with their errors."""
    if not shards:
        return []
    rows = yield from query(
        f"SELECT {_COLUMNS} FROM {_TABLE} FORCE INDEX (uncopied)"
        + sql(" WHERE datastore = %s AND consumer = %s AND uncopied = 1", datastore, consumer)
        + f" AND shard IN ({commas([str(shard) for shard in sorted(shards)])}) ORDER BY shard, added_id LIMIT {limit}"
    )
    return [_parked_cell(row) for row in rows]


def note_copied(datastore: str, consumer: str, records: Sequence[ParkedCell]) -> Operation[None]:
    """Notes that records, at least one, were copied. One that was parked anew meanwhile is copied again."""
    same = [
        sql("(shard = %s AND added_id = %s AND parked_at = %s)", one.shard, one.added_id, Time(one.parked_at))
        for one in records
    ]
    yield (
        f"UPDATE {_TABLE} SET uncopied = 0"
        + sql(" WHERE datastore = %s AND consumer = %s", datastore, consumer)
        + f" AND ({' OR '.join(same)})"
    )


def of_keys(datastore: str, consumer: str, keys: Sequence[tuple[int, int]]) -> Operation[list[ParkedCell]]:
    """Returns the records at these shards and added_ids, at least one, with their errors."""
    listed = " OR ".join(f"(shard = {shard} AND added_id = {added_id})" for shard, added_id in keys)
    rows = yield from query(
        f"SELECT {_COLUMNS} FROM {_TABLE}"
        + sql(" WHERE datastore = %s AND consumer = %s", datastore, consumer)
        + f" AND ({listed}) ORDER BY shard, added_id"
    )
    return [_parked_cell(row) for row in rows]


# What people ask for


def of_row(
    datastore: str, consumers: Sequence[str], row_key: bytes, limit: int, error_characters_max: int
) -> Operation[dict[str, list[ParkedCell]]]:
    """Returns by consumer the first records of one row, by added_id, with the beginning of their errors."""
    columns = _COLUMNS.replace("error", f"LEFT(error, {error_characters_max})", 1)
    scripts = [
        f"SELECT {columns} FROM {_TABLE}"
        + sql(" WHERE datastore = %s AND consumer = %s AND row_key = %s", datastore, consumer, row_key)
        + f" ORDER BY added_id LIMIT {limit}"
        for consumer in consumers
    ]
    if not scripts:
        return {}
    results = yield ";".join(scripts)
    return {
        consumer: [_parked_cell(row) for row in result.rows]
        for consumer, result in zip(consumers, results, strict=True)
    }


def _is(datastore: str, consumer: str, shard: int, added_id: int) -> Script:
    return sql(
        "datastore = %s AND consumer = %s AND shard = %s AND added_id = %s", datastore, consumer, shard, added_id
    )


_NAMES = (
    "shard", "added_id", "generation", "row_key", "column_name", "ref_key", "function_name", "cause", "holds_row",
    "error", "attempts", "attempted_at", "version", "parked_at", "begun", "kills",
)  # fmt: skip
_WRITTEN = "datastore, consumer, " + ", ".join(_NAMES)
_REPLACED = ", ".join(f"{name} = VALUES({name})" for name in _NAMES[2:])
_NO_ERROR = "''"
_COLUMNS = (
    commas([MICROSECONDS.format(name) if name.endswith("parked_at") else name for name in _NAMES])
    + f", ordered, {MICROSECONDS.format('due_at')}, job, order_reason"
)


def _parked_cell(row: Row) -> ParkedCell:
    (
        shard, added_id, generation, row_key, column, ref_key, function, cause, holds, error, attempts, attempted,
        version, parked_at, begun, kills, ordered, due_at, job, reason,
    ) = row  # fmt: skip
    return ParkedCell(
        shard,
        generation,
        added_id,
        bytes(row_key),
        column,
        ref_key,
        function,
        Cause(cause),
        bool(holds),
        error,
        attempts,
        msgspec.json.decode(attempted),
        version,
        parked_at,
        bool(begun),
        kills,
        None if ordered is None else Order(ordered),
        due_at,
        job,
        reason,
    )
