"""Walks over rows in the order of their keys: over one shard, or over a span of row keys in many shards.

The walk over a shard has the newest cells of each row up to a fixed added_id, and how many keys it met.

The log is dense (I3). So the keys with an added_id up to H number exactly H, and their count proves that a walk met
all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter

import msgspec

from schemaless.cell import ColumnName, RowKey, StoredCell
from schemaless.storage import entity_table
from schemaless.storage.operation import Operation, Row, query
from schemaless.storage.sql import Name, Script, commas, sql
from schemaless.topology import Datastore

COLUMNS_AT_ONCE = 4096
"""Columns of rows, all of them counted, that one page looks at."""

BYTES_MAX = 4 << 20
"""The most bytes of stored bodies in a page, beyond the first row."""

_ROW_KEY = itemgetter(0)
_ADDED_ID, _BODY, _LENGTH = 5, 6, 7
_SPAN_ADDED_ID, _SPAN_BODY, _SPAN_LENGTH = 4, 5, 6


class WalkedRow(msgspec.Struct, frozen=True, gc=False):
    """One row: the newest cells of its source columns, and how many keys it has of any column."""

    row_key: RowKey
    newest: Mapping[str, StoredCell]
    keys: int


class WalkPage(msgspec.Struct, frozen=True):
    """Consecutive rows by row key. `more`: the shard has rows behind them."""

    rows: Sequence[WalkedRow]
    more: bool


def walk(
    datastore: Datastore,
    shard: int,
    columns: Collection[ColumnName],
    until: int,
    after: RowKey,
    columns_max: int = COLUMNS_AT_ONCE,
    bytes_max: int = BYTES_MAX,
) -> Operation[WalkPage]:
    """Returns the rows behind a row key, as the log makes them up to the added_id `until`.

    It has as many whole rows as its bounds allow, but at least one if there is one.
    """
    met = yield from query(_newest(datastore, shard, columns, until, after, columns_max, bytes_max))
    found = sorted(met, key=_ROW_KEY)
    more = len(found) >= columns_max
    if more:
        last = found[-1][0]
        if found[0][0] == last:
            return WalkPage([(yield from _alone(datastore, shard, columns, until, last))], more)
        found = found[: bisect_left(found, last, key=_ROW_KEY)]  # it may have more columns than the page
    left = bytes_max
    for row in found:
        left -= row[_LENGTH] or 0
        if left < 0 and row[0] != found[0][0]:
            found, more = found[: bisect_left(found, row[0], key=_ROW_KEY)], True
            break
    unread = [(shard, row[_ADDED_ID]) for row in found if row[_BODY] is None and row[_LENGTH] is not None]
    large = yield from entity_table.bodies(datastore, unread)
    return WalkPage(_walked(shard, found, large), more)


class SpanPage(msgspec.Struct, frozen=True):
    """The newest cells of the rows of a span of row keys, up to `last`: the span's end, or where a bound was met."""

    cells: Sequence[StoredCell]
    last: RowKey


