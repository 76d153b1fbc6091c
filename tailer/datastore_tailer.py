"""DatastoreTailer: tails the partitions of one datastore that the group of its tailers assigns to this process.

A tail runs only between assignment and revocation. When the log of a partition fails and its owner isn't known, the
group has to confirm it before the log is opened again. So a stale owner doesn't take a log back, and the tails of other
partitions go on (I7). While the group isn't heard, open logs are tailed until the group says whose they are, or until a
new owner fences them. When a transaction hangs in an open log, this process leaves the group and joins it anew, because
opening a log ends hanging transactions.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog

from schemaless.errors import BusUnavailable, Misconfigured
from schemaless.location import Location
from schemaless.runtime.events import Event, emit
from schemaless.runtime.lifecycle import pause
from schemaless.topology import Datastore
from tailer.group_member import GroupMember, LeaveReason
from tailer.owned_partition import OwnedPartition
from tailer.partition_tail import TailerContext, in_thread

log = structlog.get_logger()

RETRY_S = 1.0  # before the group is joined anew
MISCONFIGURED_RETRY_S = 10.0  # an operator has to act first


class DatastoreTailer:
    def __init__(self, datastore: Datastore, context: TailerContext) -> None:
        self.datastore = self._datastore = datastore
        self._context = context
        self._stopping = asyncio.Event()
        self._leave: LeaveReason | None = None
        self._owned: dict[OwnedPartition, asyncio.Task[None]] = {}
        # The group's callbacks wait for tails to stop: they must not take a thread that a tail needs for that.
        self._group_thread = ThreadPoolExecutor(1, thread_name_prefix=f"group-{datastore.name}")

    @property
    def partitions(self) -> Collection[OwnedPartition]:
        """The partitions that the group assigned to this process."""
        return self._owned.keys()

    def stop(self) -> None:
        """Lets `run` return after the transactions in flight."""
        self._stopping.set()

    def look_again(self) -> None:
        """Lets the tails see that `TailerContext.paused` has changed."""
        for owned in self._owned:
            owned.look_again()

    def progress_moved(self) -> None:
        """Lets every log be opened anew, because an operator moved progress."""
        self._leave = LeaveReason.PROGRESS_MOVED

    def heads_moved(self, heads: Mapping[int, Location]) -> None:
        """Passes the heads of shards on to the tails of their partitions."""
        by_partition: dict[int, dict[int, Location]] = defaultdict(dict)
        for shard, head in heads.items():
            by_partition[self._datastore.partition(shard)][shard] = head
        for owned in self._owned:
            owned.heads_moved(by_partition.get(owned.partition, {}))

    async def run(self) -> None:
        """Tails until `stop`. Then it finishes the transactions in flight and leaves the group, so that others take
        over at once.
        """
        name = self._datastore.name
        try:
            async with asyncio.TaskGroup() as tails:
                while not self._stopping.is_set():
                    try:
                        await self._take_part(tails)
                        retry_s = RETRY_S
                    except BusUnavailable as error:
                        log.warning("datastore is not tailed", datastore=name, why=str(error))
                        retry_s = RETRY_S
                    except Misconfigured as error:
                        log.error("datastore is not tailed", datastore=name, why=str(error))
                        retry_s = MISCONFIGURED_RETRY_S
                    await pause(self._stopping, retry_s)
        finally:
            self._group_thread.shutdown(wait=False)

    async def _take_part(self, tails: asyncio.TaskGroup) -> None:
        """Joins the group, and leaves it at `stop` or for a reason."""
        self._leave = None
        join = partial(
            GroupMember,
            self._context.settings,
            self._datastore,
            asyncio.get_running_loop(),
            assigned=partial(self._assign, tails),
            revoked=self._release,
            lost=self._lose,
        )
        member = await in_thread(self._group_thread, join)
        try:
            while self._leave is None and not self._stopping.is_set():
                tailed = [owned.partition for owned in self._owned if owned.tailed]
                noticed = await in_thread(self._group_thread, member.poll, tailed)
                self._leave = self._leave or noticed
                failed = [owned for owned in self._owned if owned.unconfirmed]
                for owned in failed:
                    owned.wait_for(member.asked + 1)  # what was asked before the failure says nothing of it
                confirmed = await in_thread(self._group_thread, member.ask) if failed else 0
                for owned in failed:
                    owned.confirm(confirmed)
            if self._leave is not None:
                log.warning("joining the group anew", datastore=self._datastore.name, why=self._leave.value)
                self._context.metrics.joined_anew(self._datastore.name, self._leave.name.lower())
        finally:
            await self._release([owned.partition for owned in self._owned])
            await in_thread(self._group_thread, member.close)

    def _assign(self, tails: asyncio.TaskGroup, partitions: Sequence[int]) -> None:
        if partitions:
            log.info("partitions assigned", datastore=self._datastore.name, partitions=sorted(partitions))
        lost = {owned.partition: owned for owned in self._owned if owned.is_lost}
        for partition in partitions:
            if partition in lost:
                lost.pop(partition).regain()
                continue
            owned = OwnedPartition(self._datastore, partition, self._context)
            before = [task for other, task in self._owned.items() if other.partition == partition]  # it still stops
            self._owned[owned] = tails.create_task(self._tend(owned, before))
        if lost:  # stopped now: a later assignment makes successors, which wait for them
            leaving = {owned: self._owned[owned] for owned in lost.values()}
            self._stop(leaving)
            tails.create_task(self._ended(leaving, sorted(lost)))

    def _lose(self, partitions: Sequence[int]) -> None:
        """Lets the tails of these partitions go on, because the group may be what is away."""
        lost = [owned for owned in self._owned if owned.partition in partitions]
        for owned in lost:
            owned.lose()
        if lost:
            log.warning("the group isn't heard", datastore=self._datastore.name, partitions=sorted(partitions))

    async def _release(self, partitions: Sequence[int]) -> None:
        """Stops the tails of these partitions, and returns when they have stopped."""
        leaving = {owned: task for owned, task in self._owned.items() if owned.partition in partitions}
        self._stop(leaving)
        await self._ended(leaving, partitions)

    def _stop(self, leaving: Collection[OwnedPartition]) -> None:
        for owned in leaving:
            owned.stop()
        if leaving:
            partitions = sorted(owned.partition for owned in leaving)
            log.info("partitions released", datastore=self._datastore.name, partitions=partitions)

    async def _ended(self, leaving: Mapping[OwnedPartition, asyncio.Task[None]], partitions: Sequence[int]) -> None:
        if leaving:
            await asyncio.wait(leaving.values())
        emit(Event.PARTITIONS_RELEASED, datastore=self._datastore.name, partitions=partitions)

    async def _tend(self, owned: OwnedPartition, before: Collection[asyncio.Task[None]]) -> None:
        """Runs a partition when those who had it before have ended."""
        try:
            if before:
                await asyncio.wait(before)
            await owned.run()
        finally:
            del self._owned[owned]
