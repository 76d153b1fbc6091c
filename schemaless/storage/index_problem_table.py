"""index_problem: values that don't fit the types of an index, on the home of the shard of their cells.

A row is only ever overwritten by a greater version, so late writers change nothing (I11). A row of cells in which
everything fits again stays as a row without misfits, which holds the version that a late writer must beat.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from schemaless.cell import RowKey
from schemaless.index.entry import Misfit
from schemaless.index.transition import ProblemWrite
from schemaless.location import GenerationStart, Location
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Script, commas, literals, sql, where
from schemaless.storage.table import Table

_TABLE = "schemaless.index_problem"
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


class IndexVersion(msgspec.Struct, frozen=True):
    """A version of an index of a datastore."""

    datastore: str
    name: str
    number: int

    @property
    def where(self) -> Script:
        """SQL for the rows of a version, in any table that has its three columns."""
        return where(datastore=self.datastore, name=self.name, number=self.number)


VERSION = Table("", IndexVersion)
"""Its columns, in any table that has them."""


class ProblemRow(msgspec.Struct, frozen=True, gc=False):
    """A row of cells in which something doesn't fit."""

    shard: int
    row_key: RowKey
    misfits: Sequence[Misfit]


_FOUND = Table(_TABLE, ProblemRow, misfits="details")


def upserts(of: IndexVersion, writes: Sequence[ProblemWrite]) -> Script:
    """Returns a statement that writes at least one row, of shards which all live on one cluster. The guard decides."""
    rows = [
        literals(
            *msgspec.structs.astuple(of),
            write.shard,
            write.row_key,
            write.version.generation,
            write.version.added_id,
            sum(misfit.values for misfit in write.misfits),
            _details(write),
        )
        for write in writes
    ]
    return f"INSERT INTO {_TABLE} VALUES {commas(rows)} ON DUPLICATE KEY UPDATE {_UPDATE}"


def sql_bytes_max(write: ProblemWrite) -> int:
    """Returns at least as many bytes as a write adds to what `upserts` returns."""
    return _ROW_BYTES + len(_UPDATE) + 2 * len(_details(write))


def _details(write: ProblemWrite) -> str:
    return msgspec.json.encode(write.misfits[:LISTED_MAX]).decode()


def counts() -> Operation[dict[IndexVersion, int]]:
    """Returns how many values don't fit, by version of an index, in the shards whose home is this server."""
    return (yield from version_sums(_TABLE, "misfits"))


def counts_of(datastore: str) -> Operation[dict[IndexVersion, int]]:
    """Returns what `counts` does, of one datastore."""
    return (yield from version_sums(_TABLE, "misfits", where(datastore=datastore)))


def page(of: IndexVersion, shard: int, row_key: RowKey, limit: int) -> Operation[list[ProblemRow]]:
    """Returns rows with misfits by shard and row key, from this row key of this shard on."""
    behind = sql("shard >= %s AND (shard > %s OR row_key >= %s)", shard, shard, row_key)
    return (yield from _FOUND.rows(f"{of.where} AND misfits > 0 AND {behind} ORDER BY shard, row_key LIMIT {limit}"))


def superseded(
    of: IndexVersion, shard: int, starts: Sequence[GenerationStart], after: RowKey, limit: int
) -> Operation[list[tuple[RowKey, Location]]]:
    """Returns rows of a shard behind a row key, with versions that one of the generations supersedes (I13)."""
    old = " OR ".join(f"(generation < {start.generation} AND added_id >= {start.starts_at})" for start in starts)
    rows = yield from query(
        f"SELECT row_key, generation, added_id FROM {_TABLE} {of.where}"
        + sql(" AND shard = %s AND row_key > %s", shard, after)
        + f" AND ({old}) ORDER BY row_key LIMIT {limit}"
    )
    return [(row_key, Location(generation, added_id)) for row_key, generation, added_id in rows]


_SMALL_TABLES = ("index_walk", "index_forgotten", "index_pass", "index_check", "index_write")
"""The others that have rows of versions, each only a few."""


def delete_some(of: IndexVersion) -> Operation[bool]:
    """Deletes the rows of a version from all these tables, of many problems only some. Returns whether there may be
    more.
    """
    for table in _SMALL_TABLES:
        yield f"DELETE FROM schemaless.{table} {of.where}"
    (deleted,) = yield f"DELETE FROM {_TABLE} {of.where} ORDER BY shard, row_key LIMIT {_DELETED_AT_ONCE}"
    return deleted.affected >= _DELETED_AT_ONCE


def version_sums(table: Script, column: Script, which: Script = "") -> Operation[dict[IndexVersion, int]]:
    """Returns the sums of a column by version of an index."""
    versions = "datastore, name, number"
    rows = yield from query(f"SELECT {versions}, SUM({column}) FROM {table} {which} GROUP BY {versions}")
    return {VERSION.decode(version): int(total) for *version, total in rows}


def versions(datastore: str) -> Operation[set[tuple[str, int]]]:
    """Returns the names and numbers of the versions that have rows here, problems or any of the others."""
    parts = [
        f"SELECT name, number FROM schemaless.{table} {where(datastore=datastore)}"
        for table in ("index_problem", *_SMALL_TABLES)
    ]
    rows = yield from query(" UNION ".join(parts))
    return {(name, number) for name, number in rows}
