"""index_{name}, and index_{name}$n for a later version: the entries of one index in one shard. Owns its columns and the
guard of I11: a row is only ever overwritten by a greater version (generation and added_id of the source event), so late
writers change nothing.

An entry that left the shard stays as a tombstone (live = 0), which holds the version that a late writer must beat. It
goes when no writer can come any more with a lower one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from schemaless.cell import RowKey
from schemaless.index.comparison import LAST_ROW, EntryPlace, row_before
from schemaless.index.definition import Field, IndexDefinition
from schemaless.index.entry import IndexEntry
from schemaless.index.transition import IndexWrite
from schemaless.index.values import DATETIME_MIN_US, DECIMAL_DIGITS, DECIMAL_PLACES, FieldType, Value
from schemaless.location import GenerationStart, Location
from schemaless.runtime.batching import chunks
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.operation import Operation, Row, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Name, Script, commas, literal, literals, sql, time_literal, where
from schemaless.topology import Datastore

_TYPES: Mapping[FieldType, str] = {
    FieldType.UUID: "BINARY(16)",
    FieldType.STRING: "VARBINARY({bytes})",  # UTF-8: compared by code point, without padding
    FieldType.INT: "BIGINT",
    FieldType.FLOAT: "DOUBLE",
    FieldType.DECIMAL: f"DECIMAL({DECIMAL_DIGITS},{DECIMAL_PLACES})",
    FieldType.BOOL: "TINYINT",
    FieldType.DATETIME: "DATETIME(6)",
    FieldType.BYTES: "VARBINARY({bytes})",
}
_NEWER = (
    "(VALUES(source_generation) > source_generation OR"
    " (VALUES(source_generation) = source_generation AND VALUES(source_added_id) > source_added_id))"
)


EXAMINED_ROWS_MAX = 4096
"""How many rows of one index shard a page of `superseded` looks at: some milliseconds of the server."""

_WRITE_BYTES = 90  # row key, element, version, live and punctuation
_STATEMENT_BYTES = 1024
_COLUMN_BYTES = len(_NEWER) + 40
_NUMBER_BYTES = 48  # the longest number, time, uuid or decimal, and the quotes of what is longer


EntryKey = tuple[RowKey, int]
"""Row key and element."""

BEFORE_ALL: EntryKey = (RowKey(b""), 0)


class VersionPage(msgspec.Struct, frozen=True):
    """Entries and versions. `last` is the last one that was examined, or None: the table has no more."""

    rows: Sequence[tuple[EntryKey, Location]]
    last: EntryKey | None


class FoundEntry(msgspec.Struct, frozen=True, gc=False):
    row_key: RowKey
    entry: IndexEntry
    element: int = 0


def create(datastore: Datastore, shard: int, definition: IndexDefinition) -> Operation[None]:
    """Makes the table, on the master of the shard's home. Idempotent."""
    columns = [
        f"{quoted(field)} {_TYPES[field.type].format(bytes=field.bytes_max)} NULL" for field in definition.fields
    ]
    key = commas([quoted(field) for field in definition.keyed])
    yield (
        f"CREATE TABLE IF NOT EXISTS {table(datastore, shard, definition)} ("
        "row_key BINARY(16) NOT NULL, element SMALLINT UNSIGNED NOT NULL, source_generation INT UNSIGNED NOT NULL,"
        f" source_added_id BIGINT UNSIGNED NOT NULL, live TINYINT NOT NULL, {commas(columns)},"
        f" PRIMARY KEY (row_key, element), KEY entries ({key}, row_key, element)) ENGINE=InnoDB"
    )


def places(datastore: Datastore) -> Operation[list[tuple[int, str]]]:
    """Returns the shard and the name of each index table that this server has of a datastore."""
    shards = {datastore.database(shard): shard for shard in range(datastore.shards)}
    prefix = f"{datastore.name}_"
    rows = yield from query(
        "SELECT table_schema, table_name FROM information_schema.tables WHERE LEFT(table_name, 6) = 'index_'"
        + sql(" AND LEFT(table_schema, %s) = %s", len(prefix), prefix)
    )
    return sorted((shards[schema], name) for schema, name in rows if schema in shards)


