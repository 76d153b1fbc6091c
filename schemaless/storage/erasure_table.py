"""The erasure table, and how an erasure empties bodies at home (I19).

Every erasure has a row on each master. The row says what is meant, and what was done on that cluster. At home an entry
in the log comes before the bodies go, in one transaction: an ordinary cell of the erased row, in a column that no
caller can write, so every follower meets it once and in order. Position, key and time of an erased cell stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

import msgspec

from schemaless.cell import CellKey, ColumnName, RefKey, RowKey, erasure_id
from schemaless.codec import encode_body
from schemaless.errors import Busy, DuplicateKey
from schemaless.location import ADDED_ID_MAX
from schemaless.names import ERASE_COLUMN
from schemaless.shapes import shape
from schemaless.storage import append, shard_copy
from schemaless.storage.append import NewRow, TransactionSteps
from schemaless.storage.diverged_table import EMPTIED, ERASED_OUTCOME
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.shard_move_table import TABLE as MOVES
from schemaless.storage.sql import NOW, Name, Script, Time, commas, literal, matching, sql, where
from schemaless.storage.table import Table
from schemaless.topology import Datastore

_TABLE = "schemaless.erasure"
_LOOKS_MAX = 5

TARGETS_MAX = 1000
"""Cells that one entry names, and one transaction erases."""


class ErasedPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was found and removed at one place of a cluster."""

    found: int
    removed: int


class Erasure(msgspec.Struct, frozen=True):
    """An erasure as a cluster has it. Without `ref_key` all versions are meant, without `column_name` all columns.

    `ordered_at`: by the home's clock, and not before its last cell, so later cells have a later created_at (I4).
    `here_at`: the same by the clock of the master that has this row, for what it buffers. `until`: at home, cells up to
    this added_id are meant, None while nothing was erased. `entry`: at home, the added_id of its last entry. `done_at`:
    when the cluster was searched to its end. Times in microseconds since the epoch.
    """

    erasure: int
    datastore: str
    shard: int
    row_key: RowKey
    column_name: ColumnName | None
    ref_key: RefKey | None
    reason: str
    who: str
    ordered_at: int
    here_at: int = 0
    until: int | None = None
    entry: int | None = None
    places: Mapping[str, ErasedPlace] = {}
    done_at: int | None = None

    @property
    def id(self) -> str:
        return erasure_id(self.erasure)

    @property
    def age(self) -> tuple[int, int]:
        """When it was ordered, and its number: no two have the same."""
        return self.ordered_at, self.erasure

    @property
    def condition(self) -> Script:
        """Returns a condition on tables whose columns are called as those of a cell, beside the datastore."""
        named = {"column_name": self.column_name and self.column_name.encode(), "ref_key": self.ref_key}
        return matching(row_key=self.row_key, **{name: value for name, value in named.items() if value is not None})

    def means(self, key: CellKey, at: int) -> bool:
        """Whether a cell that this row's master has had since a time, in microseconds, is meant."""
        return (
            at <= self.here_at
            and key.row_key == self.row_key
            and self.column_name in (None, key.column_name)
            and self.ref_key in (None, key.ref_key)
        )


_ROWS = Table(_TABLE, Erasure)


def order(erasure: Erasure) -> Operation[None]:
    """Writes an erasure that this master may have already: then nothing changes. What others did isn't written."""
    yield _ROWS.insert([_new(erasure)], "INSERT IGNORE", here_at=NOW)


def _new(erasure: Erasure) -> Erasure:
    """Returns the row of a master that has done nothing yet, and learns late what was ordered."""
    return msgspec.structs.replace(erasure, here_at=erasure.ordered_at, until=None, entry=None, places={}, done_at=None)


def of(datastore: str, erasure: int) -> Operation[Erasure | None]:
    rows = yield from _ROWS.rows(where(datastore=datastore, erasure=erasure))
    return rows[0] if rows else None


def of_row(datastore: str, row_key: RowKey) -> Operation[list[Erasure]]:
    return (yield from _ROWS.rows(where(datastore=datastore, row_key=row_key)))


