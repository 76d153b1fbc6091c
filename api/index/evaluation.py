"""An index query on entries in memory: comparisons, order, cursor and bounds, as the servers have them. Pure (no I/O).

The SQL is in schemaless/storage/index_select.py. One test holds both to each other, on both kinds of server.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from schemaless.index.definition import IndexDefinition
from schemaless.index.values import Value
from schemaless.storage.index_select import (
    ENTRY_BYTES,
    PAGE_BYTES_MAX,
    NodePage,
    Operator,
    Selection,
    Term,
    cursor_key,
    order_key,
)
from schemaless.storage.index_table import FoundEntry

_NUMBER_BYTES = 8

_HOLDS: Mapping[Operator, Callable[[Any, Sequence[Any]], bool]] = {
    Operator.EQ: lambda value, given: value == given[0],
    Operator.NE: lambda value, given: value != given[0],
    Operator.LT: lambda value, given: operator.lt(value, given[0]),
    Operator.LTE: lambda value, given: operator.le(value, given[0]),
    Operator.GT: lambda value, given: operator.gt(value, given[0]),
    Operator.GTE: lambda value, given: operator.ge(value, given[0]),
    Operator.IN: lambda value, given: value in given,
    Operator.BETWEEN: lambda value, given: bool(given[0] <= value <= given[1]),
    Operator.PREFIX: lambda value, given: value[: len(given[0])] == given[0],
}


def holds(term: Term, value: Value | None) -> bool:
    """Returns whether a comparison holds for a value. Only `isnull` may hold for a null."""
    if term.op is Operator.ISNULL:
        return (value is None) is term.values[0]
    return value is not None and _HOLDS[term.op](value, term.values)


def page_of(
    definition: IndexDefinition,
    shard_values: Sequence[Value],
    selection: Selection,
    entries: Iterable[FoundEntry],
    bytes_max: int = PAGE_BYTES_MAX,
) -> NodePage:
    """Returns the page of a query that one node with these entries would answer.

    It has at most `bytes_max` bytes of values, but for the last entry.
    """
    terms = [(definition.fields.index(term.field), term) for term in selection.terms]
    key = order_key(definition, selection)
    behind = operator.lt if selection.descending else operator.gt
    end = None if selection.after is None else cursor_key(selection.after)
    found = [
        one
        for one in entries
        if one.entry.values[0] in shard_values
        and all(holds(term, one.entry.values[position]) for position, term in terms)
        and (end is None or behind(key(one), end))
    ]
    found.sort(key=key, reverse=selection.descending)
    page: list[FoundEntry] = []
    left = bytes_max
    for one in found[: selection.limit]:
        if left <= 0:
            break
        page.append(one)
        left -= ENTRY_BYTES + sum(map(_bytes, one.entry.values))
    return NodePage(page, len(page) < len(found))


def _bytes(value: Value | None) -> int:
    if isinstance(value, str):
        return len(value.encode())
    return len(value) if isinstance(value, bytes) else _NUMBER_BYTES
