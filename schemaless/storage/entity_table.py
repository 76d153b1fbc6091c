"""The entity table: cells of a shard. Owns what a put of cells means (I1) and the reads of cells.

A put is optimistic: it inserts at once, in one round trip (append.py). Only when a key exists already does it look
which cells exist. Nothing that exists is ever written again, so running a put twice is the same as running it once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from operator import itemgetter

import msgspec

from schemaless.cell import Cell, CellKey, ColumnName, Erased, Placed, PutStatus, RefKey, RowKey, StoredCell
from schemaless.codec import BodyComparison, may_be_same_body
from schemaless.errors import Busy, Corrupt, DuplicateKey, TooLarge
from schemaless.location import ADDED_ID_MAX
from schemaless.names import ERASE_COLUMN
from schemaless.runtime.batching import chunks
from schemaless.storage import append
from schemaless.storage.operation import PAUSE, Operation, Row, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Name, Script, commas, sql, where
from schemaless.topology import Datastore

DIGEST = "UNHEX(SHA2(body, 256))"
_INSERTION = f"row_key, column_name, ref_key, generation, added_id, {MICROSECONDS.format('created_at')}"
ERASED = f"CONCAT(erased, ' ', {MICROSECONDS.format('erased_at')})"
"""What emptied a cell's body, and when, NULL where nothing did. `erased` reads it."""
_COLUMNS = f"{_INSERTION}, body, cause, {ERASED}"
_REF_KEY, _ADDED_ID, _BODY, _LENGTH, _NOTES = 2, 4, 6, 7, slice(8, 10)
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
    same = iter((yield from same_as_stored(repeats, inserted, _selector(datastore))))
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
    same = iter((yield from same_as_stored(existing, {}, _selector(datastore))))
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
    """Returns the cell with the highest ref_key of each (shard, row key, column), in order. There is at least one.

    A version that was erased is returned only where no other one is left.
    """
    tail = "WHERE row_key = %s AND column_name = %s ORDER BY ref_key DESC LIMIT 1"
    results = yield ";".join(
        _select(datastore, shard, tail, row_key, column_name.encode()) for shard, row_key, column_name in columns
    )
    found = [_one(result.rows, shard) for result, (shard, _, _) in zip(results, columns, strict=True)]
    return (yield from _newest_left(datastore, found))


def erased_of(datastore: Datastore, shard: int, keys: Sequence[CellKey]) -> Operation[set[CellKey]]:
    """Returns those of some cells of one row whose bodies were erased. There is at least one."""
    which = where(
        row_key=keys[0].row_key,
        column_name=sorted({key.column_name.encode() for key in keys}),
        ref_key=sorted({key.ref_key for key in keys}),
    )
    table = sql("%s.entity", Name(datastore.database(shard)))
    rows = yield from query(f"SELECT row_key, column_name, ref_key FROM {table} {which} AND erased IS NOT NULL")
    return {CellKey(*row) for row in rows}


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
    lengths = {key: sum(row[_LENGTH] for row in found.get(key, ())) for key in asked}
    fitting = next(chunks(asked, bytes_max=bytes_max, size_bytes=lengths.__getitem__))
    unread: dict[int, list[RowKey]] = {}
    for shard, row_key in wanted[len(fitting) :]:
        unread.setdefault(shard, []).append(row_key)
    read = [(key[0], row) for key in fitting for row in found.get(key, ())]
    large = yield from bodies(datastore, [(shard, row[_ADDED_ID]) for shard, row in read if row[_BODY] is None])
    cells = [_whole(row, shard, large) for shard, row in read]
    return NewestRows((yield from _unerased(datastore, cells, {n: until for n, (until, _) in rows.items()})), unread)


