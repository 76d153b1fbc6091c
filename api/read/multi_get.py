"""Reads the cells under many keys from all their homes concurrently, within a bound of bytes (I14)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from api.read.reader import Reader, Served, served_together
from schemaless.cell import ColumnName, RefKey, RowKey, StoredCell
from schemaless.errors import TooLarge
from schemaless.runtime.batching import chunks
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
    """Returns the cells in order, None for a missing one. Raises TooLarge or StorageUnavailable.

    All clusters together never hold more than `bytes_max`. Each has an equal share first. Those whose cells need more
    are read again one after the other, within what the others left.
    """
    shards = [shard_of(key.row_key, datastore.shards) for key in wanted]
    by_cluster = datastore.by_home(range(len(wanted)), lambda position: shards[position])
    found: Found = {}
    served: list[Served] = []

    async def read_cluster(cluster: str, positions: Sequence[int], within: int) -> int:
        """Returns how many bytes of bodies it read."""
        here: Found = {}
        left = within
        for chunk in chunks(positions, count_max=CHUNK_KEYS):
            keys = [(shards[position], *msgspec.structs.astuple(wanted[position])) for position in chunk]
            cells, by = await reader.read(
                cluster, entity_table.get_or_newest, datastore, keys, left, read_from=read_from
            )
            here.update(zip(chunk, cells, strict=True))
            served.append(by)
            left -= sum(len(cell.body) for cell in cells if cell is not None)
        found.update(here)
        return within - left

    share = bytes_max // len(by_cluster)
    names = list(by_cluster)
    results = await asyncio.gather(
        *(read_cluster(name, by_cluster[name], share) for name in names), return_exceptions=True
    )
    left = bytes_max
    too_large = []
    for name, result in zip(names, results, strict=True):
        if isinstance(result, TooLarge) and len(names) > 1:
            too_large.append(name)
        elif isinstance(result, BaseException):
            raise result
        else:
            left -= result
    for name in too_large:
        left -= await read_cluster(name, by_cluster[name], left)
    return [found[position] for position in range(len(wanted))], served_together(served)
