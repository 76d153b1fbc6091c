"""index_definition: which indexes a datastore has, in which state. Written to every cluster, as the catalogue is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from schemaless.index.definition import IndexDefinition, dump_definition, parse_definition
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import sql

_TABLE = "schemaless.index_definition"


class IndexState(StrEnum):
    BUILDING = "building"
    ACTIVE = "active"


class DefinedIndex(msgspec.Struct, frozen=True):
    """`build_until`: by shard, the added_id that its checkpoint must reach before the index answers.

    None: its tables are still being made.
    """

    definition: IndexDefinition
    state: IndexState
    build_until: Mapping[int, int] | None


def insert(datastore: str, definition: IndexDefinition) -> Operation[None]:
    """Does nothing when the name exists: the caller then compares what `all_of` returns."""
    yield sql(
        f"INSERT IGNORE INTO {_TABLE} VALUES (%s, %s, %s, %s, 'null', UTC_TIMESTAMP(6))",
        datastore,
        definition.name,
        dump_definition(definition),
        str(IndexState.BUILDING),
    )


def all_of(datastore: str) -> Operation[dict[str, DefinedIndex]]:
    """Returns the indexes of a datastore by name, as this server has them."""
    rows = yield from query(
        sql(f"SELECT name, definition, state, build_until FROM {_TABLE} WHERE datastore = %s ORDER BY name", datastore)
    )
    found = {}
    for name, definition, state, build_until in rows:
        heads = json.loads(build_until)
        until = None if heads is None else {int(shard): head for shard, head in heads.items()}
        found[name] = DefinedIndex(parse_definition(json.loads(definition)), IndexState(state), until)
    return found


def begin_build(datastore: str, name: str, build_until: Mapping[int, int]) -> Operation[None]:
    """Records that the tables are made. The first caller fixes which checkpoints make the index active."""
    yield sql(
        f"UPDATE {_TABLE} SET build_until = %s WHERE datastore = %s AND name = %s AND build_until = 'null'",
        json.dumps(build_until),
        datastore,
        name,
    )


def set_active(datastore: str, name: str) -> Operation[None]:
    yield sql(
        f"UPDATE {_TABLE} SET state = %s WHERE datastore = %s AND name = %s AND state = %s",
        str(IndexState.ACTIVE),
        datastore,
        name,
        str(IndexState.BUILDING),
    )
