"""Expected entries: what the newest cells of rows make of an index, read on the masters of these rows (I11).

A cell that can't be decoded keeps its own row from being judged, and no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import msgspec

from schemaless.cell import RowKey, StoredCell, row_key_text
from schemaless.codec import decode_body
from schemaless.errors import Corrupt
from schemaless.index.comparison import EntryPlace, expected_entries
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import Bodies, IndexEntry
from schemaless.location import Location, kept_until
from schemaless.runtime.batching import chunks
from schemaless.storage import entity_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.topology import Datastore

_ROWS_AT_ONCE = 250

Rows = Mapping[int, Sequence[RowKey]]
"""Row keys by the shard of the rows."""


class MadeEntries(msgspec.Struct, frozen=True):
    """What some rows make, by place. `unreadable` are those of them that have a cell which can't be decoded, and why.

    They have no entries here.
    """

    rows: Sequence[RowKey]
    entries: Mapping[EntryPlace, IndexEntry]
    unreadable: Mapping[RowKey, str]


class ExpectedEntries:
    """Reads the cells of a datastore, and evaluates a version of an index."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition) -> None:
        self._storage = storage
        self._datastore = datastore
        self._definition = definition

    async def of_rows(self, rows: Rows, untils: Mapping[int, int]) -> AsyncIterator[MadeEntries]:
        """Yields rows in bounded parts, as their logs make them up to an added_id of each shard.

        Raises StorageUnavailable.
        """
        for cluster, shards in self._datastore.by_home(rows, lambda shard: shard).items():
            unread = {shard: rows[shard] for shard in shards if rows[shard]}
            while unread:
                wanted = {shard: (untils[shard], row_keys) for shard, row_keys in unread.items()}
                page = await self._storage.master(cluster).run(
                    entity_table.newest_until, self._datastore, wanted, self._definition.columns
                )
                read = [
                    row_key
                    for shard, row_keys in unread.items()
                    for row_key in row_keys[: len(row_keys) - len(page.unread.get(shard, ()))]
                ]
                async for made in self.of_cells(page.cells, read):
                    yield made
                unread = dict(page.unread)

    async def of_cells(
        self, cells: Iterable[StoredCell], row_keys: Sequence[RowKey] = ()
    ) -> AsyncIterator[MadeEntries]:
        """Yields what the newest cells of rows make, in bounded parts. Rows of `row_keys` may have no cell."""
        rows: dict[RowKey, list[StoredCell]] = {row_key: [] for row_key in row_keys}
        for cell in cells:
            rows.setdefault(cell.row_key, []).append(cell)
        for some in chunks(list(rows), count_max=_ROWS_AT_ONCE):
            bodies: dict[RowKey, Bodies] = {}
            unreadable: dict[RowKey, str] = {}
            for row_key in some:
                try:
                    bodies[row_key] = {cell.column_name: decode_body(cell.body) for cell in rows[row_key]}
                except Corrupt as error:
                    unreadable[row_key] = f"a cell of row {row_key_text(row_key)} can't be read: {error}"
            made = expected_entries(self._definition, self._datastore.shards, bodies)
            yield MadeEntries(some, made, unreadable)
            await asyncio.sleep(0)  # others of this process have their turn

    async def are_kept(self, shard: int, locations: Iterable[Location]) -> bool:
        """Returns whether the shard's log still has what it had up to these locations. Raises StorageUnavailable."""
        head, starts = await self.home(shard).run(shard_head.history, self._datastore.name, shard)
        return all(kept_until(at, starts) == at.added_id <= head.added_id for at in locations)

    def home(self, shard: int) -> AsyncNode:
        """Returns the master of a shard's home."""
        return self._storage.master(self._datastore.home(shard))
