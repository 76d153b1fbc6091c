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
from schemaless.consume.ports import CheckpointStore, Handler, HungCall, Script
from schemaless.consume.shard_work import HANDING_OVER, SharedWork, StageObserver
from schemaless.consume.worker import Worker
from schemaless.errors import BusUnavailable, LocationGone, SchemalessError
from schemaless.names import Stall
from schemaless.position import Position
from schemaless.record import Announcement, ForeignRecord, Record, decoded, misplaced
from schemaless.shard_cursor import CursorState, ProvenPage
from schemaless.storage import shard_head, shard_log
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.shard_head import Head, Movement
from schemaless.storage.shard_log import Following
from schemaless.storage.worker_table import ASSIGNED_MAX, WAITING_MAX, OldestCall, WaitingShard, WorkerReport
from schemaless.topology import Datastore, Placement

log = structlog.get_logger()

BATCH_CELLS_MAX = 1000  # of one index transaction, or of one shard's run of calls
_LOOK_PAUSE_S = 1.0
_STALLED_LOOKS = 5  # a rebalance passes in less
_CLOSE_TIMEOUT_S = 2.0
_RATE_WINDOW_S = 10.0


class ConsumerGroup(Protocol):
    """What a transport knows of this process in its group."""

    def is_alive(self) -> bool:
        """Whether the group can't have given our partitions away: a heartbeat was answered in time."""

    @property
    def kafka_answers(self) -> bool:
        """Whether Kafka answers this process, with or without partitions."""

    @property
    def refusal(self) -> str | None:
        """Which broker refuses this process's account, where that is why Kafka doesn't answer."""

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
        self._looks_without_partitions = 0
        self._is_member = False  # as it was logged last: nobody is a member before it has joined
        self._finished: deque[tuple[float, int]] = deque()
        self._consumers: dict[str, Consumer] = {}
        self._paused: dict[str, Callable[[int], bool]] = {}
        self._running: dict[tuple[str, str], _RunningDelivery] = {}
        self._followed: dict[int, Placement] = {}
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
    def stall(self) -> tuple[Stall | None, str]:
        """Why nothing is called in this process, if nothing is."""
        if self._group is not None and not self._group.kafka_answers:
            if (refusal := self._group.refusal) is not None:
                return Stall.REFUSED, refusal
            return Stall.NO_KAFKA, "Kafka doesn't answer the group's member"
        if not self.shards:
            return Stall.NO_PARTITIONS, "the group gave this process no partition with shards"
        return None, ""

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
            self._consumers[consumer.name] = consumer
            for home in self._datastore.clusters:
                self._delivery(consumer.name, home).gain(self._shards(home, self._partitions))

    async def remove(self, name: str) -> None:
        """Ends the deliveries of a consumer, if it runs here. Its checkpoints stay where they are."""
        async with self._changing:
            self._consumers.pop(name, None)
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
            for running in self._running.values():
                running.delivery.release(self._of_partitions(running, released))
            for name in self._consumers:
                held = self._held(name)
                for home in self._datastore.clusters:
                    delivery = self._delivery(name, home)
                    for some, is_kept in ((self._partitions & set(kept), True), (self._partitions - set(kept), False)):
                        mine = self._shards(home, some)
                        delivery.gain([n for n in mine if held.get(n, home) == home], kept=is_kept)
                    delivery.look(self._heads.known)

    async def revoked(self, partitions: Iterable[int]) -> None:
        """Suspends the shards of these partitions: their calls in flight end, and their checkpoints are stored."""
        async with self._changing:
            gone = self._partitions & set(partitions)
            self._partitions -= gone
            self._suspended |= gone
            await asyncio.gather(
                *(
                    running.delivery.suspend(self._of_partitions(running, gone), _CLOSE_TIMEOUT_S)
                    for running in self._running.values()
                )
            )

    async def _follow_moves(self) -> None:
        """Hands shards that moved over to the deliveries of their homes. No shard has two calls at a time."""
        moves = dict(self._datastore.moves)
        if self._followed == moves:
            return
        async with self._changing:
            for (_, home), running in list(self._running.items()):
                if away := [shard for shard in running.delivery.cursors() if self._datastore.home(shard) != home]:
                    await running.delivery.suspend(away, _CLOSE_TIMEOUT_S)
                    running.delivery.release(away)
            if all([self._gain_at_home(name) for name in self._consumers]):
                self._followed = moves

    def _gain_at_home(self, name: str) -> bool:
        """Returns whether each shard is where it belongs. A call of one may still run where it was."""
        held, is_done = self._held(name), True
        for home in self._datastore.clusters:
            mine = self._shards(home, self._partitions)
            is_done = is_done and all(held.get(shard, home) == home for shard in mine)
            if new := [shard for shard in mine if shard not in held]:
                delivery = self._delivery(name, home)
                delivery.gain(new)
                delivery.look(self._heads.known)
        return is_done

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
        await self._follow_moves()
        for running in self._running.values():
            running.delivery.look(self._heads.known, moved)
        if self._may_call() is not self._is_member:
            self._is_member = not self._is_member
            if self._is_member:
                log.info("calls go on: the group answers", consumers=sorted(self.consumers))
            else:
                log.warning(
                    "calls wait: the group doesn't answer", consumers=sorted(self.consumers), stall=self.stall[0]
                )
        stall, why = self.stall
        self._looks_without_partitions = self._looks_without_partitions + 1 if stall is Stall.NO_PARTITIONS else 0
        if self._looks_without_partitions == _STALLED_LOOKS:
            log.warning("calls wait: no partition is ours", consumers=sorted(self.consumers), stall=stall, why=why)
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
        return [n for partition in self._partitions for n in self._datastore.shards_of_partition(partition)]

    def at_work(self, consumer: str) -> list[int]:
        """Returns the shards in which calls of a consumer may begin: not those that are stopped, or begin just now."""
        return [
            shard
            for name, delivery in self.deliveries()
            for shard, cursor in delivery.cursors().items()
            if name == consumer and cursor.state in HANDING_OVER
        ]

    @property
    def is_busy(self) -> bool:
        """Whether some consumer has a call in flight."""
        return any(running.delivery.calls for running in self._running.values())

    def pause(self, consumer: str, is_paused: Callable[[int], bool]) -> None:
        """Begins no calls of the shards for which this is true, also of those that come later."""
        self._paused[consumer] = is_paused
        for name, delivery in self.deliveries():
            if name == consumer:
                delivery.pause(is_paused)

    async def seek(self, consumer: str, to: Position, script: Script) -> None:
        """Moves the checkpoint of a shard as a person ordered, with a script that ends the order."""
        await self._delivery(consumer, self._datastore.home(to.shard)).seek(to, script)

    async def blame(self, consumer: str, hung: HungCall) -> None:
        """Stores that a call doesn't return. The process has to end then."""
        for name, delivery in self.deliveries():
            if name == consumer:
                await delivery.blame(hung)

    def report(
        self,
        oldest_call: OldestCall | None = None,
        tripped: str | None = None,
        parallel: Mapping[str, int] | None = None,
    ) -> WorkerReport:
        """Returns what people may want to know of this process."""
        answered = "" if self._may_call() else ", and the group doesn't answer"
        stall, stall_reason = self.stall
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
            stall=stall,
            stall_reason=stall_reason,
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

    def _delivery(self, name: str, home: str) -> Delivery:
        """Returns the delivery of a consumer for a cluster. It begins with the first shard that may live there."""
        if (name, home) not in self._running:
            consumer = self._consumers[name]
            delivery = Delivery(
                consumer.handler,
                consumer.checkpoints,
                HomeLog(self._storage, self._datastore, home),
                batch_cells_max=BATCH_CELLS_MAX,
                may_call=self._may_call,
                shared=self._shared,
            )
            delivery.pause(self._paused.get(name, lambda _: False))
            self._running[name, home] = _RunningDelivery(delivery)
        return self._running[name, home].delivery

    def _of_partitions(self, running: _RunningDelivery, partitions: Collection[int]) -> list[int]:
        return [n for n in running.delivery.cursors() if self._datastore.partition(n) in partitions]

    def _held(self, name: str) -> dict[int, str]:
        """Returns the clusters whose delivery of a consumer has each shard, also one that it gives away."""
        return {n: at for (of, at), one in self._running.items() if of == name for n in one.delivery.cursors()}

    def _shards(self, home: str, partitions: Collection[int]) -> list[int]:
        return [
            shard
            for partition in partitions
            for shard in self._datastore.shards_of_partition(partition)
            if self._datastore.home(shard) == home
        ]


