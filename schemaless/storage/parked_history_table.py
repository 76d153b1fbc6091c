"""parked_history: what became of cells that were parked, for people. On the home of the shard.

The owner of a shard writes it in the transaction that deletes the record. Nothing is decided by it, and it is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from schemaless.storage.operation import Operation, Row, query
from schemaless.storage.parked_table import Cause, ParkedCell
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Script, sql

KEPT_DAYS = 30
KEPT_MAX = 100_000
"""Of one server. With more, the oldest go before their time."""

ERROR_CHARACTERS_KEPT = 500
_DELETED_AT_ONCE = 5_000
_TABLE = "schemaless.parked_history"


class Ending(StrEnum):
    """What became of a parked cell."""

    FINISHED = "finished"  # it was called again, and all functions have finished it
    DISCARDED = "discarded"  # a person gave it up
    SOUGHT = "sought"  # a seek went back to before it, so it came again
    SUPERSEDED = "superseded"  # a new generation began at or before it


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
    return sql(
        f"INSERT IGNORE INTO {_TABLE} ({copied}, error, ending, ended_at)"
        f" SELECT {copied}, RIGHT(error, {ERROR_CHARACTERS_KEPT}), %s, UTC_TIMESTAMP(6) FROM schemaless.parked"
        f" WHERE datastore = %s AND consumer = %s AND shard = %s AND added_id {'>=' if later else '='} %s"
        " AND (cause <> %s OR job IS NOT NULL)",
        ending.value,
        datastore,
        consumer,
        shard,
        added_id,
        Cause.WAITING.value,
    )


def of_row(
    datastore: str, consumers: Sequence[str], row_key: bytes, limit: int
) -> Operation[dict[str, list[EndedCell]]]:
    """Returns by consumer what became last of parked cells of one row, in the order of time."""
    scripts = [
        f"SELECT {_READ} FROM {_TABLE}"
        + sql(" WHERE datastore = %s AND consumer = %s AND row_key = %s", datastore, consumer, row_key)
        + f" ORDER BY ended_at DESC, added_id DESC LIMIT {limit}"
        for consumer in consumers
    ]
    if not scripts:
        return {}
    results = yield ";".join(scripts)
    return {
        consumer: [_ended_cell(row) for row in reversed(result.rows)]
        for consumer, result in zip(consumers, results, strict=True)
    }


def forget_old(kept_days: int = KEPT_DAYS, kept_max: int = KEPT_MAX) -> Operation[None]:
    """Deletes what is older than KEPT_DAYS, and the oldest beyond KEPT_MAX. Some at once.

    Both are found by a key. Numbers that were never used, or are deleted, count as kept.
    """
    ((last,),) = yield from query(f"SELECT COALESCE(MAX(number), 0) FROM {_TABLE}")
    for old in (
        f"number <= {last - kept_max} ORDER BY number",
        f"ended_at < UTC_TIMESTAMP(6) - INTERVAL {kept_days} DAY ORDER BY ended_at",
    ):
        deleted = _DELETED_AT_ONCE
        while deleted == _DELETED_AT_ONCE:
            (result,) = yield f"DELETE FROM {_TABLE} WHERE {old} LIMIT {_DELETED_AT_ONCE}"
            deleted = result.affected


def _ended_cell(row: Row) -> EndedCell:
    shard, generation, added_id, row_key, column, ref_key, function, cause, holds_row, error, *rest = row
    attempts, attempted_at, version, parked_at, job, ending, ended_at = rest
    record = ParkedCell(
        shard, generation, added_id, bytes(row_key), column, ref_key, function, Cause(cause), bool(holds_row), error,
        attempts, msgspec.json.decode(attempted_at), version, parked_at, job=job,
    )  # fmt: skip
    return EndedCell(record, Ending(ending), ended_at)


_COPIED = (
    "datastore", "consumer", "row_key", "shard", "added_id", "generation", "column_name", "ref_key", "function_name",
    "cause", "holds_row", "attempts", "attempted_at", "version", "parked_at", "job", "order_reason",
)  # fmt: skip
_READ = (
    "shard, generation, added_id, row_key, column_name, ref_key, function_name, cause, holds_row, error, attempts,"
    f" attempted_at, version, {MICROSECONDS.format('parked_at')}, job, ending, {MICROSECONDS.format('ended_at')}"
)
