"""parked: the cells that trigger programs set aside, each with its cause (I12). On the home of the shard.

The owner of a shard writes records in the transaction that moves the checkpoint, so these functions return scripts.
People order that records are called again or discarded: an order only marks them, and the owner carries it out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from schemaless.location import Location
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import NOW, Expression, Script, Time, commas, literal, matching, sql, where
from schemaless.storage.table import Table

ERROR_CHARACTERS_MAX = 16_000
ATTEMPTS_KEPT = 20
_PAGE = 20_000
_TABLE = "schemaless.parked"
T = TypeVar("T")
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

    `again_in_us`: how long it is until the next attempt is due, from the moment when the record is written, or was
    read. Only the server's clock measures it, because the worker that reads it may be another one.
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
    again_in_us: int = 0

    @property
    def location(self) -> Location:
        return Location(self.generation, self.added_id)


_AGAIN_IN_US = "GREATEST(0, IFNULL(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), again_at), 0))"
CELLS = Table(_TABLE, ParkedCell, again_in_us=_AGAIN_IN_US)
_WITHOUT_ERRORS = Table(_TABLE, ParkedCell, again_in_us=_AGAIN_IN_US, error="''")
_KEPT = {"ordered": None, "due_at": None, "job": None, "order_reason": None}
"""What people write into a record, and its owner doesn't."""
_REPLACED = tuple(
    name for name in ParkedCell.__struct_fields__ if name not in ("shard", "added_id", "again_in_us", *_KEPT)
)


# What the owner of a shard writes


