"""index_write: how many entries were written to a version of an index while it was kept, after another took its place.

It is counted in the transaction of the entries, for a shard of their cells. So processes don't wait for one another.
"""

from __future__ import annotations

from schemaless.storage.index_problem_table import IndexVersion, version_sums
from schemaless.storage.operation import Operation
from schemaless.storage.sql import Script, literals, where

_TABLE = "schemaless.index_write"


def count(version: IndexVersion, shard: int, entries: int) -> Script:
    """Adds to what this server has for a shard. It belongs to a transaction that moves a checkpoint."""
    values = literals(version.datastore, version.name, version.number, shard, entries)
    return f"INSERT INTO {_TABLE} VALUES {values} ON DUPLICATE KEY UPDATE entries = entries + VALUES(entries)"


def of_datastore(datastore: str) -> Operation[dict[IndexVersion, int]]:
    """Returns how many entries this server took, by version that was ever kept."""
    return (yield from version_sums(_TABLE, "entries", where(datastore=datastore)))