# The log of each shard in MySQL, and the heads, as the home's master has them. It holds what the topic lacks (I9).

READ_BYTES_MAX = 4 << 20
"""Bodies of one read, all its shards together. One larger cell is read alone (I14)."""


class HomeLog:
    """Reads the logs of the shards whose home is one cluster, from its master."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, cluster: str) -> None:
        self._master = storage.master(cluster)
        self._datastore = datastore

    async def read(self, wanted: Mapping[int, Position], limit: int) -> Mapping[int, ProvenPage | LocationGone]:
        pages = [Following(position, limit) for position in wanted.values()]
        return await self._master.run(shard_log.follow, self._datastore, pages, READ_BYTES_MAX)


class ShardHeads:
    """Knows the heads of all shards. A look costs one small query for each cluster while nothing moved."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, *, timeout_s: float = 2.0) -> None:
        self._storage = storage
        self._datastore = datastore
        self._timeout_s = timeout_s
        self._movements: dict[str, Movement] = {}
        self._blocks: dict[str, Mapping[int, Movement]] = {}
        self._moves: dict[int, Placement] = {}
        self.known: dict[int, Head] = {}
        """The heads by shard, as far as known: a cluster that is unreachable keeps its last heads."""

    async def look(self) -> set[int]:
        """Reads the heads that moved. Returns their shards."""
        if self._moves != self._datastore.moves:  # what was seen of another cluster may be a home's by now
            self._moves = dict(self._datastore.moves)
            self._movements.clear()
            self._blocks.clear()
        moved = await asyncio.gather(*(self._look_at(cluster) for cluster in self._datastore.clusters))
        return set().union(*moved)

    async def _look_at(self, cluster: str) -> set[int]:
        """Asks for the sum of the heads, then for the sums of blocks, then for the heads of blocks that moved."""
        master = self._storage.master(cluster)
        name = self._datastore.name
        try:
            movement = await master.run(shard_head.movement, name, timeout_s=self._timeout_s)
            if movement == self._movements.get(cluster):
                return set()
            blocks = await master.run(shard_head.block_movements, name, timeout_s=self._timeout_s)
            known = self._blocks.get(cluster, {})
            moved = [block for block, sums in blocks.items() if sums != known.get(block)]
            heads = (
                await master.run(shard_head.heads_in_blocks, name, moved, timeout_s=self._timeout_s) if moved else []
            )
            changed = {
                head.shard: head
                for head in heads
                if self._datastore.home(head.shard) == cluster and self.known.get(head.shard) != head
            }
            self.known.update(changed)
            self._blocks[cluster] = blocks
            self._movements[cluster] = movement
            return set(changed)
        except SchemalessError:
            return set()
