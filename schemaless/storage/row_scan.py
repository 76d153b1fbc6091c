"""The rows of a shard one after another, for whoever compares something with all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schemaless.cell import RowKey
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Name, Script, commas, sql
from schemaless.topology import Datastore


def row_keys(
    datastore: Datastore, shard: int, columns: Iterable[str], until: int, after: RowKey, limit: int
) -> Operation[list[RowKey]]:
    """Row keys above `after`, ascending, of rows that have one of the columns in the log up to `until`."""
    rows = yield from query(
        sql("SELECT DISTINCT row_key FROM %s.entity", Name(datastore.database(shard)))
        + sql(" WHERE row_key > %s AND added_id <= %s", after, until)
        + f" AND column_name IN ({_names(columns)}) ORDER BY row_key LIMIT {limit}"
    )
    return [row_key for (row_key,) in rows]


def changed_since(
    datastore: Datastore, shard: int, columns: Iterable[str], until: int, keys: Sequence[RowKey]
) -> Operation[set[RowKey]]:
    """Which of the rows, at least one, got a cell of the columns after `until`."""
    rows = yield from query(
        sql("SELECT DISTINCT row_key FROM %s.entity", Name(datastore.database(shard)))
        + f" WHERE row_key IN ({commas([sql('%s', key) for key in keys])}) AND added_id > {until}"
        + f" AND column_name IN ({_names(columns)})"
    )
    return {row_key for (row_key,) in rows}


def _names(columns: Iterable[str]) -> Script:
    return commas([sql("%s", name.encode()) for name in sorted(columns)])
