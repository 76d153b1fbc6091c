"""The maintainer is one index as a consumer: it turns cells into versioned index writes, by cluster (I11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from schemaless.batching import all_or_first_error
from schemaless.cell import RowKey, StoredCell
from schemaless.consume.ports import Effect, Outcome, Run, Script
from schemaless.index.definition import IndexDefinition
from schemaless.index.transition import IndexWrite, Row, index_writes
from schemaless.storage import entity_table, index_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import Datastore

Rows = Mapping[RowKey, Row]

EFFECT_BYTES_MAX = 8 << 20
"""The most bytes of SQL that one effect has for a cluster: half of MariaDB's default for what a server takes."""


class Maintainer:
    together = True
    """Entries of several shards go to the same tables: one transaction for each cluster takes them all."""

    record_within_s = 0.0
    """A checkpoint moves in the transaction of its entries."""

    def __init__(
        self,
        storage: AsyncStorage,
        datastore: Datastore,
        definition: IndexDefinition,
        *,
        effect_bytes_max: int = EFFECT_BYTES_MAX,
    ) -> None:
        self._storage = storage
        self._datastore = datastore
        self._definition = definition
        self._effect_bytes_max = effect_bytes_max

    async def handle(self, runs: Sequence[Run]) -> Effect:
        """Evaluates the index before and after each event, on the log alone. Raises StorageUnavailable.

        It finishes as many cells as fit the bounds of what it reads and writes, at least one of all runs.
        """
        before, unread = await self._rows_before(runs)
        room = self._room()
        outcomes, writes = [], list[IndexWrite]()
        for run in runs:
            missing = unread.get(run.shard, frozenset())
            readable = next(
                (
                    n
                    for n, cell in enumerate(run.cells)
                    if cell.row_key in missing and cell.column_name in self._definition.columns
                ),
                len(run.cells),
            )
            cells = run.cells[:readable]
            changed = index_writes(self._definition, self._datastore.shards, before[run.shard], cells, room.take)
            writes += changed.writes
            outcomes.append(Outcome(changed.finished))
        return Effect(outcomes, self._scripts(writes))

    async def supersede(self, shard: int, starts_at: int, generation: int) -> Effect:
        return Effect([])

    async def _rows_before(self, runs: Sequence[Run]) -> tuple[dict[int, Rows], dict[int, frozenset[RowKey]]]:
        """Returns by shard the rows of the run's cells, as the log makes them just before its first cell.

        And the rows that were not read, because their bodies are too many bytes. The first that is needed was read.
        """
        columns = self._definition.columns
        wanted: dict[int, tuple[int, Sequence[RowKey]]] = {}
        for run in runs:
            row_keys = list(dict.fromkeys(cell.row_key for cell in run.cells if cell.column_name in columns))
            if row_keys and run.after.added_id:
                wanted[run.shard] = (run.after.added_id, row_keys)
        pages = await all_or_first_error(
            self._storage.master(cluster).run(
                entity_table.newest_until, self._datastore, {shard: wanted[shard] for shard in shards}, columns
            )
            for cluster, shards in self._datastore.by_home(wanted, lambda shard: shard).items()
        )
        before: dict[int, Rows] = {run.shard: {} for run in runs}
        before.update(_rows(cell for page in pages for cell in page.cells))
        return before, {shard: frozenset(keys) for page in pages for shard, keys in page.unread.items()}

    def _scripts(self, writes: Sequence[IndexWrite]) -> dict[str, Script]:
        return {
            cluster: index_table.upserts(self._datastore, self._definition, sorted(here, key=_lock_order))
            for cluster, here in self._datastore.by_home(writes, lambda write: write.shard).items()
        }

    def _room(self) -> _Room:
        return _Room(self._datastore, self._definition, self._effect_bytes_max)


class _Room:
    """The bytes of SQL that are left of an effect, by cluster. The first writes are taken whatever their size."""

    def __init__(self, datastore: Datastore, definition: IndexDefinition, bytes_max: int) -> None:
        self._datastore = datastore
        self._definition = definition
        self._left = dict.fromkeys(datastore.clusters, bytes_max)
        self._shards = set[int]()

    def take(self, writes: Sequence[IndexWrite]) -> bool:
        """Takes the writes of one cell, all or none. Returns whether they fit."""
        left = dict(self._left)
        for write in writes:
            is_first = write.shard not in self._shards
            left[self._datastore.home(write.shard)] -= index_table.sql_bytes_max(self._definition, write, is_first)
        if self._shards and min(left.values()) < 0:
            return False
        self._left = left
        self._shards.update(write.shard for write in writes)
        return True


def _rows(cells: Iterable[StoredCell]) -> Mapping[int, Rows]:
    """Returns cells by shard, row and column."""
    found: dict[int, dict[RowKey, dict[str, StoredCell]]] = {}
    for cell in cells:
        found.setdefault(cell.shard, {}).setdefault(cell.row_key, {})[cell.column_name] = cell
    return found


def _lock_order(write: IndexWrite) -> tuple[int, RowKey]:
    """Concurrent transactions lock rows in the same order, so they wait for one another instead of failing."""
    return write.shard, write.row_key