def entries_about(datastore: Datastore, names: Sequence[str]) -> Operation[int]:
    """Returns about how many rows the tables of these names have on this server, at least one, as InnoDB estimates."""
    databases, prefix = set(map(datastore.database, range(datastore.shards))), f"{datastore.name}_"
    rows = yield from query(
        "SELECT table_schema, table_rows FROM information_schema.tables"
        f" {where(table_name=list(names))}" + sql(" AND LEFT(table_schema, %s) = %s", len(prefix), prefix)
    )
    return sum(int(count or 0) for database, count in rows if database in databases)


def drop(datastore: Datastore, shards: Sequence[int], name: str) -> Operation[None]:
    """Drops the tables of a version in these shards, at least one, which all live on one cluster. Idempotent."""
    tables = [f"{literal(Name(datastore.database(shard)))}.{literal(Name(name))}" for shard in shards]
    yield f"DROP TABLE IF EXISTS {commas(tables)}"


def upserts(datastore: Datastore, definition: IndexDefinition, writes: Sequence[IndexWrite]) -> Script:
    """Returns statements that write to the tables of shards which all live on one cluster. The guard decides."""
    by_shard: dict[int, list[IndexWrite]] = {}
    for write in writes:
        by_shard.setdefault(write.shard, []).append(write)
    names = [quoted(field) for field in definition.fields]
    # MySQL assigns from left to right: the guard reads the version columns, so they are assigned last.
    guarded = [f"{name} = IF({_NEWER}, VALUES({name}), {name})" for name in ["live", *names, "source_added_id"]]
    update = commas([*guarded, "source_generation = GREATEST(source_generation, VALUES(source_generation))"])
    return ";".join(_insertion(datastore, shard, definition, here, update) for shard, here in by_shard.items())


def overwrites(datastore: Datastore, definition: IndexDefinition, writes: Sequence[IndexWrite]) -> Script:
    """Returns statements that write to tables of one cluster whatever version is there, at least one write.

    They must run while the checkpoint of the rows' shard can't move (`checkpoint_table.write_at`).
    """
    by_shard: dict[int, list[IndexWrite]] = {}
    for write in writes:
        by_shard.setdefault(write.shard, []).append(write)
    names = ["live", *map(quoted, definition.fields), "source_added_id", "source_generation"]
    update = commas([f"{name} = VALUES({name})" for name in names])
    return ";".join(_insertion(datastore, shard, definition, here, update) for shard, here in by_shard.items())


def _insertion(
    datastore: Datastore, shard: int, definition: IndexDefinition, writes: Sequence[IndexWrite], update: Script
) -> Script:
    names = [quoted(field) for field in definition.fields]
    columns = commas(["row_key", "element", "source_generation", "source_added_id", "live", *names])
    literals = [_LITERALS[field.type] for field in definition.fields]
    rows = commas([_row(literals, write) for write in writes])
    return (
        f"INSERT INTO {table(datastore, shard, definition)} ({columns}) VALUES {rows} ON DUPLICATE KEY UPDATE {update}"
    )


def sql_bytes_max(definition: IndexDefinition, write: IndexWrite, is_first: bool) -> int:
    """Returns at least as many bytes as a write adds to what `upserts` returns. `is_first`: of its shard."""
    size = _WRITE_BYTES + _NUMBER_BYTES * len(definition.fields)
    if is_first:
        size += _STATEMENT_BYTES + sum(_COLUMN_BYTES + 5 * len(field.name) for field in definition.fields)
    if write.entry is not None:
        for value in write.entry.values:
            if isinstance(value, str):
                size += 8 * len(value)  # hexadecimal digits of UTF-8, at most four bytes a code point
            elif isinstance(value, bytes):
                size += 2 * len(value)
    return size


def superseded(
    datastore: Datastore,
    definition: IndexDefinition,
    after: Mapping[int, EntryKey],
    starts: Sequence[GenerationStart],
    examined_max: int,
) -> Operation[dict[int, VersionPage]]:
    """Returns a page of each index shard's rows that have a version which one of the generations supersedes (I13).

    The versions' shard isn't known here: the caller looks only at row keys of the shard that has these generations.
    `after`, by index shard, is where the page begins. Each page examines at most `examined_max` rows.
    """
    versions = [
        f"(source_generation < {start.generation} AND source_added_id >= {start.starts_at})" for start in starts
    ]
    old = f"({' OR '.join(versions)})"
    results = yield ";".join(
        _examined(datastore, shard, definition, begin, old, examined_max) for shard, begin in after.items()
    )
    return {shard: _version_page(result.rows, examined_max) for shard, result in zip(after, results, strict=True)}


