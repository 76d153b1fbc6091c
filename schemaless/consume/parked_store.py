"""ParkedStore: what a trigger handler reads of MySQL to call parked cells again, and the rows that wait behind them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from schemaless.batching import all_or_first_error
from schemaless.cell import StoredCell
from schemaless.storage import parked_table, shard_log
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.parked_table import ParkedCell
from schemaless.topology import Datastore

ROW_BYTES_MAX = 4 << 20
"""Bodies of one page of a row. One larger cell is read alone (I14)."""


class ParkedStore(Protocol):
    async def of_shards(self, shards: Iterable[int]) -> Mapping[int, Sequence[ParkedCell]]:
        """Returns the records of these shards, by shard, in the order of added_ids. Raises StorageUnavailable."""

    async def of_row(
        self, shard: int, row_key: bytes, columns: Collection[str], after: int, until: int
    ) -> Sequence[StoredCell]:
        """Returns the first cells of a row in these columns, after one added_id and up to another, bounded.

        None means that there are no more. Raises StorageUnavailable.
        """


class MySQLParkedStore:
    """Reads from the masters of the shards' homes."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, consumer: str) -> None:
        self._storage = storage
        self._datastore = datastore
        self._consumer = consumer

    async def of_shards(self, shards: Iterable[int]) -> Mapping[int, Sequence[ParkedCell]]:
        by_home = self._datastore.by_home(list(shards), lambda shard: shard)
        answers = await all_or_first_error(
            self._storage.master(home).run(parked_table.of_shards, self._datastore.name, self._consumer, numbers)
            for home, numbers in by_home.items()
        )
        found: dict[int, list[ParkedCell]] = {}
        for answer in answers:
            for cell in answer:
                found.setdefault(cell.shard, []).append(cell)
        return found

    async def of_row(
        self, shard: int, row_key: bytes, columns: Collection[str], after: int, until: int
    ) -> Sequence[StoredCell]:
        master = self._storage.master(self._datastore.home(shard))
        return await master.run(shard_log.of_row, self._datastore, shard, row_key, columns, after, until, ROW_BYTES_MAX)
