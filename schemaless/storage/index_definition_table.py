"""index_definition: which indexes a datastore has, in which state. Written to every cluster, as the catalogue is.

index_build says how far the checkpoints of an index must come before it answers. It has rows only while one is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from schemaless.index.definition import IndexDefinition, dump_definition, parse_definition
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import commas, sql

_TABLE = "schemaless.index_definition"
_BUILD_TABLE = "schemaless.index_build"


class IndexState(StrEnum):
    BUILDING = "building"
    ACTIVE = "active"


class DefinedIndex(msgspec.Struct, frozen=True):
    """`has_tables`: every shard has its index table, and the build has begun."""

    definition: IndexDefinition
    state: IndexState
    has_tables: bool


class BuildProgress(msgspec.Struct, frozen=True):
    """`done` of the `total` cells at the start are finished. `total` is None while tables are being made."""

    done: int
    total: int | None


def insert(datastore: str, definition: IndexDefinition) -> Operation[None]:
    """Does nothing when the name exists: the caller then compares what `all_of` returns."""
    yield sql(
        f"INSERT IGNORE INTO {_TABLE} VALUES (%s, %s, %s, %s, 0, UTC_TIMESTAMP(6))",
        datastore,
        definition.name,
        dump_definition(definition),
        str(IndexState.BUILDING),
    )


def all_of(datastore: str) -> Operation[dict[str, DefinedIndex]]:
    """Returns the indexes of a datastore by name, as this server has them."""
    rows = yield from query(
        sql(f"SELECT name, definition, state, has_tables FROM {_TABLE} WHERE datastore = %s ORDER BY name", datastore)
    )
    return {
        name: DefinedIndex(parse_definition(json.loads(definition)), IndexState(state), bool(has_tables))
        for name, definition, state, has_tables in rows
    }


def stamps_of(datastore: str) -> Operation[tuple[tuple[object, ...], ...]]:
    """Returns what changes whenever `all_of` does, without the definitions: cheap enough to be asked often."""
    rows = yield from query(
        f"SELECT name, state, has_tables, {MICROSECONDS.format('created_at')} FROM {_TABLE}"
        + sql(" WHERE datastore = %s ORDER BY name", datastore)
    )
    return tuple(tuple(row) for row in rows)


def begin_build(datastore: str, name: str, build_until: Mapping[int, int]) -> Operation[None]:
    """Records that the tables are made. The first caller fixes which checkpoints make the index active.

    `build_until`: by shard, the added_id that its checkpoint must reach.
    """
    where = sql("WHERE datastore = %s AND name = %s", datastore, name)
    _, began = yield f"BEGIN;UPDATE {_TABLE} SET has_tables = 1 {where} AND has_tables = 0"
    if began.affected and build_until:
        rows = [sql("(%s, %s, %s, %s)", datastore, name, shard, until) for shard, until in build_until.items()]
        yield f"INSERT INTO {_BUILD_TABLE} VALUES {commas(rows)}"
    yield "COMMIT"


def build_progress(datastore: str, name: str, consumer: str) -> Operation[BuildProgress]:
    """Returns how far the checkpoints of an index are on this server.

    Where the generations of a shard are known, on its home, what a later one superseded isn't finished (I13).
    """
    ((done, total),) = yield from query(
        "SELECT COALESCE(SUM(LEAST(build.added_id, COALESCE(reached.added_id, 0), COALESCE((SELECT MIN(g.starts_at) - 1"
        " FROM schemaless.shard_generation AS g WHERE g.datastore = reached.datastore AND g.shard = reached.shard"
        " AND g.generation > reached.generation), build.added_id))), 0),"
        f" COALESCE(SUM(build.added_id), 0) FROM {_BUILD_TABLE} AS build"
        " LEFT JOIN schemaless.checkpoint AS reached ON reached.datastore = build.datastore"
        + sql(" AND reached.consumer = %s AND reached.shard = build.shard", consumer)
        + sql(" WHERE build.datastore = %s AND build.name = %s", datastore, name)
    )
    return BuildProgress(int(done), int(total))


def lower_build(datastore: str, name: str, shard: int, added_id: int) -> Operation[None]:
    """Lets a shard count as built at an added_id, when the cells behind it were superseded (I13)."""
    yield sql(
        f"UPDATE {_BUILD_TABLE} SET added_id = LEAST(added_id, %s) WHERE datastore = %s AND name = %s AND shard = %s",
        added_id,
        datastore,
        name,
        shard,
    )


def set_active(datastore: str, name: str) -> Operation[None]:
    where = sql("WHERE datastore = %s AND name = %s", datastore, name)
    active, building = sql("%s", str(IndexState.ACTIVE)), sql("%s", str(IndexState.BUILDING))
    yield (
        f"BEGIN;UPDATE {_TABLE} SET state = {active} {where} AND state = {building};"
        f"DELETE FROM {_BUILD_TABLE} {where};COMMIT"
    )
