"""The SELECT of an index query: comparisons, order, pages and their bounds. The tables are index_table's.

Entries are ordered by a keyed field, then by the keyed fields behind it, then by row key and element. So where the
fields before the order are given by equality, the server reads in the order of the table's key, and ends at the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from schemaless.cell import RowKey
from schemaless.index.definition import Field, IndexDefinition
from schemaless.index.values import FieldType, Value
from schemaless.storage.index_table import FoundEntry, field_literal, quoted, shown, sound, table
from schemaless.storage.operation import Row
from schemaless.storage.sql import Script, commas, literal
from schemaless.topology import Datastore

PAGE_BYTES_MAX = 1 << 20
"""The most bytes of values that one node returns for a page, but for the last entry. A page may end early by it."""

STATEMENT_MS_MAX = 1500
"""How long a server works on a query. Less than a reader waits, so a slow query isn't taken for a dead server."""

ENTRY_BYTES = 64
"""Row key, numbers and what else an entry takes beside its long values."""

_BYTES, _OWN = "`$bytes`", "`$own`"  # no field has such a name


class Operator(StrEnum):
    """Comparisons of a query. None but `isnull` holds for a null."""

    EQ = "eq"
    NE = "ne"
    LT = "lt"
    LTE = "lte"
    GT = "gt"
    GTE = "gte"
    IN = "in"
    PREFIX = "prefix"
    BETWEEN = "between"
    ISNULL = "isnull"


PREFIX_TYPES = frozenset({FieldType.STRING, FieldType.BYTES})


class Term(msgspec.Struct, frozen=True):
    """One comparison of a query. `between` has two values, `in` has at least one, `isnull` has True or False."""

    field: Field
    op: Operator
    values: tuple[Value, ...]


class EntryCursor(msgspec.Struct, frozen=True):
    """Where a page ends: the values that it is ordered by, the row key, and the number of the element."""

    values: tuple[Value | None, ...]
    row_key: RowKey
    element: int = 0


class Selection(msgspec.Struct, frozen=True):
    """A query without its shard field. `order` has the keyed fields that entries are ordered by, at least one."""

    terms: Sequence[Term]
    order: tuple[Field, ...]
    descending: bool
    limit: int
    after: EntryCursor | None = None


class NodePage(msgspec.Struct, frozen=True):
    """What one node returned. `more`: it may have entries behind these. `damaged` are rows of entries that it lacks.

    These have a value that no cell can make.
    """

    entries: list[FoundEntry]
    more: bool
    damaged: Sequence[RowKey] = ()


def select(
    datastore: Datastore,
    definition: IndexDefinition,
    places: Sequence[tuple[int, Value]],
    selection: Selection,
    bytes_max: int = PAGE_BYTES_MAX,
    excluded: Sequence[RowKey] = (),
) -> Script:
    """Returns one statement, whose rows `node_page` reads. `places` are (shard, value of the shard field)s of a node.

    Entries of `excluded` rows are left out before the limit counts. Each place is read by a SELECT of its own, in the
    order of the table's key. The server merges them.
    """
    way = "DESC" if selection.descending else "ASC"
    order = commas([f"{name} {way}" for name in (*map(quoted, selection.order), "row_key", "element")])
    is_cut = page_bytes(definition, selection) > bytes_max
    if len(places) == 1 and not is_cut:
        columns = commas(["row_key", "element", *(shown(field) for field in definition.fields), "0"])
        return f"{_LIMITED} {_of_place(datastore, definition, places[0], selection, excluded, order, columns)}"
    names = commas(["row_key", "element", *(quoted(field) for field in definition.fields)])
    parts = [
        f"(SELECT {_of_place(datastore, definition, place, selection, excluded, order, names)})" for place in places
    ]
    page = f"({' UNION ALL '.join(parts)}) AS found ORDER BY {order} LIMIT {selection.limit}"
    columns = commas(["row_key", "element", *(shown(field) for field in definition.fields)])
    if not is_cut:
        return f"{_LIMITED} {columns},0 FROM {page}"
    own = " + ".join([str(ENTRY_BYTES), *(f"COALESCE(LENGTH({quoted(f)}), 0)" for f in definition.fields)])
    return (
        f"{_LIMITED} {columns},{_BYTES} > {bytes_max} FROM (SELECT found.*, {own} AS {_OWN},"
        f" SUM({own}) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) AS {_BYTES} FROM {page}) AS page"
        f" WHERE {_BYTES} - {_OWN} <= {bytes_max} ORDER BY {order}"
    )


def without_limits(select: Script) -> Script:
    """Returns what `select` returned without its limit on time, which an EXPLAIN can't have."""
    return select.replace(_LIMITED, "SELECT", 1)


