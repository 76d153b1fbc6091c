"""The entity table: cells of a shard. Owns what a put of cells means (I1) and the reads of cells.

A put is optimistic: it inserts at once, in one round trip (append.py). Only when a key exists already does it look
which cells exist. Nothing that exists is ever written again, so running a put twice is the same as running it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from schemaless.cell import Cell, CellKey, ColumnName, Placed, PutStatus, RefKey, RowKey, StoredCell
from schemaless.errors import Busy, DuplicateKey, TooLarge
from schemaless.location import ADDED_ID_MAX
from schemaless.runtime.batching import chunks
from schemaless.storage import append, stored_bodies
from schemaless.storage.operation import Operation, Row, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Name, Script, commas, sql
from schemaless.topology import Datastore

DIGEST = "UNHEX(SHA2(body, 256))"
_INSERTION = f"row_key, column_name, ref_key, generation, added_id, {MICROSECONDS.format('created_at')}"
_COLUMNS = f"{_INSERTION}, body, cause"
_REF_KEY, _ADDED_ID, _BODY, _LENGTH, _CAUSE = 2, 4, 6, 7, 8
_NO_BOUND = 1 << 62

ROW_COLUMNS_MAX = 10_000
"""Columns of a row that is read as a whole."""

NEWEST_BYTES_MAX = 8 << 20
"""The most bytes of stored bodies that `newest_until` reads at once, beyond the first row."""

_LOOKS_MAX = 5  # a put is looked up again only after another one was faster with one of its cells
_NEWEST_CELLS_MAX = 4096  # looked up at once: a statement's text stays below 1 MiB


class ShardCell(Cell, frozen=True, gc=False):
    """A cell and the shard that its row key names."""

    shard: int


def put_cells(datastore: Datastore, cells: Sequence[ShardCell], latest: int | None = None) -> Operation[list[Placed]]:
    """Puts cells whose shards all live on this cluster. Returns one outcome for each, in order.

    It is one transaction for each append.SHARDS_MAX shards. A key that occurs twice counts in order: the later one is
    ALREADY_STORED or CONFLICT. Raises what append.insert does.
    """
    firsts: dict[CellKey, ShardCell] = {}
    for cell in cells:
        firsts.setdefault(cell.key, cell)
    places: dict[CellKey, Placed] = {}
    for distinct in _transactions(list(firsts.values())):
        try:
            placed = yield from append.insert_new(datastore, distinct, latest=latest)
        except DuplicateKey:
            placed = yield from _insert_missing(datastore, distinct, latest)
        else:
            if len(distinct) == len(cells):
                return placed
        places.update(zip([cell.key for cell in distinct], placed, strict=True))
    inserted = {key: firsts[key].body for key, place in places.items() if place.status is PutStatus.STORED}
    repeats = [cell for cell in cells if cell.key not in inserted or cell is not firsts[cell.key]]
    same = iter((yield from stored_bodies.same_as_stored(repeats, inserted, _selector(datastore))))
    return [
        places[cell.key]
        if cell.key in inserted and cell is firsts[cell.key]
        else _compared(places[cell.key], next(same))
        for cell in cells
    ]


def _transactions(cells: Sequence[ShardCell]) -> list[Sequence[ShardCell]]:
    """Returns the cells in groups of few enough shards for one transaction. Usually that is one group."""
    shards = {cell.shard for cell in cells}
    if len(shards) <= append.SHARDS_MAX:
        return [cells]
    groups = [frozenset(some) for some in chunks(sorted(shards), count_max=append.SHARDS_MAX)]
    return [[cell for cell in cells if cell.shard in group] for group in groups]


def look_up(datastore: Datastore, cells: Sequence[ShardCell]) -> Operation[list[Placed | None]]:
    """Returns what a put of these cells would say of those that exist, in order, and None for the others."""
    found = yield from _places(datastore, cells)
    existing = [cell for cell, place in zip(cells, found, strict=True) if place is not None]
    same = iter((yield from stored_bodies.same_as_stored(existing, {}, _selector(datastore))))
    return [None if place is None else _compared(place, next(same)) for place in found]


def _compared(place: Placed, is_same: bool) -> Placed:
    status = PutStatus.ALREADY_STORED if is_same else PutStatus.CONFLICT
    return msgspec.structs.replace(place, status=status)


def get(datastore: Datastore, keys: Sequence[tuple[int, CellKey]]) -> Operation[list[StoredCell | None]]:
    """Returns the cells under (shard, key), in order, None where there is none. There is at least one."""
    results = yield ";".join(
        _select(datastore, shard, "WHERE row_key = %s AND column_name = %s AND ref_key = %s", *_key(key))
        for shard, key in keys
    )
    return [_one(result.rows, shard) for result, (shard, _) in zip(results, keys, strict=True)]


def digests(datastore: Datastore, keys: Sequence[tuple[int, CellKey]]) -> Operation[list[bytes | None]]:
    """Returns SHA-256 of the stored bodies under (shard, key), in order: equal bytes are found without moving them."""
    results = yield ";".join(
        sql(
            f"SELECT {DIGEST} FROM %s.entity WHERE row_key = %s AND column_name = %s AND ref_key = %s",
            Name(datastore.database(shard)),
            *_key(key),
        )
        for shard, key in keys
    )
    return [result.rows[0][0] if result.rows else None for result in results]


def newest(
    datastore: Datastore, columns: Sequence[tuple[int, RowKey, ColumnName]]
) -> Operation[list[StoredCell | None]]:
    """Returns the cell with the highest ref_key of each (shard, row key, column), in order. There is at least one."""
    tail = "WHERE row_key = %s AND column_name = %s ORDER BY ref_key DESC LIMIT 1"
    results = yield ";".join(
        _select(datastore, shard, tail, row_key, column_name.encode()) for shard, row_key, column_name in columns
    )
    return [_one(result.rows, shard) for result, (shard, _, _) in zip(results, columns, strict=True)]


class NewestRows(msgspec.Struct, frozen=True):
    """The newest cells of rows, each row whole. `unread`, by shard: the rows for which no bytes were left, in order."""

    cells: list[StoredCell]
    unread: Mapping[int, Sequence[RowKey]]


def newest_until(
    datastore: Datastore,
    rows: Mapping[int, tuple[int, Sequence[RowKey]]],
    columns: Iterable[str],
    bytes_max: int = NEWEST_BYTES_MAX,
) -> Operation[NewestRows]:
    """Returns the newest cells of rows as the log makes them up to an added_id, and no further.

    `rows`: by shard, that added_id and at least one row key. Rows and columns are never empty. It reads in
    this order, as long as their bodies have at most `bytes_max` bytes together, but at least the first one. It never
    holds more than twice that: a body above its even share is read only once its length is known to fit.
    """
    names = sorted(columns)
    wanted = [(shard, row_key) for shard, (_, row_keys) in rows.items() for row_key in row_keys]
    asked = wanted[: max(1, _NEWEST_CELLS_MAX // len(names))]
    share = max(1, bytes_max // (len(asked) * len(names)))
    by_shard: dict[int, list[RowKey]] = {}
    for shard, row_key in asked:
        by_shard.setdefault(shard, []).append(row_key)
    results = yield ";".join(
        _newest_until(datastore, shard, rows[shard][0], row_keys, names, share) for shard, row_keys in by_shard.items()
    )
    found: dict[tuple[int, RowKey], list[Row]] = {}
    for shard, result in zip(by_shard, results, strict=True):
        for row in result.rows:
            found.setdefault((shard, row[0]), []).append(row)
    left = bytes_max
    fitting = 0
    for key in asked:
        left -= sum(row[_LENGTH] for row in found.get(key, ()))
        if left < 0 and fitting:
            break
        fitting += 1
    unread: dict[int, list[RowKey]] = {}
    for shard, row_key in wanted[fitting:]:
        unread.setdefault(shard, []).append(row_key)
    read = [(shard, row) for shard, row_key in asked[:fitting] for row in found.get((shard, row_key), ())]
    large = yield from bodies(datastore, [(shard, row[_ADDED_ID]) for shard, row in read if row[_BODY] is None])
    cells = [_whole(row, shard, large) for shard, row in read]
    return NewestRows(cells, unread)


def row(datastore: Datastore, shard: int, row_key: RowKey, bytes_max: int) -> Operation[list[StoredCell]]:
    """Returns the newest version of every column of a row, by column name. Raises TooLarge beyond `bytes_max`."""
    table = sql("%s.entity", Name(datastore.database(shard)))
    tail = (
        f"JOIN (SELECT column_name, MAX(ref_key) AS ref_key FROM {table} WHERE row_key = %s GROUP BY column_name)"
        " AS newest USING (column_name, ref_key) WHERE row_key = %s ORDER BY column_name"
    )
    page = yield from _page(datastore, shard, tail, (row_key, row_key), ROW_COLUMNS_MAX, bytes_max)
    if page.following is not None:
        raise TooLarge(f"the row has more than {bytes_max} bytes or {ROW_COLUMNS_MAX} columns: ask for its columns")
    return page.cells


class CellPage(msgspec.Struct, frozen=True):
    """The first cells of a selection, as many as fit, but at least one. `following` is the first that didn't fit."""

    cells: list[StoredCell]
    following: RefKey | None


