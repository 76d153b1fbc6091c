"""A query of an index on the nodes that hold its entries, and what their pages make together.

Each value of the shard field is in one shard. One node of each cluster answers for all shards that live there, in one
statement. With `after`, a put's location, the same node first shows how far its entries go: the index's checkpoint of
that source shard. What its page lacks is another module's work (api/index/entry_reader.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from api.http.budget import Steps
from api.index.cursor import cursor_of
from api.index.query import IndexQuery
from schemaless.cell import ColumnName, RowKey, StoredCell, row_key_text
from schemaless.codec import Body, decode_packed, inflate_body
from schemaless.errors import Corrupt, LockTimeout, StatementTimeout, TooLarge, Unavailable
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import entries_for, entry_fields
from schemaless.index.values import Value
from schemaless.location import Location
from schemaless.storage import checkpoint_table, index_select
from schemaless.storage.index_select import NodePage
from schemaless.storage.index_table import FoundEntry
from schemaless.storage.operation import Operation, Result
from schemaless.storage.sql import Script
from schemaless.topology import Datastore, Role

DAMAGED_MAX = 1000
"""How many rows with damaged entries one node leaves out of a page."""

Places = Sequence[tuple[int, Value]]
Newest = Mapping[tuple[RowKey, ColumnName], StoredCell | None]
"""The newest cells of rows."""


class Behind(Unavailable):
    """The entries of the node don't include the location yet."""

    hint = "ask again: the index has not reached that location on the node that answers"


class QueryTooSlow(Unavailable):
    """A server gave a query up."""

    hint = (
        "compare more of the keyed fields, in their order, and order by the first one that isn't given by equality:"
        " then the server reads few entries"
    )


class ManyDamaged(Unavailable):
    """More entries of a query are damaged than it leaves out. `row_keys` are those of the rows that it met."""

    def __init__(self, definition: IndexDefinition, role: Role, row_keys: Collection[RowKey]) -> None:
        hint = (
            "ask again: the rows that it met are being repaired."
            f" `schemaless index repair {definition.name}` writes all of them anew"
        )
        if role is Role.MINION:
            hint = (
                "ask the master (read_from=master): nothing repairs a minion, it is made anew."
                f" `schemaless index verify {definition.name}` names it"
            )
        super().__init__(f"more than {DAMAGED_MAX} rows of index {definition.name} are damaged on a {role}", hint=hint)
        self.row_keys = row_keys


class MinionsDiffer(Unavailable):
    """Every node that could answer is a minion whose entries differ from their cells."""

    def __init__(self, definition: IndexDefinition, cluster: str) -> None:
        super().__init__(
            f"the entries of index {definition.name} on the minions of cluster {cluster} differ from their cells",
            hint="ask the master (read_from=master), or again when it is back."
            f" `schemaless index verify {definition.name}` names the minions, which must be made anew",
        )


class Execution(msgspec.Struct, frozen=True):
    """How a node ran a query. `rows_read` counts rows of tables and keys."""

    sql: str
    plan: Sequence[Mapping[str, Any]]
    rows_read: int
    seconds: float


class NodeAnswer(msgspec.Struct, frozen=True):
    """What one node answers. `reached` is its checkpoint in the shard of `after`, None without `after`.

    `added_ids_sum` says how far the index is there. It is known where that was asked for.
    """

    page: NodePage
    reached: Location | None = None
    added_ids_sum: int | None = None
    execution: Execution | None = None


class EntryPage(msgspec.Struct, frozen=True):
    """One page of entries. `cursor` is None when there are no more."""

    entries: Sequence[FoundEntry]
    cursor: str | None


def places_by_cluster(datastore: Datastore, query: IndexQuery) -> Mapping[str, Places]:
    return datastore.by_home(query.places, lambda place: place[0])


def find_entries(
    datastore: Datastore,
    definition: IndexDefinition,
    query: IndexQuery,
    places: Places,
    sums: bool = False,
    bytes_max: int = index_select.PAGE_BYTES_MAX,
    excluded: Sequence[RowKey] = (),
) -> Operation[NodeAnswer]:
    """Finds the entries of places that live on one cluster, on any node of it, without the excluded rows.

    A row with a damaged entry is left out, and named. So a page that is full of them doesn't look like the last one.
    It ends where more than DAMAGED_MAX are named, and is no answer then. Raises QueryTooSlow.
    """
    consumer, damaged = definition.consumer, list[RowKey]()

    def select_now() -> Script:
        return index_select.select(datastore, definition, places, query.selection, bytes_max, [*excluded, *damaged])

    select = select_now()
    # Checkpoints are read first: entries that arrive in between do no harm.
    before = []
    if query.after is not None:
        before.append(checkpoint_table.reached(datastore.name, consumer, query.after.shard))
    if sums:
        before.append(checkpoint_table.added_ids_sum(datastore.name, consumer))
    try:
        if query.explain:
            first, result, execution = yield from _explained(before, select)
        else:
            *first, result = yield ";".join([*before, select])
            execution = None
        page = index_select.node_page(definition, query.selection, result.rows)
        while page.damaged:
            damaged += page.damaged
            if len(damaged) > DAMAGED_MAX:
                break
            (result,) = yield select_now()
            page = index_select.node_page(definition, query.selection, result.rows)
    except (StatementTimeout, LockTimeout) as error:  # MySQL has one number for both, and a SELECT waits for no lock
        raise QueryTooSlow(
            f"a server worked on the query for {index_select.STATEMENT_MS_MAX / 1000} s and gave it up"
        ) from error
    reached = None
    if query.after is not None:
        rows = first.pop(0).rows
        reached = Location(*rows[0]) if rows else None
    added_ids_sum = int(first.pop(0).rows[0][0]) if sums else None
    return NodeAnswer(msgspec.structs.replace(page, damaged=damaged), reached, added_ids_sum, execution)


