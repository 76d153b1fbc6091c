"""index_write: how many entries were written to a version of an index while it was kept, after another took its place.

It is counted in the transaction of the entries, for a shard of their cells. So processes don't wait for one another.
"""

from __future__ import annotations

from schemaless.storage.index_problem_table import IndexVersion, versions_in
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Script, sql

_TABLE = "schemaless.index_write"


def count(version: IndexVersion, shard: int, entries: int) -> Script:
    """Adds to what this server has for a shard. It belongs to a transaction that moves a checkpoint."""
    return sql(
        f"INSERT INTO {_TABLE} (datastore, name, number, shard, entries) VALUES (%s, %s, %s, %s, %s)"
        " ON DUPLICATE KEY UPDATE entries = entries + VALUES(entries)",
        version.datastore,
        version.name,
        version.number,
        shard,
        entries,
    )


def of_datastore(datastore: str) -> Operation[dict[IndexVersion, int]]:
    """Returns how many entries this server took, by version that was ever kept."""
    rows = yield from query(
        sql(f"SELECT name, number, SUM(entries) FROM {_TABLE} WHERE datastore = %s GROUP BY name, number", datastore)
    )
    return {IndexVersion(datastore, name, number): int(entries) for name, number, entries in rows}


def delete_all(version: IndexVersion) -> Operation[None]:
    """Deletes the rows of a version that is gone."""
    yield sql(
        f"DELETE FROM {_TABLE} WHERE datastore = %s AND name = %s AND number = %s",
        version.datastore,
        version.name,
        version.number,
    )


def versions(datastore: str) -> Operation[set[tuple[str, int]]]:
    """Returns the names and numbers of the versions that have rows here."""
    return (yield from versions_in(_TABLE, datastore))
