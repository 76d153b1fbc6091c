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
from itertools import chain, repeat

import msgspec

from schemaless.cell import CellKey, ColumnName, Placed, RefKey, RowKey, StoredCell
from schemaless.errors import Busy, DuplicateKey, NeedsLockedHeads
from schemaless.runtime.batching import chunks
from schemaless.storage import append, appointment_table, entity_table
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import NOW, Script, commas, literal, literals, sql, where
from schemaless.storage.table import Table
from schemaless.topology import Datastore


class BufferRow(ShardCell, frozen=True, gc=False):
    """What a put writes. `claim` is a random 63-bit number of the put, which all its rows may share.

    In the table `home` is a hint: the cleaner corrects it where the shard has moved, also to where the row lies.
    """

    home: str
    claim: int


class BufferOutcome(StrEnum):
    """INSERTED: the row is this put's. SHARED: the same body was there. CONFLICT: another body is there."""

    INSERTED = "inserted"
    SHARED = "shared"
    CONFLICT = "conflict"


class Buffered(msgspec.Struct, frozen=True, gc=False):
    """A row as the cleaner sees it, with size and SHA-256 of its body instead of the body. `was_refused`: its home
    refused the cell when it was last put there. `buffered_at` is in microseconds.
    """

    buffer_id: int
    datastore: str
    shard: int
    key: CellKey
    claim: int
    size_bytes: int
    digest: bytes
    was_refused: bool = False
    buffered_at: int = 0


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
    " (datastore, home, shard, row_key, column_name, ref_key, body, digest, size, owner, claim, buffered_at, cause,"
    " idempotency_key)"
    " VALUES "
)
_BUFFERED = (
    "buffer_id, datastore, shard, row_key, column_name, ref_key, claim, size, digest,"
    " EXISTS (SELECT * FROM schemaless.refusal WHERE refusal.buffer_id = buffer.buffer_id),"
    f" {MICROSECONDS.format('buffered_at')}"
)
_CELL = "CONCAT(datastore, row_key, column_name, ':', ref_key)"
"""Which cell a row has. A server that is promoted gives buffer_ids again, so they alone name no row."""
_KEY = "datastore = %s AND row_key = %s AND column_name = %s AND ref_key = %s"


def insert(datastore: Datastore, rows: Sequence[BufferRow]) -> Operation[list[BufferOutcome]]:
    """Puts rows into the buffer, in one transaction. Returns one outcome for each, in order.

    A key that occurs twice counts in order. Running it twice with the same claims is the same as running it once.
    """
    try:
        yield insertion_of(datastore, rows)
    except DuplicateKey:
        return (yield from _insert_missing(datastore, rows))
    except NeedsLockedHeads:
        yield from appointment_table.verify_none_newer()
        raise
    return [BufferOutcome.INSERTED] * len(rows)