def versions(
    datastore: Datastore,
    shard: int,
    column: tuple[RowKey, ColumnName],
    ref_keys: tuple[int, int],
    descending: bool,
    limit: int,
    bytes_max: int,
) -> Operation[CellPage]:
    """Returns versions of one column, with a ref_key from the first of `ref_keys` to the second, both included."""
    tail = (
        "WHERE row_key = %s AND column_name = %s AND ref_key BETWEEN %s AND %s"
        f" ORDER BY ref_key {'DESC' if descending else 'ASC'}"
    )
    row_key, column_name = column
    return (yield from _page(datastore, shard, tail, (row_key, column_name.encode(), *ref_keys), limit, bytes_max))


def read_after(
    datastore: Datastore, shard: int, after: int, limit: int, columns: Iterable[str] = (), until: int = ADDED_ID_MAX
) -> Operation[list[StoredCell]]:
    """Returns at most `limit` cells with an added_id above `after`, in added_id order.

    Where `columns` are named, cells of others are left out.
    `until`, the last added_id to look at, bounds what a search for rare columns examines.
    """
    return (yield from read_page_after(datastore, shard, after, limit, columns, until, _NO_BOUND)).cells


def read_page_after(
    datastore: Datastore, shard: int, after: int, limit: int, columns: Iterable[str], until: int, bytes_max: int
) -> Operation[CellPage]:
    """Returns what `read_after` does, within a bound of bytes."""
    names = _literals(columns)
    only = f"AND column_name IN ({names}) " if names else ""
    tail = f"WHERE added_id > %s AND added_id <= %s {only}ORDER BY added_id"
    return (yield from _page(datastore, shard, tail, (after, until), limit, bytes_max))


