"""Reads the cells under many keys from all their homes concurrently, within a bound of bytes (I14)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from api.read.reader import Reader, Served, served_together
from schemaless.batching import chunks
from schemaless.cell import CellKey, ColumnName, RefKey, RowKey, StoredCell
from schemaless.errors import TooLarge
from schemaless.sharding import shard_of
from schemaless.storage import entity_table
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore, Role

CHUNK_KEYS = 100  # of a megabyte at most: bounds what is held before the answer's own bound is noticed
Found = dict[int, StoredCell | None]


class WantedCell(msgspec.Struct, frozen=True):
    """A key to read. Without a ref_key it asks for the newest version."""

    row_key: RowKey
    column_name: ColumnName
    ref_key: RefKey | None


async def read_many(
    reader: Reader, datastore: Datastore, wanted: Sequence[WantedCell], read_from: Role | None, bytes_max: int
) -> tuple[list[StoredCell | None], Served]:
    """Returns the cells in order, None for a missing one. Raises TooLarge or StorageUnavailable."""
    shards = [shard_of(key.row_key, datastore.shards) for key in wanted]
    by_cluster = datastore.by_home(range(len(wanted)), lambda position: shards[position])

    async def read_cluster(cluster: str, positions: list[int]) -> tuple[Found, Served]:
        found: Found = {}
        parts: list[Served] = []
        for chunk in chunks(positions, count_max=CHUNK_KEYS):
            keys = [wanted[position] for position in chunk]
            cells, served = await reader.read(cluster, _get_or_newest, datastore, keys, read_from=read_from)
            found.update(zip(chunk, cells, strict=True))
            parts.append(served)
            if sum(len(cell.body) for cell in found.values() if cell is not None) > bytes_max:
                raise TooLarge("the answer would be too large: ask for fewer at once")
        return found, served_together(parts)

    parts = await asyncio.gather(*(read_cluster(cluster, positions) for cluster, positions in by_cluster.items()))
    found = {position: cell for cells, _ in parts for position, cell in cells.items()}
    return [found[position] for position in range(len(wanted))], served_together([served for _, served in parts])


def _get_or_newest(datastore: Datastore, keys: Sequence[WantedCell]) -> Operation[list[StoredCell | None]]:
    exact: dict[int, tuple[int, CellKey]] = {}
    newest = {}
    for position, key in enumerate(keys):
        shard = shard_of(key.row_key, datastore.shards)
        if key.ref_key is None:
            newest[position] = (shard, key.row_key, key.column_name)
        else:
            exact[position] = (shard, CellKey(key.row_key, key.column_name, key.ref_key))
    found: Found = {}
    if exact:
        found.update(zip(exact, (yield from entity_table.get(datastore, list(exact.values()))), strict=True))
    if newest:
        found.update(zip(newest, (yield from entity_table.newest(datastore, list(newest.values()))), strict=True))
    return [found[position] for position in range(len(keys))]