def keys_at_home(datastore: Datastore, erasure: Erasure) -> Operation[tuple[int, list[CellKey]]]:
    """Returns the time of this home, in microseconds and not before the shard's last cell, and which cells with a body
    an erasure means that is ordered then.
    """
    moment = MICROSECONDS.format("GREATEST(UTC_TIMESTAMP(6), last_created_at)")
    of_shard = where(datastore=datastore.name, shard=erasure.shard)
    ((now,),) = yield from query(f"SELECT {moment} FROM schemaless.shard_head {of_shard}")
    table = sql("%s.entity", Name(datastore.database(erasure.shard)))
    rows = yield from query(
        f"SELECT row_key, column_name, ref_key FROM {table} WHERE {erasure.condition} AND erased IS NULL"
        + sql(" AND column_name <> %s", ERASE_COLUMN.encode())
    )
    return int(now), [CellKey(*row) for row in rows]


def keys_in_buffer(erasure: Erasure) -> Operation[list[CellKey]]:
    """Returns the cells that an erasure means, of those that this server buffers."""
    which = f"{where(datastore=erasure.datastore)} AND {erasure.condition}"
    rows = yield from query(f"SELECT row_key, column_name, ref_key FROM schemaless.buffer {which}")
    return [CellKey(*row) for row in rows]


class ErasureSum(msgspec.Struct, frozen=True):
    """Which erasures a master has. Two masters that have the same ones have the same sum."""

    count: int
    mixed: int


def due(after: tuple[int, int], limit: int) -> Operation[tuple[ErasureSum, list[Erasure]]]:
    """Returns which erasures this master has, and the oldest of those that its cluster wasn't searched for: by
    `Erasure.age` above `after`, ascending.
    """
    ordered_at, erasure = after
    above = f"(ordered_at, erasure) > ({literal(Time(ordered_at))}, {erasure})"
    summed, rows = yield (
        f"SELECT COUNT(*), CAST(COALESCE(BIT_XOR(erasure), 0) AS UNSIGNED) FROM {_TABLE};"
        f"SELECT {_ROWS.select} FROM {_TABLE} WHERE done_at IS NULL AND {above}"
        f" ORDER BY ordered_at, erasure LIMIT {limit}"
    )
    count, mixed = summed.rows[0]
    return ErasureSum(int(count), int(mixed)), [_ROWS.decode(row) for row in rows.rows]


def numbers() -> Operation[set[int]]:
    """Returns all erasures that this master has."""
    return {int(number) for (number,) in (yield from query(f"SELECT erasure FROM {_TABLE}"))}


def of_numbers(erasures: Collection[int]) -> Operation[list[Erasure]]:
    """Returns erasures, at least one, without those that this master doesn't have."""
    return (yield from _ROWS.rows(where(erasure=erasures)))


def learn(erasure: Erasure) -> Operation[None]:
    """Writes an erasure with what is known of its home, where this master lacks either. What else it has stays."""
    yield _ROWS.insert([_new(erasure)], "INSERT IGNORE")
    known = sql(
        "until = COALESCE(until, %s), entry = COALESCE(GREATEST(entry, %s), entry, %s)",
        erasure.until,
        *[erasure.entry] * 2,
    )
    yield f"UPDATE {_TABLE} SET {known} {where(erasure=erasure.erasure)}"


def settle_home(erasure: Erasure) -> Operation[None]:
    """Records at home that nothing is left, also where nothing was found: what is put from now on isn't meant."""
    head = f"SELECT head FROM schemaless.shard_head {where(datastore=erasure.datastore, shard=erasure.shard)}"
    yield f"UPDATE {_TABLE} SET until = COALESCE(until, ({head})) {where(erasure=erasure.erasure)}"


def finish(erasure: Erasure) -> Operation[None]:
    """Records that this cluster was searched to its end."""
    yield f"UPDATE {_TABLE} SET done_at = UTC_TIMESTAMP(6) {where(erasure=erasure.erasure)} AND done_at IS NULL"


def reopen(erasures: Collection[int]) -> Operation[None]:
    """Has this cluster searched again for erasures, at least one."""
    yield f"UPDATE {_TABLE} SET done_at = NULL {where(erasure=list(erasures))}"


def covering(datastore: str, keys: Sequence[tuple[CellKey, int]]) -> Operation[list[Erasure | None]]:
    """Returns the erasure that means each cell, of which there is at least one, in order. With each is the time in
    microseconds since when it has been there: what came after the order isn't meant.
    """
    row_keys = sorted({key.row_key for key, _ in keys})
    found = yield from _ROWS.rows(where(datastore=datastore, row_key=row_keys))
    return [next((erasure for erasure in found if erasure.means(key, at)), None) for key, at in keys]


