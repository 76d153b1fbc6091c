"""ReadBatcher: concurrent reads of single cells from one node become one script, as puts become one transaction.

A read that is alone is sent at once. A round trip costs this process more than MySQL's answer. Batching halves that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from schemaless.batching import Batcher, BatchLimits
from schemaless.cell import CellKey, ColumnName, RowKey, StoredCell
from schemaless.storage import entity_table
from schemaless.storage.asyncmy_driver import AsyncNode
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore

Key = TypeVar("Key")
ExactKey = tuple[int, CellKey]
ColumnKey = tuple[int, RowKey, ColumnName]
Read = Callable[[Datastore, Sequence[Key]], Operation[list[StoredCell | None]]]

LIMITS = BatchLimits(lanes=3, items_max=64)  # cells of a megabyte at most, so 64 MiB a script
KEY_BYTES = 100  # of one that waits, about


class ReadBatcher:
    """Holds one batcher for each node, datastore and kind of read."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._exact: dict[tuple[str, str], Batcher[ExactKey, StoredCell | None]] = {}
        self._newest: dict[tuple[str, str], Batcher[ColumnKey, StoredCell | None]] = {}

    async def exact(self, node: AsyncNode, datastore: Datastore, key: ExactKey) -> StoredCell | None:
        """Raises StorageUnavailable."""
        batcher = self._exact.get((node.node.name, datastore.name))
        if batcher is None:
            batcher = self._exact[node.node.name, datastore.name] = self._batcher(node, datastore, entity_table.get)
        return (await batcher.submit((key,), KEY_BYTES))[0]

    async def newest(self, node: AsyncNode, datastore: Datastore, key: ColumnKey) -> StoredCell | None:
        """Raises StorageUnavailable."""
        batcher = self._newest.get((node.node.name, datastore.name))
        if batcher is None:
            batcher = self._newest[node.node.name, datastore.name] = self._batcher(node, datastore, entity_table.newest)
        return (await batcher.submit((key,), KEY_BYTES))[0]

    def _batcher(self, node: AsyncNode, datastore: Datastore, read: Read[Key]) -> Batcher[Key, StoredCell | None]:
        async def flush(keys: list[Key]) -> list[StoredCell | None]:
            return await node.run(read, datastore, keys, timeout_s=self._timeout_s)

        return Batcher(flush, LIMITS)
