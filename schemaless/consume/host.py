"""The host of all consumers of one datastore in one process: it runs their deliveries for the assigned partitions.

It knows nothing of Kafka clients. There is one delivery for each consumer and home cluster, so a cluster that is
unreachable holds up its own shards only. A record is decoded once, whatever the number of consumers.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec
import structlog

from schemaless.cell import StoredCell
from schemaless.config import FollowerSettings, program_version
from schemaless.consume.checkpoints import CommitLanes
from schemaless.consume.delivery import Delivery
from schemaless.consume.mysql_log import HomeLog, ShardHeads
from schemaless.consume.ports import CheckpointStore, Handler, HungCall, Script
from schemaless.consume.shard_work import HANDING_OVER, SharedWork, StageObserver
from schemaless.consume.worker import Worker
from schemaless.errors import BusUnavailable
from schemaless.position import Position
from schemaless.record import Announcement, ForeignRecord, Record, decoded, misplaced
from schemaless.shard_cursor import CursorState
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.shard_head import Head
from schemaless.storage.worker_table import ASSIGNED_MAX, WAITING_MAX, OldestCall, WaitingShard, WorkerReport
from schemaless.topology import Datastore

log = structlog.get_logger()

_LOOK_PAUSE_S = 1.0
_CLOSE_TIMEOUT_S = 2.0
_RATE_WINDOW_S = 10.0


class ConsumerGroup(Protocol):
    """What a transport knows of this process in its group."""

    def is_alive(self) -> bool:
        """Whether the group can't have given our partitions away: a heartbeat was answered in time."""

    async def confirm(self, partitions: Collection[int]) -> None:
        """Returns when the group has said that these partitions are still ours. Raises BusUnavailable, Fenced."""


class Consumer(msgspec.Struct, frozen=True):
    """One index or one trigger program."""

    handler: Handler
    checkpoints: CheckpointStore

    @property
    def name(self) -> str:
        return self.checkpoints.consumer