def _examined(
    datastore: Datastore, shard: int, definition: IndexDefinition, after: EntryKey, wanted: Script, examined_max: int
) -> Script:
    """Returns a SELECT of the versions that are wanted among the next rows behind `after`, and of the last of these.

    It is one statement, because rows come and go: the end must be that of the page which was looked at.
    """
    row_key, element = after
    page = (
        f"SELECT row_key, element, source_generation, source_added_id, live FROM {table(datastore, shard, definition)}"
        + sql(" WHERE row_key >= %s AND (row_key > %s OR element > %s)", row_key, row_key, element)
        + f" ORDER BY row_key, element LIMIT {examined_max}"
    )
    return (
        f"SELECT row_key, element, source_generation, source_added_id, {wanted}, place FROM"
        f" (SELECT page.*, ROW_NUMBER() OVER (ORDER BY row_key, element) AS place FROM ({page}) AS page) AS placed"
        f" WHERE {wanted} OR place = {examined_max} ORDER BY place"
    )


def _version_page(rows: Sequence[Row], examined_max: int) -> VersionPage:
    found = [((row[0], row[1]), Location(row[2], row[3])) for row in rows if row[4]]
    return VersionPage(found, next(((row[0], row[1]) for row in rows if row[5] == examined_max), None))


def write(script: Script) -> Operation[None]:
    """Runs what `upserts` returned."""
    yield script


def sound(definition: IndexDefinition, rows: Sequence[Row]) -> list[FoundEntry]:
    """Returns entries to answer queries with. Raises ValueError if one has a value that no cell can make."""
    end = 2 + len(definition.fields)
    reads = [(n, read) for n, field in enumerate(definition.fields) if (read := _reader(field)) is not None]
    entries = []
    for row in rows:
        values = list(row[2:end])
        for n, read in reads:
            if values[n] is not None:
                values[n] = read(values[n])
        entries.append(FoundEntry(row[0], IndexEntry(tuple(values)), row[1]))
    return entries


def found(definition: IndexDefinition, rows: Sequence[Row]) -> list[FoundEntry]:
    """Returns entries to compare with cells. A value that no cell can make equals no value of an entry."""
    return [FoundEntry(row[0], stored_entry(definition, row[2:]), row[1]) for row in rows]


def stored_entry(definition: IndexDefinition, values: Sequence[object]) -> IndexEntry:
    return IndexEntry(tuple(map(_stored_value, definition.fields, values)))


def live_entries(
    datastore: Datastore,
    shard: int,
    definition: IndexDefinition,
    after: EntryKey,
    limit: int,
    last: RowKey = LAST_ROW,
) -> Operation[list[FoundEntry]]:
    """Returns a page of one shard's entries behind `after`, by row key and element, up to the row `last`.

    To compare an index with its cells.
    """
    row_key, element = after
    between = sql("row_key >= %s AND row_key <= %s AND (row_key > %s OR element > %s)", row_key, last, row_key, element)
    rows = yield from query(
        f"SELECT {_columns(definition)} FROM {table(datastore, shard, definition)} WHERE live = 1 AND {between}"
        f" ORDER BY row_key, element LIMIT {limit}"
    )
    return found(definition, rows)


def entries_of(
    datastore: Datastore, definition: IndexDefinition, rows: Mapping[int, Sequence[RowKey]]
) -> Operation[dict[int, list[FoundEntry]]]:
    """Returns the entries of rows, by shard of the index. It takes at least one shard, and one row key of each."""
    results = yield ";".join(
        f"SELECT {_columns(definition)} FROM {table(datastore, shard, definition)} WHERE live = 1"
        f" AND row_key IN ({commas([literal(row_key) for row_key in row_keys])})"
        for shard, row_keys in rows.items()
    )
    return {shard: found(definition, result.rows) for shard, result in zip(rows, results, strict=True)}


def count_live(datastore: Datastore, shard: int, definition: IndexDefinition) -> Operation[int]:
    (result,) = yield f"SELECT COUNT(*) FROM {table(datastore, shard, definition)} WHERE live = 1"
    return int(result.rows[0][0])


