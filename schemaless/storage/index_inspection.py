"""Reads of index tables that compare them with the cells. What is there may be damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from schemaless.cell import RowKey
from schemaless.index.comparison import EntryPlace, row_before
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import IndexEntry
from schemaless.storage import index_table
from schemaless.storage.index_table import EntryKey
from schemaless.storage.operation import Operation, Row, query
from schemaless.storage.sql import Script, commas, literal, sql
from schemaless.topology import Datastore

Entries = dict[EntryPlace, IndexEntry]


def live_page(
    datastore: Datastore, definition: IndexDefinition, shard: int, after: EntryKey, last: RowKey, limit: int
) -> Operation[Entries]:
    """Returns a page of one shard's entries behind `after`, by row key and element, up to the row `last`."""
    row_key, element = after
    rows = yield from query(
        f"SELECT {_columns(definition)} FROM {index_table.table(datastore, shard, definition)}"
        + sql(" WHERE live = 1 AND row_key >= %s AND (row_key > %s OR element > %s)", row_key, row_key, element)
        + sql(" AND row_key <= %s ORDER BY row_key, element", last)
        + f" LIMIT {limit}"
    )
    return _entries(definition, shard, rows)


def live_in_span(
    datastore: Datastore,
    definition: IndexDefinition,
    shards: Sequence[int],
    span: tuple[RowKey, RowKey],
    limit: int,
) -> Operation[tuple[Entries, RowKey]]:
    """Returns the entries of shards of one cluster whose rows are above the first row key, up to the second.

    And up to which row key that is. Each shard gives `limit` entries at most, so it ends before a row that has as many.
    """
    after, last = span
    results = yield ";".join(
        f"SELECT {_columns(definition)} FROM {index_table.table(datastore, shard, definition)}"
        + sql(" WHERE live = 1 AND row_key > %s AND row_key <= %s ORDER BY row_key, element", after, last)
        + f" LIMIT {limit}"
        for shard in shards
    )
    for result in results:
        if len(result.rows) == limit:
            last = min(last, row_before(result.rows[-1][0]))
    found: Entries = {}
    for shard, result in zip(shards, results, strict=True):
        found |= _entries(definition, shard, [row for row in result.rows if row[0] <= last])
    return found, last


def of_rows(
    datastore: Datastore, definition: IndexDefinition, wanted: Mapping[int, Sequence[RowKey]]
) -> Operation[Entries]:
    """Returns the entries of rows, at least one, by shard of the index. All shards live on one cluster."""
    results = yield ";".join(
        f"SELECT {_columns(definition)} FROM {index_table.table(datastore, shard, definition)} WHERE live = 1"
        f" AND row_key IN ({commas([literal(row_key) for row_key in row_keys])})"
        for shard, row_keys in wanted.items()
    )
    found: Entries = {}
    for shard, result in zip(wanted, results, strict=True):
        found |= _entries(definition, shard, result.rows)
    return found


def _columns(definition: IndexDefinition) -> Script:
    return commas(["row_key", "element", *(index_table.shown(field) for field in definition.fields)])


def _entries(definition: IndexDefinition, shard: int, rows: Sequence[Row]) -> Entries:
    return {EntryPlace(shard, one.row_key, one.element): one.entry for one in index_table.found(definition, rows)}
