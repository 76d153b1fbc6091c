"""Overlay: what the cells of one shard that an index has not reached yet add to a query, so that it sees a put at once.

The order of the reads makes it right. The node that answers shows the index's checkpoint first. Then the shard's
master shows its head, the rows of the cells in between, and the newest cells of these rows as of that head. The page of
the node is read last, without these rows: the index may have written any of them meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api.http.budget import Steps
from api.index.evaluation import page_of
from api.index.query import IndexQuery
from api.index.search import unreadable_view
from api.read.reader import Reader, Served
from schemaless.cell import ColumnName, RowKey, StoredCell
from schemaless.codec import Body, decode_packed, inflate_body
from schemaless.errors import Corrupt, LocationGone, Unavailable
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import entries_for
from schemaless.location import Location, ShardLocation, is_lag, verify_location
from schemaless.storage import entity_table, shard_log
from schemaless.storage.index_select import NodePage
from schemaless.storage.index_table import FoundEntry
from schemaless.storage.operation import Operation
from schemaless.storage.shard_log import Changes
from schemaless.topology import Datastore, Role

CELLS_MAX = 1000
BYTES_MAX = 4 << 20
"""Of the bodies that one query reads, as they are stored and as they are decoded."""

ENTRIES_MAX = 10_000
"""Elements that one query evaluates: some tens of milliseconds."""

EXCLUDED_MAX = 10_000
"""Rows times values of the shard field, each of which is a row key in the statement."""

AT_ONCE_MAX = 16
"""Queries of a process that read an overlay at the same time."""

_ENTRY_WORK_BYTES = 64  # evaluating an element takes about as long as decoding so many bytes


Cells = Mapping[tuple[RowKey, ColumnName], StoredCell | None]
"""The newest cells of columns, as a node has them."""


class Unevaluated(Unavailable):
    """The cells that the index lacks can't be evaluated with the query, so it waits for the index."""


class Overlay(msgspec.Struct, frozen=True):
    """`page` has the entries of the rows as of the shard's head, as far as the query asks for them.

    `cells` counts what the index lacked. `newest` has the source cells of the rows on the page. `unreadable` has cells
    that can't be decoded, as an answer names them. Their rows are in `row_keys` and not on the page.
    """

    cells: int
    row_keys: list[RowKey]
    page: NodePage
    newest: Cells
    unreadable: Mapping[tuple[RowKey, ColumnName], dict[str, Any]] = {}

    def with_newest(self, cells: Cells) -> Cells:
        """Returns cells that another node read, each at least as new as the one that this overlay was made of."""
        newer = {}
        for key, cell in cells.items():
            known = self.newest.get(key)
            newer[key] = known if known is not None and (cell is None or cell.ref_key < known.ref_key) else cell
        return newer