def _row(literals: Sequence[Callable[[Any], str]], write: IndexWrite) -> str:
    version = f"{write.version.generation},{write.version.added_id}"
    if write.entry is None:
        return f"(x'{write.row_key.hex()}',{write.element},{version},0{',NULL' * len(literals)})"
    values = commas(
        [
            "NULL" if value is None else as_literal(value)
            for as_literal, value in zip(literals, write.entry.values, strict=True)
        ]
    )
    return f"(x'{write.row_key.hex()}',{write.element},{version},1,{values})"


def _bytes_literal(value: bytes) -> str:
    return f"x'{value.hex()}'"


_LITERALS: Mapping[FieldType, Callable[[Any], str]] = {
    FieldType.UUID: _bytes_literal,
    FieldType.STRING: lambda value: _bytes_literal(value.encode()),
    FieldType.INT: str,
    FieldType.FLOAT: repr,
    FieldType.DECIMAL: lambda value: format(value, "f"),
    FieldType.BOOL: lambda value: "1" if value else "0",
    FieldType.DATETIME: time_literal,
    FieldType.BYTES: _bytes_literal,
}


def field_literal(field: Field, value: Value | None) -> str:
    return "NULL" if value is None else _LITERALS[field.type](value)


def read_value(field: Field, value: Any) -> Value | None:
    """Returns a value as an entry has it. Raises ValueError for one that no cell can make."""
    read = _reader(field)
    return value if value is None or read is None else read(value)


def _reader(field: Field) -> Callable[[Any], Value | None] | None:
    """Returns what makes a field's value of what a driver returns, None where that is the value."""
    if field.type is FieldType.DECIMAL:
        return lambda value: field.convert(format(value, "f"))
    return _READERS.get(field.type)


def _bool(value: int) -> bool:
    if value not in (0, 1):
        raise ValueError(f"{value} is no bool")
    return bool(value)


def _moment(microseconds: int) -> int:
    if microseconds < DATETIME_MIN_US:
        raise ValueError("the time is before the first that a field has")
    return microseconds


_READERS: Mapping[FieldType, Callable[[Any], Value]] = {
    FieldType.STRING: bytes.decode,
    FieldType.BOOL: _bool,
    FieldType.DATETIME: _moment,
}


def _stored_value(field: Field, value: object) -> Value | None:
    """Returns a value as `read_value` does, and text for one that no cell can make."""
    try:
        return read_value(field, value)
    except ValueError:
        return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)


def shown(field: Field) -> Script:
    return MICROSECONDS.format(quoted(field)) if field.type is FieldType.DATETIME else quoted(field)


def quoted(field: Field) -> Script:
    return literal(Name(field.name))


def table(datastore: Datastore, shard: int, definition: IndexDefinition) -> Script:
    return f"{literal(Name(datastore.database(shard)))}.{literal(Name(definition.table))}"


# Tombstones that nothing needs any more, and index_forgotten: which of them are gone (I11).
#
# A tombstone refuses writers with a lower version. Every writer holds the checkpoint of its source shard on the cluster
# still, so none comes late with a version up to that checkpoint. (A cluster that is ahead of another takes all events
# between them again, in the order of the log, and ends as it was.)
#
# Only a new generation can ask for what such a tombstone told. So the transaction that deletes it notes its added_id,
# and a generation at or below makes the indexer evaluate the whole source shard again (indexer/maintainer.py).

_FORGOTTEN = "schemaless.index_forgotten"


def tombstones(
    datastore: Datastore, definition: IndexDefinition, shard: int, after: EntryKey, examined_max: int
) -> Operation[VersionPage]:
    """Returns the tombstones among the next rows of one shard, with the versions of the events that they left by."""
    rows = yield from query(_examined(datastore, shard, definition, after, "live = 0", examined_max))
    return _version_page(rows, examined_max)