def merged(definition: IndexDefinition, query: IndexQuery, pages: Sequence[NodePage]) -> EntryPage:
    """Returns one page in the order of the query.

    It ends at the last entry of a node that has more: what other nodes have behind that one may not come next.
    """
    key = index_select.order_key(definition, query.selection)
    descending = query.selection.descending
    entries = pages[0].entries
    if len(pages) > 1:
        entries = sorted((found for page in pages for found in page.entries), key=key, reverse=descending)
        ends = [key(page.entries[-1]) for page in pages if page.more and page.entries]
        if ends:
            end = max(ends) if descending else min(ends)
            entries = [found for found in entries if (key(found) >= end if descending else key(found) <= end)]
    shown = entries[: query.selection.limit]
    has_more = len(entries) > len(shown) or any(page.more for page in pages)
    cursor = None
    if shown and has_more:
        cursor = cursor_of(definition, query.selection, query.digest, shown[-1], query.after)
    return EntryPage(shown, cursor)


def entry_view(definition: IndexDefinition, query: IndexQuery, found: FoundEntry) -> dict[str, Any]:
    """Returns an entry as an answer shows it, without `cells`."""
    fields = entry_fields(definition, found.entry)
    if query.fields:
        fields = {name: value for name, value in fields.items() if name in query.fields}
    view: dict[str, Any] = {"row_key": row_key_text(found.row_key), "fields": fields}
    if definition.array_positions:
        view["element"] = found.element
    return view


async def current_entries(
    definition: IndexDefinition, entries: Sequence[FoundEntry], newest: Newest, bytes_max: int
) -> list[FoundEntry]:
    """Returns the entries that the newest cells of their rows make, in order: `verify` shows no others.

    Raises TooLarge for bodies that inflate to more than `bytes_max` in all, and Corrupt for one that can't be decoded.
    """
    steps = Steps()
    left = bytes_max
    current = []
    for found in entries:
        bodies: dict[ColumnName, Body] = {}
        for column in definition.columns:
            cell = newest[found.row_key, column]
            if cell is not None:
                packed = inflate_body(cell.body)
                left -= len(packed)
                if left < 0:
                    raise TooLarge("verify reads too many bytes of cells: ask for fewer entries at once")
                bodies[column] = decode_packed(packed)
                await steps.after(len(packed))
        made = entries_for(definition, bodies)
        if found.element < len(made) and made[found.element] == found.entry:
            current.append(found)
    return current


def unreadable_view(cell: StoredCell, error: Corrupt) -> dict[str, Any]:
    """Shows a cell that can't be decoded, as an answer names it."""
    return {
        "row_key": row_key_text(cell.row_key),
        "column_name": cell.column_name,
        "ref_key": cell.ref_key,
        "reason": str(error),
    }


async def unreadable_cells(
    cells: Iterable[StoredCell | None], bytes_max: int
) -> dict[tuple[RowKey, ColumnName], dict[str, Any]]:
    """Returns the cells that can't be decoded, as an answer names them.

    Raises TooLarge for bodies that inflate to more than `bytes_max` in all.
    """
    steps, left = Steps(), bytes_max
    found = {}
    for cell in cells:
        if cell is None:
            continue
        try:
            packed = inflate_body(cell.body)
            decode_packed(packed)
        except Corrupt as error:
            found[cell.row_key, cell.column_name] = unreadable_view(cell, error)
            continue
        left -= len(packed)
        if left < 0:
            raise TooLarge("the query reads too many bytes of cells: ask for fewer entries at once")
        await steps.after(len(packed))
    return found


_COUNTERS = "SHOW SESSION STATUS LIKE 'Handler_read%'"
_CLOCK = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6))"


def _explained(before: Sequence[str], select: str) -> Operation[tuple[list[Result], Result, Execution]]:
    """Runs a query, and measures it. Reading the counters twice before it shows what that itself reads."""
    plan = f"EXPLAIN FORMAT=TRADITIONAL {index_select.without_limits(select)}"
    *first, shown, one, two, began, result, ended, three = yield ";".join(
        [*before, plan, _COUNTERS, _COUNTERS, _CLOCK, select, _CLOCK, _COUNTERS]
    )
    zero, start, end = (sum(int(count) for _, count in counters.rows) for counters in (one, two, three))
    # Two clocks are read between the second and the third look at the counters. They read no rows.
    rows_read = max(0, (end - start) - (start - zero))
    seconds = (ended.rows[0][0] - began.rows[0][0]) / 1e6
    lines = [dict(zip(_PLAN_COLUMNS, _plan_line(row), strict=True)) for row in shown.rows]
    return first, result, Execution(index_select.without_limits(select), lines, rows_read, seconds)


_PLAN_COLUMNS = ("table", "access", "key", "rows", "extra")


def _plan_line(row: Sequence[Any]) -> tuple[Any, ...]:
    """MySQL's EXPLAIN has two columns more than MariaDB's: partitions behind the table, and filtered before the end."""
    if len(row) > 10:
        return row[2], row[4], row[6], row[9], row[11]
    return row[2], row[3], row[5], row[8], row[9]
