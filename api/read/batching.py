"""ReadBatcher: concurrent reads of single cells from one node become one script, as puts become one transaction.

A read that is alone is sent at once. A round trip costs this process more than MySQL's answer. Batching halves that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from schemaless.cell import CellKey, ColumnName, RowKey, StoredCell
from schemaless.runtime.batching import Batcher, BatchLimits
from schemaless.storage import entity_table
from schemaless.storage.asyncmy_driver import AsyncNode
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore

Key = TypeVar("Key")
ExactKey = tuple[int, CellKey]
ColumnKey = tuple[int, RowKey, ColumnName]
Read = Callable[[Datastore, Sequence[Key]], Operation[list[StoredCell | None]]]

LIMITS = BatchLimits(lanes=3, items_max=64, queued_bytes_max=1 << 40)  # its keys are small: units bound the queue
KEY_BYTES = 100  # of one that waits, about


class CellBatcher(Batcher[Key, StoredCell | None]):
    """Where cells are large, fewer of them share a script: each counts as much as the largest of late (I14)."""

    def __init__(self, read: Callable[[list[Key]], Awaitable[list[StoredCell | None]]]) -> None:
        super().__init__(self._read_and_measure, LIMITS)
        self._read = read
        self._expected_bytes = KEY_BYTES

    async def one(self, key: Key) -> StoredCell | None:
        return (await self.submit((key,), self._expected_bytes))[0]

    async def _read_and_measure(self, keys: list[Key]) -> list[StoredCell | None]:
        cells = await self._read(keys)
        largest = max([len(cell.body) for cell in cells if cell is not None], default=0)
        self._expected_bytes = max(KEY_BYTES, largest, self._expected_bytes // 2)
        return cells


class ReadBatcher:
    """Holds one batcher for each node, datastore and kind of read."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._exact: dict[tuple[str, str], CellBatcher[ExactKey]] = {}
        self._newest: dict[tuple[str, str], CellBatcher[ColumnKey]] = {}

    async def exact(self, node: AsyncNode, datastore: Datastore, key: ExactKey) -> StoredCell | None:
        """Raises StorageUnavailable."""
        batcher = self._exact.get((node.node.name, datastore.name))
        if batcher is None:
            batcher = self._exact[node.node.name, datastore.name] = self._batcher(node, datastore, entity_table.get)
        return await batcher.one(key)

    async def newest(self, node: AsyncNode, datastore: Datastore, key: ColumnKey) -> StoredCell | None:
        """Raises StorageUnavailable."""
        batcher = self._newest.get((node.node.name, datastore.name))
        if batcher is None:
            batcher = self._newest[node.node.name, datastore.name] = self._batcher(node, datastore, entity_table.newest)
        return await batcher.one(key)

    def _batcher(self, node: AsyncNode, datastore: Datastore, read: Read[Key]) -> CellBatcher[Key]:
        async def flush(keys: list[Key]) -> list[StoredCell | None]:
            return await node.run(read, datastore, keys, timeout_s=self._timeout_s)

        return CellBatcher(flush)
