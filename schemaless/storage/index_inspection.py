"""Reads of index tables that compare them with the cells. What is there may be damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from schemaless.cell import RowKey
from schemaless.index.comparison import LAST_ROW, EntryPlace, row_before
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import IndexEntry
from schemaless.runtime.batching import chunks
from schemaless.storage import index_table
from schemaless.storage.index_table import EntryKey
from schemaless.storage.operation import Operation, Row, query
from schemaless.storage.sql import Script, commas, literal, sql
from schemaless.topology import Datastore

Entries = dict[EntryPlace, IndexEntry]

SHARDS_AT_ONCE = 256
"""How many shards one statement reads."""

ENTRY_BYTES = 64
"""Row key, element and what a driver adds to them."""


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
    bytes_max: int,
) -> Operation[tuple[Entries, RowKey]]:
    """Returns the entries of shards of one cluster whose rows are above the first row key, up to the second.

    And up to which row key that is. It ends before a row that has `limit` entries of a shard, or that takes the entries
    beyond `bytes_max`. Some shards are read at a time, so that no more is in memory than these bytes and one page.
    """
    after, last = span
    found: Entries = {}
    for some in chunks(shards, count_max=SHARDS_AT_ONCE):
        results = yield ";".join(
            f"SELECT {_columns(definition)} FROM {index_table.table(datastore, shard, definition)}"
            + sql(" WHERE live = 1 AND row_key > %s AND row_key <= %s ORDER BY row_key, element", after, last)
            + f" LIMIT {limit}"
            for shard in some
        )
        for shard, result in zip(some, results, strict=True):
            if len(result.rows) == limit:
                last = min(last, row_before(result.rows[-1][0]))
            found |= _entries(definition, shard, result.rows)
        last = min(last, _end_within(found, bytes_max))
        found = {place: entry for place, entry in found.items() if place.row_key <= last}
    return found, last


def _end_within(entries: Entries, bytes_max: int) -> RowKey:
    """Returns the last row key up to which entries take at most so many bytes."""
    sizes = {
        place: ENTRY_BYTES + sum([len(value) for value in entry.values if isinstance(value, str | bytes)])
        for place, entry in entries.items()
    }
    if sum(sizes.values()) <= bytes_max:
        return LAST_ROW
    left = bytes_max
    for place in sorted(entries, key=lambda place: place.row_key):
        left -= sizes[place]
        if left < 0:
            return row_before(place.row_key)
    return LAST_ROW


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


def held(
    datastore: Datastore, definition: IndexDefinition, places: Sequence[EntryPlace]
) -> Operation[frozenset[EntryPlace]]:
    """Returns those of some places of one cluster, at least one, that have a row of the table: also a tombstone."""
    by_shard: dict[int, list[EntryPlace]] = {}
    for place in places:
        by_shard.setdefault(place.shard, []).append(place)
    results = yield ";".join(
        f"SELECT row_key, element FROM {index_table.table(datastore, shard, definition)} WHERE (row_key, element) IN ("
        + commas([f"({literal(place.row_key)}, {place.element})" for place in here])
        + ")"
        for shard, here in by_shard.items()
    )
    return frozenset(
        EntryPlace(shard, row_key, element)
        for shard, result in zip(by_shard, results, strict=True)
        for row_key, element in result.rows
    )


def _columns(definition: IndexDefinition) -> Script:
    return commas(["row_key", "element", *(index_table.shown(field) for field in definition.fields)])


def _entries(definition: IndexDefinition, shard: int, rows: Sequence[Row]) -> Entries:
    return {EntryPlace(shard, one.row_key, one.element): one.entry for one in index_table.found(definition, rows)}
