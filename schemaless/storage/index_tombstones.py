"""Tombstones that nothing needs any more, and index_forgotten: which of them are gone (I11).

A tombstone refuses writers with a lower version. Every writer holds the checkpoint of its source shard on the cluster
still, so none comes late with a version up to that checkpoint. (A cluster that is ahead of another takes all events
between them again, in the order of the log, and ends as it was.)

Only a new generation can ask for what such a tombstone told. So the transaction that deletes it notes its added_id, and
a generation at or below makes the indexer evaluate the whole source shard again (indexer/maintainer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from schemaless.cell import RowKey
from schemaless.index.definition import IndexDefinition
from schemaless.location import Location
from schemaless.storage import index_table
from schemaless.storage.index_problem_table import IndexVersion, versions_in
from schemaless.storage.index_table import EntryKey
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Script, literal, sql
from schemaless.topology import Datastore

_TABLE = "schemaless.index_forgotten"


class Tombstone(msgspec.Struct, frozen=True, gc=False):
    """An entry that left a shard, with the version of the event that it left by."""

    row_key: RowKey
    element: int
    version: Location


class TombstonePage(msgspec.Struct, frozen=True):
    """The tombstones among some rows of a table. `last` is the last of these rows, or None: the table has no more."""

    tombstones: Sequence[Tombstone]
    last: EntryKey | None


def page(
    datastore: Datastore, definition: IndexDefinition, shard: int, after: EntryKey, examined_max: int
) -> Operation[TombstonePage]:
    """Returns the tombstones among the next rows of one shard behind `after`, by row key and element."""
    row_key, element = after
    examined = (
        "SELECT row_key, element, source_generation, source_added_id, live"
        f" FROM {index_table.table(datastore, shard, definition)}"
        + sql(" WHERE row_key >= %s AND (row_key > %s OR element > %s)", row_key, row_key, element)
        + f" ORDER BY row_key, element LIMIT {examined_max}"
    )
    rows = yield from query(
        "SELECT row_key, element, source_generation, source_added_id, live, place FROM (SELECT examined.*,"
        f" ROW_NUMBER() OVER (ORDER BY row_key, element) AS place FROM ({examined}) AS examined) AS placed"
        f" WHERE live = 0 OR place = {examined_max} ORDER BY place"
    )
    tombstones = [Tombstone(row[0], row[1], Location(row[2], row[3])) for row in rows if not row[4]]
    return TombstonePage(tombstones, next(((row[0], row[1]) for row in rows if row[5] == examined_max), None))


def forget(
    of: IndexVersion,
    datastore: Datastore,
    definition: IndexDefinition,
    shard: int,
    tombstones: Mapping[int, Sequence[Tombstone]],
) -> Operation[int]:
    """Deletes tombstones of one index shard, by source shard, at least one. Returns how many.

    One stays that is above the checkpoint of its source shard here, or that another event has written since.
    """
    scripts = ["BEGIN"]
    for source, found in sorted(tombstones.items()):
        highest = max(tombstone.version.added_id for tombstone in found)
        these = " OR ".join(
            f"(row_key = {literal(each.row_key)} AND element = {each.element}"
            f" AND source_generation = {each.version.generation} AND source_added_id = {each.version.added_id})"
            for each in found
        )
        scripts += [
            "SET @generation = 0, @added_id = 0",
            sql(
                "SELECT generation, added_id INTO @generation, @added_id FROM schemaless.checkpoint"
                " WHERE datastore = %s AND consumer = %s AND shard = %s FOR UPDATE",
                datastore.name,
                definition.consumer,
                source,
            ),
            sql(
                f"INSERT INTO {_TABLE} VALUES (%s, %s, %s, %s, %s)"
                " ON DUPLICATE KEY UPDATE added_id = GREATEST(added_id, VALUES(added_id))",
                of.datastore,
                of.name,
                of.number,
                source,
                highest,
            ),
            f"DELETE FROM {index_table.table(datastore, shard, definition)} WHERE live = 0 AND ({these})"
            " AND (source_generation < @generation"
            " OR (source_generation = @generation AND source_added_id <= @added_id))",
        ]
    results = yield ";".join([*scripts, "COMMIT"])
    return sum(result.affected for result in results[4:-1:4])


def forgotten(of: IndexVersion, shard: int) -> Operation[int]:
    """Returns up to which added_id of a source shard tombstones may be gone here, 0: none is."""
    rows = yield from query(f"SELECT added_id FROM {_TABLE} WHERE {_of(of)} AND shard = {shard}")
    return rows[0][0] if rows else 0


def remembering(of: IndexVersion, shard: int, until: int) -> Script:
    """Returns a statement that notes that no tombstone behind an added_id is missed here."""
    return f"UPDATE {_TABLE} SET added_id = LEAST(added_id, {until}) WHERE {_of(of)} AND shard = {shard}"


def refusal(of: IndexVersion, shard: int, until: int) -> Script:
    """Returns a statement that undoes its transaction if tombstones behind an added_id are gone here.

    It inserts a NULL where none may be, as `checkpoint_table.UNDO` does.
    """
    return (
        f"INSERT INTO schemaless.format SELECT NULL FROM {_TABLE}"
        f" WHERE {_of(of)} AND shard = {shard} AND added_id > {until}"
    )


def delete(of: IndexVersion) -> Operation[None]:
    """Deletes the notes of a version that is gone."""
    yield f"DELETE FROM {_TABLE} WHERE {_of(of)}"


def versions(datastore: str) -> Operation[set[tuple[str, int]]]:
    """Returns the names and numbers of the versions that have rows here."""
    return (yield from versions_in(_TABLE, datastore))


def _of(of: IndexVersion) -> Script:
    return sql("datastore = %s AND name = %s AND number = %s", of.datastore, of.name, of.number)
