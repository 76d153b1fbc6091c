"""Reads the cells under many keys from all their homes concurrently, within a bound of bytes (I14)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from api.read.reader import Reader, Served, served_together
from schemaless.batching import chunks
from schemaless.cell import ColumnName, RefKey, RowKey, StoredCell
from schemaless.errors import TooLarge
from schemaless.sharding import shard_of
from schemaless.storage import entity_table
from schemaless.topology import Datastore, Role

CHUNK_KEYS = 100  # of one script
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
    left = bytes_max
    by_cluster = datastore.by_home(range(len(wanted)), lambda position: shards[position])

    async def read_cluster(cluster: str, positions: list[int]) -> tuple[Found, Served]:
        found: Found = {}
        parts: list[Served] = []
        for chunk in chunks(positions, count_max=CHUNK_KEYS):
            nonlocal left
            keys = [(shards[position], *msgspec.structs.astuple(wanted[position])) for position in chunk]
            cells, served = await reader.read(
                cluster, entity_table.get_or_newest, datastore, keys, left, read_from=read_from
            )
            found.update(zip(chunk, cells, strict=True))
            parts.append(served)
            left -= sum(len(cell.body) for cell in cells if cell is not None)
            if left < 0:  # another cluster's cells were read meanwhile
                raise TooLarge("the answer would be too large: ask for fewer at once")
        return found, served_together(parts)

    parts = await asyncio.gather(*(read_cluster(cluster, positions) for cluster, positions in by_cluster.items()))
    found = {position: cell for cells, _ in parts for position, cell in cells.items()}
    return [found[position] for position in range(len(wanted))], served_together([served for _, served in parts])
