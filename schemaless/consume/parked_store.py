"""ParkedStore: what a trigger handler stores and reads of parked cells, and of the rows that wait behind them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from schemaless.cell import StoredCell
from schemaless.consume.ports import Script
from schemaless.runtime.batching import all_or_first_error
from schemaless.storage import parked_history_table, parked_table, shard_log
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.parked_history_table import Ending
from schemaless.storage.parked_table import Cause, ParkedCell
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

    # Scripts for the transaction that moves the checkpoint

    def put(self, record: ParkedCell) -> Script:
        """Makes or replaces a record. A retry of it is done with that. A discard that came meanwhile stays ordered."""

    def begin(self, record: ParkedCell) -> Script:
        """Marks that a process begins to call a record's cell again."""

    def unmark(self, record: ParkedCell) -> Script:
        """Takes that mark away, and stores the kills. What people ordered, and the error, stay."""

    def release_row(self, record: ParkedCell) -> Script:
        """Lets the later cells of a record's row pass it."""

    def delete(self, record: ParkedCell, ending: Ending) -> Script:
        """Deletes a record. If its cell was parked, people can see what became of it."""

    def delete_from(self, shard: int, added_id: int, ending: Ending) -> Script:
        """Deletes the records of a shard from an added_id on."""


class MySQLParkedStore:
    """Reads from the masters of the shards' homes. Its scripts are SQL."""

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

    def put(self, record: ParkedCell) -> Script:
        return parked_table.put(self._datastore.name, self._consumer, record)

    def begin(self, record: ParkedCell) -> Script:
        return parked_table.begin(self._datastore.name, self._consumer, record.shard, record.added_id)

    def unmark(self, record: ParkedCell) -> Script:
        return parked_table.unmark(self._datastore.name, self._consumer, record.shard, record.added_id, record.kills)

    def release_row(self, record: ParkedCell) -> Script:
        return parked_table.release_row(self._datastore.name, self._consumer, record.shard, record.added_id)

    def delete(self, record: ParkedCell, ending: Ending) -> Script:
        place = self._datastore.name, self._consumer, record.shard, record.added_id
        delete = parked_table.delete(*place)
        return f"{parked_history_table.keep(*place, ending)};{delete}" if is_kept(record) else delete

    def delete_from(self, shard: int, added_id: int, ending: Ending) -> Script:
        place = self._datastore.name, self._consumer, shard, added_id
        return f"{parked_history_table.keep(*place, ending, later=True)};{parked_table.delete_from(*place)}"


def is_kept(record: ParkedCell) -> bool:
    """Whether people may want to know what became of a record: it was parked, and not only waiting."""
    return record.cause is not Cause.WAITING or record.job is not None