def forget(
    of: IndexVersion,
    datastore: Datastore,
    definition: IndexDefinition,
    shard: int,
    tombstones: Mapping[int, Sequence[tuple[EntryKey, Location]]],
) -> Operation[int]:
    """Deletes tombstones of one index shard, by source shard, at least one. Returns how many.

    One stays that is above the checkpoint of its source shard here, or that another event has written since.
    """
    scripts = ["BEGIN"]
    for source, found in sorted(tombstones.items()):
        highest = max(version.added_id for _, version in found)
        these = " OR ".join(
            f"(row_key = {literal(row_key)} AND element = {element}"
            f" AND source_generation = {version.generation} AND source_added_id = {version.added_id})"
            for (row_key, element), version in found
        )
        scripts += [
            "SET @generation = 0, @added_id = 0",
            "SELECT generation, added_id INTO @generation, @added_id FROM schemaless.checkpoint"
            f" {where(datastore=of.datastore, consumer=definition.consumer, shard=source)} FOR UPDATE",
            f"INSERT INTO {_FORGOTTEN} VALUES {literals(*msgspec.structs.astuple(of), source, highest)}"
            " ON DUPLICATE KEY UPDATE added_id = GREATEST(added_id, VALUES(added_id))",
            f"DELETE FROM {table(datastore, shard, definition)} WHERE live = 0 AND ({these})"
            " AND (source_generation < @generation"
            " OR (source_generation = @generation AND source_added_id <= @added_id))",
        ]
    results = yield ";".join([*scripts, "COMMIT"])
    return sum(result.affected for result in results[4:-1:4])


def forgotten(of: IndexVersion, shard: int) -> Operation[int]:
    """Returns up to which added_id of a source shard tombstones may be gone here, 0: none is."""
    rows = yield from query(f"SELECT added_id FROM {_FORGOTTEN} {of.where} AND shard = {shard}")
    return rows[0][0] if rows else 0


def remembering(of: IndexVersion, shard: int, until: int) -> Script:
    """Returns a statement that notes that no tombstone behind an added_id is missed here."""
    return f"UPDATE {_FORGOTTEN} SET added_id = LEAST(added_id, {until}) {of.where} AND shard = {shard}"


def refusal(of: IndexVersion, shard: int, until: int) -> Script:
    """Returns a statement that undoes its transaction if tombstones behind an added_id are gone here.

    It inserts a NULL where none may be, as `checkpoint_table.UNDO` does.
    """
    return (
        f"INSERT INTO schemaless.format SELECT NULL FROM {_FORGOTTEN}"
        f" {of.where} AND shard = {shard} AND added_id > {until}"
    )


# Reads of index tables that compare them with the cells. What is there may be damaged.

Entries = dict[EntryPlace, IndexEntry]

SHARDS_AT_ONCE = 256
"""How many shards one statement reads."""

ENTRY_BYTES = 64
"""Row key, element and what a driver adds to them."""


def live_page(
    datastore: Datastore, definition: IndexDefinition, shard: int, after: EntryKey, last: RowKey, limit: int
) -> Operation[Entries]:
    """Returns what `live_entries` does, by place."""
    return _placed(shard, (yield from live_entries(datastore, shard, definition, after, limit, last)))


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
    met: Entries = {}
    for some in chunks(shards, count_max=SHARDS_AT_ONCE):
        results = yield ";".join(
            f"SELECT {_columns(definition)} FROM {table(datastore, shard, definition)}"
            + sql(" WHERE live = 1 AND row_key > %s AND row_key <= %s ORDER BY row_key, element", after, last)
            + f" LIMIT {limit}"
            for shard in some
        )
        for shard, result in zip(some, results, strict=True):
            if len(result.rows) == limit:
                last = min(last, row_before(result.rows[-1][0]))
            met |= _placed(shard, found(definition, result.rows))
        last = min(last, _end_within(met, bytes_max))
        met = {place: entry for place, entry in met.items() if place.row_key <= last}
    return met, last


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
    by_shard = yield from entries_of(datastore, definition, wanted)
    return {place: entry for shard, own in by_shard.items() for place, entry in _placed(shard, own).items()}


def held(
    datastore: Datastore, definition: IndexDefinition, places: Sequence[EntryPlace]
) -> Operation[frozenset[EntryPlace]]:
    """Returns those of some places of one cluster, at least one, that have a row of the table: also a tombstone."""
    by_shard: dict[int, list[EntryPlace]] = {}
    for place in places:
        by_shard.setdefault(place.shard, []).append(place)
    results = yield ";".join(
        f"SELECT row_key, element FROM {table(datastore, shard, definition)} WHERE (row_key, element) IN ("
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
    return commas(["row_key", "element", *(shown(field) for field in definition.fields)])


def _placed(shard: int, entries: Sequence[FoundEntry]) -> Entries:
    return {EntryPlace(shard, one.row_key, one.element): one.entry for one in entries}