def row(datastore: Datastore, shard: int, row_key: RowKey, bytes_max: int) -> Operation[list[StoredCell]]:
    """Returns the newest version of every column of a row, by column name, as `newest` does. Raises TooLarge beyond
    `bytes_max`.
    """
    table = sql("%s.entity", Name(datastore.database(shard)))
    tail = (
        f"JOIN (SELECT column_name, MAX(ref_key) AS ref_key FROM {table} WHERE row_key = %s AND column_name <> %s"
        " GROUP BY column_name) AS newest USING (column_name, ref_key) WHERE row_key = %s ORDER BY column_name"
    )
    which = (row_key, ERASE_COLUMN.encode(), row_key)
    page = yield from _page(datastore, shard, tail, which, ROW_COLUMNS_MAX, bytes_max)
    cells = [cell for cell in (yield from _newest_left(datastore, page.cells)) if cell is not None]
    if page.following is not None or sum(len(cell.body) for cell in cells) > bytes_max:
        raise TooLarge(f"the row has more than {bytes_max} bytes or {ROW_COLUMNS_MAX} columns: ask for its columns")
    return cells


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
    cells = [None if one is None else _whole(one[1], one[0], large) for one in found]
    newest = yield from _newest_left(
        datastore, [None if ref_key is not None else cell for cell, (*_, ref_key) in zip(cells, keys, strict=True)]
    )
    return [cell if left is None else left for cell, left in zip(cells, newest, strict=True)]


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
    """Returns which of the rows, at least one, got a cell of `columns`, or lost some, after `until`."""
    rows = yield from query(
        sql("SELECT DISTINCT row_key FROM %s.entity", Name(datastore.database(shard)))
        + f" WHERE row_key IN ({commas([sql('%s', key) for key in keys])}) AND added_id > {until}"
        + f" AND column_name IN ({_literals([*columns, ERASE_COLUMN])})"
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
        select(cell, f"generation, added_id, {MICROSECONDS.format('created_at')}, {ERASED}") for cell in cells
    )
    return [
        _existing(cell.shard, *result.rows[0]) if result.rows else None
        for cell, result in zip(cells, results, strict=True)
    ]


def _existing(shard: int, generation: int, added_id: int, created_at: int, by: str | None) -> Placed:
    return Placed(PutStatus.ALREADY_STORED, shard, generation, added_id, created_at, erased(by))


def _selector(datastore: Datastore) -> Select:
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
            f"SELECT {_INSERTION}, IF(LENGTH(body) <= %s, body, NULL), LENGTH(body), cause, {ERASED} FROM ("
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
    fitting: Sequence[Row] = next(chunks(rows[:limit], bytes_max=bytes_max, size_bytes=itemgetter(_LENGTH)), ())
    large = yield from bodies(datastore, [(shard, row[_ADDED_ID]) for row in fitting if row[_BODY] is None])
    following = rows[len(fitting)][_REF_KEY] if len(fitting) < len(rows) else None
    return CellPage([_whole(row, shard, large) for row in fitting], following)


def _select_sized(datastore: Datastore, shard: int, tail: str, values: Sequence[object], share: int) -> Script:
    """Selects an insertion, a body up to `share` bytes, every body's length, and the cause."""
    columns = f"{_INSERTION}, IF(LENGTH(body) <= {share}, body, NULL), LENGTH(body), cause, {ERASED}"
    return sql(f"SELECT {columns} FROM %s.entity {tail}", Name(datastore.database(shard)), *values)


def _whole(row: Row, shard: int, large: Mapping[tuple[int, int], bytes]) -> StoredCell:
    body = large[shard, row[_ADDED_ID]] if row[_BODY] is None else row[_BODY]
    return _stored((*row[:_BODY], body, *row[_NOTES]), shard)


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
    row_key, column_name, ref_key, generation, added_id, created_at, body, cause, by = found
    return StoredCell(row_key, column_name, ref_key, shard, generation, added_id, created_at, body, cause, erased(by))


def erased(text: str | None) -> Erased | None:
    """Returns what a column ERASED says."""
    return None if text is None else Erased(*map(int, text.split()))


