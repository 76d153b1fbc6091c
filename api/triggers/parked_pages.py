"""Parked pages: the parked cells of a program with what waits behind each, over all clusters.

A page is bounded in cells and bytes (I14). It is found without errors and bodies first, so it is known what fits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from api.read.reader import Reader, Served
from schemaless.cell import StoredCell, created_at_text, row_key_text
from schemaless.codec import decode_body
from schemaless.errors import Corrupt
from schemaless.location import ADDED_ID_MAX
from schemaless.runtime.batching import chunks
from schemaless.storage import everywhere, parked_selection, trigger_order_table
from schemaless.storage.parked_selection import ParkedFilter, ParkedPlace
from schemaless.storage.parked_table import ParkedCell
from schemaless.storage.trigger_order_table import ProgramFunctions
from schemaless.topology import Datastore, Role

PAGE_BYTES_MAX = 4 << 20
BEHIND = "behind"
_HEADS_AT_ONCE = 16


class ParkedCursor(msgspec.Struct, frozen=True, array_like=True):
    """The last cell that was shown: `after` waits behind the record at `head`, or is the record's own added_id."""

    shard: int = 0
    head: int = 0
    after: int = 0


BEFORE_ALL = ParkedCursor()


class ParkedItem(msgspec.Struct, frozen=True, gc=False):
    """A cell of a page: the record's own where `added_id` is that of `head`, else one that waits behind it."""

    head: ParkedPlace
    added_id: int

    @property
    def is_behind(self) -> bool:
        return self.added_id != self.head.added_id

    @property
    def cursor(self) -> ParkedCursor:
        return ParkedCursor(self.head.shard, self.head.added_id, self.added_id)


class ParkedPage(msgspec.Struct, frozen=True):
    """`count`: how many records match, without what waits behind them. `following` leads to the rest."""

    views: Sequence[tuple[ParkedItem, dict[str, Any]]]
    count: int
    following: ParkedCursor | None
    served: Sequence[Served]


class ParkedPages:
    """Reads the parked cells of one program."""

    def __init__(self, reader: Reader, datastore: Datastore, consumer: str, read_from: Role | None) -> None:
        self._reader = reader
        self._datastore = datastore
        self._consumer = consumer
        self._read_from = read_from

    async def read(
        self, wanted: ParkedFilter, after: ParkedCursor, limit: int, *, heads: bool = True, behind: bool = True
    ) -> ParkedPage:
        """Returns the next cells. `heads` and `behind` say which kinds are shown."""
        read = partial(self._reader.read, read_from=self._read_from)
        asked = self._datastore, self._consumer, wanted, (after.shard, after.head), limit + 1
        program, clusters = (self._datastore.name, self._consumer), self._datastore.clusters
        parts, programs = await asyncio.gather(
            asyncio.gather(*(read(cluster, parked_selection.places, *asked) for cluster in clusters)),
            asyncio.gather(*(read(cluster, trigger_order_table.functions_of, *program) for cluster in clusters)),
        )
        found = sorted((place for (places, _), _ in parts for place in places), key=_key)[: limit + 1]
        functions = everywhere.latest(known for known, _ in programs)
        columns = () if functions is None else tuple(functions.functions)
        items: list[ParkedItem] = []
        size = 0
        for batch in chunks(found, count_max=_HEADS_AT_ONCE):
            for item, size_bytes in await self._expanded(batch, columns, after, limit + 1, behind=behind):
                shown = behind if item.is_behind else heads and _key(item.head) != (after.shard, after.head)
                if not shown:
                    continue
                size += size_bytes
                if items and (len(items) == limit or size > PAGE_BYTES_MAX):
                    return await self._page(items, parts, functions, items[-1].cursor)
                items.append(item)
        following = None if len(found) <= limit else ParkedCursor(*_key(found[-1]), ADDED_ID_MAX)
        return await self._page(items, parts, functions, following)

    async def _expanded(
        self, batch: Sequence[ParkedPlace], columns: Sequence[str], after: ParkedCursor, limit: int, *, behind: bool
    ) -> list[tuple[ParkedItem, int]]:
        """Returns records, each with the cells behind it, and the bytes that they take."""
        held = [place for place in batch if place.holds_row] if behind else []
        cells: dict[tuple[int, int], list[parked_selection.BehindCell]] = {}
        for cluster, own in self._datastore.by_home(held, lambda place: place.shard).items():
            starts = [
                (place, after.after if _key(place) == (after.shard, after.head) else place.added_id) for place in own
            ]
            lists, _ = await self._reader.read(
                cluster, parked_selection.behind, self._datastore, starts, columns, limit, read_from=self._read_from
            )
            cells.update(zip(map(_key, own), lists, strict=True))
        expanded = []
        for place in batch:
            expanded.append((ParkedItem(place, place.added_id), place.size_bytes))
            for cell in cells.get(_key(place), ()):
                expanded.append((ParkedItem(place, cell.added_id), cell.size_bytes))
        return expanded

    async def _page(
        self,
        items: Sequence[ParkedItem],
        parts: Sequence[Any],
        functions: ProgramFunctions | None,
        following: ParkedCursor | None,
    ) -> ParkedPage:
        records: dict[tuple[int, int], ParkedCell] = {}
        cells: dict[tuple[int, int], StoredCell] = {}
        keys = [(item.head.shard, added_id) for item in items for added_id in {item.head.added_id, item.added_id}]
        for cluster, own in self._datastore.by_home(sorted(set(keys)), lambda key: key[0]).items():
            (some_records, some_cells), _ = await self._reader.read(
                cluster, parked_selection.read, self._datastore, self._consumer, own, read_from=self._read_from
            )
            records |= some_records
            cells |= some_cells
        views: list[tuple[ParkedItem, dict[str, Any]]] = []
        for item in items:
            record, cell = records.get(_key(item.head)), cells.get((item.head.shard, item.added_id))
            if record is not None and not item.is_behind:
                views.append((item, _record_view(record, cell)))
            elif record is not None and cell is not None:
                views.append((item, _behind_view(record, cell, functions)))
        counted = sum(count for (_, count), _ in parts)
        return ParkedPage(views, counted, following, [served for _, served in parts])


