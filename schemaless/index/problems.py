"""Problems: values of a cell that don't fit the type of their field. The index has null instead of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from schemaless.cell import ColumnName
from schemaless.index.definition import ELEMENTS_MAX, Field, IndexDefinition
from schemaless.index.entry import Values
from schemaless.index.values import why_null

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
