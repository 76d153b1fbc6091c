"""The host of all consumers of one datastore in one process: it runs their deliveries for the assigned partitions.

It knows nothing of Kafka clients. There is one delivery for each consumer, partition and home cluster, so a cluster
that is unreachable holds up its own shards only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec
import structlog

from schemaless.batching import all_or_first_error
from schemaless.cell import StoredCell
from schemaless.config import FollowerSettings
from schemaless.consume.delivery import Delivery
from schemaless.consume.mysql_log import ShardHeads, ShardLogs
from schemaless.consume.ports import CheckpointStore, Handler
from schemaless.record import ForeignRecord, Record, decoded, misplaced
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import Datastore

log = structlog.get_logger()

_LOOK_PAUSE_S = 1.0
_CLOSE_TIMEOUT_S = 2.0


class Consumer(msgspec.Struct, frozen=True):
    """One index or one trigger program."""

    handler: Handler
    checkpoints: CheckpointStore

    @property
    def name(self) -> str:
        return self.checkpoints.consumer


class _RunningDelivery:
    """A delivery and the task that lets its shards catch up."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.task = asyncio.create_task(delivery.run())

    async def stop(self) -> None:
        await self.delivery.close(_CLOSE_TIMEOUT_S)
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


class ConsumerHost:
    """Feeds any number of consumers with the partitions that the group assigned to this process."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, settings: FollowerSettings) -> None:
        self._datastore = datastore
        self._settings = settings
        self._logs = ShardLogs(storage, datastore)
        self._heads = ShardHeads(storage, datastore)
        self._consumers: dict[str, Consumer] = {}
        self._running: dict[tuple[str, int, str], _RunningDelivery] = {}
        self._partitions: set[int] = set()
        self._changing = asyncio.Lock()

    @property
    def consumers(self) -> Iterable[str]:
        return tuple(self._consumers)

    async def add(self, consumer: Consumer) -> None:
        """Runs a consumer from now on, also for partitions that are assigned already."""
        async with self._changing:
            self._consumers[consumer.name] = consumer
            self._start_missing()

    async def assigned(self, partitions: Iterable[int]) -> None:
        """Takes these partitions, and no others, as assigned to this process."""
        async with self._changing:
            self._partitions = set(partitions)
            await self._stop(lambda partition: partition not in self._partitions)
            self._start_missing()

    async def revoked(self, partitions: Iterable[int]) -> None:
        """Ends the deliveries of these partitions."""
        async with self._changing:
            gone = set(partitions)
            self._partitions -= gone
            await self._stop(lambda partition: partition in gone)

    async def take(self, partition: int, records: Sequence[Record]) -> None:
        """Takes the partition's next records, in topic order. Returns when they are finished or their shards behind."""
        if not self._consumers:
            return
        by_home = self._datastore.by_home(self._cells(partition, records), lambda cell: cell.shard)
        await all_or_first_error(
            [
                asyncio.ensure_future(running.delivery.deliver(by_home[home]))  # so that calls begin in order
                for (_, number, home), running in self._running.items()
                if number == partition and home in by_home
            ]
        )

    async def step(self) -> None:
        """Compares every delivery with the heads: this finds what the topic never brought."""
        heads = await self._heads.look()
        for running in self._running.values():
            running.delivery.notice(heads)

    async def run(self) -> None:
        """Looks at the heads again and again until it is cancelled. Raises what ended a delivery."""
        try:
            while True:
                await self.step()
                for running in self._running.values():
                    if running.task.done():
                        running.task.result()
                await asyncio.sleep(_LOOK_PAUSE_S)
        finally:
            await self.revoked(list(self._partitions))

    def _cells(self, partition: int, records: Iterable[Record]) -> list[StoredCell]:
        """Returns the cells among the records. Other kinds, and what others wrote there, are skipped."""
        cells = []
        for record in records:
            found = decoded(record)
            if isinstance(found, StoredCell):
                if found.shard < self._datastore.shards and self._datastore.partition(found.shard) == partition:
                    cells.append(found)
                    continue
                found = misplaced(record, found.shard)
            if isinstance(found, ForeignRecord):
                log.warning("a record that is not ours was skipped", record=str(found))
        return cells

    def _start_missing(self) -> None:
        for name, consumer in self._consumers.items():
            for partition in self._partitions:
                shards_of_partition = self._datastore.shards_of_partition(partition)
                for home, shards in self._datastore.by_home(shards_of_partition, lambda shard: shard).items():
                    key = (name, partition, home)
                    if key not in self._running:
                        delivery = Delivery(
                            shards,
                            consumer.handler,
                            consumer.checkpoints,
                            self._logs,
                            batch_cells_max=self._settings.batch_cells_max,
                        )
                        self._running[key] = _RunningDelivery(delivery)

    async def _stop(self, concerns: Callable[[int], bool]) -> None:
        gone = [key for key in self._running if concerns(key[1])]
        await asyncio.gather(*(self._running.pop(key).stop() for key in gone))