def erase_page(
    datastore: Datastore, erasure: Erasure, buffered: Mapping[CellKey, str | None] = {}, latest: int | None = None
) -> Operation[int]:
    """Empties the bodies of up to TARGETS_MAX cells at home, and returns how many: 0 when none is left.

    `buffered`: cells that a buffer or a tail holds, fewer than TARGETS_MAX, with the Idempotency-Keys of their POSTs.
    They are meant wherever they are. Those that aren't home get their place without a body, and their
    Idempotency-Keys, so nothing brings them home later. `erasure` is as the home has it.
    `latest` and what it raises: append.insert.
    """
    for _ in range(_LOOKS_MAX):
        targets, missing = yield from _targets(datastore, erasure, list(buffered))
        if not targets:
            return 0
        posted = {key: buffered[key] for key in missing}
        try:
            yield from append.insert(datastore, *_entry(datastore, erasure, targets, posted), latest)
        except DuplicateKey:  # a buffered cell came home meanwhile
            continue
        return len(targets)
    raise Busy("buffered cells of this erasure came home again and again")


def _targets(
    datastore: Datastore, erasure: Erasure, buffered: Sequence[CellKey]
) -> Operation[tuple[list[CellKey], list[CellKey]]]:
    """Returns the next cells to erase, by column and ref_key, and which of them aren't home yet."""
    table = sql("%s.entity", Name(datastore.database(erasure.shard)))
    until = ADDED_ID_MAX if erasure.until is None else erasure.until
    scripts = [
        f"SELECT column_name, ref_key FROM {table} WHERE {erasure.condition} AND erased IS NULL"
        + sql(" AND column_name <> %s AND added_id <= %s", ERASE_COLUMN.encode(), until)
        + sql(" AND created_at <= %s", Time(erasure.ordered_at))
        + f" ORDER BY column_name, ref_key LIMIT {TARGETS_MAX - len(buffered)}",
        *(
            f"SELECT erased IS NULL FROM {table} "
            + where(row_key=key.row_key, column_name=key.column_name.encode(), ref_key=key.ref_key)
            for key in buffered
        ),
    ]
    here, *found = yield ";".join(scripts)
    missing = [key for key, result in zip(buffered, found, strict=True) if not result.rows]
    came = [key for key, result in zip(buffered, found, strict=True) if result.rows and result.rows[0][0]]
    page = dict.fromkeys([*(CellKey(erasure.row_key, *row) for row in here.rows), *came, *missing])
    return list(page), missing


def _entry(
    datastore: Datastore, erasure: Erasure, targets: Sequence[CellKey], missing: Mapping[CellKey, str | None]
) -> tuple[list[NewRow], TransactionSteps]:
    """Returns what `append.insert` takes: the places of the missing cells, and the entry behind them. With each missing
    cell is the Idempotency-Key of its POST.
    """
    shard, table = erasure.shard, sql("%s.entity", Name(datastore.database(erasure.shard)))
    by_column: dict[ColumnName, list[RefKey]] = {}
    for key in targets:
        by_column.setdefault(key.column_name, []).append(key.ref_key)
    body = encode_body({"erasure": erasure.id, "cells": by_column})
    rows = [append.values(key.row_key, key.column_name, str(key.ref_key), b"", None) for key in missing]
    rows.append(append.values(erasure.row_key, ColumnName(ERASE_COLUMN), "@e", body, None))
    number = f"SET @e=(SELECT COALESCE(MAX(ref_key),0)+1 FROM {table} " + where(
        row_key=erasure.row_key, column_name=ERASE_COLUMN.encode()
    )
    which = f"{where(row_key=erasure.row_key)} AND {these(by_column)} AND erased IS NULL"
    emptied = f"UPDATE {table} SET body = '', erased = {erasure.erasure}, erased_at = UTC_TIMESTAMP(6) {which}"
    noted = f"UPDATE {_TABLE} SET until = COALESCE(until, @h0), entry = @h0 + {len(rows)}"
    steps = TransactionSteps(
        locked=[(shard, f"{number})")],
        last=[
            emptied,
            f"{noted} {where(erasure=erasure.erasure)}",
            *append.answers_of(datastore.name, missing.items()),
        ],
    )
    return [NewRow(shard, values) for values in rows], steps