def _key(place: ParkedPlace) -> tuple[int, int]:
    return place.shard, place.added_id


def _record_view(record: ParkedCell, cell: StoredCell | None) -> dict[str, Any]:
    return {
        "id": f"{record.shard}:{record.location}:{record.function_name}",
        "row_key": row_key_text(record.row_key),
        "column_name": record.column_name,
        "ref_key": record.ref_key,
        "shard": record.shard,
        "generation": record.generation,
        "added_id": record.added_id,
        "trigger": record.function_name,
        "cause": record.cause.value,
        "error": record.error,
        "attempts": record.attempts,
        "attempted_at": [created_at_text(at) for at in record.attempted_at],
        "parked_at": created_at_text(record.parked_at),
        "version": record.version,
        "holds_row": record.holds_row,
        "ordered": None if record.ordered is None else record.ordered.value,
        "due_at": None if record.due_at is None else created_at_text(record.due_at),
        "job": None if record.job is None else f"{record.job:016x}",
        "reason": record.order_reason,
        **_body_members(cell),
    }


def _behind_view(record: ParkedCell, cell: StoredCell, functions: ProgramFunctions | None) -> dict[str, Any]:
    """Shows a cell that waits. It owes every function of its column."""
    own = () if functions is None else functions.functions.get(cell.column_name, ())
    trigger = own[0] if own else record.function_name
    return {
        "id": f"{cell.shard}:{cell.generation}:{cell.added_id}:{trigger}",
        "row_key": row_key_text(cell.row_key),
        "column_name": cell.column_name,
        "ref_key": cell.ref_key,
        "shard": cell.shard,
        "generation": cell.generation,
        "added_id": cell.added_id,
        "trigger": trigger,
        "cause": BEHIND,
        "error": None,
        "attempts": 0,
        "parked_at": None,
        "version": None,
        "holds_row": False,
        "behind": f"{record.shard}:{record.location}:{record.function_name}",
        **_body_members(cell),
    }


def _body_members(cell: StoredCell | None) -> dict[str, Any]:
    """Returns the body, which is null for a cell that is gone, or was erased. So is one that can't be decoded, with the
    reason.
    """
    if cell is None or cell.is_erased:
        return {"body": None}
    try:
        return {"body": decode_body(cell.body)}
    except Corrupt as error:
        return {"body": None, "unreadable": str(error)}