def insertion_of(datastore: Datastore, rows: Sequence[BufferRow]) -> Script:
    """Returns the statement that inserts rows into the buffer. It fails with DuplicateKey when a key exists, and with
    NeedsLockedHeads where a master was appointed that the session's process doesn't know.
    """
    name = sql("%s", datastore.name.encode())
    times = chain([f"IF({appointment_table.NONE_NEWER},UTC_TIMESTAMP(6),NULL)"], repeat("UTC_TIMESTAMP(6)"))
    return _INSERT + commas(
        [
            f"({name},x'{row.home.encode().hex()}',{row.shard},x'{row.key.row_key.hex()}',"
            f"x'{row.key.column_name.encode().hex()}',{row.key.ref_key},x'{row.body.hex()}',"
            f"x'{hashlib.sha256(row.body).hexdigest()}',{len(row.body)},{row.claim},{row.claim},{time},"
            f"{append.optional(row.cause)},{append.optional(row.idempotency_key)})"
            for row, time in zip(rows, times, strict=False)
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
        f"SELECT {_BUFFERED} FROM schemaless.buffer FORCE INDEX (home) {where(home=home.encode())}"
        f" AND buffer_id > {after} AND buffer_id <= {until}"
        f" AND size BETWEEN {sizes.least_bytes} AND {sizes.most_bytes} ORDER BY buffer_id LIMIT {rows_max}"
    )
    found = [
        Buffered(
            number, datastore, shard, CellKey(row_key, column_name, ref_key), claim, size, digest, bool(refused), at
        )
        for number, datastore, shard, row_key, column_name, ref_key, claim, size, digest, refused, at in rows
    ]
    return list(next(chunks(found, bytes_max=bytes_max, size_bytes=lambda row: row.size_bytes), ()))


def cells(buffered: Sequence[Buffered]) -> Operation[list[ShardCell | None]]:
    """Returns the cells of rows, in order, None for one that is gone. The caller bounds how many it asks for."""
    rows = yield from query(
        f"SELECT buffer_id, body, cause, idempotency_key FROM schemaless.buffer {these(buffered)} ORDER BY buffer_id"
    )
    found = {number: (body, cause, key and key.decode()) for number, body, cause, key in rows}
    cells: list[ShardCell | None] = []
    for row in buffered:
        if row.buffer_id not in found:
            cells.append(None)
            continue
        body, cause, key = found[row.buffer_id]
        cells.append(ShardCell(row.key, body, row.shard, cause=cause, idempotency_key=key))
    return cells


NOBODYS_CLAIM = 0  # of a row that no put may remove


def take_over(buffered: Sequence[Buffered]) -> Operation[list[Buffered]]:
    """Takes over the claims of what this server has of another server's rows, at least one, under any number with the
    same body. So no put of before removes it (I6). Returns the rows that this server lacks.
    """
    which = [sql(f"{_KEY} AND digest = %s", row.datastore.encode(), *_cell(row.key), row.digest) for row in buffered]
    results = yield ";".join(
        f"UPDATE schemaless.buffer SET claim = {NOBODYS_CLAIM} WHERE {mine};"
        f"SELECT 1 FROM schemaless.buffer WHERE {mine} AND claim = {NOBODYS_CLAIM}"
        for mine in which
    )
    return [row for row, result in zip(buffered, results[1::2], strict=True) if not result.rows]


class BufferedCopy(msgspec.Struct, frozen=True, gc=False):
    """A row of the buffer without its body. `buffered_at` is in microseconds. `refused`: why its home refuses it."""

    column_name: str
    ref_key: int
    size_bytes: int
    buffered_at: int
    refused: str | None


_REFUSED = "(SELECT reason FROM schemaless.refusal WHERE refusal.buffer_id = buffer.buffer_id)"
_COPIES = Table("schemaless.buffer", BufferedCopy, size_bytes="size", refused=_REFUSED)


def of_row(datastore: str, row_key: RowKey, limit: int) -> Operation[list[BufferedCopy]]:
    """Returns what this server buffers of one row, by column and ref_key."""
    which = where(datastore=datastore, row_key=row_key)
    return (yield from _COPIES.rows(f"{which} ORDER BY column_name, ref_key LIMIT {limit}"))


class BufferSelection(msgspec.Struct, frozen=True):
    """Which cells of a row are wanted: all, or those of a column with a ref_key within bounds, both included."""

    row_key: RowKey
    column_name: ColumnName | None = None
    least: int = 0
    most: int = (1 << 63) - 1


SELECTED_MAX = 1000
"""Cells of one row that are read from one buffer. Its highest ref_keys go first."""


def selected(datastore: Datastore, shard: int, wanted: BufferSelection) -> Operation[list[StoredCell]]:
    """Returns what this server buffers of a row. Such cells have no place yet (`StoredCell.is_buffered`)."""
    which = {} if wanted.column_name is None else {"column_name": wanted.column_name.encode()}
    rows = yield from query(
        "SELECT column_name, ref_key, body, cause FROM schemaless.buffer"
        f" {where(datastore=datastore.name.encode(), row_key=wanted.row_key, **which)}"
        f" AND ref_key BETWEEN {wanted.least} AND {wanted.most} ORDER BY ref_key DESC LIMIT {SELECTED_MAX}"
    )
    return [
        StoredCell(wanted.row_key, name, ref_key, shard, 0, 0, 0, body, cause) for name, ref_key, body, cause in rows
    ]


class BufferedColumn(msgspec.Struct, frozen=True, gc=False):
    """What a server buffers of one column: the highest ref_key, 0 without any, and ref_key, body and cause of the cell
    of a POST with the Idempotency-Key that was asked for.
    """

    highest: int = 0
    ref_key: RefKey | None = None
    body: bytes = b""
    cause: str | None = None


def columns(asked: Sequence[tuple[str, RowKey, ColumnName, str | None]]) -> Operation[list[BufferedColumn]]:
    """Returns what this server buffers of each (datastore, row key, column, Idempotency-Key), in order."""
    questions = []
    for datastore, row_key, column_name, key in asked:
        of_column = sql(
            "FROM schemaless.buffer WHERE datastore = %s AND row_key = %s AND column_name = %s",
            datastore.encode(),
            row_key,
            column_name.encode(),
        )
        questions.append(f"SELECT COALESCE(MAX(ref_key), 0) {of_column}")
        if key is not None:
            questions.append(f"SELECT ref_key, body, cause {of_column} AND idempotency_key = {append.optional(key)}")
    results = iter((yield ";".join(questions)))
    found = []
    for *_, key in asked:
        ((highest,),) = next(results).rows
        posted = () if key is None else next(results).rows
        found.append(BufferedColumn(int(highest), *(posted[0] if posted else ())))
    return found


def delete_confirmed(buffered: Sequence[Buffered], home: str, epoch: int) -> Operation[int]:
    """Deletes rows whose cells a minion of their home showed under an epoch, and returns how many.

    Claims are random, so a row whose claim was taken over since it was read stays. The next pass confirms it. All stay
    where this server knows of a later master of the home: what was shown may be another history.
    """
    (result,) = yield (
        f"DELETE FROM schemaless.buffer {these(buffered)} AND claim IN ({commas([str(row.claim) for row in buffered])})"
        f" AND {appointment_table.none_later(home, epoch)}"
    )
    return result.affected


def correct_home(buffered: Sequence[Buffered], home: str) -> Operation[None]:
    """Has rows, at least one, name the present home of their shards."""
    yield f"UPDATE schemaless.buffer SET home = {literal(home.encode())} {these(buffered)}"


def record_conflict(buffered: Buffered, stored_body: bytes, home: str, epoch: int) -> Operation[bool]:
    """Moves a row to the conflict table: the home showed `stored_body` under its key and an epoch. False when it is
    gone already, or this server knows of a later master of the home.

    The row is locked first, so of two cleaners one records it.
    """
    none_later = appointment_table.none_later(home, epoch)
    same = f"{these([buffered])} AND digest = x'{buffered.digest.hex()}' AND {none_later}"
    results = yield f"BEGIN; SELECT body FROM schemaless.buffer {same} FOR UPDATE"
    if not results[-1].rows:
        yield "COMMIT"
        return False
    key = buffered.key
    bodies = (stored_body, results[-1].rows[0][0])
    values = literals(buffered.datastore, key.row_key, key.column_name.encode(), key.ref_key, *bodies, NOW)
    yield (
        "INSERT INTO schemaless.conflict (datastore, row_key, column_name, ref_key, stored_body, buffered_body,"
        f" detected_at) VALUES {values};DELETE FROM schemaless.buffer WHERE buffer_id = {buffered.buffer_id}; COMMIT"
    )
    return True


def homes() -> Operation[list[str]]:
    """Returns the homes that rows of this server's buffer wait for."""
    return [home for (home,) in (yield from query("SELECT DISTINCT home FROM schemaless.buffer"))]


def waiting() -> Operation[dict[tuple[str, str], Waiting]]:
    """Returns what this server buffers, by (datastore, home). Read from one key, at most `COUNTED_ROWS_MAX` a home."""
    found = yield from homes()
    if not found:
        return {}
    results = yield ";".join(
        "SELECT datastore, COUNT(*), CAST(SUM(size) AS SIGNED),"
        " TIMESTAMPDIFF(MICROSECOND, MIN(buffered_at), UTC_TIMESTAMP(6)) FROM"
        " (SELECT datastore, size, buffered_at FROM schemaless.buffer FORCE INDEX (home)"
        f" {where(home=home.encode())} ORDER BY buffer_id LIMIT {COUNTED_ROWS_MAX}) AS oldest GROUP BY datastore"
        for home in found
    )
    return {
        (datastore, home): Waiting(rows, size_bytes, max(0.0, age_us / 1e6))
        for home, result in zip(found, results, strict=True)
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
    same = yield from entity_table.same_as_stored(
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
    except NeedsLockedHeads:
        yield from appointment_table.verify_none_newer()
        raise
    except DuplicateKey as error:  # READ COMMITTED locks no gaps: somebody else inserted one of them meanwhile
        raise Busy("a row came into the buffer meanwhile") from error
    return outcomes


def _select(datastore: Datastore, row: ShardCell, what: str) -> Script:
    return f"SELECT {what} FROM schemaless.buffer WHERE " + sql(_KEY, *_key(datastore, row))


def _key(datastore: Datastore, row: ShardCell) -> tuple[bytes, bytes, bytes, int]:
    return datastore.name.encode(), *_cell(row.key)


def _cell(key: CellKey) -> tuple[bytes, bytes, int]:
    return key.row_key, key.column_name.encode(), key.ref_key


def these(buffered: Sequence[Buffered]) -> Script:
    """Returns the WHERE of rows that were read, at least one."""
    cells = [
        row.datastore.encode() + row.key.row_key + f"{row.key.column_name}:{row.key.ref_key}".encode()
        for row in buffered
    ]
    numbers, named = commas([str(row.buffer_id) for row in buffered]), commas([f"x'{cell.hex()}'" for cell in cells])
    return f"WHERE buffer_id IN ({numbers}) AND {_CELL} IN ({named})"


# What puts write to one master: cells whose home it is, and second copies of cells whose home is elsewhere (I5).
#
# Both kinds go into one transaction, so a master that is home and secondary at once commits half as often.


def put_copies(
    datastore: Datastore, cluster: str, rows: Sequence[BufferRow], latest: int | None = None
) -> Operation[list[Placed | BufferOutcome]]:
    """Puts rows on the master of `cluster` and returns, for each in order, its place in the entity table where
    `cluster` is its home, or else its outcome in the buffer table.

    `latest` is the latest created_at that is believed (append.insert). Usually it is one transaction. When a key exists
    already it is one for each kind, with the same outcomes.
    """
    at_home = [row for row in rows if row.home == cluster]
    others = [row for row in rows if row.home != cluster]
    placed: Sequence[Placed] = ()
    buffered: Sequence[BufferOutcome] = ()
    together = bool(at_home and others) and len({row.shard for row in at_home}) <= append.SHARDS_MAX
    if together:
        try:
            copies = [insertion_of(datastore, others)]
            placed = yield from append.insert_new(datastore, at_home, copies, latest)
            buffered = [BufferOutcome.INSERTED] * len(others)
        except DuplicateKey:
            together = False
    if not together:
        buffered = (yield from insert(datastore, others)) if others else []
        placed = (yield from entity_table.put_cells(datastore, at_home, latest)) if at_home else []
    places, outcomes = iter(placed), iter(buffered)
    return [next(places) if row.home == cluster else next(outcomes) for row in rows]
