"""The buffer table: cells on a secondary that await confirmation on a minion of their home (I5, I6).

Each row carries the `owner`, a random number of the put that inserted it, which never changes. It also carries a
`claim`, the number of the put that relies on it last. Who may remove a row:

- the put that inserted it, when it met another body at home, and only while owner and claim are its own: a later put
  with the same body takes the claim over and may have answered "buffered".
- the cleaner, after a minion showed the same body, or in the transaction that records a conflict.

A put that took a claim over never removes the row, because the one before may have answered "buffered". That holds when
its operation is run again, too: the owner still says who inserted the row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from schemaless.cell import CellKey, ColumnName, RowKey
from schemaless.errors import Busy, DuplicateKey
from schemaless.runtime.batching import chunks
from schemaless.storage import append, stored_bodies
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Script, commas, sql
from schemaless.topology import Datastore


class BufferRow(ShardCell, frozen=True, gc=False):
    """What a put writes. `claim` is a random 63-bit number of the put, which all its rows may share."""

    home: str
    claim: int


class BufferOutcome(StrEnum):
    """INSERTED: the row is this put's. SHARED: the same body was there. CONFLICT: another body is there."""

    INSERTED = "inserted"
    SHARED = "shared"
    CONFLICT = "conflict"


class Buffered(msgspec.Struct, frozen=True, gc=False):
    """A row as the cleaner sees it, with size and SHA-256 of its body instead of the body. `was_refused`: its home
    refused the cell when it was last put there.
    """

    buffer_id: int
    datastore: str
    shard: int
    key: CellKey
    claim: int
    size_bytes: int
    digest: bytes
    was_refused: bool = False


class Sizes(msgspec.Struct, frozen=True):
    """The sizes of the bodies that are looked for, both ends included."""

    least_bytes: int = 0
    most_bytes: int = 2**32 - 1


class Waiting(msgspec.Struct, frozen=True):
    """What waits in a server's buffer for one home. `oldest_s` is how long the oldest row has waited.

    `rows` and `size_bytes` count the oldest `COUNTED_ROWS_MAX` rows: that many mean as many or more.
    """

    rows: int
    size_bytes: int
    oldest_s: float


COUNTED_ROWS_MAX = 100_000

_INSERT = (
    "INSERT INTO schemaless.buffer"
    " (datastore, home, shard, row_key, column_name, ref_key, body, digest, size, owner, claim, buffered_at, cause)"
    " VALUES "
)
_BUFFERED = (
    "buffer_id, datastore, shard, row_key, column_name, ref_key, claim, size, digest,"
    " EXISTS (SELECT * FROM schemaless.refusal WHERE refusal.buffer_id = buffer.buffer_id)"
)
_KEY = "datastore = %s AND row_key = %s AND column_name = %s AND ref_key = %s"


def insert(datastore: Datastore, rows: Sequence[BufferRow]) -> Operation[list[BufferOutcome]]:
    """Puts rows into the buffer, in one transaction. Returns one outcome for each, in order.

    A key that occurs twice counts in order. Running it twice with the same claims is the same as running it once.
    """
    try:
        yield insertion_of(datastore, rows)
    except DuplicateKey:
        return (yield from _insert_missing(datastore, rows))
    return [BufferOutcome.INSERTED] * len(rows)


def insertion_of(datastore: Datastore, rows: Sequence[BufferRow]) -> Script:
    """Returns the statement that inserts rows into the buffer. It fails with DuplicateKey when a key exists."""
    name = sql("%s", datastore.name.encode())
    return _INSERT + commas(
        [
            f"({name},x'{row.home.encode().hex()}',{row.shard},x'{row.key.row_key.hex()}',"
            f"x'{row.key.column_name.encode().hex()}',{row.key.ref_key},x'{row.body.hex()}',"
            f"x'{hashlib.sha256(row.body).hexdigest()}',{len(row.body)},{row.claim},{row.claim},UTC_TIMESTAMP(6),{append.cause_literal(row.cause)})"
            for row in rows
        ]
    )


def remove(datastore: Datastore, rows: Sequence[BufferRow]) -> Operation[None]:
    """Removes rows that the put inserted and no longer needs, unless another put took the claim over."""
    mine = f"{_KEY} AND owner = %s AND claim = %s"
    deletes = [
        sql(f"DELETE FROM schemaless.buffer WHERE {mine}", *_key(datastore, row), row.claim, row.claim) for row in rows
    ]
    yield ";".join(["BEGIN", *deletes, "COMMIT"])