def these(cells: Mapping[ColumnName, Sequence[RefKey]]) -> Script:
    """Returns a condition on tables whose columns are called as those of a cell, beside the row."""
    named = [matching(column_name=column.encode(), ref_key=ref_keys) for column, ref_keys in cells.items()]
    return f"({' OR '.join(named)})"


# Where a cluster may have bodies beside the log of a shard's home: buffer, tails, conflicts, copies of moved shards.
# Each removal counts in the cluster's row of the erasure, in one transaction.

HELD_MAX = 500
"""Rows of one table that are looked at together."""


class PlaceName(StrEnum):
    """A table of a cluster with bodies, or errors that may tell of them. `COPY`: of a shard that lives elsewhere."""

    BUFFER = "buffer"
    DIVERGED = "diverged"
    CONFLICT = "conflict"
    COPY = "copy"
    PARKED = "parked"
    PARKED_HISTORY = "parked_history"


class _Beside(msgspec.Struct, frozen=True):
    """How a table beside the logs is read, and what becomes of its rows."""

    number: str
    at: str
    digest: Script
    removed: Script
    condition: Script = "TRUE"
    idempotency_key: Script = "CONVERT(idempotency_key USING utf8mb4)"


_DIVERGED_EMPTIED = f"UPDATE schemaless.diverged SET {EMPTIED}, {ERASED_OUTCOME}"
_BESIDE = {
    PlaceName.BUFFER: _Beside("buffer_id", "buffered_at", "digest", "DELETE FROM schemaless.buffer"),
    PlaceName.DIVERGED: _Beside("number", "kept_at", "digest", _DIVERGED_EMPTIED, "body <> ''"),
    PlaceName.CONFLICT: _Beside(
        "conflict_id", "detected_at", "''", "DELETE FROM schemaless.conflict", idempotency_key="NULL"
    ),
}


class HeldBody(msgspec.Struct, frozen=True):
    """A row with a body of a cell that an erasure may mean. `is_early`: it was there before the order came.
    `idempotency_key`: of the POST that wrote the cell.
    """

    place: PlaceName
    number: int
    key: CellKey
    digest: bytes
    is_early: bool
    idempotency_key: str | None


def held(erasure: Erasure, place: PlaceName, after: int) -> Operation[list[HeldBody]]:
    """Returns rows of a table, by a number above `after`, at most HELD_MAX, of cells that an erasure may mean."""
    table = _BESIDE[place]
    rows = yield from query(
        f"SELECT {table.number}, column_name, ref_key, {table.digest}, {_early(erasure, table.at)},"
        f" {table.idempotency_key} FROM schemaless.{place} {where(datastore=erasure.datastore)}"
        f" AND {erasure.condition} AND {table.condition}"
        f" AND {table.number} > {after} ORDER BY {table.number} LIMIT {HELD_MAX}"
    )
    return [
        HeldBody(place, number, CellKey(erasure.row_key, column_name, ref_key), digest, bool(is_early), posted)
        for number, column_name, ref_key, digest, is_early, posted in rows
    ]


def remove(erasure: Erasure, rows: Sequence[HeldBody]) -> Operation[None]:
    """Removes the bodies of rows of one table, at least one."""
    place = rows[0].place
    table = _BESIDE[place]
    # A server that is promoted gives numbers again, so they alone name no row.
    named = " OR ".join(
        matching(**{table.number: row.number}, column_name=row.key.column_name.encode(), ref_key=row.key.ref_key)
        for row in rows
    )
    which = f"{where(datastore=erasure.datastore, row_key=erasure.row_key)} AND ({named})"
    yield "BEGIN"
    yield from _counted(erasure, place, f"{table.removed} {which}")