def node_page(definition: IndexDefinition, selection: Selection, rows: Sequence[Row]) -> NodePage:
    """Reads the rows of `select`."""
    is_cut = bool(rows) and bool(rows[-1][-1])
    more = is_cut or len(rows) >= selection.limit
    try:
        return NodePage(sound(definition, rows), more)
    except ValueError:
        entries, damaged = list[FoundEntry](), list[RowKey]()
    for row in rows:
        try:
            entries += sound(definition, [row])
        except ValueError:
            damaged.append(row[0])
    return NodePage(entries, more, damaged)


def page_bytes(definition: IndexDefinition, selection: Selection) -> int:
    """Returns the most bytes of values that the entries of a page have."""
    return selection.limit * (ENTRY_BYTES + definition.entry_bytes_max)


def order_key(definition: IndexDefinition, selection: Selection) -> Callable[[FoundEntry], Any]:
    """Returns the key that sorts entries as the servers do: nulls first, strings by code point."""
    at = [definition.fields.index(field) for field in selection.order]

    def key(one: FoundEntry) -> Any:
        values = one.entry.values
        return _sort_key([values[n] for n in at], one.row_key, one.element)

    return key


def cursor_key(after: EntryCursor) -> Any:
    """Returns what `order_key` makes of the entry that a cursor names."""
    return _sort_key(after.values, after.row_key, after.element)


def _sort_key(values: Sequence[Value | None], row_key: RowKey, element: int) -> Any:
    return (*((value is not None, 0 if value is None else value) for value in values), row_key, element)


_LIMITED = (
    f"/*M! SET STATEMENT max_statement_time={STATEMENT_MS_MAX / 1000} FOR */"
    f" SELECT /*+ MAX_EXECUTION_TIME({STATEMENT_MS_MAX}) */"
)
"""MariaDB reads the first comment and MySQL the second."""


def _of_place(
    datastore: Datastore,
    definition: IndexDefinition,
    place: tuple[int, Value],
    selection: Selection,
    excluded: Sequence[RowKey],
    order: Script,
    columns: Script,
) -> Script:
    """Returns what follows the word SELECT."""
    shard, value = place
    where = ["live = 1", f"{quoted(definition.shard_field)} = {field_literal(definition.shard_field, value)}"]
    where += [_condition(term) for term in selection.terms]
    if selection.after is not None:
        where.append(_after(selection, selection.after))
    if excluded:  # within IF the list is no range of a key, which a server would read instead of the query's order
        where.append(f"IF(row_key IN ({commas([literal(row_key) for row_key in excluded])}), FALSE, TRUE)")
    return (
        f"{columns} FROM {table(datastore, shard, definition)} WHERE {' AND '.join(where)}"
        f" ORDER BY {order} LIMIT {selection.limit}"
    )


_COMPARED: Mapping[Operator, str] = {
    Operator.EQ: "=",
    Operator.NE: "<>",
    Operator.LT: "<",
    Operator.LTE: "<=",
    Operator.GT: ">",
    Operator.GTE: ">=",
}


def _condition(term: Term) -> Script:
    name = quoted(term.field)
    if term.op is Operator.ISNULL:
        return f"{name} IS {'' if term.values[0] else 'NOT '}NULL"
    if term.op is Operator.PREFIX:
        return _prefix(term)
    literals = [field_literal(term.field, value) for value in term.values]
    if term.op is Operator.IN:
        return f"{name} IN ({commas(literals)})"
    if term.op is Operator.BETWEEN:
        return f"{name} BETWEEN {literals[0]} AND {literals[1]}"
    return f"{name} {_COMPARED[term.op]} {literals[0]}"


def _prefix(term: Term) -> Script:
    """Returns a range of the key: a LIKE would need escapes, and a collation that this column doesn't have."""
    (value,) = term.values
    name, low = quoted(term.field), value.encode() if isinstance(value, str) else bytes(value)  # type: ignore[arg-type]
    rest = low.rstrip(b"\xff")
    if not rest:  # every value that begins with these bytes is at or above them
        return f"{name} >= x'{low.hex()}'"
    high = rest[:-1] + bytes([rest[-1] + 1])
    return f"{name} >= x'{low.hex()}' AND {name} < x'{high.hex()}'"


def _after(selection: Selection, after: EntryCursor) -> Script:
    """Returns the condition for entries behind a page. Nulls come first when ascending, last when descending."""
    beyond = "<" if selection.descending else ">"
    row_key = f"x'{after.row_key.hex()}'"
    condition = f"(row_key {beyond} {row_key} OR (row_key = {row_key} AND element {beyond} {after.element}))"
    for field, value in reversed(list(zip(selection.order, after.values, strict=True))):
        name = quoted(field)
        if value is None:
            behind = "FALSE" if selection.descending else f"{name} IS NOT NULL"
            condition = f"({behind} OR ({name} IS NULL AND {condition}))"
        else:
            literal = field_literal(field, value)
            nulls = f" OR {name} IS NULL" if selection.descending else ""
            condition = f"({name} {beyond} {literal}{nulls} OR ({name} = {literal} AND {condition}))"
    return condition