def newest_id(home: str) -> Operation[int]:
    """Returns the highest buffer_id of the rows of one home, 0 where there is none."""
    ((newest,),) = yield from query(
        sql("SELECT COALESCE(MAX(buffer_id), 0) FROM schemaless.buffer WHERE home = %s", home.encode())
    )
    return int(newest)


def page(
    home: str, after: int, until: int, sizes: Sizes, *, rows_max: int, bytes_max: int
) -> Operation[list[Buffered]]:
    """Returns rows of one home with an id above `after` and up to `until`, in the order of their ids.

    It ends before the row that exceeds either bound, but has one row at least. No body is read for it.
    """
    if sizes.least_bytes:
        rows_max = max(1, min(rows_max, bytes_max // sizes.least_bytes))
    rows = yield from query(
        sql(
            f"SELECT {_BUFFERED} FROM schemaless.buffer FORCE INDEX (home)"
            " WHERE home = %s AND buffer_id > %s AND buffer_id <= %s AND size BETWEEN %s AND %s"
            " ORDER BY buffer_id LIMIT %s",
            home.encode(),
            after,
            until,
            sizes.least_bytes,
            sizes.most_bytes,
            rows_max,
        )
    )
    found = [
        Buffered(number, datastore, shard, CellKey(row_key, column_name, ref_key), claim, size, digest, bool(refused))
        for number, datastore, shard, row_key, column_name, ref_key, claim, size, digest, refused in rows
    ]
    return list(next(chunks(found, bytes_max=bytes_max, size_bytes=lambda row: row.size_bytes), ()))


def cells(buffered: Sequence[Buffered]) -> Operation[list[ShardCell | None]]:
    """Returns the cells of rows, in order, None for one that is gone. The caller bounds how many it asks for."""
    rows = yield from query(
        f"SELECT buffer_id, body, cause FROM schemaless.buffer WHERE buffer_id IN ({_ids(buffered)}) ORDER BY buffer_id"
    )
    found = {buffer_id: (body, cause) for buffer_id, body, cause in rows}
    return [
        ShardCell(row.key, found[row.buffer_id][0], row.shard, cause=found[row.buffer_id][1])
        if row.buffer_id in found
        else None
        for row in buffered
    ]


class BufferedCopy(msgspec.Struct, frozen=True, gc=False):
    """A row of the buffer without its body. `buffered_at` is in microseconds. `refused`: why its home refuses it."""

    column_name: str
    ref_key: int
    size_bytes: int
    buffered_at: int
    refused: str | None


def of_row(datastore: str, row_key: RowKey, limit: int) -> Operation[list[BufferedCopy]]:
    """Returns what this server buffers of one row, by column and ref_key."""
    rows = yield from query(
        f"SELECT column_name, ref_key, size, {MICROSECONDS.format('buffered_at')}, (SELECT reason"
        " FROM schemaless.refusal WHERE refusal.buffer_id = buffer.buffer_id) FROM schemaless.buffer"
        + sql(" WHERE datastore = %s AND row_key = %s", datastore, row_key)
        + f" ORDER BY column_name, ref_key LIMIT {limit}"
    )
    return [BufferedCopy(*row) for row in rows]


def highest_ref_keys(columns: Sequence[tuple[str, RowKey, ColumnName]]) -> Operation[list[int]]:
    """Returns the highest ref_key that this server buffers of each (datastore, row key, column), in order, or 0."""
    results = yield ";".join(
        sql(
            "SELECT COALESCE(MAX(ref_key), 0) FROM schemaless.buffer"
            " WHERE datastore = %s AND row_key = %s AND column_name = %s",
            datastore.encode(),
            row_key,
            column_name.encode(),
        )
        for datastore, row_key, column_name in columns
    )
    return [int(result.rows[0][0]) for result in results]


def delete_confirmed(buffered: Sequence[Buffered]) -> Operation[int]:
    """Deletes rows whose cells a minion of their home has, and returns how many.

    Claims are random, so a row whose claim was taken over since it was read stays. The next pass confirms it.
    """
    (result,) = yield (
        f"DELETE FROM schemaless.buffer WHERE buffer_id IN ({_ids(buffered)})"
        f" AND claim IN ({commas([str(row.claim) for row in buffered])})"
    )
    return result.affected


def record_conflict(buffered: Buffered, stored_body: bytes) -> Operation[bool]:
    """Moves a row to the conflict table: the home holds `stored_body` under its key. False when it is gone already.

    The row is locked first, so of two cleaners one records it.
    """
    results = yield sql("BEGIN; SELECT body FROM schemaless.buffer WHERE buffer_id = %s FOR UPDATE", buffered.buffer_id)
    if not results[-1].rows:
        yield "COMMIT"
        return False
    key = buffered.key
    yield sql(
        "INSERT INTO schemaless.conflict (datastore, row_key, column_name, ref_key, stored_body, buffered_body,"
        " detected_at) VALUES (%s, %s, %s, %s, %s, %s, UTC_TIMESTAMP(6));"
        "DELETE FROM schemaless.buffer WHERE buffer_id = %s; COMMIT",
        buffered.datastore,
        key.row_key,
        key.column_name.encode(),
        key.ref_key,
        stored_body,
        results[-1].rows[0][0],
        buffered.buffer_id,
    )
    return True


def waiting() -> Operation[dict[tuple[str, str], Waiting]]:
    """Returns what this server buffers, by (datastore, home). Read from one key, at most `COUNTED_ROWS_MAX` a home."""
    homes = yield from query("SELECT DISTINCT home FROM schemaless.buffer")
    if not homes:
        return {}
    results = yield ";".join(
        sql(
            "SELECT datastore, COUNT(*), CAST(SUM(size) AS SIGNED),"
            " TIMESTAMPDIFF(MICROSECOND, MIN(buffered_at), UTC_TIMESTAMP(6)) FROM"
            " (SELECT datastore, size, buffered_at FROM schemaless.buffer FORCE INDEX (home) WHERE home = %s"
            " ORDER BY buffer_id LIMIT %s) AS oldest GROUP BY datastore",
            home.encode(),
            COUNTED_ROWS_MAX,
        )
        for (home,) in homes
    )
    return {
        (datastore, home): Waiting(rows, size_bytes, max(0.0, age_us / 1e6))
        for (home,), result in zip(homes, results, strict=True)
        for datastore, rows, size_bytes, age_us in result.rows
    }


def _insert_missing(datastore: Datastore, rows: Sequence[BufferRow]) -> Operation[list[BufferOutcome]]:
    """Looks which keys exist. Shares or refuses those, and inserts the others."""
    firsts: dict[CellKey, BufferRow] = {}
    for row in rows:
        firsts.setdefault(row.key, row)
    found = yield "BEGIN;" + ";".join(_select(datastore, row, "owner") + " FOR UPDATE" for row in firsts.values())
    owners = {key: result.rows[0][0] for key, result in zip(firsts, found[1:], strict=True) if result.rows}
    inserted = {key: row for key, row in firsts.items() if key not in owners}
    same = yield from stored_bodies.same_as_stored(
        rows, {key: row.body for key, row in inserted.items()}, lambda row, what: _select(datastore, row, what)
    )
    outcomes = []
    for row, is_same in zip(rows, same, strict=True):
        # A row of this very put: inserted when the operation ran before, or the key comes twice in the put.
        owner = inserted[row.key].claim if row.key in inserted else owners[row.key]
        own = BufferOutcome.INSERTED if owner == row.claim else BufferOutcome.SHARED
        outcomes.append(own if is_same else BufferOutcome.CONFLICT)
    shared = [row for row, outcome in zip(rows, outcomes, strict=True) if outcome is BufferOutcome.SHARED]
    missing = list(inserted.values())
    script = [insertion_of(datastore, missing)] if missing else []
    script += [
        sql(f"UPDATE schemaless.buffer SET claim = %s WHERE {_KEY}", row.claim, *_key(datastore, row)) for row in shared
    ]
    try:
        yield ";".join([*script, "COMMIT"])
    except DuplicateKey as error:  # READ COMMITTED locks no gaps: somebody else inserted one of them meanwhile
        raise Busy("a row came into the buffer meanwhile") from error
    return outcomes


def _select(datastore: Datastore, row: ShardCell, what: str) -> Script:
    return f"SELECT {what} FROM schemaless.buffer WHERE " + sql(_KEY, *_key(datastore, row))


def _key(datastore: Datastore, row: ShardCell) -> tuple[bytes, bytes, bytes, int]:
    return datastore.name.encode(), row.key.row_key, row.key.column_name.encode(), row.key.ref_key


def _ids(buffered: Sequence[Buffered]) -> Script:
    return commas([str(row.buffer_id) for row in buffered])