def _counted(erasure: Erasure, place: PlaceName, statement: Script, *others: Script) -> Operation[None]:
    """Ends a transaction with a statement that removes bodies, others, and the count of what the first one changed."""
    of_it = where(erasure=erasure.erasure)
    (places,) = yield f"SELECT places FROM schemaless.erasure {of_it} FOR UPDATE"
    counted = msgspec.json.decode(places.rows[0][0], type=shape(dict[str, ErasedPlace])) if places.rows else {}
    removed, *_ = yield ";".join([statement, *others])
    before = counted.get(place, ErasedPlace(0, 0))
    counted[place] = ErasedPlace(before.found + removed.affected, before.removed + removed.affected)
    yield f"UPDATE schemaless.erasure SET places = {literal(msgspec.json.encode(counted).decode())} {of_it};COMMIT"


# The log of the erased row's shard, at home and in copies.


class LoggedState(msgspec.Struct, frozen=True):
    """What a log has under a key: the digest of its body, and whether an erasure emptied it."""

    digest: bytes
    is_erased: bool


def states(datastore: Datastore, shard: int, keys: Sequence[CellKey]) -> Operation[list[LoggedState | None]]:
    """Returns what this server's log of a shard has under keys, at least one, in order."""
    table = sql("%s.entity", Name(datastore.database(shard)))
    results = yield ";".join(
        f"SELECT UNHEX(SHA2(body, 256)), erased IS NOT NULL FROM {table} "
        + where(row_key=key.row_key, column_name=key.column_name.encode(), ref_key=key.ref_key)
        for key in keys
    )
    return [LoggedState(result.rows[0][0], bool(result.rows[0][1])) if result.rows else None for result in results]


class Stub(msgspec.Struct, frozen=True):
    """A cell whose body is erased. `created_at` is in microseconds."""

    column_name: ColumnName
    ref_key: RefKey
    added_id: int
    created_at: int


def stubs(datastore: Datastore, erasure: Erasure, after: int, limit: int) -> Operation[list[Stub]]:
    """Returns what an erasure emptied in this server's log of the shard, by an added_id above `after`, ascending."""
    rows = yield from query(
        sql(
            f"SELECT column_name, ref_key, added_id, {MICROSECONDS.format('created_at')} FROM %s.entity"
            " WHERE row_key = %s AND erased = %s AND added_id > %s ORDER BY added_id LIMIT %s",
            Name(datastore.database(erasure.shard)),
            erasure.row_key,
            erasure.erasure,
            after,
            limit,
        )
    )
    return [Stub(*row) for row in rows]


def erase_copy(datastore: Datastore, erasure: Erasure, emptied: Sequence[Stub]) -> Operation[None]:
    """Empties cells that the home has emptied, at least one, in the log of a shard that doesn't live on this server's
    cluster. The digest of a move stays that of the cells that are here.
    """
    database, of_move = datastore.database(erasure.shard), where(datastore=datastore.name, shard=erasure.shard)
    if not (yield from _has_log(database)):
        return
    if (yield from query(f"SELECT 1 FROM schemaless.shard_head {of_move} AND moved_to IS NULL")):
        return  # it came here meanwhile: at home an entry comes first
    table = sql("%s.entity", Name(database))
    named = matching(row_key=erasure.row_key, added_id=[stub.added_id for stub in emptied])
    yield f"BEGIN;SELECT digest FROM {MOVES.name} {of_move} FOR UPDATE"
    found = yield from query(f"SELECT added_id FROM {table} WHERE {named} AND erased IS NULL")
    if not found:
        yield "COMMIT"
        return
    these = matching(added_id=[int(added_id) for (added_id,) in found])
    compared = shard_copy.digest_of(datastore, erasure.shard, these)
    change = shard_copy.joined("@before", f"({compared})")
    yield f"SET @before = ({compared})"
    yield from _counted(
        erasure,
        PlaceName.COPY,
        f"UPDATE {table} SET body = '', erased = {erasure.erasure}, erased_at = UTC_TIMESTAMP(6) WHERE {these}",
        f"UPDATE {MOVES.name} SET digest = {shard_copy.joined('digest', change)} {of_move}",
    )


def _has_log(database: str) -> Operation[bool]:
    rows = yield from query(
        "SELECT 1 FROM information_schema.tables " + where(table_schema=database, table_name="entity")
    )
    return bool(rows)


def _covered(erasure: Erasure) -> Script:
    until = ADDED_ID_MAX if erasure.until is None else erasure.until
    return f"{erasure.condition} AND added_id <= {until}" + sql(
        " AND created_at <= %s AND column_name <> %s", Time(erasure.ordered_at), ERASE_COLUMN.encode()
    )


