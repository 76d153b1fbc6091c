"""ParkedCopies: copies parked cells to a topic, after they are durable in MySQL, and each at least once.

A record says whether its copy is owed, in the transaction that parks the cell. So nothing is forgotten when a process
dies or Kafka is away, and no shard ever waits for a copy. What is retried or discarded before that isn't copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

import structlog

from schemaless.bus.parked_topic import ParkedCopy
from schemaless.errors import SchemalessError
from schemaless.storage import parked_selection, parked_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.topology import Datastore

log = structlog.get_logger()

PAGE_RECORDS_MAX = 16
"""Of a page, with their bodies: at most 16 MiB."""
_PAUSE_S = 1.0
_PAUSE_MAX_S = 30.0


class ParkedCopies:
    """The copies of one program. `publish` blocks until Kafka has them. It raises SchemalessError."""

    def __init__(
        self,
        storage: AsyncStorage,
        datastore: Datastore,
        consumer: str,
        publish: Callable[[Sequence[ParkedCopy]], None],
    ) -> None:
        self.copied = self.failed = 0
        """How many cells were copied, and how many attempts failed, since the process started."""
        self._storage = storage
        self._datastore = datastore
        self._consumer = consumer
        self._publish = publish

    async def run(self, shards: Callable[[], Collection[int]]) -> None:
        """Copies what the process's own shards have parked, until it is cancelled."""
        failures = 0
        while True:
            try:
                copied = await self.step(shards())
                failures = 0
            except SchemalessError as error:
                copied, failures = 0, failures + 1
                self.failed += 1
                log.warning("parked cells wait for their copies", failed=self.failed, why=str(error), hint=error.hint)
            if not copied:
                await asyncio.sleep(min(_PAUSE_MAX_S, _PAUSE_S * 2**failures))

    async def step(self, shards: Collection[int]) -> int:
        """Copies a page of each cluster. Returns how many cells were copied. Raises what the last failure was."""
        copied, failure = 0, None
        for cluster, own in self._datastore.by_home(sorted(shards), lambda shard: shard).items():
            try:
                copied += await self._copy_page(self._storage.master(cluster), own)
            except SchemalessError as error:  # the other clusters' cells are copied all the same
                failure = error
        self.copied += copied
        if failure is not None:
            raise failure
        return copied

    async def _copy_page(self, master: AsyncNode, shards: Collection[int]) -> int:
        name, consumer = self._datastore.name, self._consumer
        records = await master.run(parked_table.uncopied, name, consumer, shards, PAGE_RECORDS_MAX)
        if not records:
            return 0
        keys = [(record.shard, record.added_id) for record in records]
        _, cells = await master.run(parked_selection.read, self._datastore, consumer, keys)
        copies = [
            ParkedCopy(
                cells[record.shard, record.added_id], record.function_name, record.cause, record.error,
                record.attempts, record.parked_at,
            )
            for record in records
            if (record.shard, record.added_id) in cells
        ]  # fmt: skip
        await asyncio.to_thread(self._publish, copies)
        await master.run(parked_table.note_copied, name, consumer, records)
        log.info("parked cells were copied", cells=len(copies), copied=self.copied + len(copies))
        return len(records)