def _left(
    datastore: Datastore, cells: Sequence[StoredCell | None], untils: Mapping[int, int]
) -> Operation[dict[int, StoredCell | None]]:
    """Returns by position, of cells that have no body, the newest version of their column that wasn't erased, None
    where none is left. `untils`: by shard, the last added_id to look at.
    """
    left = {}
    tail = "WHERE row_key = %s AND column_name = %s AND added_id <= %s AND erased IS NULL ORDER BY ref_key DESC LIMIT 1"
    for position, cell in enumerate(cells):
        if cell is not None and cell.is_erased:  # few: columns whose newest version was erased
            until = untils.get(cell.shard, ADDED_ID_MAX)
            (result,) = yield _select(datastore, cell.shard, tail, cell.row_key, cell.column_name.encode(), until)
            left[position] = _one(result.rows, cell.shard)
    return left


def _newest_left(datastore: Datastore, cells: Sequence[StoredCell | None]) -> Operation[list[StoredCell | None]]:
    """Returns the newest versions that are left of columns, and the erased one where none is."""
    left = yield from _left(datastore, cells, {})
    return [left.get(position) or cell for position, cell in enumerate(cells)]


def _unerased(
    datastore: Datastore, cells: Sequence[StoredCell], untils: Mapping[int, int]
) -> Operation[list[StoredCell]]:
    """Returns the newest versions that are left, without columns of which none is."""
    left = yield from _left(datastore, cells, untils)
    return [found for position, cell in enumerate(cells) if (found := left.get(position, cell)) is not None]


# Stored bodies compared with those of a put that met an existing key (I1), within bounds of what is read (I14).
#
# Equal bytes are recognised by length and SHA-256 on the server. A body is read only where the bytes differ and could
# still be the same JSON value, at most once for each key, and never while heads are locked.

_SCRIPT_BYTES_MAX = 4 << 20
"""The most bytes of bodies that one script reads, beyond the first."""
_STEP_BYTES_MAX = 256 << 10
"""Bytes of bodies that are compared without a pause."""


Select = Callable[["ShardCell", str], Script]
"""Returns the statement that selects something of the row under a cell's key."""


def same_as_stored(cells: Sequence[ShardCell], known: Mapping[CellKey, bytes], select: Select) -> Operation[list[bool]]:
    """Returns of each cell, in order, whether the body that is stored under its key is the same JSON value.

    All keys exist. `known` has the stored bodies that the caller knows: those are not read.
    """
    verdicts: dict[tuple[CellKey, bytes], bool] = {}
    asked: dict[CellKey, list[ShardCell]] = {}
    for cell in cells:
        if cell.key not in known:
            asked.setdefault(cell.key, []).append(cell)
    lengths: dict[CellKey, int] = {}
    if asked:
        results = yield ";".join(select(group[0], _length_and_digest(group)) for group in asked.values())
        for (key, group), result in zip(asked.items(), results, strict=True):
            if not result.rows:
                raise Corrupt(f"{key} was there, and is not any more")
            length, digest = result.rows[0]
            for body in {cell.body for cell in group}:
                if len(body) == length and sha256(body).digest() == digest:
                    verdicts[key, body] = True
                elif length and may_be_same_body(body, length):  # an erased one has none
                    lengths[key] = length
                else:
                    verdicts[key, body] = False
    unequal = [cell for cell in cells if (cell.key, cell.body) not in verdicts]
    yield from _compare([cell for cell in unequal if cell.key in known], known, verdicts)
    to_read = [asked[key][0] for key in lengths]
    for some in chunks(to_read, bytes_max=_SCRIPT_BYTES_MAX, size_bytes=lambda cell: lengths[cell.key]):
        results = yield ";".join(select(cell, "body") for cell in some)
        stored = {cell.key: result.rows[0][0] for cell, result in zip(some, results, strict=True)}
        yield from _compare([cell for cell in unequal if cell.key in stored], stored, verdicts)
    return [verdicts[cell.key, cell.body] for cell in cells]