def span(
    datastore: Datastore,
    untils: Mapping[int, int],
    columns: Collection[ColumnName],
    after: RowKey,
    last: RowKey,
    columns_max: int,
    bytes_max: int = BYTES_MAX,
) -> Operation[SpanPage]:
    """Returns the rows of shards of one cluster above `after`, up to `last`, as their logs make them up to `untils`.

    It returns whole rows, as many as fit its bounds, but at least one if there is one. `columns_max` bounds the columns
    of rows that it reads of a shard, and is above the number of `columns`. A row without any of these isn't there.
    """
    share = max(1, bytes_max // (columns_max * len(untils)))
    results = yield ";".join(
        _newest_in_span(datastore, shard, columns, until, (after, last), columns_max, share)
        for shard, until in untils.items()
    )
    rows = [(row, shard) for shard, result in zip(untils, results, strict=True) for row in result.rows]
    for result in results:
        if len(result.rows) == columns_max:  # its last row may have more columns
            met = [row[0] for row in result.rows]
            last = min(last, max(row_key for row_key in met if row_key < met[-1]))
    rows = sorted((entry for entry in rows if entry[0][0] <= last), key=lambda entry: entry[0][0])
    left, taken = bytes_max, len(rows)
    for number, (row, _) in enumerate(rows):
        left -= row[_SPAN_LENGTH]
        if left < 0 and row[0] != rows[0][0][0]:
            taken = next(n for n in range(number, -1, -1) if rows[n - 1][0][0] != row[0])
            last = rows[taken - 1][0][0]
            break
    rows = rows[:taken]
    unread = [(shard, row[_SPAN_ADDED_ID]) for row, shard in rows if row[_SPAN_BODY] is None]
    large = yield from entity_table.bodies(datastore, unread)
    cells = [
        StoredCell(
            row_key, column, ref_key, shard, generation, added_id, 0, large[shard, added_id] if body is None else body
        )
        for (row_key, column, ref_key, generation, added_id, body, _), shard in rows
    ]
    return SpanPage(cells, last)


def _newest_in_span(
    datastore: Datastore,
    shard: int,
    columns: Collection[ColumnName],
    until: int,
    span: tuple[RowKey, RowKey],
    columns_max: int,
    share: int,
) -> Script:
    """Selects the newest versions of a shard's rows, with bodies up to `share` bytes, and the length of each."""
    table = sql("%s.entity", Name(datastore.database(shard)))
    groups = (
        f"SELECT row_key, column_name, MAX(ref_key) AS ref_key FROM {table} FORCE INDEX (cell)"
        + sql(" WHERE row_key > %s AND row_key <= %s AND added_id <= %s", *span, until)
        + f" AND column_name IN ({commas([sql('%s', name.encode()) for name in sorted(columns)])})"
        + f" GROUP BY row_key, column_name ORDER BY row_key, column_name LIMIT {columns_max}"
    )
    return (
        "SELECT row_key, column_name, ref_key, newest.generation, newest.added_id,"
        f" IF(LENGTH(newest.body) <= {share}, newest.body, NULL), LENGTH(newest.body)"
        f" FROM ({groups}) AS met STRAIGHT_JOIN {table} AS newest USING (row_key, column_name, ref_key)"
        " ORDER BY row_key, column_name"
    )


def _newest(
    datastore: Datastore,
    shard: int,
    columns: Collection[ColumnName],
    until: int,
    after: RowKey,
    columns_max: int,
    bytes_max: int,
) -> Script:
    """Selects by row and column the number of versions and the newest one, with the body of a source column.

    The key alone is read, in its order, but for these bodies.
    """
    table = sql("%s.entity", Name(datastore.database(shard)))
    share = max(1, bytes_max // columns_max)
    groups = (
        f"SELECT row_key, column_name, MAX(ref_key) AS ref_key, COUNT(*) AS versions FROM {table} FORCE INDEX (cell)"
        + sql(" WHERE row_key > %s AND added_id <= %s", after, until)
        + f" GROUP BY row_key, column_name ORDER BY row_key, column_name LIMIT {columns_max}"
    )
    return (
        "SELECT met.row_key, met.column_name, met.versions, met.ref_key, newest.generation, newest.added_id,"
        f" IF(LENGTH(newest.body) <= {share}, newest.body, NULL), LENGTH(newest.body)"
        f" FROM ({groups}) AS met LEFT JOIN {table} AS newest ON newest.row_key = met.row_key"
        " AND newest.column_name = met.column_name AND newest.ref_key = met.ref_key"
        f" AND met.column_name IN ({commas([sql('%s', name.encode()) for name in sorted(columns)])})"
    )


def _walked(shard: int, found: Sequence[Row], large: Mapping[tuple[int, int], bytes]) -> list[WalkedRow]:
    """Returns the rows of what `_newest` selected, in its order."""
    keys: dict[RowKey, int] = {}
    newest: dict[RowKey, dict[str, StoredCell]] = {}
    for row_key, column, versions, ref_key, generation, added_id, body, _ in found:
        if row_key in keys:
            keys[row_key] += versions
        else:
            keys[row_key], newest[row_key] = versions, {}
        if added_id is not None:
            stored = large[shard, added_id] if body is None else body
            newest[row_key][column] = StoredCell(row_key, column, ref_key, shard, generation, added_id, 0, stored)
    return [WalkedRow(row_key, newest[row_key], count) for row_key, count in keys.items()]


def _alone(
    datastore: Datastore, shard: int, columns: Collection[ColumnName], until: int, row_key: RowKey
) -> Operation[WalkedRow]:
    """Returns one row that has as many columns as a page looks at, or more."""
    ((keys,),) = yield from query(
        sql("SELECT COUNT(*) FROM %s.entity", Name(datastore.database(shard)))
        + sql(" WHERE row_key = %s AND added_id <= %s", row_key, until)
    )
    found = yield from entity_table.newest_until(datastore, {shard: (until, [row_key])}, columns)
    return WalkedRow(row_key, {cell.column_name: cell for cell in found.cells}, int(keys))