def get_or_newest(
    datastore: Datastore, keys: Sequence[tuple[int, RowKey, ColumnName, RefKey | None]], bytes_max: int
) -> Operation[list[StoredCell | None]]:
    """Returns the cells under (shard, row key, column, ref_key), in order. Without a ref_key it is the newest version.

    Raises TooLarge when they have more than `bytes_max` bytes together. It never holds more than twice that.
    """
    share = max(1, bytes_max // len(keys))
    scripts = []
    for shard, row_key, column_name, ref_key in keys:
        which = "ORDER BY ref_key DESC LIMIT 1" if ref_key is None else f"AND ref_key = {ref_key}"
        tail = f"WHERE row_key = %s AND column_name = %s {which}"
        scripts.append(_select_sized(datastore, shard, tail, (row_key, column_name.encode()), share))
    results = yield ";".join(scripts)
    found = [
        (shard, result.rows[0]) if result.rows else None for result, (shard, *_) in zip(results, keys, strict=True)
    ]
    if sum(one[1][_LENGTH] for one in found if one is not None) > bytes_max:
        raise TooLarge("the answer would be too large: ask for fewer at once")
    large = yield from bodies(
        datastore, sorted({(shard, row[_ADDED_ID]) for shard, row in filter(None, found) if row[_BODY] is None})
    )
    return [None if one is None else _whole(one[1], one[0], large) for one in found]


def first_since(datastore: Datastore, shard: int, created_at: int, head: int) -> Operation[int]:
    """Returns the lowest added_id up to `head` whose created_at (microseconds) is not earlier, or head + 1.

    A binary search: created_at never decreases along added_id (I4), and added_ids are dense (I3).
    """
    low, high = 1, head + 1
    table = Name(datastore.database(shard))
    while low < high:
        middle = (low + high) // 2
        select = f"SELECT {MICROSECONDS.format('created_at')} FROM %s.entity WHERE added_id = %s"
        ((moment,),) = yield from query(sql(select, table, middle))
        low, high = (low, middle) if moment >= created_at else (middle + 1, high)
    return low


def row_keys(
    datastore: Datastore, shard: int, columns: Iterable[str], until: int, after: RowKey, limit: int
) -> Operation[list[RowKey]]:
    """Returns row keys above `after`, ascending, of rows with a cell of `columns` in the log up to `until`."""
    rows = yield from query(
        sql("SELECT DISTINCT row_key FROM %s.entity", Name(datastore.database(shard)))
        + sql(" WHERE row_key > %s AND added_id <= %s", after, until)
        + f" AND column_name IN ({_literals(columns)}) ORDER BY row_key LIMIT {limit}"
    )
    return [row_key for (row_key,) in rows]


def rows_changed_since(
    datastore: Datastore, shard: int, columns: Iterable[str], until: int, keys: Sequence[RowKey]
) -> Operation[set[RowKey]]:
    """Returns which of the rows, at least one, got a cell of `columns` after `until`."""
    rows = yield from query(
        sql("SELECT DISTINCT row_key FROM %s.entity", Name(datastore.database(shard)))
        + f" WHERE row_key IN ({commas([sql('%s', key) for key in keys])}) AND added_id > {until}"
        + f" AND column_name IN ({_literals(columns)})"
    )
    return {row_key for (row_key,) in rows}


def has_unique_key(datastore: Datastore, shard: int) -> Operation[bool]:
    """Returns whether the table still has the unique key that I1 rests on."""
    rows = yield from query(
        sql(
            "SELECT column_name FROM information_schema.statistics WHERE table_schema = %s AND table_name = 'entity'"
            " AND index_name = 'cell' AND non_unique = 0 ORDER BY seq_in_index",
            datastore.database(shard),
        )
    )
    return [name for (name,) in rows] == ["row_key", "column_name", "ref_key"]


def _insert_missing(datastore: Datastore, cells: Sequence[ShardCell], latest: int | None) -> Operation[list[Placed]]:
    """Inserts the cells that don't exist: they are STORED. The others are ALREADY_STORED, and not compared yet.

    It looks without a lock. A cell that another put inserts in between is found by the next look.
    """
    for _ in range(_LOOKS_MAX):
        existing = yield from _places(datastore, cells)
        missing = [cell for cell, found in zip(cells, existing, strict=True) if found is None]
        try:
            inserted = iter((yield from append.insert_new(datastore, missing, latest=latest)) if missing else ())
        except DuplicateKey:
            continue
        return [next(inserted) if found is None else found for found in existing]
    raise Busy("other puts inserted cells of this one again and again")


def _places(datastore: Datastore, cells: Sequence[ShardCell]) -> Operation[list[Placed | None]]:
    select = _selector(datastore)
    results = yield ";".join(
        select(cell, f"generation, added_id, {MICROSECONDS.format('created_at')}") for cell in cells
    )
    return [
        Placed(PutStatus.ALREADY_STORED, cell.shard, *result.rows[0]) if result.rows else None
        for cell, result in zip(cells, results, strict=True)
    ]


def _selector(datastore: Datastore) -> stored_bodies.Select:
    where = "WHERE row_key = %s AND column_name = %s AND ref_key = %s"

    def select(cell: ShardCell, what: str) -> Script:
        return f"SELECT {what}" + sql(f" FROM %s.entity {where}", Name(datastore.database(cell.shard)), *_key(cell.key))

    return select


def _newest_until(
    datastore: Datastore, shard: int, until: int, row_keys: Sequence[RowKey], columns: Sequence[str], share: int
) -> Script:
    """Selects a row's newest cells, with a body up to `share` bytes and every body's length.

    The look-up walks the key backwards from the highest ref_key and nearly always takes the first: a column with many
    versions costs no more than others. MAX over them would read them all.
    """
    first, *others = row_keys
    wanted = sql("SELECT %s AS row_key", first) + "".join([sql(" UNION ALL SELECT %s", key) for key in others])
    return " UNION ALL ".join(
        sql(
            f"SELECT {_INSERTION}, IF(LENGTH(body) <= %s, body, NULL), LENGTH(body), cause FROM ("
            "SELECT (SELECT versions.added_id FROM %s.entity AS versions WHERE versions.row_key = wanted.row_key"
            " AND versions.column_name = %s AND versions.added_id <= %s ORDER BY versions.ref_key DESC LIMIT 1"
            ") AS added_id FROM (",
            share,
            Name(datastore.database(shard)),
            column.encode(),
            until,
        )
        + wanted
        + sql(") AS wanted) AS newest STRAIGHT_JOIN %s.entity USING (added_id)", Name(datastore.database(shard)))
        for column in columns
    )


def _page(
    datastore: Datastore, shard: int, tail: str, values: Sequence[object], limit: int, bytes_max: int
) -> Operation[CellPage]:
    """Reads the first cells of a selection, and never holds more than twice `bytes_max` of bodies.

    A body above its even share of the bytes is read only once its length is known to fit.
    """
    share = max(1, bytes_max // max(1, limit))
    rows = yield from query(_select_sized(datastore, shard, f"{tail} LIMIT {limit + 1}", values, share))
    left = bytes_max
    fitting = 0
    for row in rows[:limit]:
        left -= row[_LENGTH]
        if left < 0 and fitting:
            break
        fitting += 1
    large = yield from bodies(datastore, [(shard, row[_ADDED_ID]) for row in rows[:fitting] if row[_BODY] is None])
    following = rows[fitting][_REF_KEY] if fitting < len(rows) else None
    return CellPage([_whole(row, shard, large) for row in rows[:fitting]], following)


def _select_sized(datastore: Datastore, shard: int, tail: str, values: Sequence[object], share: int) -> Script:
    """Selects an insertion, a body up to `share` bytes, every body's length, and the cause."""
    columns = f"{_INSERTION}, IF(LENGTH(body) <= {share}, body, NULL), LENGTH(body), cause"
    return sql(f"SELECT {columns} FROM %s.entity {tail}", Name(datastore.database(shard)), *values)


def _whole(row: Row, shard: int, large: Mapping[tuple[int, int], bytes]) -> StoredCell:
    body = large[shard, row[_ADDED_ID]] if row[_BODY] is None else row[_BODY]
    return _stored((*row[:_BODY], body, row[_CAUSE]), shard)


def bodies(datastore: Datastore, places: Sequence[tuple[int, int]]) -> Operation[dict[tuple[int, int], bytes]]:
    """Returns the bodies at each (shard, added_id), by it."""
    by_shard: dict[int, list[str]] = {}
    for shard, added_id in places:
        by_shard.setdefault(shard, []).append(str(added_id))
    if not by_shard:
        return {}
    results = yield ";".join(
        sql("SELECT added_id, body FROM %s.entity WHERE added_id IN ", Name(datastore.database(shard)))
        + f"({commas(added_ids)})"
        for shard, added_ids in by_shard.items()
    )
    return {
        (shard, added_id): body
        for shard, result in zip(by_shard, results, strict=True)
        for added_id, body in result.rows
    }


def _literals(columns: Iterable[str]) -> Script:
    """Column names compare bytewise: they are ASCII, and their collation is binary."""
    return commas([sql("%s", name.encode()) for name in sorted(columns)])


def _key(key: CellKey) -> tuple[bytes, bytes, int]:
    return key.row_key, key.column_name.encode(), key.ref_key


def _select(datastore: Datastore, shard: int, tail: str, *values: object) -> Script:
    return sql(f"SELECT {_COLUMNS} FROM %s.entity {tail}", Name(datastore.database(shard)), *values)


def _one(rows: Sequence[Row], shard: int) -> StoredCell | None:
    return _stored(rows[0], shard) if rows else None


def _stored(found: Row, shard: int) -> StoredCell:
    row_key, column_name, ref_key, generation, added_id, created_at, body, cause = found
    return StoredCell(row_key, column_name, ref_key, shard, generation, added_id, created_at, body, cause)
