"""The entry of a row: a pure function of the newest cell (highest ref_key) of each source column (I11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from schemaless.index.definition import Field, IndexDefinition
from schemaless.index.values import Value, shard_text, to_json
from schemaless.sharding import shard_of_text

Bodies = Mapping[str, Mapping[str, Any]]
"""By column: the body of its newest cell. Columns without a cell are missing."""


class IndexEntry(msgspec.Struct, frozen=True, gc=False):
    """`values` in the order of the definition's `fields`; the first is never None."""

    values: tuple[Value | None, ...]


def entry_for(definition: IndexDefinition, newest: Bodies) -> IndexEntry | None:
    """None: the row is not in the index, because its shard field has no value or `where` doesn't hold."""
    values = tuple([_extract(field, newest) for field in definition.fields])
    if values[0] is None:
        return None
    if definition.where and not _holds(definition, values):
        return None
    return IndexEntry(values)


def entry_shard(definition: IndexDefinition, entry: IndexEntry, shards: int) -> int:
    """Whose index table holds the entry."""
    (first, *_) = entry.values
    assert first is not None, "an entry without a shard field is none"
    return shard_of_text(shard_text(definition.shard_field.type, first), shards)


def entry_fields(definition: IndexDefinition, entry: IndexEntry) -> dict[str, Any]:
    """As an answer shows them: keyed and stored fields together, JSON values."""
    return {
        field.name: to_json(field.type, value) for field, value in zip(definition.fields, entry.values, strict=True)
    }


def _extract(field: Field, newest: Bodies) -> Value | None:
    found: Any = newest.get(field.column)
    for part in field.path:
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return None if found is None else field.convert(found)


def _holds(definition: IndexDefinition, values: tuple[Value | None, ...]) -> bool:
    by_name = {field.name: value for field, value in zip(definition.fields, values, strict=True)}
    return all(condition.op.holds(by_name[condition.field], condition.value) for condition in definition.where)
