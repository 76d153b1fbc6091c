"""index_problem: values that don't fit the types of an index, on the home of the shard of their cells.

A row is only ever overwritten by a greater version, so late writers change nothing (I11). A row of cells in which
everything fits again stays as a row without misfits, which holds the version that a late writer must beat.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from schemaless.cell import RowKey
from schemaless.index.problems import Misfit
from schemaless.index.transition import ProblemWrite
from schemaless.location import GenerationStart, Location
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Script, commas, sql

_TABLE = "schemaless.index_problem"
_COLUMNS = "datastore, name, number, shard, row_key, generation, added_id, misfits, details"
_NEWER = "(VALUES(generation) > generation OR (VALUES(generation) = generation AND VALUES(added_id) > added_id))"
# MySQL assigns from left to right: the guard reads the version columns, so they are assigned last.
_UPDATE = commas(
    [
        *(f"{name} = IF({_NEWER}, VALUES({name}), {name})" for name in ("misfits", "details", "added_id")),
        "generation = GREATEST(generation, VALUES(generation))",
    ]
)
LISTED_MAX = 16
"""How many fields of one row are listed. Values of more fields are counted."""

_ROW_BYTES = 400  # names, versions and punctuation
_DELETED_AT_ONCE = 1000

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(tuple[Misfit, ...])


class IndexVersion(msgspec.Struct, frozen=True):
    """A version of an index of a datastore."""

    datastore: str
    name: str
    number: int


class ProblemRow(msgspec.Struct, frozen=True, gc=False):
    """A row of cells in which something doesn't fit."""

    shard: int
    row_key: RowKey
    misfits: Sequence[Misfit]


def upserts(of: IndexVersion, writes: Sequence[ProblemWrite]) -> Script:
    """Returns a statement that writes at least one row, of shards which all live on one cluster. The guard decides."""
    rows = [
        sql(
            "(%s, %s, %s, %s, %s, %s, %s, %s, %s)",
            of.datastore,
            of.name,
            of.number,
            write.shard,
            write.row_key,
            write.version.generation,
            write.version.added_id,
            sum(misfit.values for misfit in write.misfits),
            _details(write).decode(),
        )
        for write in writes
    ]
    return f"INSERT INTO {_TABLE} ({_COLUMNS}) VALUES {commas(rows)} ON DUPLICATE KEY UPDATE {_UPDATE}"


def sql_bytes_max(write: ProblemWrite) -> int:
    """Returns at least as many bytes as a write adds to what `upserts` returns."""
    return _ROW_BYTES + len(_UPDATE) + 2 * len(_details(write))


def write(script: Script) -> Operation[None]:
    """Runs what `upserts` returned."""
    yield script


def counts() -> Operation[dict[IndexVersion, int]]:
    """Returns how many values don't fit, by version of an index, in the shards whose home is this server."""
    rows = yield from query(
        f"SELECT datastore, name, number, SUM(misfits) FROM {_TABLE} GROUP BY datastore, name, number"
    )
    return {IndexVersion(datastore, name, number): int(misfits) for datastore, name, number, misfits in rows}


def counts_of(datastore: str) -> Operation[dict[IndexVersion, int]]:
    """Returns what `counts` does, of one datastore."""
    rows = yield from query(
        sql(f"SELECT name, number, SUM(misfits) FROM {_TABLE} WHERE datastore = %s GROUP BY name, number", datastore)
    )
    return {IndexVersion(datastore, name, number): int(misfits) for name, number, misfits in rows}


def page(of: IndexVersion, shard: int, row_key: RowKey, limit: int) -> Operation[list[ProblemRow]]:
    """Returns rows with misfits by shard and row key, from this row key of this shard on."""
    rows = yield from query(
        f"SELECT shard, row_key, details FROM {_TABLE} WHERE {_of(of)} AND misfits > 0"
        + sql(" AND shard >= %s AND (shard > %s OR row_key >= %s)", shard, shard, row_key)
        + f" ORDER BY shard, row_key LIMIT {limit}"
    )
    return [ProblemRow(shard, row_key, _decoder.decode(details)) for shard, row_key, details in rows]


def superseded(
    of: IndexVersion, shard: int, starts: Sequence[GenerationStart], after: RowKey, limit: int
) -> Operation[list[tuple[RowKey, Location]]]:
    """Returns rows of a shard behind a row key, with versions that one of the generations supersedes (I13)."""
    old = " OR ".join(f"(generation < {start.generation} AND added_id >= {start.starts_at})" for start in starts)
    rows = yield from query(
        f"SELECT row_key, generation, added_id FROM {_TABLE} WHERE {_of(of)}"
        + sql(" AND shard = %s AND row_key > %s", shard, after)
        + f" AND ({old}) ORDER BY row_key LIMIT {limit}"
    )
    return [(row_key, Location(generation, added_id)) for row_key, generation, added_id in rows]


def delete_some(of: IndexVersion) -> Operation[bool]:
    """Deletes rows of a version, of many only some. Returns whether there may be more."""
    (deleted,) = yield f"DELETE FROM {_TABLE} WHERE {_of(of)} ORDER BY shard, row_key LIMIT {_DELETED_AT_ONCE}"
    return deleted.affected >= _DELETED_AT_ONCE


def versions(datastore: str) -> Operation[set[tuple[str, int]]]:
    """Returns the names and numbers of the versions that have rows here."""
    return (yield from versions_in(_TABLE, datastore))


def versions_in(table: Script, datastore: str) -> Operation[set[tuple[str, int]]]:
    """Returns the names and numbers of the versions of indexes that have rows in a table of this server."""
    rows = yield from query(sql(f"SELECT DISTINCT name, number FROM {table} WHERE datastore = %s", datastore))
    return {(name, number) for name, number in rows}


def _details(write: ProblemWrite) -> bytes:
    return _encoder.encode(write.misfits[:LISTED_MAX])


def _of(of: IndexVersion) -> Script:
    return sql("datastore = %s AND name = %s AND number = %s", of.datastore, of.name, of.number)
