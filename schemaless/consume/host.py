"""Subscription: all consumers of one datastore in one process. Owns which deliveries run, for the partitions that the
group gave to this process; knows nothing of Kafka clients.

There is one delivery for each consumer, partition and home cluster: a cluster that is away holds up its own shards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec
import structlog

from schemaless.cell import StoredCell
from schemaless.config import FollowerSettings
from schemaless.consume.checkpoints import all_or_first_error
from schemaless.consume.delivery import Delivery
from schemaless.consume.mysql_log import ShardHeads, ShardLogs
from schemaless.consume.ports import CheckpointStore, Handler
from schemaless.record import DecodedRecord, ForeignRecord, Record, decoded, misplaced
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


class _Running:
    """A delivery and the task that lets its shards catch up."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.task = asyncio.create_task(delivery.run())

    async def stop(self) -> None:
        await self.delivery.close(_CLOSE_TIMEOUT_S)
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


class Subscription:
    def __init__(self, storage: AsyncStorage, datastore: Datastore, settings: FollowerSettings) -> None:
        self.passed_over = 0
        self._datastore = datastore
        self._settings = settings
        self._logs = ShardLogs(storage, datastore)
        self._watch = ShardHeads(storage, datastore)
        self._consumers: dict[str, Consumer] = {}
        self._running: dict[tuple[str, int, str], _Running] = {}
        self._partitions: set[int] = set()
        self._changing = asyncio.Lock()

    @property
    def consumers(self) -> Iterable[str]:
        return tuple(self._consumers)

    async def add(self, consumer: Consumer) -> None:
        """Takes effect at once, also for partitions that are being consumed."""
        async with self._changing:
            self._consumers[consumer.name] = consumer
            self._start_missing()

    async def remove(self, name: str) -> None:
        async with self._changing:
            self._consumers.pop(name, None)
            await self._stop(lambda consumer, partition: consumer == name)

    async def assigned(self, partitions: Iterable[int]) -> None:
        """These, and no others, are ours now."""
        async with self._changing:
            self._partitions = set(partitions)
            await self._stop(lambda consumer, partition: partition not in self._partitions)
            self._start_missing()

    async def revoked(self, partitions: Iterable[int]) -> None:
        async with self._changing:
            gone = set(partitions)
            self._partitions -= gone
            await self._stop(lambda consumer, partition: partition in gone)

    async def take(self, partition: int, records: Sequence[Record]) -> None:
        """The partition's next records, in topic order. Returns when they are finished, or will come from the log."""
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
        """Tells every delivery of the heads: what the topic never brought is found here."""
        heads = await self._watch.look()
        for running in self._running.values():
            running.delivery.notice(heads)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self.step()
                self._end_if_failed()
                await asyncio.sleep(_LOOK_PAUSE_S)
        finally:
            await self.revoked(list(self._partitions))

    def deliveries(self) -> list[Delivery]:
        return [running.delivery for running in self._running.values()]

    def _cells(self, partition: int, records: Iterable[Record]) -> list[StoredCell]:
        """Records that are not cells of this partition are passed over: other kinds, and what others wrote there."""
        cells = []
        for record in records:
            found = self._cell(partition, record)
            if isinstance(found, StoredCell):
                cells.append(found)
            else:
                self.passed_over += 1
                if isinstance(found, ForeignRecord):
                    log.warning("a record that is not ours was passed over", record=str(found))
        return cells

    def _cell(self, partition: int, record: Record) -> DecodedRecord:
        found = decoded(record)
        if isinstance(found, StoredCell) and not self._belongs(found, partition):
            return misplaced(record, found.shard)
        return found

    def _belongs(self, cell: StoredCell, partition: int) -> bool:
        return cell.shard < self._datastore.shards and self._datastore.partition(cell.shard) == partition

    def _start_missing(self) -> None:
        for name, consumer in self._consumers.items():
            for partition in self._partitions:
                shards_of_partition = self._datastore.shards_of_partition(partition)
                for home, shards in self._datastore.by_home(shards_of_partition, lambda shard: shard).items():
                    key = (name, partition, home)
                    if key not in self._running:
                        self._running[key] = _Running(self._delivery(consumer, shards))

    def _delivery(self, consumer: Consumer, shards: Iterable[int]) -> Delivery:
        cells_max = self._settings.batch_cells_max
        return Delivery(shards, consumer.handler, consumer.checkpoints, self._logs, batch_cells_max=cells_max)

    async def _stop(self, which: Callable[[str, int], bool]) -> None:
        gone = [key for key in self._running if which(key[0], key[1])]
        await asyncio.gather(*(self._running.pop(key).stop() for key in gone))

    def _end_if_failed(self) -> None:
        for running in self._running.values():
            if running.task.done():
                running.task.result()
