"""The maintainer is one index as a consumer: it turns cells into versioned index writes, by cluster (I11)."""

from __future__ import annotations

from collections.abc import Sequence

from schemaless.batching import all_or_first_error
from schemaless.cell import RowKey
from schemaless.consume.ports import Effect, Outcome, Run
from schemaless.index.definition import IndexDefinition
from schemaless.index.transition import IndexWrite, Row, index_writes
from schemaless.storage import entity_table, index_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import Datastore

Rows = dict[RowKey, Row]


class Maintainer:
    together = True
    """Entries of several shards go to the same tables: one transaction for each cluster takes them all."""

    record_within_s = 0.0
    """A checkpoint moves in the transaction of its entries."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition) -> None:
        self._storage = storage
        self._datastore = datastore
        self._definition = definition

    async def handle(self, runs: Sequence[Run]) -> Effect:
        """Evaluates the index before and after each event, on the log alone. Raises StorageUnavailable."""
        before = await self._rows_before(runs)
        writes = (
            write
            for run in runs
            for write in index_writes(self._definition, self._datastore.shards, before[run.shard], run.cells)
        )
        scripts = {
            cluster: index_table.upserts(self._datastore, self._definition, sorted(here, key=_lock_order))
            for cluster, here in self._datastore.by_home(writes, lambda write: write.shard).items()
        }
        return Effect([Outcome(len(run.cells)) for run in runs], scripts)

    async def supersede(self, shard: int, starts_at: int, generation: int) -> Effect:
        return Effect([])

    async def _rows_before(self, runs: Sequence[Run]) -> dict[int, Rows]:
        """Returns by shard the rows of the run's cells, as the log makes them just before its first cell."""
        wanted: dict[int, tuple[int, Sequence[RowKey]]] = {}
        for run in runs:
            row_keys = {cell.row_key for cell in run.cells if cell.column_name in self._definition.columns}
            if row_keys and run.after.added_id:
                wanted[run.shard] = (run.after.added_id, sorted(row_keys))
        columns = self._definition.columns
        pages = await all_or_first_error(
            self._storage.master(cluster).run(
                entity_table.newest_until, self._datastore, {shard: wanted[shard] for shard in shards}, columns
            )
            for cluster, shards in self._datastore.by_home(wanted, lambda shard: shard).items()
        )
        before: dict[int, Rows] = {run.shard: {} for run in runs}
        for cell in (cell for page in pages for cell in page):
            row = before[cell.shard].setdefault(cell.row_key, {})
            before[cell.shard][cell.row_key] = {**row, cell.column_name: cell}
        return before


def _lock_order(write: IndexWrite) -> tuple[int, RowKey]:
    """Concurrent transactions lock rows in the same order, so they wait for one another instead of failing."""
    return write.shard, write.row_key
