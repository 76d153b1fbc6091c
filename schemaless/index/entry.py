"""The entry of a row: a pure function of the newest cell (highest ref_key) of each source column (I11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from schemaless.cell import ColumnName
from schemaless.index.definition import IndexDefinition
from schemaless.index.values import Value, shard_text, to_json
from schemaless.sharding import shard_of_text

Bodies = Mapping[ColumnName, Mapping[str, Any]]
"""By column, the body of its newest cell. A column without a cell is missing."""


class IndexEntry(msgspec.Struct, frozen=True, gc=False):
    """`values` are in the order of the definition's `fields`. The first is never None."""

    values: tuple[Value | None, ...]


Values = Sequence[Value | None]
"""Field values, in the order of the definition's `fields`."""


def entry_for(definition: IndexDefinition, newest: Bodies) -> IndexEntry | None:
    """Returns the entry of a row, or None when its shard field has no value or `where` doesn't hold."""
    values: Values = [None] * len(definition.fields)
    for column in definition.columns & newest.keys():
        values = with_column(definition, values, column, newest[column])
    return entry_of(definition, values)


def with_column(definition: IndexDefinition, values: Values, column: ColumnName, body: Mapping[str, Any]) -> Values:
    """Returns the values of a row once a source column's newest cell has this body."""
    changed = list(values)
    for position in definition.positions[column]:
        field = definition.fields[position]
        found: Any = body
        for part in field.path:
            found = found.get(part) if isinstance(found, Mapping) else None
        changed[position] = None if found is None else field.convert(found)
    return changed


def entry_of(definition: IndexDefinition, values: Values) -> IndexEntry | None:
    """Returns the entry of a row with these values, or None when its shard field has none or `where` doesn't hold."""
    if values[0] is None:
        return None
    if definition.where:
        by_name = {field.name: value for field, value in zip(definition.fields, values, strict=True)}
        if not all(condition.op.holds(by_name[condition.field], condition.value) for condition in definition.where):
            return None
    return IndexEntry(tuple(values))


def entry_shard(definition: IndexDefinition, entry: IndexEntry, shards: int) -> int:
    """Returns the shard whose index table holds the entry."""
    (first, *_) = entry.values
    assert first is not None, "a row without a shard field has no entry"
    return shard_of_text(shard_text(definition.shard_field.type, first), shards)


def entry_fields(definition: IndexDefinition, entry: IndexEntry) -> dict[str, Any]:
    """Returns an entry's fields as the API shows them: keyed and stored ones together, as JSON values."""
    return {
        field.name: to_json(field.type, value) for field, value in zip(definition.fields, entry.values, strict=True)
    }
