"""datastore: which datastores there are. Written to every cluster, so that any one of them can answer."""

from __future__ import annotations

import json

from schemaless.errors import Corrupt
from schemaless.storage.operation import Operation, query
from schemaless.storage.schema import check_format
from schemaless.storage.sql import sql
from schemaless.topology import Datastore


def insert(datastore: Datastore) -> Operation[None]:
    """Does nothing when the name exists: the caller then compares what `all_of` returns."""
    yield sql(
        "INSERT IGNORE INTO schemaless.datastore VALUES (%s, %s, %s, %s, 0, UTC_TIMESTAMP(6))",
        datastore.name,
        datastore.shards,
        datastore.partitions,
        json.dumps(datastore.placement),
    )


def set_ready(name: str) -> Operation[None]:
    yield sql("UPDATE schemaless.datastore SET ready = 1 WHERE name = %s", name)


def all_of(*, ready: bool = True) -> Operation[dict[str, Datastore]]:
    """Returns datastores by name, with ready=False also those whose shards are still being made.

    Every use of a datastore begins here, so the format is checked here. Raises Misconfigured for an unknown one, and
    Corrupt for a row that isn't a datastore.
    """
    yield from check_format()
    rows = yield from query(
        sql(
            "SELECT name, shards, partitions, placement FROM schemaless.datastore WHERE ready >= %s ORDER BY name",
            ready,
        )
    )
    try:
        return {
            name: Datastore(name, shards, partitions, tuple(json.loads(placement)))
            for name, shards, partitions, placement in rows
        }
    except (TypeError, ValueError) as error:
        raise Corrupt(f"a row of schemaless.datastore is no datastore: {error}") from error
