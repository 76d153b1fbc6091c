"""Shards' logs as the tailer and the audit read them: from a position on, bounded in cells and in bytes (I14)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from schemaless.cell import StoredCell
from schemaless.storage.operation import Operation, Result, Row
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Name, Script, commas, sql
from schemaless.topology import Datastore


class LogRange(msgspec.Struct, frozen=True, gc=False):
    """At most `limit` cells of a shard, with added_ids above `after`."""

    shard: int
    after: int
    limit: int


class LogBatch(msgspec.Struct, frozen=True):
    """For each part that was wanted, its cells in added_id order. `cut`: there was more than the bytes allowed.

    `lost`: shards without any cell behind `after`, although the same server shows a head behind it.
    """

    cells: list[list[StoredCell]]
    cut: bool
    lost: frozenset[int]


def read(datastore: Datastore, wanted: Sequence[LogRange], bytes_max: int) -> Operation[LogBatch]:
    """Returns cells with at most `bytes_max` of bodies in all, or one cell. Each shard is at most once in `wanted`.

    It never holds more than twice that: a body above its even share of the bytes is read only once its length is known
    to fit.
    """
    share = max(1, bytes_max // sum(part.limit for part in wanted))
    results = yield ";".join(_select(datastore, part, share) for part in wanted)
    rows = dict(zip([part.shard for part in wanted], _within(results, bytes_max), strict=True))
    bodies = yield from _large_bodies(datastore, rows)
    cells = [_cells(shard, found, bodies.get(shard, {})) for shard, found in rows.items()]
    lost = yield from _lost(datastore, [part for part, result in zip(wanted, results, strict=True) if not result.rows])
    cut = any(len(kept) < len(result.rows) for result, kept in zip(results, rows.values(), strict=True))
    return LogBatch(cells, cut, lost)


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


_LENGTH = -1
_BODY = -2
_ADDED_ID = 4


def _select(datastore: Datastore, part: LogRange, share: int) -> Script:
    """Selects StoredCell's fields but the shard, in their order, and then the body's length."""
    return sql(
        f"SELECT row_key, column_name, ref_key, generation, added_id, {MICROSECONDS.format('created_at')},"
        " IF(LENGTH(body) <= %s, body, NULL), LENGTH(body)"
        " FROM %s.entity WHERE added_id > %s ORDER BY added_id LIMIT %s",
        share,
        Name(datastore.database(part.shard)),
        part.after,
        part.limit,
    )


def _lost(datastore: Datastore, empty: Sequence[LogRange]) -> Operation[frozenset[int]]:
    """Asks the server that had no cells for head and cells in one snapshot: on one that lags both are missing."""
    if not empty:
        return frozenset()
    results = yield ";".join(
        sql(
            "SELECT shard FROM schemaless.shard_head WHERE datastore = %s AND shard = %s AND head > %s"
            " AND NOT EXISTS (SELECT * FROM %s.entity WHERE added_id > %s)",
            datastore.name,
            part.shard,
            part.after,
            Name(datastore.database(part.shard)),
            part.after,
        )
        for part in empty
    )
    return frozenset(shard for result in results for (shard,) in result.rows)


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
        )
        for row_key, column_name, ref_key, generation, added_id, created_at, body, _ in rows
    ]