def put(datastore: str, consumer: str, cell: ParkedCell) -> Script:
    """Makes or replaces a record. A retry of it is done with that. A discard that came meanwhile stays ordered."""
    cut = msgspec.structs.replace(
        cell, error=cell.error[:ERROR_CHARACTERS_MAX], attempted_at=cell.attempted_at[-ATTEMPTS_KEPT:]
    )
    again_in = f"UTC_TIMESTAMP(6) + INTERVAL {cell.again_in_us} MICROSECOND" if cell.again_in_us else "NULL"
    written = {"uncopied": cell.cause is not Cause.WAITING, "again_at": Expression(again_in)}
    return (
        CELLS.upsert([cut], (*_REPLACED, *written), datastore=datastore, consumer=consumer, **written, **_KEPT)
        + ",due_at = IF(ordered <=> 'discard', due_at, NULL), ordered = IF(ordered <=> 'discard', ordered, NULL)"
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
    which = where(datastore=datastore, consumer=consumer, shard=shard)
    return f"DELETE FROM {_TABLE} {which} AND added_id >= {added_id}"


def erase(datastore: str, consumer: str, row_key: bytes, cells: Script) -> Script:
    """Empties the errors of some cells of a row, whose bodies they may tell of, also of those that ended (I19).

    The cells that are still parked are ordered to be called again. That ends them, because they have no body.
    """
    which = f"{where(datastore=datastore, consumer=consumer, row_key=row_key)} AND {cells}"
    again = f"ordered = COALESCE(ordered, {literal(Order.RETRY)}), due_at = {NOW.text}"
    return f"UPDATE {_TABLE} SET error = '', {again} {which};UPDATE {_HISTORY} SET error = '' {which}"


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
        rows = yield from _WITHOUT_ERRORS.rows(
            where(datastore=datastore, consumer=consumer)
            + f" AND ((shard = {shard} AND added_id > {after}){beyond}) ORDER BY shard, added_id LIMIT {page_rows}"
        )
        found += rows
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
    only = "" if shards is None else f" AND {matching(shard=list(shards))}"
    return (
        yield from _WITHOUT_ERRORS.rows(
            where(datastore=datastore, consumer=consumer)
            + f" AND {_DUE}{only} AND NOT EXISTS (SELECT * FROM schemaless.trigger_order AS told"
            " WHERE told.datastore = parked.datastore AND told.consumer = parked.consumer"
            " AND told.shard = parked.shard AND told.paused)"
            f" ORDER BY due_at, shard, added_id LIMIT {limit}"
        )
    )


def uncopied(datastore: str, consumer: str, shards: Collection[int], limit: int) -> Operation[list[ParkedCell]]:
    """Returns parked cells of these shards that are not yet in the topic of parked cells, with their errors."""
    if not shards:
        return []
    which = where(datastore=datastore, consumer=consumer, uncopied=True, shard=sorted(shards))
    return (yield from CELLS.rows(f"FORCE INDEX (uncopied) {which} ORDER BY shard, added_id LIMIT {limit}"))


def note_copied(datastore: str, consumer: str, records: Sequence[ParkedCell]) -> Operation[None]:
    """Notes that records, at least one, were copied. One that was parked anew meanwhile is copied again."""
    same = [
        sql("(shard = %s AND added_id = %s AND parked_at = %s)", one.shard, one.added_id, Time(one.parked_at))
        for one in records
    ]
    yield f"UPDATE {_TABLE} SET uncopied = 0 {where(datastore=datastore, consumer=consumer)} AND ({' OR '.join(same)})"


def of_keys(datastore: str, consumer: str, keys: Sequence[tuple[int, int]]) -> Operation[list[ParkedCell]]:
    """Returns the records at these shards and added_ids, at least one, with their errors."""
    listed = " OR ".join(f"(shard = {shard} AND added_id = {added_id})" for shard, added_id in keys)
    which = where(datastore=datastore, consumer=consumer)
    return (yield from CELLS.rows(f"{which} AND ({listed}) ORDER BY shard, added_id"))


# What people ask for


def of_row(
    datastore: str, consumers: Sequence[str], row_key: bytes, limit: int, error_characters_max: int
) -> Operation[dict[str, list[ParkedCell]]]:
    """Returns by consumer the first records of one row, by added_id, with the beginning of their errors."""
    beginnings = Table(_TABLE, ParkedCell, again_in_us=_AGAIN_IN_US, error=f"LEFT(error, {error_characters_max})")
    return (yield from of_consumers(beginnings, datastore, consumers, row_key, f"ORDER BY added_id LIMIT {limit}"))


def of_consumers(
    table: Table[T], datastore: str, consumers: Sequence[str], row_key: bytes, tail: Script
) -> Operation[dict[str, list[T]]]:
    """Returns by consumer the rows that are about one row of cells. Each consumer's are found by a key."""
    if not consumers:
        return {}
    results = yield ";".join(
        f"SELECT {table.select} FROM {table.name} {where(datastore=datastore, consumer=each, row_key=row_key)} {tail}"
        for each in consumers
    )
    return {each: list(map(table.decode, found.rows)) for each, found in zip(consumers, results, strict=True)}


def _is(datastore: str, consumer: str, shard: int, added_id: int) -> Script:
    return matching(datastore=datastore, consumer=consumer, shard=shard, added_id=added_id)


# parked_history: what became of cells that were parked, for people.
#
# The owner of a shard writes it in the transaction that deletes the record. Nothing is decided by it. It is bounded.

KEPT_DAYS = 30
KEPT_MAX = 100_000
"""Of one server. With more, the oldest go before their time."""

ERROR_CHARACTERS_KEPT = 500
_DELETED_AT_ONCE = 5_000
_HISTORY = "schemaless.parked_history"


class Ending(StrEnum):
    """What became of a parked cell."""

    FINISHED = "finished"  # it was called again, and all functions have finished it
    DISCARDED = "discarded"  # a person gave it up
    SOUGHT = "sought"  # a seek went back to before it, so it came again
    ERASED = "erased"  # its body was erased
    SUPERSEDED = "superseded"  # a new generation began at or before it
    FAILED = "failed"  # it was called again, and failed, so its record tells of that from now on


class EndedCell(msgspec.Struct, frozen=True):
    """A record as it was at the end, with the end of its error's text. `ended_at` is in microseconds."""

    record: ParkedCell
    ending: Ending
    ended_at: int


def keep(datastore: str, consumer: str, shard: int, added_id: int, ending: Ending, *, later: bool = False) -> Script:
    """Keeps what a record says, before it is deleted. `later`: also those of the shard that come after it.

    A record that only waited for its next attempt isn't kept, unless people ordered something for it.
    """
    copied = ", ".join(_COPIED)
    return (
        f"INSERT IGNORE INTO {_HISTORY} ({copied}, error, ending, ended_at)"
        f" SELECT {copied}, RIGHT(error, {ERROR_CHARACTERS_KEPT}), {literal(ending)}, {NOW.text} FROM {_TABLE}"
        f" {where(datastore=datastore, consumer=consumer, shard=shard)}"
        f" AND added_id {'>=' if later else '='} {added_id} AND (cause <> {literal(Cause.WAITING)} OR job IS NOT NULL)"
    )


def ended_of_row(
    datastore: str, consumers: Sequence[str], row_key: bytes, limit: int
) -> Operation[dict[str, list[EndedCell]]]:
    """Returns by consumer what became last of parked cells of one row, in the order of time."""
    latest = f"ORDER BY ended_at DESC, added_id DESC LIMIT {limit}"
    found = yield from of_consumers(_ENDED, datastore, consumers, row_key, latest)
    return {consumer: cells[::-1] for consumer, cells in found.items()}


def forget_old_history(kept_days: int = KEPT_DAYS, kept_max: int = KEPT_MAX) -> Operation[None]:
    """Deletes what is older than KEPT_DAYS, and the oldest beyond KEPT_MAX. Some at once.

    Both are found by a key. Numbers that were never used, or are deleted, count as kept.
    """
    ((last,),) = yield from query(f"SELECT COALESCE(MAX(number), 0) FROM {_HISTORY}")
    for old in (
        f"number <= {last - kept_max} ORDER BY number",
        f"ended_at < UTC_TIMESTAMP(6) - INTERVAL {kept_days} DAY ORDER BY ended_at",
    ):
        deleted = _DELETED_AT_ONCE
        while deleted == _DELETED_AT_ONCE:
            (result,) = yield f"DELETE FROM {_HISTORY} WHERE {old} LIMIT {_DELETED_AT_ONCE}"
            deleted = result.affected


_COPIED = (
    "datastore", "consumer", "row_key", "shard", "added_id", "generation", "column_name", "ref_key", "function_name",
    "cause", "holds_row", "attempts", "attempted_at", "version", "parked_at", "job", "order_reason",
)  # fmt: skip
_ABSENT = {name: "0" for name in ("begun", "kills", "again_in_us")} | {name: "NULL" for name in ("ordered", "due_at")}
_ENDED = Table(_HISTORY, EndedCell, record=Table("", ParkedCell, **_ABSENT, order_reason="NULL"))
