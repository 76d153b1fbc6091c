"""One datastore: a seat in the group of its tailers, and a tail for each partition that the group gives.

A tail runs only between assignment and revocation. When the log of any partition fails and nobody knows how, this
process gives up its seat and takes a new one: so a log isn't opened because a stale owner wants it back (I7). It does
the same when records of an open log stay hidden, since opening a log ends that.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog

from schemaless.bus.hanging_transactions import HangingTransactionsWatch
from schemaless.bus.membership import Membership
from schemaless.bus.topics import TopicsWatch, ensure_topics
from schemaless.errors import BusUnavailable, Fenced, Misconfigured
from schemaless.events import Event, emit
from schemaless.location import Location
from schemaless.topology import Datastore
from tailer.context import Shared, in_thread, pause
from tailer.owned_partition import OwnedPartition

log = structlog.get_logger()

POLL_S = 0.2  # the group's decisions end a poll early; a stop waits for it
TOPICS_TIMEOUT_S = 5.0
TOPICS_CHECK_S = 2.0
TOPICS_CHECK_TIMEOUT_S = 1.0
RETRY_S = 1.0  # before a new seat is taken
MISCONFIGURED_RETRY_S = 10.0  # somebody has to act first


class DatastoreTailer:
    def __init__(self, datastore: Datastore, shared: Shared) -> None:
        self._datastore = datastore
        self._shared = shared
        self._stopping = asyncio.Event()
        self._seat_lost = asyncio.Event()
        self._owned: dict[OwnedPartition, asyncio.Task[None]] = {}
        # The group's callbacks wait for tails to stop: they must not take a thread that a tail needs for that.
        self._group_thread = ThreadPoolExecutor(1, thread_name_prefix=f"group-{datastore.name}")

    def stop(self) -> None:
        self._stopping.set()

    def look_again(self) -> None:
        """`Shared.paused` has changed."""
        for owned in self._owned:
            owned.look_again()

    def take_new_seat(self) -> None:
        """Progress was moved by hand: every log is opened anew."""
        log.info("progress was moved: taking a new seat in the group", datastore=self._datastore.name)
        self._seat_lost.set()

    def heads_moved(self, heads: Mapping[int, Location]) -> None:
        by_partition: dict[int, dict[int, Location]] = defaultdict(dict)
        for shard, head in heads.items():
            by_partition[self._datastore.partition(shard)][shard] = head
        for owned in self._owned:
            owned.heads_moved(by_partition.get(owned.partition, {}))

    async def run(self) -> None:
        """Until `stop`. Transactions in hand are finished, then the seat is left, so that others take over at once."""
        try:
            async with asyncio.TaskGroup() as tails:
                while not self._stopping.is_set():
                    await self._take_seat(tails)
        finally:
            self._group_thread.shutdown(wait=False)

    async def _take_seat(self, tails: asyncio.TaskGroup) -> None:
        name = self._datastore.name
        try:
            await in_thread(self._group_thread, self._ensure_topics)
            await self._hold_seat(tails)
        except BusUnavailable as error:
            log.warning("datastore is not tailed", datastore=name, why=str(error))
            await pause(RETRY_S, self._stopping)
        except Misconfigured as error:
            log.error("datastore is not tailed", datastore=name, why=str(error))
            await pause(MISCONFIGURED_RETRY_S, self._stopping)

    async def _hold_seat(self, tails: asyncio.TaskGroup) -> None:
        """Until `stop`, or until the log of a partition fails or the topics were deleted."""
        loop = asyncio.get_running_loop()
        self._seat_lost.clear()

        def assigned(partitions: Sequence[int]) -> None:
            loop.call_soon_threadsafe(self._assign, partitions, tails)

        def revoked(partitions: Sequence[int]) -> None:
            asyncio.run_coroutine_threadsafe(self._release(partitions), loop).result()

        topics = await in_thread(self._group_thread, self._watch_topics)
        hidden = self._watch_hidden_records()
        membership = await in_thread(self._group_thread, lambda: self._join(assigned, revoked))

        def take_part(tailed: Collection[int]) -> str | None:
            """What was noticed that ends it."""
            membership.poll(POLL_S)
            if topics.changed():
                return "the topics were deleted"
            if hanging := hidden.hanging(tailed):
                return f"partitions {hanging} have a hanging transaction"
            return None

        try:
            while not (self._stopping.is_set() or self._seat_lost.is_set()):
                tailed = [owned.partition for owned in self._owned if owned.tailed]
                if noticed := await in_thread(self._group_thread, partial(take_part, tailed)):
                    log.error("taking a new seat in the group", datastore=self._datastore.name, why=noticed)
                    break
        finally:
            await self._release([owned.partition for owned in self._owned])
            await in_thread(self._group_thread, membership.close)
        if not self._stopping.is_set():
            await pause(RETRY_S, self._stopping)

    def _ensure_topics(self) -> None:
        ensure_topics(self._shared.settings.kafka, self._datastore, timeout_s=TOPICS_TIMEOUT_S)

    def _watch_topics(self) -> TopicsWatch:
        topics = (self._datastore.topic, self._datastore.progress_topic)
        return TopicsWatch(
            self._shared.settings.kafka, topics, every_s=TOPICS_CHECK_S, timeout_s=TOPICS_CHECK_TIMEOUT_S
        )

    def _watch_hidden_records(self) -> HangingTransactionsWatch:
        settings = self._shared.settings
        return HangingTransactionsWatch(
            settings.kafka,
            self._datastore.topic,
            every_s=TOPICS_CHECK_S,
            patience_s=3 * settings.transaction_timeout_s,  # to flush, to commit, to abort
            timeout_s=TOPICS_CHECK_TIMEOUT_S,
        )

    def _join(self, assigned: Callable[[Sequence[int]], None], revoked: Callable[[Sequence[int]], None]) -> Membership:
        settings = self._shared.settings
        return Membership(
            settings.kafka,
            self._datastore,
            session_timeout_s=settings.session_timeout_s,
            assigned=assigned,
            revoked=revoked,
        )

    def _assign(self, partitions: Sequence[int], tails: asyncio.TaskGroup) -> None:
        if partitions:
            log.info("partitions assigned", datastore=self._datastore.name, partitions=sorted(partitions))
        for partition in partitions:
            owned = OwnedPartition(self._datastore, partition, self._shared)
            self._owned[owned] = tails.create_task(self._tend(owned))

    async def _release(self, partitions: Sequence[int]) -> None:
        """Returns when the tails have stopped."""
        leaving = {owned: task for owned, task in self._owned.items() if owned.partition in partitions}
        for owned in leaving:
            owned.stop()
        if leaving:
            log.info("partitions released", datastore=self._datastore.name, partitions=sorted(partitions))
            await asyncio.wait(leaving.values())
        emit(Event.PARTITIONS_RELEASED, datastore=self._datastore.name, partitions=partitions)

    async def _tend(self, owned: OwnedPartition) -> None:
        try:
            await owned.run()
        except (BusUnavailable, Fenced) as error:
            log.warning(
                "a partition's log failed: taking a new seat in the group",
                datastore=self._datastore.name,
                partition=owned.partition,
                why=str(error),
            )
            self._seat_lost.set()
        finally:
            del self._owned[owned]