def _compare(
    cells: Sequence[ShardCell], stored: Mapping[CellKey, bytes], verdicts: dict[tuple[CellKey, bytes], bool]
) -> Operation[None]:
    """Decodes each stored body at most once, and each given one at most once."""
    comparisons: dict[CellKey, BodyComparison] = {}
    compared = 0
    for cell in cells:
        if (cell.key, cell.body) in verdicts:
            continue
        if cell.key not in comparisons:
            comparisons[cell.key] = BodyComparison(stored[cell.key])
        comparison = comparisons[cell.key]
        verdicts[cell.key, cell.body] = comparison.same(cell.body)
        compared += comparison.compared_bytes
        if compared >= _STEP_BYTES_MAX:
            compared = 0
            yield PAUSE


def _length_and_digest(cells: Sequence[ShardCell]) -> str:
    """Names the length of a stored body, and its digest if one of the given bodies is as long."""
    lengths = commas([str(length) for length in {len(cell.body) for cell in cells}])
    return f"LENGTH(body), IF(LENGTH(body) IN ({lengths}), UNHEX(SHA2(body, 256)), NULL)"


# Walks over rows in the order of their keys: over one shard, or over a span of row keys in many shards.
#
# The walk over a shard has the newest cells of each row up to a fixed added_id, and how many keys it met.
#
# The log is dense (I3). So the keys with an added_id up to H number exactly H, and their count proves that a walk met
# all of them.

COLUMNS_AT_ONCE = 4096
"""Columns of rows, all of them counted, that one page looks at."""

BYTES_MAX = 4 << 20
"""The most bytes of stored bodies in a page, beyond the first row."""

_ROW_KEY = itemgetter(0)
_WALK_ADDED_ID, _WALK_BODY, _WALK_LENGTH = 5, 6, 7
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
        left -= row[_WALK_LENGTH] or 0
        if left < 0 and row[0] != found[0][0]:
            found, more = found[: bisect_left(found, row[0], key=_ROW_KEY)], True
            break
    unread = [
        (shard, row[_WALK_ADDED_ID]) for row in found if row[_WALK_BODY] is None and row[_WALK_LENGTH] is not None
    ]
    large = yield from bodies(datastore, unread)
    keys: dict[RowKey, int] = {}
    cells: list[StoredCell] = []
    for row_key, column, versions, ref_key, generation, added_id, body, _ in found:
        keys[row_key] = keys.get(row_key, 0) + versions
        if added_id is not None:
            stored = large[shard, added_id] if body is None else body
            cells.append(StoredCell(row_key, column, ref_key, shard, generation, added_id, 0, stored))
    newest: dict[RowKey, dict[str, StoredCell]] = {row_key: {} for row_key in keys}
    for cell in (yield from _unerased(datastore, cells, {shard: until})):
        newest[cell.row_key][cell.column_name] = cell
    return WalkPage([WalkedRow(row_key, newest[row_key], count) for row_key, count in keys.items()], more)


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
    large = yield from bodies(datastore, unread)
    cells = [
        StoredCell(
            row_key, column, ref_key, shard, generation, added_id, 0, large[shard, added_id] if body is None else body
        )
        for (row_key, column, ref_key, generation, added_id, body, _), shard in rows
    ]
    return SpanPage((yield from _unerased(datastore, cells, untils)), last)


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
        + f" AND column_name IN ({_literals(columns)})"
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
        f" AND met.column_name IN ({_literals(columns)})"
    )


def _alone(
    datastore: Datastore, shard: int, columns: Collection[ColumnName], until: int, row_key: RowKey
) -> Operation[WalkedRow]:
    """Returns one row that has as many columns as a page looks at, or more."""
    ((keys,),) = yield from query(
        sql("SELECT COUNT(*) FROM %s.entity", Name(datastore.database(shard)))
        + sql(" WHERE row_key = %s AND added_id <= %s", row_key, until)
    )
    found = yield from newest_until(datastore, {shard: (until, [row_key])}, columns)
    return WalkedRow(row_key, {cell.column_name: cell for cell in found.cells}, int(keys))
