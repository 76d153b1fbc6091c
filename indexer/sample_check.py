"""Comparison of a new version of an index with a bounded sample of rows and entries, before it may answer."""

from __future__ import annotations

import os

from schemaless.cell import RowKey, row_key_text
from schemaless.errors import SchemalessError
from schemaless.index.comparison import FIRST_ROW, EntryFault
from schemaless.index.inspection import IndexInspector
from schemaless.runtime.batching import all_or_first_error, chunks
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import DefinedIndex
from schemaless.topology import Datastore

SAMPLE_MAX = 4096
"""About how many rows, and how many entries, are compared in all shards."""

_PAGE_ROWS_MAX = 200
_SHARDS_AT_ONCE = 8


class DiffersFromCells(SchemalessError):
    """A new version of an index isn't what its cells make."""

    retryable = False
    hint = "the present version goes on answering; `schemaless index resume` compares again, a drop gives the change up"


async def compare(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> int:
    """Compares a sample of rows and entries of every shard with the cells, on masters. Returns how many it read.

    Raises DiffersFromCells, StorageUnavailable or NotReady.
    """
    page_rows = max(1, min(_PAGE_ROWS_MAX, SAMPLE_MAX // (2 * datastore.shards)))
    inspector = IndexInspector(storage, datastore, index.definition, page_rows)
    masters = [storage.master(cluster) for cluster in datastore.clusters]
    somewhere = RowKey(os.urandom(16))

    async def sample(shard: int) -> tuple[int, list[EntryFault]]:
        """Compares two pages of a shard in each direction: the first ones, and some others."""
        read, faults = 0, list[EntryFault]()
        for begin in (FIRST_ROW, somewhere):
            rows = await inspector.rows(masters, shard, begin)
            entries = await inspector.entries(storage.master(datastore.home(shard)), shard, (begin, 0))
            read += rows.rows + entries.entries
            faults += [fault for found in rows.faults.values() for fault in found] + list(entries.faults)
        return read, faults

    read, faults = 0, list[EntryFault]()
    for shards in chunks(range(datastore.shards), count_max=_SHARDS_AT_ONCE):
        for count, found in await all_or_first_error(sample(shard) for shard in shards):
            read += count
            faults += found
    if faults:
        raise DiffersFromCells(
            f"version {index.number} was compared with its cells: {len(faults)} of {read} rows and entries differ, such"
            f" as the {faults[0].kind} entry of row {row_key_text(faults[0].place.row_key)}"
        )
    return read
