"""The idempotency table: which ref_key a POST with an Idempotency-Key got.

It is on the home of the shard and is written in the cell's own transaction. So a repeat gets the first response, even
if that was lost on its way.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemaless.cell import ColumnName, RefKey, RowKey
from schemaless.storage.operation import Operation
from schemaless.storage.sql import Script, sql

KEPT_HOURS = 25
"""The contract says at least 24; an hour for clocks and slow cleaners."""


def find(datastore: str, wanted: Sequence[tuple[RowKey, ColumnName, str]]) -> Operation[list[RefKey | None]]:
    """Returns, for each (row key, column, Idempotency-Key), the ref_key that an earlier POST with it got, or None."""
    results = yield ";".join(
        sql(
            "SELECT ref_key FROM schemaless.idempotency"
            " WHERE datastore = %s AND row_key = %s AND column_name = %s AND idempotency_key = %s",
            datastore.encode(),
            row_key,
            column_name.encode(),
            idempotency_key.encode(),
        )
        for row_key, column_name, idempotency_key in wanted
    )
    return [RefKey(result.rows[0][0]) if result.rows else None for result in results]


def insertion(
    datastore: str, row_key: RowKey, column_name: ColumnName, idempotency_key: str, ref_key: Script
) -> Script:
    """Returns a statement for the transaction that inserts the cell. `ref_key` is an expression."""
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


def delete_old(limit: int) -> Operation[int]:
    """Deletes at most `limit` rows that need not be kept any longer, and returns how many."""
    (result,) = yield sql(
        "DELETE FROM schemaless.idempotency WHERE created_at < UTC_TIMESTAMP(6) - INTERVAL %s HOUR"
        " ORDER BY created_at LIMIT %s",
        KEPT_HOURS,
        limit,
    )
    return result.affected