def _early(erasure: Erasure, at: str) -> Script:
    """Returns a condition: a row was written before the order came, by the clock of this master."""
    here = f"SELECT here_at FROM {_TABLE} {where(erasure=erasure.erasure)}"
    return f"{at} <= COALESCE(({here}), {literal(Time(erasure.ordered_at))})"


class Searched(msgspec.Struct, frozen=True):
    """What a server has of an erasure. `stubs`: emptied cells of its log. `left`: bodies that it means, by place.

    `log_left` is None where the server has no log of the shard.
    """

    stubs: int
    log_left: int | None
    left: Mapping[PlaceName, int]

    @property
    def bodies_left(self) -> int:
        """How many of the bodies are left that a search of the cluster removes."""
        return (self.log_left or 0) + sum(count for place, count in self.left.items() if place in _BESIDE)


_ERRORS = (PlaceName.PARKED, PlaceName.PARKED_HISTORY)


def search(datastore: Datastore, erasure: Erasure, keys: Sequence[tuple[str, int]] = ()) -> Operation[Searched]:
    """Looks for bodies that an erasure means, and for errors that may tell of them. `keys`: (column, ref_key) of cells
    that are known to be erased.
    """
    database = datastore.database(erasure.shard)
    emptied, log_left = 0, None
    if (yield from _has_log(database)):
        table = sql("%s.entity", Name(database))
        found, bodies = yield (
            f"SELECT COUNT(*) FROM {table} {where(row_key=erasure.row_key, erased=erasure.erasure)};"
            f"SELECT COUNT(*) FROM {table} WHERE {_covered(erasure)} AND erased IS NULL"
        )
        emptied, log_left = int(found.rows[0][0]), int(bodies.rows[0][0])
    named = [f"({literal(column.encode())},{ref_key})" for column, ref_key in keys]
    among = f"(column_name, ref_key) IN ({commas(named)})" if named else "FALSE"
    of_row = f"{where(datastore=erasure.datastore)} AND {erasure.condition}"
    conditions = {
        place: f"{table.condition} AND ({_early(erasure, table.at)} OR {among})" for place, table in _BESIDE.items()
    } | {place: f"error <> '' AND {among}" for place in _ERRORS}
    results = yield ";".join(
        f"SELECT COUNT(*) FROM schemaless.{place} {of_row} AND {condition}" for place, condition in conditions.items()
    )
    left = {place: int(result.rows[0][0]) for place, result in zip(conditions, results, strict=True)}
    return Searched(emptied, log_left, left)


class ServerLook(msgspec.Struct, frozen=True):
    """What a report needs of one server: its row, its bodies, and what else it has.

    `expiry_s`: of its binary logs, None without any, 0: they stay. `passed`: by consumer of the shard whether its
    checkpoint here is past the entry.
    """

    row: Erasure | None
    searched: Searched
    expiry_s: int | None
    idempotency_keys: int
    passed: Mapping[str, bool]


def look(datastore: Datastore, erasure: Erasure, keys: Sequence[tuple[str, int]]) -> Operation[ServerLook]:
    """Looks for what a report of an erasure says of this server. `erasure` and `keys` are the home's."""
    searched = yield from search(datastore, erasure, keys)
    row = yield from of(datastore.name, erasure.erasure)
    variables, answers, consumers = yield (
        "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('log_bin', 'binlog_expire_logs_seconds', 'expire_logs_days');"
        f"SELECT COUNT(*) FROM schemaless.idempotency {where(datastore=datastore.name)} AND {erasure.condition};"
        f"SELECT consumer, added_id >= {erasure.entry or 0} FROM schemaless.checkpoint"
        f" {where(datastore=datastore.name, shard=erasure.shard)} AND state <> 'moved'"
    )
    values = {str(name): str(value) for name, value in variables.rows}
    days_s = float(values.get("expire_logs_days", "0")) * 86_400  # older servers have days only
    expiry_s = int(values.get("binlog_expire_logs_seconds", "0")) or int(days_s)
    passed = {consumer: bool(past) for consumer, past in consumers.rows}
    return ServerLook(row, searched, expiry_s if values["log_bin"] == "ON" else None, int(answers.rows[0][0]), passed)
