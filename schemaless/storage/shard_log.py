"""Shards' logs as their followers and the audit read them: from a position on, bounded in cells and bytes (I14)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from schemaless.cell import Erased, RowKey, StoredCell
from schemaless.errors import LocationGone, Misconfigured, NotWhole, TableMissing
from schemaless.location import GenerationStart, Location
from schemaless.names import ERASE_COLUMN
from schemaless.position import BEGINNING_DIGEST, Position, insertion_digest, verify_position
from schemaless.shard_cursor import ProvenPage
from schemaless.storage import shard_head
from schemaless.storage.entity_table import ERASED, erased
from schemaless.storage.operation import Operation, Result, Row, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Name, Script, commas, literal, sql
from schemaless.topology import Datastore, shard_database

ROW_CELLS_MAX = 100
"""How many cells of one row are read at a time."""


class LogRange(msgspec.Struct, frozen=True, gc=False):
    """At most `limit` cells of a shard, with added_ids above `after`."""

    shard: int
    after: int
    limit: int


def read(datastore: Datastore, wanted: Sequence[LogRange], bytes_max: int) -> Operation[list[list[StoredCell]]]:
    """Returns, for each part that is wanted, its cells in added_id order. Each shard is at most once in `wanted`.

    The bodies have at most `bytes_max` in all, or there is one cell. It never holds more than twice that: a body above
    its even share of the bytes is read only once its length is known to fit.
    """
    share = max(1, bytes_max // sum(part.limit for part in wanted))
    results = yield ";".join(_select(datastore, part, share) for part in wanted)
    rows = dict(zip([part.shard for part in wanted], _within(results, bytes_max), strict=True))
    bodies = yield from _large_bodies(datastore, rows)
    return [_cells(shard, found, bodies.get(shard, {})) for shard, found in rows.items()]


class Following(msgspec.Struct, frozen=True, gc=False):
    """At most `limit` cells of a shard, after a position. A limit of 0 only proves the position."""

    position: Position
    limit: int


def follow(
    datastore: Datastore, wanted: Sequence[Following], bytes_max: int
) -> Operation[dict[int, ProvenPage | LocationGone]]:
    """Returns the next page of each shard whose log still has the cell of its position, else why it hasn't (I16).

    Each shard is at most once in `wanted`. The bodies of all pages have at most `bytes_max` together, or there is one
    cell. A shard for which no bytes were left is not in the answer.
    """
    numbers = [part.position.shard for part in wanted]
    share = max(1, bytes_max // max(1, sum(part.limit for part in wanted)))
    found, *results = yield ";".join(
        [
            sql("SELECT shard, generation, head FROM schemaless.shard_head WHERE datastore = %s", datastore.name)
            + f" AND shard IN ({commas([str(number) for number in numbers])})",
            *(_select_with_first(datastore, part, share) for part in wanted),
        ]
    )
    heads = {shard: Location(generation, head) for shard, generation, head in found.rows}
    firsts: dict[int, Row | None] = {}
    rest: list[Result] = []
    for part, result in zip(wanted, results, strict=True):
        at = part.position.added_id
        first = result.rows[0] if at and result.rows and result.rows[0][_ADDED_ID] == at else None
        firsts[part.position.shard] = first
        rest.append(msgspec.structs.replace(result, rows=result.rows[1:]) if first is not None else result)
    answers: dict[int, ProvenPage | LocationGone] = {}
    for part in wanted:
        number = part.position.shard
        gone = yield from _verified(datastore, part.position, firsts[number], heads.get(number))
        if gone is not None:
            answers[number] = gone
    proven = [(number, result) for number, result in zip(numbers, rest, strict=True) if number not in answers]
    kept = _within([result for _, result in proven], bytes_max)
    rows = {number: found for (number, _), found in zip(proven, kept, strict=True)}
    bodies = yield from _large_bodies(datastore, rows)
    for number, result in proven:
        if rows[number]:
            answers[number] = ProvenPage(_cells(number, rows[number], bodies.get(number, {})), heads[number])
        elif not result.rows:
            first = firsts[number]
            answers[number] = ProvenPage((), heads[number], BEGINNING_DIGEST if first is None else _digest(first))
    return answers


def _verified(
    datastore: Datastore, position: Position, first: Row | None, head: Location | None
) -> Operation[LocationGone | None]:
    """Compares what a log has at a position. Asks for the generations only where that doesn't prove enough."""
    if head is None:
        raise Misconfigured(f"datastore {datastore.name}: shard {position.shard} does not live on this cluster")
    digest = BEGINNING_DIGEST if position.added_id == 0 else None if first is None else _digest(first)
    if digest is not None and digest == position.digest:
        return None
    starts = yield from shard_head.generations(datastore.name, position.shard)
    try:
        verify_position(position, digest, starts, head)
    except LocationGone as gone:
        return gone
    return None


