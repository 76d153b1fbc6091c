"""QueuedRepairs: rows of which a query found wrong entries. They are compared with their cells and repaired soon after.

A query says only that an entry differs at that moment. The comparison says whether it differs from what the index has
reached, so an index that is merely behind costs no write (I11). What is lost with the process is left to the index
cleaner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import structlog

from schemaless.cell import RowKey
from schemaless.errors import SchemalessError
from schemaless.index.definition import IndexDefinition
from schemaless.index.inspection import IndexInspector
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.topology import Datastore

log = structlog.get_logger()

ROWS_MAX = 10_000
"""How many rows may wait. What comes then is left to the index cleaner."""

_ROWS_AT_ONCE = 100
_PAUSE_S = 1.0
_PAUSE_FACTOR = 10  # times as long as a comparison took


class QueuedRepairs:
    """Belongs to one event loop. Masters are repaired, and what a minion has of its own isn't."""

    def __init__(self, storage: AsyncStorage) -> None:
        self._storage = storage
        self._inspectors: dict[IndexVersion, IndexInspector] = {}
        self._rows: dict[tuple[IndexVersion, RowKey], None] = {}
        self._wake = asyncio.Event()

    def add(self, datastore: Datastore, definition: IndexDefinition, row_keys: Iterable[RowKey]) -> None:
        """Queues rows, each once."""
        version = IndexVersion(datastore.name, definition.name, definition.number)
        for row_key in row_keys:
            if len(self._rows) >= ROWS_MAX:
                return
            if version not in self._inspectors:
                self._inspectors[version] = IndexInspector(self._storage, datastore, definition)
            self._rows[version, row_key] = None
            self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            began = time.monotonic()
            await self.step()
            await asyncio.sleep(max(_PAUSE_S, _PAUSE_FACTOR * (time.monotonic() - began)))

    async def step(self) -> None:
        """Compares and repairs the rows of one version that wait longest, up to a hundred."""
        version, _ = next(iter(self._rows))
        row_keys = [row_key for found, row_key in self._rows if found == version][:_ROWS_AT_ONCE]
        for row_key in row_keys:
            del self._rows[version, row_key]
        inspector = self._inspectors[version]
        try:
            await self._repair(inspector, row_keys)
        except SchemalessError as error:  # a server is away, or the index is being dropped
            log.warning("entries that a query found wrong aren't repaired", index=version.name, why=str(error))
        if not self._rows:
            self._inspectors.clear()
            self._wake.clear()

    async def _repair(self, inspector: IndexInspector, row_keys: list[RowKey]) -> None:
        masters = [self._storage.master(cluster) for cluster in inspector.datastore.clusters]
        page = await inspector.of_rows(masters, row_keys)
        faults = [fault for found in page.faults.values() for fault in found]
        if faults:
            repaired = await inspector.repair(faults)
            log.warning(
                "entries that a query found wrong are repaired",
                datastore=inspector.datastore.name,
                index=inspector.definition.name,
                faults=len(faults),
                repaired=repaired,
            )
