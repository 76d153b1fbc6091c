"""The entries of a row: a pure function of the newest cell (highest ref_key) of each source column (I11).

A row has one entry at most, or one for each element of the array that the definition names with []. An entry is known
by its row key and the number of its element, 0 without an array.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from schemaless.cell import ColumnName
from schemaless.index.definition import ELEMENTS_MAX, Field, IndexDefinition
from schemaless.index.values import FieldType, Value, shard_text, to_json, why_null
from schemaless.sharding import shard_of_text

Bodies = Mapping[ColumnName, Mapping[str, Any]]
"""By column, the body of its newest cell. A column without a cell is missing."""


class IndexEntry(msgspec.Struct, frozen=True, gc=False):
    """`values` are in the order of the definition's `fields`. The first is never None."""

    values: tuple[Value | None, ...]


Elements = tuple[Value | None, ...]
"""The values of one field in the elements of an array."""

Values = Sequence[Value | Elements | None]
"""Field values, in the order of the definition's `fields`."""


def entries_for(definition: IndexDefinition, newest: Bodies) -> list[IndexEntry | None]:
    """Returns the entries of a row by element, None for an element without one."""
    values: Values = [None] * len(definition.fields)
    for column in definition.columns & newest.keys():
        values = with_column(definition, values, column, newest[column])
    return entries_of(definition, values)


def with_column(definition: IndexDefinition, values: Values, column: ColumnName, body: Mapping[str, Any]) -> Values:
    """Returns the values of a row once a source column's newest cell has this body."""
    changed = list(values)
    for position in definition.positions[column]:
        field = definition.fields[position]
        if field.array is None:
            changed[position] = _value(field, field.path, body)
        else:
            changed[position] = _elements(field, body)
    return changed


def entries_of(definition: IndexDefinition, values: Values) -> list[IndexEntry | None]:
    """Returns the entries of a row with these values, by element.

    An array that is empty, missing or too long gives one element without values, as any other missing field.
    """
    at = definition.array_positions
    if not at:
        return [_entry(definition, values)]
    count = max((len(found) for n in at if isinstance(found := values[n], tuple)), default=0)
    entries = []
    for element in range(count or 1):
        single = list(values)
        for n in at:
            found = values[n]
            single[n] = found[element] if isinstance(found, tuple) and found else None
        entries.append(_entry(definition, single))
    return entries


def why_no_entry(definition: IndexDefinition, newest: Bodies) -> str:
    """Returns why a row has no entry, for people. It has none."""
    columns = sorted(definition.columns)
    if not newest.keys() & definition.columns:
        return f"the row has no cell in {' or '.join(columns)}"
    shard_field = definition.fields[0]
    values: Values = [None] * len(definition.fields)
    for column in definition.columns & newest.keys():
        values = with_column(definition, values, column, newest[column])
    first = values[0]
    if first is None or (isinstance(first, tuple) and all(value is None for value in first)):
        return f"its shard field {shard_field.name} has no value"
    return "`where` doesn't hold"


def _entry(definition: IndexDefinition, values: Sequence[Any]) -> IndexEntry | None:
    """Returns the entry with these values, or None when its shard field has none or `where` doesn't hold."""
    if values[0] is None:
        return None
    if definition.where is not None:
        by_name = {field.name: value for field, value in zip(definition.fields, values, strict=True)}
        if not definition.where.holds(by_name):
            return None
    return IndexEntry(tuple(values))


def _value(field: Field, path: Sequence[str], found: Any) -> Value | None:
    for part in path:
        if not isinstance(found, dict):  # a Mapping takes ten times as long, and each value comes by here
            return None
        found = found.get(part)
    return None if found is None else field.convert(found)


def _elements(field: Field, body: Any) -> Elements:
    found = body
    for part in field.path[: field.array]:
        found = found.get(part) if isinstance(found, Mapping) else None
    if not isinstance(found, list) or len(found) > ELEMENTS_MAX:
        return ()
    return tuple([_value(field, field.path[field.array :], element) for element in found])


