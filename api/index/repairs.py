"""QueuedRepairs: rows of which a query found wrong entries. They are compared with their cells and repaired soon after.

A query says only that an entry differs at that moment. The comparison says whether it differs from what the index has
reached, so an index that is merely behind costs no write (I11). Rows of which one can't be compared are tried again in
smaller parts. What is dropped, or lost with the process, is left to the index cleaner.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable

import structlog

from schemaless.cell import RowKey, row_key_text
from schemaless.errors import SchemalessError
from schemaless.index.definition import IndexDefinition
from schemaless.index.inspection import IndexInspector
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.topology import Datastore

log = structlog.get_logger()

ROWS_MAX = 10_000
"""How many rows may wait. What comes then is left to the index cleaner."""

ROWS_AT_ONCE = (100, 10, 1)
"""How many rows are compared together at each attempt. After the last one a row is dropped."""

_PAUSE_S = 1.0
_PAUSE_FACTOR = 10  # times as long as a comparison took


class QueuedRepairs:
    """Belongs to one event loop. Masters are repaired, and what a minion has of its own isn't."""

    def __init__(self, storage: AsyncStorage) -> None:
        self._storage = storage
        self._inspectors: dict[IndexVersion, IndexInspector] = {}
        self._attempts: dict[tuple[IndexVersion, RowKey], int] = {}
        self.counts: Counter[tuple[str]] = Counter({("compared",): 0, ("dropped",): 0})
        """Rows by what became of them."""
        self._wake = asyncio.Event()

    def add(self, datastore: Datastore, definition: IndexDefinition, row_keys: Iterable[RowKey]) -> None:
        """Queues rows, each once."""
        version = IndexVersion(datastore.name, definition.name, definition.number)
        for row_key in row_keys:
            if version not in self._inspectors:
                self._inspectors[version] = IndexInspector(self._storage, datastore, definition)
            self._queue(version, row_key, 0)

    def __len__(self) -> int:
        """How many rows wait."""
        return len(self._attempts)

    def _queue(self, version: IndexVersion, row_key: RowKey, attempt: int) -> None:
        if (version, row_key) in self._attempts:
            return
        if attempt < len(ROWS_AT_ONCE) and len(self._attempts) < ROWS_MAX:
            self._attempts[version, row_key] = attempt
            self._wake.set()
        else:
            self.counts["dropped",] += 1

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            began = time.monotonic()
            await self.step()
            await asyncio.sleep(max(_PAUSE_S, _PAUSE_FACTOR * (time.monotonic() - began)))

    async def step(self) -> None:
        """Compares and repairs the rows of one version that wait longest, as many as their attempt allows."""
        (version, _), attempt = next(iter(self._attempts.items()))
        waiting = [row_key for (of, row_key), tried in self._attempts.items() if (of, tried) == (version, attempt)]
        row_keys = waiting[: ROWS_AT_ONCE[attempt]]
        for row_key in row_keys:
            del self._attempts[version, row_key]
        inspector = self._inspectors[version]
        try:
            unreadable = await self._repair(inspector, row_keys)
            self.counts["dropped",] += unreadable
            self.counts["compared",] += len(row_keys) - unreadable
        except SchemalessError as error:  # a server is away, or the index is being dropped
            log.warning(
                "entries that a query found wrong aren't repaired",
                index=version.name,
                rows=len(row_keys),
                dropped=self.counts["dropped",],
                why=str(error),
            )
            for row_key in row_keys:
                self._queue(version, row_key, attempt + 1)
        if not self._attempts:
            self._inspectors.clear()
            self._wake.clear()

    async def _repair(self, inspector: IndexInspector, row_keys: list[RowKey]) -> int:
        """Returns how many rows have a cell that can't be decoded, and so weren't compared."""
        masters = [self._storage.master(cluster) for cluster in inspector.datastore.clusters]
        page = await inspector.of_rows(masters, row_keys)
        for row_key, why in page.unreadable.items():
            log.error(
                "a row isn't compared with its index",
                datastore=inspector.datastore.name,
                index=inspector.definition.name,
                row_key=row_key_text(row_key),
                why=why,
            )
        faults = [fault for found in page.faults.values() for fault in found]
        if faults:
            repaired = await inspector.repair(faults)
            log.warning(
                "entries that a query found wrong are repaired",
                datastore=inspector.datastore.name,
                index=inspector.definition.name,
                faults=len(faults),
                repaired=repaired.written,
                withheld=dict(repaired.withheld),
            )
        return len(page.unreadable)