def _digest(row: Row) -> int:
    row_key, column_name, ref_key, generation, added_id, created_at, *_ = row
    return insertion_digest(generation, added_id, created_at, row_key, column_name, ref_key)


def of_row(
    datastore: Datastore, shard: int, row_key: bytes, columns: Collection[str], after: int, until: int, bytes_max: int
) -> Operation[list[StoredCell]]:
    """Returns the first cells of one row in these columns, after one added_id and up to another, by added_id.

    The bodies have at most `bytes_max` together, or there is one cell.
    """
    names = commas([sql("%s", column.encode()) for column in sorted(columns)])
    share = max(1, bytes_max // ROW_CELLS_MAX)
    result = yield (
        sql(
            f"{_INSERTION}, IF(LENGTH(body) <= %s, body, NULL), LENGTH(body), cause, {ERASED}"
            " FROM %s.entity WHERE row_key = %s",
            share,
            Name(datastore.database(shard)),
            row_key,
        )
        + f" AND column_name IN ({names}) AND added_id > {after} AND added_id <= {until}"
        + f" ORDER BY added_id LIMIT {ROW_CELLS_MAX}"
    )
    (rows,) = _within(result, bytes_max)
    bodies = yield from _large_bodies(datastore, {shard: rows})
    return _cells(shard, rows, bodies.get(shard, {}))


class RowCell(msgspec.Struct, frozen=True, gc=False):
    """A cell of a row without its body. `created_at` is in microseconds. `size_bytes` is of the stored body.

    `entry` is the stored body of an entry of an erasure, which names no more than keys.
    """

    column_name: str
    ref_key: int
    location: Location
    created_at: int
    size_bytes: int
    cause: str | None
    erased: Erased | None = None
    entry: bytes | None = None


class RowPage(msgspec.Struct, frozen=True):
    """Cells of a row by added_id. `earlier` and `later` say whether there are more on either side."""

    cells: Sequence[RowCell]
    earlier: bool
    later: bool


def cells_of_row(
    datastore: Datastore, shard: int, row_key: bytes, until: int, before: int, after: int
) -> Operation[RowPage]:
    """Returns the last `before` cells of a row up to an added_id, and the first `after` behind it, in all columns."""
    select = (
        f"SELECT column_name, ref_key, generation, added_id, {MICROSECONDS.format('created_at')}, LENGTH(body), cause,"
        f" {ERASED}, IF(column_name = {literal(ERASE_COLUMN.encode())}, body, NULL)"
    )
    table = Name(datastore.database(shard))
    tail = "FROM %s.entity WHERE row_key = %s AND added_id {} %s ORDER BY added_id {} LIMIT %s"
    first, last = yield (
        sql(f"{select} {tail.format('<=', 'DESC')};", table, row_key, until, before + 1)
        + sql(f"{select} {tail.format('>', 'ASC')}", table, row_key, until, after + 1)
    )
    rows = [*reversed(first.rows[:before]), *last.rows[:after]]
    cells = [
        RowCell(column, ref_key, Location(generation, added_id), created_at, size, cause, erased(by), entry)
        for column, ref_key, generation, added_id, created_at, size, cause, by, entry in rows
    ]
    return RowPage(cells, len(first.rows) > before, len(last.rows) > after)


def row_at(datastore: Datastore, shard: int, added_id: int) -> Operation[bytes | None]:
    """Returns the row key of the cell at an added_id, None where there is none."""
    rows = yield from query(
        sql("SELECT row_key FROM %s.entity WHERE added_id = %s", Name(datastore.database(shard)), added_id)
    )
    return bytes(rows[0][0]) if rows else None


class Changes(msgspec.Struct, frozen=True):
    """A shard's head and generations, and which rows the cells behind a position touch, up to that head."""

    head: Location
    starts: Sequence[GenerationStart]
    row_keys: Sequence[RowKey]


def changes_after(
    datastore: Datastore, shard: int, after: int, columns: Collection[str], cells_max: int
) -> Operation[Changes]:
    """Returns the rows with a cell of these columns after an added_id, in the order of their first one.

    It looks at no more than `cells_max` cells and reads no bodies. Raises Misconfigured: the shard doesn't live here.
    """
    names = commas([sql("%s", column.encode()) for column in sorted(columns)])
    where = sql("WHERE datastore = %s AND shard = %s", datastore.name, shard)
    heads, starts, cells = yield (
        f"SELECT generation, head FROM schemaless.shard_head {where};"
        f"SELECT generation, starts_at FROM schemaless.shard_generation {where} ORDER BY generation;"
        + sql("SELECT row_key, added_id FROM %s.entity", Name(datastore.database(shard)))
        + f" WHERE added_id > {after} AND added_id <= {after + cells_max} AND column_name IN ({names})"
        + " ORDER BY added_id"
    )
    if not heads.rows:
        raise Misconfigured(f"datastore {datastore.name}: shard {shard} does not live on this cluster")
    head = Location(*heads.rows[0])
    # The head is read first: every cell up to it can be read by now (I3), and later ones may be there, too.
    touched = dict.fromkeys(row_key for row_key, added_id in cells.rows if added_id <= head.added_id)
    return Changes(head, [GenerationStart(*row) for row in starts.rows], list(touched))


def digests(datastore: Datastore, shards: Mapping[int, int]) -> Operation[dict[int, int | None]]:
    """Returns by shard the digest of the cell at an added_id, None where there is none (I16)."""
    results = yield ";".join(
        sql(_INSERTION + " FROM %s.entity WHERE added_id = %s", Name(datastore.database(shard)), added_id)
        for shard, added_id in shards.items()
    )
    return {
        shard: BEGINNING_DIGEST if added_id == 0 else _digest(result.rows[0]) if result.rows else None
        for (shard, added_id), result in zip(shards.items(), results, strict=True)
    }


def digests_at(datastore: Datastore, shard: int, added_ids: Sequence[int]) -> Operation[dict[int, int]]:
    """Returns the digests of a shard's cells at these added_ids, at least one, by added_id. Reads no bodies."""
    rows = yield from query(
        sql(_INSERTION + " FROM %s.entity WHERE added_id IN ", Name(datastore.database(shard)))
        + f"({commas([str(added_id) for added_id in added_ids])})"
    )
    return {row[_ADDED_ID]: _digest(row) for row in rows}


def verify_dense(datastore: Datastore, shard: int, after: int, until: int) -> Operation[None]:
    """Raises NotWhole when a cell behind one added_id, up to another that is no higher than the head, isn't there (I3).

    It reads no bodies, and the ids only where they are too few.
    """
    found = yield from _hole(datastore.database(shard), after, until)
    if found is not None:
        raise found


def hole(database: str, added_id: int) -> NotWhole:
    return NotWhole(f"{database}.entity lacks added_id {added_id}, although the head is beyond it", database, added_id)


def _hole(database: str, after: int, until: int, without: Collection[int] = ()) -> Operation[NotWhole | None]:
    """Returns the first cell behind one added_id, up to another, that isn't there, apart from those in `without`."""
    table = sql("FROM %s.entity WHERE added_id > %s AND added_id <= %s", Name(database), after, until)
    ((count,),) = yield from query(f"SELECT COUNT(*) {table}")
    if count == until - after:
        return None
    found = {added_id for (added_id,) in (yield from query(f"SELECT added_id {table}"))}
    missing = (added_id for added_id in range(after + 1, until + 1) if added_id not in found)
    return next((hole(database, added_id) for added_id in missing if added_id not in without), None)


class _Proven(msgspec.Struct):
    """The added_ids of a shard above `low`, up to `high`, are there, but for those that are `lost` everywhere."""

    database: str
    generation: int
    low: int
    high: int
    lost: set[int]


class DensityWalk:
    """What one server's logs are proven to have: first what came since the start, then what was there before, newest
    first, down to the first cell.

    A server that left something out, by a filter, an event that it took for its own, or a repair by hand, shows its
    heads all the same, and its replication stays healthy. Each `look` takes the next shards in turn, and costs one
    statement over their added_ids. Who looks again and again has soon seen all, and then only what is new.
    """

    def __init__(self) -> None:
        self._proven: dict[tuple[str, int], _Proven] = {}
        self._after = _FIRST_HEAD
        self._cells = CELLS_AT_ONCE
        self._has_proven = False  # anything in this round
        self._failures = 0  # in this round

    def look(self) -> Operation[tuple[list[NotWhole], bool]]:
        """Returns holes of the next shards, at most two of each, and whether another look may find more.

        After one that raised the next look has half as many shards and cells, and begins behind it: what holds up one
        shard, such as a lock, isn't in the way of the others. After a round in which none raised it has twice as many.
        """
        cells, heads = self._cells, max(1, HEADS_AT_ONCE * self._cells // CELLS_AT_ONCE)
        self._cells, self._failures = max(1, cells // 2) if heads > 1 else cells, self._failures + 1
        rows = yield from query(
            sql(
                "SELECT datastore, shard, generation, head, moved_to FROM schemaless.shard_head"
                " WHERE (datastore, shard) > (%s, %s)",
                *self._after,
            )
            + f" ORDER BY datastore, shard LIMIT {heads}"
        )
        is_last = len(rows) < heads
        self._after = _FIRST_HEAD if is_last else (rows[-1][0], rows[-1][1])
        share = max(1, cells // max(1, len(rows)))
        parts: list[tuple[_Proven, int, int]] = []
        for name, shard, generation, head, moved_to in rows:
            known = self._proven.get((name, shard))
            if moved_to is not None:
                self._proven.pop((name, shard), None)
                continue
            if known is None or known.generation != generation or known.high > head:
                known = _Proven(shard_database(name, shard), generation, head, head, set())
                self._proven[name, shard] = known
            ranges = (known.high, min(head, known.high + share)), (max(0, known.low - share), known.low)
            parts += [(known, after, until) for after, until in ranges if until > after]
        holes = (yield from self._prove(parts)) if parts else []
        self._cells, self._failures = cells, self._failures - 1
        self._has_proven |= len(holes) < len(parts)
        goes_on = self._has_proven or not is_last
        if is_last:
            self._cells = cells if self._failures else min(CELLS_AT_ONCE, 2 * cells)
            self._has_proven, self._failures = False, 0
        return holes, goes_on

    def pass_over(self, found: NotWhole) -> None:
        """Takes a hole for no fault of this server: its master has it as well."""
        for known in self._proven.values():
            if known.database == found.database:
                known.lost.add(found.added_id)

    def _prove(self, parts: Sequence[tuple[_Proven, int, int]]) -> Operation[list[NotWhole]]:
        select = "SELECT COUNT(*) FROM %s.entity WHERE added_id > %s AND added_id <= %s"
        selects = [sql(select, Name(known.database), after, until) for known, after, until in parts]
        try:
            counts = [count for (count,) in (yield from query(" UNION ALL ".join(selects)))]
        except TableMissing:
            counts = [-1] * len(parts)  # one of them: each is asked by itself
        holes: list[NotWhole] = []
        for (known, after, until), count in zip(parts, counts, strict=True):
            found = None
            if count != until - after:
                try:
                    found = yield from _hole(known.database, after, until, known.lost)
                except TableMissing:
                    found = hole(known.database, after + 1)
            if found is not None:
                holes.append(found)
            elif until == known.low:
                known.low = after
            else:
                known.high = until
        return holes


HEADS_AT_ONCE = 256
CELLS_AT_ONCE = 2000
"""Of one look. In InnoDB a count reads the pages of these cells, with bodies of up to about half a page each."""
_FIRST_HEAD = ("", -1)


def ends(datastore: Datastore, shard: int) -> Operation[tuple[int, int]]:
    """Returns the highest added_id of the cells, and the head. The head is read later, so it is never lower (I3)."""
    cells, heads = yield (
        sql("SELECT COALESCE(MAX(added_id), 0) FROM %s.entity;", Name(datastore.database(shard)))
        + sql("SELECT head FROM schemaless.shard_head WHERE datastore = %s AND shard = %s", datastore.name, shard)
    )
    return int(cells.rows[0][0]), int(heads.rows[0][0])


class Oldest(msgspec.Struct, frozen=True, gc=False):
    """The first cell behind a position, and how long ago it was written, by its master's clock."""

    added_id: int
    age_us: int


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


def oldest_after(datastore: Datastore, positions: Mapping[int, int]) -> Operation[dict[int, Oldest | None]]:
    """Returns, by shard, the first cell after an added_id, or None where no cell follows."""
    results = yield ";".join(
        sql(
            "SELECT added_id, TIMESTAMPDIFF(MICROSECOND, created_at, UTC_TIMESTAMP(6))"
            " FROM %s.entity WHERE added_id > %s ORDER BY added_id LIMIT 1",
            Name(datastore.database(shard)),
            after,
        )
        for shard, after in positions.items()
    )
    return {
        shard: Oldest(*result.rows[0]) if result.rows else None
        for shard, result in zip(positions, results, strict=True)
    }


_ADDED_ID, _BODY, _LENGTH = 4, 6, 7


_INSERTION = f"SELECT row_key, column_name, ref_key, generation, added_id, {MICROSECONDS.format('created_at')}"
"""Selects StoredCell's fields but shard, body and cause, in their order."""


def _select_with_first(datastore: Datastore, part: Following, share: int) -> Script:
    """Selects what `_select` does, and before it the cell at the position itself, without its body."""
    at = part.position.added_id
    return sql(
        f"{_INSERTION}, IF(added_id > %s AND LENGTH(body) <= %s, body, NULL), IF(added_id > %s, LENGTH(body), 0),"
        f" cause, {ERASED} FROM %s.entity WHERE added_id >= %s ORDER BY added_id LIMIT %s",
        at,
        share,
        at,
        Name(datastore.database(part.position.shard)),
        at,
        part.limit + (at > 0),
    )


def _select(datastore: Datastore, part: LogRange, share: int) -> Script:
    """Selects StoredCell's fields but the shard, in their order, with the body's length before the cause."""
    return sql(
        f"{_INSERTION}, IF(LENGTH(body) <= %s, body, NULL), LENGTH(body), cause, {ERASED}"
        " FROM %s.entity WHERE added_id > %s ORDER BY added_id LIMIT %s",
        share,
        Name(datastore.database(part.shard)),
        part.after,
        part.limit,
    )


def _within(results: Sequence[Result], bytes_max: int) -> Iterator[Sequence[Row]]:
    """Yields the rows of each result that fit. After the first row that doesn't fit, none does, in whichever shard."""
    left = bytes_max
    first = True
    for result in results:
        kept = 0
        for row in result.rows:
            left -= row[_LENGTH]
            if left < 0 and not first:
                break
            first = False
            kept += 1
        yield result.rows[:kept]


def oldest(datastore: Datastore, places: Mapping[int, int]) -> Operation[int | None]:
    """Returns the earliest created_at of the cells at these added_ids by shard, at least one. None without cells."""
    select = f"SELECT {MICROSECONDS.format('created_at')} AS at FROM %s.entity WHERE added_id = %s"
    parts = [sql(select, Name(datastore.database(shard)), added_id) for shard, added_id in places.items()]
    ((moment,),) = yield from query(f"SELECT MIN(at) FROM ({' UNION ALL '.join(parts)}) AS found")
    return None if moment is None else int(moment)


def _large_bodies(datastore: Datastore, rows: Mapping[int, Sequence[Row]]) -> Operation[dict[int, dict[int, bytes]]]:
    """Returns the bodies that were too large for their share, by shard and added_id."""
    large = {
        shard: ids for shard, found in rows.items() if (ids := [row[_ADDED_ID] for row in found if row[_BODY] is None])
    }
    if not large:
        return {}
    results = yield ";".join(
        sql("SELECT added_id, body FROM %s.entity WHERE added_id IN ", Name(datastore.database(shard)))
        + f"({commas([str(added_id) for added_id in ids])})"
        for shard, ids in large.items()
    )
    return {shard: dict(result.rows) for shard, result in zip(large, results, strict=True)}


def _cells(shard: int, rows: Sequence[Row], large: Mapping[int, bytes]) -> list[StoredCell]:
    return [
        StoredCell(
            row_key,
            column_name,
            ref_key,
            shard,
            generation,
            added_id,
            created_at,
            large[added_id] if body is None else body,
            cause,
            erased(by),
        )
        for row_key, column_name, ref_key, generation, added_id, created_at, body, _, cause, by in rows
    ]