class _RunningDelivery:
    """A delivery and the task that runs it."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.task = asyncio.create_task(delivery.run())

    async def stop(self) -> None:
        await self.delivery.close(_CLOSE_TIMEOUT_S)
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        self.delivery.release(self.delivery.cursors())  # what waits in its queues counts for the whole process


class ConsumerHost:
    """Feeds any number of consumers with the partitions that the group assigned to this process."""

    def __init__(
        self, storage: AsyncStorage, datastore: Datastore, settings: FollowerSettings, worker: Worker | None = None
    ) -> None:
        self.lanes = CommitLanes(storage, datastore, worker)
        self._storage = storage
        self._datastore = datastore
        self._settings = settings
        self._heads = ShardHeads(storage, datastore)
        self._group: ConsumerGroup | None = None
        self._shared = SharedWork()
        self._is_member = False  # as it was logged last: nobody is a member before it has joined
        self._finished: deque[tuple[float, int]] = deque()
        self._running: dict[tuple[str, str], _RunningDelivery] = {}
        self._partitions: set[int] = set()
        self._suspended: set[int] = set()
        self._changing = asyncio.Lock()

    @property
    def consumers(self) -> Collection[str]:
        return {name for name, _ in self._running}

    @property
    def heads(self) -> Mapping[int, Head]:
        """The heads of the datastore's shards, as seen last."""
        return self._heads.known

    @property
    def partitions(self) -> Collection[int]:
        """The partitions that the group assigned to this process."""
        return self._partitions

    @property
    def is_member(self) -> bool:
        """Whether the group can't have given the partitions away."""
        return self._may_call()

    @property
    def queued_bytes(self) -> int:
        return self._shared.queued.total

    def deliveries(self) -> Iterator[tuple[str, Delivery]]:
        """Yields every delivery with the name of its consumer."""
        for (name, _), running in self._running.items():
            yield name, running.delivery

    def observe(self, observer: StageObserver) -> None:
        """Calls the observer with the parts of every call."""
        self._shared.observe = observer

    def join(self, group: ConsumerGroup) -> None:
        """Calls nothing from now on while this process may have lost its partitions without being told."""
        self._group = group

    async def add(self, consumer: Consumer) -> None:
        """Runs a consumer from now on, also for partitions that are assigned already."""
        async with self._changing:
            for home in self._datastore.clusters:
                delivery = Delivery(
                    consumer.handler,
                    consumer.checkpoints,
                    HomeLog(self._storage, self._datastore, home),
                    batch_cells_max=self._settings.batch_cells_max,
                    may_call=self._may_call,
                    shared=self._shared,
                )
                delivery.gain(self._shards(home, self._partitions))
                self._running[consumer.name, home] = _RunningDelivery(delivery)

    async def remove(self, name: str) -> None:
        """Ends the deliveries of a consumer, if it runs here. Its checkpoints stay where they are."""
        async with self._changing:
            gone = [self._running.pop(key) for key in list(self._running) if key[0] == name]
            await asyncio.gather(*(running.stop() for running in gone))

    async def assigned(self, partitions: Iterable[int], kept: Collection[int] = ()) -> None:
        """Takes these partitions, and no others, as assigned to this process.

        `kept` are those that nobody else had since they were revoked here: their shards continue where they are.
        """
        async with self._changing:
            self._partitions = set(partitions)
            released, self._suspended = self._suspended - self._partitions, set()
            await self._heads.look()
            for (_, home), running in self._running.items():
                running.delivery.release(self._shards(home, released))
                running.delivery.gain(self._shards(home, self._partitions & set(kept)), kept=True)
                running.delivery.gain(self._shards(home, self._partitions - set(kept)))
                running.delivery.look(self._heads.known)

    async def revoked(self, partitions: Iterable[int]) -> None:
        """Suspends the shards of these partitions: their calls in flight end, and their checkpoints are stored."""
        async with self._changing:
            gone = self._partitions & set(partitions)
            self._partitions -= gone
            self._suspended |= gone
            await asyncio.gather(
                *(
                    running.delivery.suspend(self._shards(home, gone), _CLOSE_TIMEOUT_S)
                    for (_, home), running in self._running.items()
                )
            )

    def take(self, partition: int, records: Sequence[Record]) -> None:
        """Takes the partition's next records, in topic order."""
        by_shard: dict[int, list[StoredCell]] = {}
        for record in records:
            found = decoded(record, check_body=False)
            if isinstance(found, ForeignRecord):
                log.warning("a record that is not ours was skipped", record=str(found))
            elif found.shard >= self._datastore.shards or self._datastore.partition(found.shard) != partition:
                log.warning("a record that is not ours was skipped", record=str(misplaced(record, found.shard)))
            elif isinstance(found, StoredCell):
                by_shard.setdefault(found.shard, []).append(found)
            elif isinstance(found, Announcement):
                self._give(by_shard)  # what came before it comes first
                by_shard.clear()
                home = self._datastore.home(found.shard)
                for running in self._of_home(home):
                    running.delivery.announce(found.shard, found.generation, found.starts_at)
        self._give(by_shard)

    async def step(self) -> None:
        """Compares every delivery with the heads, and asks the group about shards whose checkpoint was lost."""
        moved = await self._heads.look()
        for running in self._running.values():
            running.delivery.look(self._heads.known, moved)
        if self._may_call() is not self._is_member:
            self._is_member = not self._is_member
            if self._is_member:
                log.info("calls go on: the group answers", consumers=sorted(self.consumers))
            else:
                log.warning("calls wait: the group doesn't answer", consumers=sorted(self.consumers))
        unconfirmed = {
            running: shards for running in self._running.values() if (shards := running.delivery.unconfirmed())
        }
        if unconfirmed and self._group is not None:
            try:
                await self._group.confirm(
                    {self._datastore.partition(shard) for shards in unconfirmed.values() for shard in shards}
                )
            except BusUnavailable as error:
                log.warning("the group doesn't confirm our partitions", why=str(error))
                return
        for running, shards in unconfirmed.items():
            running.delivery.confirmed(shards)

    @property
    def shards(self) -> list[int]:
        """The shards of the partitions that are assigned to this process."""
        return [shard for home in self._datastore.clusters for shard in self._shards(home, self._partitions)]

    def at_work(self, consumer: str) -> list[int]:
        """Returns the shards in which calls of a consumer may begin: not those that are stopped, or begin just now."""
        return [
            shard
            for home in self._datastore.clusters
            for shard, cursor in self._running[consumer, home].delivery.cursors().items()
            if cursor.state in HANDING_OVER
        ]

    @property
    def is_busy(self) -> bool:
        """Whether some consumer has a call in flight."""
        return any(running.delivery.calls for running in self._running.values())

    def pause(self, consumer: str, is_paused: Callable[[int], bool]) -> None:
        """Begins no calls of the shards for which this is true, also of those that come later."""
        for home in self._datastore.clusters:
            self._running[consumer, home].delivery.pause(is_paused)

    async def seek(self, consumer: str, to: Position, script: Script) -> None:
        """Moves the checkpoint of a shard as a person ordered, with a script that ends the order."""
        await self._running[consumer, self._datastore.home(to.shard)].delivery.seek(to, script)

    async def blame(self, consumer: str, hung: HungCall) -> None:
        """Stores that a call doesn't return. The process has to end then."""
        await self._running[consumer, self._datastore.home(hung.cell.shard)].delivery.blame(hung)

    def report(
        self,
        oldest_call: OldestCall | None = None,
        tripped: str | None = None,
        parallel: Mapping[str, int] | None = None,
    ) -> WorkerReport:
        """Returns what people may want to know of this process."""
        answered = "" if self._may_call() else ", and the group doesn't answer"
        unconfirmed = [
            WaitingShard(name, cursor.at.shard, f"another process moved its checkpoint{answered}")
            for (name, _), running in self._running.items()
            for cursor in running.delivery.halted(CursorState.UNCONFIRMED)
        ]
        failing = [
            WaitingShard(name, shard, error)
            for (name, _), running in self._running.items()
            for shard, error in running.delivery.failing()
        ]
        refused = [
            WaitingShard(name, cursor.at.shard, cursor.reason or "")
            for (name, _), running in self._running.items()
            for cursor in running.delivery.halted(CursorState.REFUSED)
        ]
        return WorkerReport(
            version=program_version(),
            transport=self._settings.transport,
            host=socket.gethostname(),
            pid=os.getpid(),
            is_member=self._may_call(),
            partitions=len(self._partitions),
            assigned=tuple(sorted(self._partitions)[:ASSIGNED_MAX]),
            rate=self._finished_a_second(),
            unconfirmed=tuple(unconfirmed[:WAITING_MAX]),
            unconfirmed_count=len(unconfirmed),
            refused=tuple(refused[:WAITING_MAX]),
            refused_count=len(refused),
            failing_shards=tuple(failing[:WAITING_MAX]),
            failing_shards_count=len(failing),
            oldest_call=oldest_call,
            tripped=tripped,
            parallel=dict(parallel or {}),
        )

    def _finished_a_second(self) -> float:
        """Returns the rate of the last ten seconds or so, if it is asked for often."""
        now, finished = time.monotonic(), sum(r.delivery.counts.delivered for r in self._running.values())
        while len(self._finished) > 1 and now - self._finished[0][0] > _RATE_WINDOW_S:
            self._finished.popleft()
        self._finished.append((now, finished))
        since, before = self._finished[0]
        return round(max(0, finished - before) / (now - since), 1) if now > since else 0.0

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
            await asyncio.gather(*(running.stop() for running in self._running.values()))

    def _may_call(self) -> bool:
        return self._group is None or self._group.is_alive()

    def _give(self, by_shard: dict[int, list[StoredCell]]) -> None:
        for shard, cells in by_shard.items():
            for running in self._of_home(self._datastore.home(shard)):
                running.delivery.take(shard, cells)

    def _of_home(self, home: str) -> list[_RunningDelivery]:
        return [running for (_, cluster), running in self._running.items() if cluster == home]

    def _shards(self, home: str, partitions: Collection[int]) -> list[int]:
        return [
            shard
            for partition in partitions
            for shard in self._datastore.shards_of_partition(partition)
            if self._datastore.home(shard) == home
        ]