class Overlays:
    """Reads overlays. Belongs to one event loop."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._under_way = 0

    async def read(
        self,
        datastore: Datastore,
        definition: IndexDefinition,
        query: IndexQuery,
        after: ShardLocation,
        reached: tuple[Location, int],
        read_from: Role | None,
    ) -> tuple[Overlay, Served]:
        """Returns what lies between the index's checkpoint and the head of the shard of `after`.

        `reached` is the lowest checkpoint of the nodes that answer, and the highest added_id that any of them has
        reached. Raises Unevaluated, StorageUnavailable, or LocationGone for a location that is superseded.
        """
        if self._under_way >= AT_ONCE_MAX:
            raise Unevaluated(f"{AT_ONCE_MAX} queries evaluate such cells already")
        self._under_way += 1
        try:
            (changes, cells), served = await self._reader.read(
                datastore.home(after.shard),
                changed_rows,
                datastore,
                definition,
                after,
                reached,
                read_from=Role.MASTER if read_from is Role.MASTER else None,  # a minion only if the master is away
            )
            if len(changes.row_keys) * len(query.places) > EXCLUDED_MAX:
                raise Unevaluated(f"{len(changes.row_keys)} rows changed, with {len(query.places)} values to look for")
            entries, unreadable = await _entries(definition, cells)
            page = page_of(definition, [value for _, value in query.places], query.selection, entries)
            shown = {found.row_key for found in page.entries}
            newest = {(cell.row_key, cell.column_name): cell for cell in cells if cell.row_key in shown}
            lacked = changes.head.added_id - reached[0].added_id
            return Overlay(lacked, list(changes.row_keys), page, newest, unreadable), served
        finally:
            self._under_way -= 1


def changed_rows(
    datastore: Datastore, definition: IndexDefinition, after: ShardLocation, reached: tuple[Location, int]
) -> Operation[tuple[Changes, list[StoredCell]]]:
    """Returns the rows that the index lacks cells of, and their newest source cells as of the head, of one node."""
    changes = yield from shard_log.changes_after(
        datastore, after.shard, reached[0].added_id, definition.columns, CELLS_MAX
    )
    verify_evaluable(changes, after.location, reached)
    if not changes.row_keys:
        return changes, []
    rows = {after.shard: (changes.head.added_id, changes.row_keys)}
    newest = yield from entity_table.newest_until(datastore, rows, definition.columns, BYTES_MAX)
    if newest.unread or sum(len(cell.body) for cell in newest.cells) > BYTES_MAX:
        raise Unevaluated(f"{len(changes.row_keys)} rows changed, with more cells than are evaluated")
    return changes, newest.cells


def verify_evaluable(changes: Changes, wanted: Location, reached: tuple[Location, int]) -> None:
    """Raises Unevaluated where the cells between the checkpoints and the head say too little or are too many.

    Raises LocationGone for a wanted location that is superseded.
    """
    lowest, highest = reached
    head = changes.head
    try:
        verify_location(wanted.generation, wanted.added_id, changes.starts, head.added_id)
    except LocationGone as gone:
        if not is_lag(wanted, gone):
            raise
        raise Unevaluated(str(gone)) from gone
    if lowest.generation != head.generation:
        raise Unevaluated(f"the shard's generation is {head.generation}")
    if head.added_id < highest:
        raise Unevaluated(f"the node that has the log shows it up to {head.added_id} only")
    if head.added_id - lowest.added_id > CELLS_MAX:
        raise Unevaluated(f"it lacks {head.added_id - lowest.added_id} cells, and {CELLS_MAX} are evaluated at most")


async def _entries(
    definition: IndexDefinition, cells: list[StoredCell]
) -> tuple[list[FoundEntry], dict[tuple[RowKey, ColumnName], dict[str, Any]]]:
    """Evaluates the rows of these cells. Returns their entries, and the cells that cost their rows: they can't be
    decoded.

    Raises Unevaluated.
    """
    rows: dict[RowKey, list[StoredCell]] = {}
    for cell in cells:
        rows.setdefault(cell.row_key, []).append(cell)
    steps = Steps()
    left = BYTES_MAX
    evaluated = 0
    entries: list[FoundEntry] = []
    unreadable: dict[tuple[RowKey, ColumnName], dict[str, Any]] = {}
    for row_key, columns in rows.items():
        bodies: dict[ColumnName, Body] = {}
        for cell in columns:
            try:
                packed = inflate_body(cell.body)
                left -= len(packed)
                if left < 0:
                    raise Unevaluated(f"{len(rows)} rows changed, with more than {BYTES_MAX} bytes of cells")
                bodies[cell.column_name] = decode_packed(packed)
            except Corrupt as error:
                unreadable[row_key, cell.column_name] = unreadable_view(cell, error)
                continue
            await steps.after(len(packed))
        if len(bodies) < len(columns):
            continue
        made = entries_for(definition, bodies)
        entries += [FoundEntry(row_key, entry, element) for element, entry in enumerate(made) if entry is not None]
        evaluated += len(made)
        if evaluated > ENTRIES_MAX:
            raise Unevaluated(f"{len(rows)} rows changed, with more than {ENTRIES_MAX} elements")
        await steps.after(len(made) * _ENTRY_WORK_BYTES)
    return entries, unreadable