def entry_shard(definition: IndexDefinition, entry: IndexEntry, shards: int) -> int:
    """Returns the shard whose index table holds the entry."""
    (first, *_) = entry.values
    assert first is not None, "a row without a shard field has no entry"
    return _shard_of_value(definition.shard_field.type, first, shards)


@lru_cache(maxsize=4096)  # rows share the values of their shard field, and hashing one takes a microsecond
def _shard_of_value(kind: FieldType, value: Value, shards: int) -> int:
    return shard_of_text(shard_text(kind, value), shards)


def entry_fields(definition: IndexDefinition, entry: IndexEntry) -> dict[str, Any]:
    """Returns an entry's fields as the API shows them: keyed and stored ones together, as JSON values."""
    return {
        name: value if value is None or write is None else write(value)
        for (name, write), value in zip(definition.json_writers, entry.values, strict=True)
    }


def stored_fields(definition: IndexDefinition, entry: IndexEntry) -> dict[str, Any]:
    """Returns an entry's fields for people, as `entry_fields` does. A value that no cell can make is text."""
    return {
        # JSON has no lone surrogates, which stand for bytes of a damaged value that are no UTF-8
        field.name: value.encode(errors="backslashreplace").decode()
        if isinstance(value, str)
        else to_json(field.type, value)
        for field, value in zip(definition.fields, entry.values, strict=True)
    }


# Problems: values of a cell that don't fit the type of their field. The index has null instead of them.

SHOWN_CHARACTERS_MAX = 64


class Misfit(msgspec.Struct, frozen=True, gc=False):
    """What a cell has for one field and the index can't hold.

    `value` is the beginning of it as JSON. With [] in the field's path, `values` elements don't fit, and `element` is
    the number of the first one.
    """

    field: str
    reason: str
    value: str
    values: int = 1
    element: int | None = None


def misfits_of(
    definition: IndexDefinition, column: ColumnName, values: Values, body: Mapping[str, Any]
) -> tuple[Misfit, ...]:
    """Returns what in the body of a source column became null in `values`, although the cell has something there."""
    fields = definition.fields
    doubtful = [n for n in definition.positions[column] if values[n] is None or fields[n].array is not None]
    if not doubtful:  # each cell of an index comes by here
        return ()
    found = [_misfit(fields[position], values[position], body) for position in doubtful]
    return tuple([misfit for misfit in found if misfit is not None])


def _misfit(field: Field, converted: Any, body: Any) -> Misfit | None:
    if field.array is not None:
        return _misfit_of_elements(field, converted, body)
    if converted is not None or (found := _at(field.path, body)) is None:
        return None
    return Misfit(field.name, why_null(field.type, field.length, found), _shown(found))


def _misfit_of_elements(field: Field, converted: Sequence[Any], body: Any) -> Misfit | None:
    if converted and None not in converted:
        return None
    array = _at(field.path[: field.array], body)
    if array is None:
        return None
    if not isinstance(array, list):
        return Misfit(field.name, "is no array", _shown(array))
    if len(array) > ELEMENTS_MAX:
        return Misfit(field.name, f"has {len(array)} elements, and an index takes {ELEMENTS_MAX}", _shown(array))
    inner = field.path[field.array :]
    wrong = [
        (number, found)
        for number, (value, element) in enumerate(zip(converted, array, strict=True))
        if value is None and (found := _at(inner, element)) is not None
    ]
    if not wrong:
        return None
    number, first = wrong[0]
    return Misfit(field.name, why_null(field.type, field.length, first), _shown(first), len(wrong), number)


def _at(path: Sequence[str], found: Any) -> Any:
    for part in path:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _shown(found: Any) -> str:
    """Returns the beginning of a value as JSON. A container is not rendered: it may be large."""
    if isinstance(found, Mapping):
        return "{…}" if found else "{}"
    if isinstance(found, list):
        return "[…]" if found else "[]"
    text = json.dumps(found[:SHOWN_CHARACTERS_MAX] if isinstance(found, str) else found, ensure_ascii=False)
    is_cut = isinstance(found, str) and len(found) > SHOWN_CHARACTERS_MAX
    return text[:-1] + "…" if is_cut else text
