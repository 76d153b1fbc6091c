"""The idempotency table: which ref_key a POST with an Idempotency-Key got.

It is on the home of the shard and is written in the cell's own transaction. So a repeat gets the first response, even
if that was lost on its way.
"""

from __future__ import annotations

from schemaless.cell import ColumnName, RefKey, RowKey
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Script, sql

KEPT_HOURS = 25
"""The contract says at least 24; an hour for clocks and slow cleaners."""


def find(datastore: str, row_key: RowKey, column_name: ColumnName, idempotency_key: str) -> Operation[RefKey | None]:
    """Returns the ref_key that an earlier POST with this key got, None if there was none."""
    rows = yield from query(
        sql(
            "SELECT ref_key FROM schemaless.idempotency"
            " WHERE datastore = %s AND row_key = %s AND column_name = %s AND idempotency_key = %s",
            datastore.encode(),
            row_key,
            column_name.encode(),
            idempotency_key.encode(),
        )
    )
    return RefKey(rows[0][0]) if rows else None


def insertion(
    datastore: str, row_key: RowKey, column_name: ColumnName, idempotency_key: str, ref_key: RefKey
) -> Script:
    """Returns a statement for the transaction that inserts the cell."""
    return sql(
        "INSERT INTO schemaless.idempotency VALUES (%s, %s, %s, %s, %s, UTC_TIMESTAMP(6))",
        datastore.encode(),
        row_key,
        column_name.encode(),
        idempotency_key.encode(),
        ref_key,
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
