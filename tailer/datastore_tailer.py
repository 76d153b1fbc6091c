"""DatastoreTailer: tails the partitions of one datastore that the group of its tailers assigns to this process.

A tail runs only between assignment and revocation. When the log of a partition fails and its owner isn't known, the
group has to confirm it before the log is opened again. So a stale owner doesn't take a log back, and the tails of other
partitions go on (I7). While the group isn't heard, open logs are tailed until the group says whose they are, or until a
new owner fences them. When a transaction hangs in an open log, this process leaves the group and joins it anew, because
opening a log ends hanging transactions.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial

import structlog

from schemaless.bus.membership import Membership
from schemaless.bus.partition_log import HangingTransactionsWatch, LogState, PartitionLog
from schemaless.bus.topics import TopicsWatch, ensure_topics, raised_topics
from schemaless.config import TailerSettings, program_version
from schemaless.errors import BusUnavailable, Corrupt, Fenced, Misconfigured, SchemalessError, Unavailable
from schemaless.location import Location
from schemaless.names import TAILER, Stall
from schemaless.runtime.events import Event, emit
from schemaless.runtime.lifecycle import pause
from schemaless.storage.standstill import stall_after
from schemaless.storage.worker_table import ASSIGNED_MAX, WAITING_MAX, WaitingShard, WorkerReport
from schemaless.topology import Datastore
from tailer.partition_tail import RETRY_S, PartitionTail, TailerContext, in_thread, quota_stall
from tailer.shard_queue import ShardQueue

log = structlog.get_logger()

REJOIN_S = 1.0  # before the group is joined anew
MISCONFIGURED_RETRY_S = 10.0  # an operator has to act first
ASSIGNING_S = 10.0  # a group that a member has joined may first wait for one that ended


class DatastoreTailer:
    def __init__(self, datastore: Datastore, context: TailerContext) -> None:
        self.datastore = self._datastore = datastore
        self._context = context
        self.challenges: Sequence[str] = ()
        """What processes ask that read the same databases (I20). The group's offsets answer it."""
        self._is_proven = False
        self._stopping = asyncio.Event()
        self._leave: LeaveReason | None = None
        self._member: GroupMember | None = None
        self._failure: tuple[Stall, str] | None = None  # of the last attempt to join the group
        self._joined_at = 0.0
        self._owned: dict[OwnedPartition, asyncio.Task[None]] = {}
        # The group's callbacks wait for tails to stop: they must not take a thread that a tail needs for that.
        self._group_thread = ThreadPoolExecutor(1, thread_name_prefix=f"group-{datastore.name}")

    @property
    def partitions(self) -> Collection[OwnedPartition]:
        """The partitions that the group assigned to this process."""
        return self._owned.keys()

    @property
    def stalls(self) -> Mapping[Stall, str]:
        """Why something of the datastore isn't published, as far as this process knows."""
        return {**self._stalls_of_all(), **{stall: why for owned in self._owned for stall, why in owned.stalls.items()}}

    def _stalls_of_all(self) -> Mapping[Stall, str]:
        """Why nothing at all is published by this process, or it is late. What is wrong with the topics comes last."""
        if self._member is None:
            return {} if self._failure is None else dict([self._failure])
        found = dict(self._member.stalls)
        raised = {stall: found.pop(stall) for stall in (Stall.PARTITION_COUNT,) if stall in found}
        owned = [each.stall for each in self._owned]
        if not owned and time.monotonic() - self._joined_at > ASSIGNING_S:
            found[Stall.NO_PARTITIONS] = "the group gave this tailer no partition"
        stalled = [stall for stall in owned if stall is not None]
        if len(stalled) < len(owned):  # a quota is on the account, so it delays whoever publishes
            stalled = [stall for stall in stalled if stall[0] is Stall.QUOTA]
        return found | dict(stalled) | raised

    def report(self) -> WorkerReport:
        """Returns what people may want to know of this process. `failing_shards` are those that aren't published.

        `stall` is none of single shards or partitions, while others are published.
        """
        partitions = sorted(owned.partition for owned in self._owned)
        held = [
            WaitingShard(TAILER, shard, f"{stall}: {why}")
            for owned in self._owned
            for shard, stall, why in owned.held()
        ]
        stall, why = next(iter(self._stalls_of_all().items()), (None, ""))
        return WorkerReport(
            version=program_version(),
            host=socket.gethostname(),
            pid=os.getpid(),
            is_member=self._member is not None,
            partitions=len(partitions),
            assigned=tuple(partitions[:ASSIGNED_MAX]),
            stall=stall,
            stall_reason=why,
            failing_shards=tuple(held[:WAITING_MAX]),
            failing_shards_count=len(held),
        )

    @property
    def answered(self) -> str:
        """The newest challenge that this process has answered for the group, or nothing."""
        return "" if self._member is None else self._member.answered

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
                        retry_s = REJOIN_S
                    except BusUnavailable as error:
                        self._failure = Stall.NO_KAFKA, str(error)
                        log.warning("datastore is not tailed", datastore=name, stall=Stall.NO_KAFKA, why=str(error))
                        retry_s = REJOIN_S
                    except Unavailable as error:
                        self._failure = stall_after(error), str(error)
                        log.warning("datastore is not tailed", datastore=name, stall=stall_after(error), why=str(error))
                        retry_s = REJOIN_S
                    except Misconfigured as error:
                        self._failure = Stall.REFUSED, str(error)
                        log.error("datastore is not tailed", datastore=name, stall=Stall.REFUSED, why=str(error))
                        retry_s = MISCONFIGURED_RETRY_S
                    await pause(self._stopping, retry_s)
        finally:
            self._group_thread.shutdown(wait=False)

    async def _take_part(self, tails: asyncio.TaskGroup) -> None:
        """Makes what topics are missing, joins the group, and leaves it at `stop` or for a reason."""
        self._leave = None
        kafka = self._context.settings.kafka
        making = partial(ensure_topics, kafka, self._datastore, timeout_s=TOPICS_TIMEOUT_S)
        await in_thread(self._group_thread, making)
        if not self._is_proven:
            await self._context.prove(self._datastore)
            self._is_proven = True
        join = partial(
            GroupMember,
            self._context.settings,
            self._datastore,
            asyncio.get_running_loop(),
            assigned=partial(self._assign, tails),
            revoked=self._release,
            lost=self._lose,
        )
        member = self._member = await in_thread(self._group_thread, join)
        self._failure, self._joined_at = None, time.monotonic()
        try:
            while self._leave is None and not self._stopping.is_set():
                tailed = [owned.partition for owned in self._owned if owned.tailed]
                noticed = await in_thread(self._group_thread, member.poll, tailed, self.challenges)
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
            self._member = None
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


# OwnedPartition: a partition from its assignment to its revocation. Its log is opened, tailed and closed.
#
# A log that failed is opened anew in place. Where another process may own the partition, the group has to confirm
# first that it is still ours. Else two processes could fence each other for ever.

FENCED_RETRY_S = 2.0  # an operator's seek fences, too, and must not be fenced by us in the middle
QUOTA_RETRY_MAX_S = 12.0  # Kafka's quotas look back eleven seconds
REFUSED_RETRY_S = 5.0  # an operator has to act first: on settings, or on a record that is not ours


class OwnedPartition:
    def __init__(self, datastore: Datastore, partition: int, context: TailerContext) -> None:
        self.partition = partition
        self._datastore = datastore
        self._context = context
        self._stopping = asyncio.Event()
        self._confirmed = asyncio.Event()
        self._confirmed.set()  # the group has just assigned it
        self._question: int | None = None
        self._is_lost = False
        self._tail: PartitionTail | None = None
        self._failure: tuple[Stall, str] | None = None
        self._cells_max: int | None = None  # of a transaction, once one has failed

    @property
    def stall(self) -> tuple[Stall, str] | None:
        """Why the whole partition isn't published, or later than it should."""
        return self._failure if self._tail is None else self._tail.stall

    @property
    def stalls(self) -> Mapping[Stall, str]:
        """Why the partition, or some of its shards, aren't published."""
        found = {stall: why for _, stall, why in self.held()}
        return found if self.stall is None else found | dict([self.stall])

    def held(self) -> list[tuple[int, Stall, str]]:
        """Returns the shards that aren't published, and why: while the log is closed after a failure, all of them."""
        if self._tail is not None:
            return [(shard.shard, shard.stall, shard.why) for shard in self._tail.shards.held() if shard.stall]
        if self._failure is None:
            return []
        return [(shard, *self._failure) for shard in self._datastore.shards_of_partition(self.partition)]

    @property
    def shards(self) -> ShardQueue | None:
        return None if self._tail is None else self._tail.shards

    @property
    def tailed(self) -> bool:
        """True while its log is open."""
        return self._tail is not None

    @property
    def unconfirmed(self) -> bool:
        """True after a failure that leaves open whose the partition is, until `confirm`."""
        return not self._confirmed.is_set() and not self._is_lost

    @property
    def is_lost(self) -> bool:
        """True from `lose` to `regain`."""
        return self._is_lost

    async def run(self) -> None:
        """Runs until `stop`. It opens the log anew after a failure."""
        while not self._stopping.is_set():
            await pause(self._stopping, await self._open_and_tail())
            if self._is_lost and not self._stopping.is_set():
                self._confirmed.clear()
            await self._confirmed.wait()

    def lose(self) -> None:
        """Takes note that the group wasn't heard for a session time-out, and may have given the partition away.

        An open log stays open: whoever got the partition fences it. No opening begins before `regain`, and a log whose
        opening ends meanwhile is closed.
        """
        self._is_lost = not self._stopping.is_set()

    def regain(self) -> None:
        """Takes note that the group has assigned the partition to this process again."""
        self._is_lost = False
        self._question = None
        self._confirmed.set()

    def wait_for(self, question: int) -> None:
        """Takes note of the first question to the group after the failure."""
        if self._question is None:
            self._question = question

    def confirm(self, answered: int) -> None:
        """Lets the log be opened again if the group has confirmed a question that was asked after the failure."""
        if self._question is not None and answered >= self._question and not self._is_lost:
            self._question = None
            self._confirmed.set()

    def stop(self) -> None:
        """Lets `run` return after the transaction in flight."""
        self._stopping.set()
        self._is_lost = False
        self._confirmed.set()
        if self._tail is not None:
            self._tail.stop()

    def look_again(self) -> None:
        """Lets the tail see whether the datastore is paused."""
        if self._tail is not None:
            self._tail.look_again()

    def heads_moved(self, heads: Mapping[int, Location]) -> None:
        """Passes the heads of this partition's shards on to its tail."""
        if self._tail is not None:
            self._tail.heads_moved(heads)

    async def _open_and_tail(self) -> float:
        """Returns after how many seconds the log may be opened again."""
        settings = self._context.settings
        partition_log = PartitionLog(
            settings.kafka, self._datastore, self.partition, transaction_timeout_s=settings.transaction_timeout_s
        )
        try:
            async with self._context.openings.taken():
                if self._stopping.is_set() or self._is_lost:  # while it waited
                    return 0.0
                progress = await in_thread(self._context.opening, partition_log.open)
            if self._is_lost:  # meanwhile: a new owner may have been fenced, and opens it again
                return 0.0
            failure, self._failure = self._failure, None
            quota = failure if failure is not None and failure[0] is Stall.QUOTA else None
            self._tail = PartitionTail(self._datastore, partition_log, progress, self._context, self._cells_max, quota)
            known = self._context.heads(self._datastore.name)
            shards = self._datastore.shards_of_partition(self.partition)
            self.heads_moved({shard: known[shard] for shard in shards if shard in known})
            if not self._stopping.is_set():
                await self._tail.run()
            return 0.0
        except (Corrupt, Misconfigured, BusUnavailable, Fenced) as error:
            return self._note_failure(error, partition_log)
        finally:
            if self._tail is not None:
                self._cells_max = self._tail.cells_max
            self._tail = None
            await in_thread(self._context.closing, partition_log.close)

    def _note_failure(self, error: SchemalessError, partition_log: PartitionLog) -> float:
        """Notes and logs why the log failed. Returns after how many seconds it may be opened again."""
        place = {"topic": self._datastore.topic, "partition": self.partition}
        if isinstance(error, (Corrupt, Misconfigured)):
            self._failure = Stall.REFUSED, str(error)
            log.error("partition is not tailed", **place, stall=Stall.REFUSED, why=str(error))
            is_aborted = partition_log.state is LogState.ABORTED  # a record was refused: opening shows what changed
            return RETRY_S if is_aborted else REFUSED_RETRY_S
        if partition_log.state is not LogState.ABORTED and not self._stopping.is_set():
            self._confirmed.clear()
        quota = quota_stall(partition_log)
        if isinstance(error, BusUnavailable):
            self._failure = quota or (Stall.NO_KAFKA, str(error))
        stall = None if self._failure is None else self._failure[0]
        log.warning("a partition's log failed", **place, state=partition_log.state.value, stall=stall, why=str(error))
        if quota is not None:
            return min(partition_log.throttled_s, QUOTA_RETRY_MAX_S)
        return FENCED_RETRY_S if isinstance(error, Fenced) else RETRY_S


# GroupMember: one membership in the group of a datastore's tailers, and what is watched while it lasts.
#
# Kafka's client calls back in the thread that polls. The callbacks hand over to the event loop and, where partitions
# are revoked, wait until their tails have stopped.

POLL_S = 0.2  # the group's decisions end a poll early, and a stop waits for it
TOPICS_TIMEOUT_S = 5.0
WATCH_PERIOD_S = 2.0
WATCH_TIMEOUT_S = 1.0
CONFIRM_TIMEOUT_S = 1.0


class LeaveReason(Enum):
    """Why a tailer leaves the group and joins it anew, which opens every log anew."""

    TOPICS_DELETED = "the topics were deleted"
    TRANSACTION_HANGS = "a partition has a hanging transaction"
    PROGRESS_MOVED = "an operator moved progress"
    KAFKA_WAS_AWAY = "Kafka was away, and may have lost the end of its logs"


class GroupMember:
    """To be made, polled and closed in one thread, which isn't the event loop's."""

    def __init__(
        self,
        settings: TailerSettings,
        datastore: Datastore,
        loop: asyncio.AbstractEventLoop,
        *,
        assigned: Callable[[Sequence[int]], None],
        revoked: Callable[[Sequence[int]], Coroutine[None, None, None]],
        lost: Callable[[Sequence[int]], None],
    ) -> None:
        """Joins the group. Raises BusUnavailable, Misconfigured."""
        self._datastore = datastore
        self._topics = TopicsWatch(settings.kafka, datastore, every_s=WATCH_PERIOD_S, timeout_s=WATCH_TIMEOUT_S)
        self._raised: list[str] = []
        self._note_raised()
        self._transactions = HangingTransactionsWatch(
            settings.kafka,
            datastore.topic,
            every_s=WATCH_PERIOD_S,
            patience_s=3 * settings.transaction_timeout_s,  # to flush, to commit, to abort
            timeout_s=WATCH_TIMEOUT_S,
        )
        self._membership = Membership(
            settings.kafka,
            datastore,
            session_timeout_s=settings.session_timeout_s,
            assigned=partial(_call_soon, loop, assigned),
            revoked=lambda partitions: asyncio.run_coroutine_threadsafe(revoked(partitions), loop).result(),
            lost=partial(_call_soon, loop, lost),
        )

    def poll(self, tailed: Collection[int], challenges: Sequence[str]) -> LeaveReason | None:
        """Lets the group's decisions take effect, and answers challenges. Returns why the group has to be left, if it
        has to.

        `tailed` are the partitions whose log is open. Raises BusUnavailable or Misconfigured.
        """
        self._membership.poll(POLL_S)
        if challenges:
            self._membership.answer(challenges)
        answered, changed = self._topics.answered, self._topics.changed()
        was_away = self._topics.answered > answered and self._membership.kafka_answers()
        if changed:
            return LeaveReason.TOPICS_DELETED
        self._note_raised()
        self._topics.verify_settings()
        if was_away:
            return LeaveReason.KAFKA_WAS_AWAY
        if hanging := self._transactions.hanging(tailed):
            log.error("partitions have a hanging transaction", topic=self._datastore.topic, partitions=hanging)
            return LeaveReason.TRANSACTION_HANGS
        return None

    @property
    def stalls(self) -> Mapping[Stall, str]:
        """What is wrong with the group or the topics, and what to do."""
        found = {}
        if self._membership.is_away:
            refusal = self._membership.refusal
            found = {Stall.REFUSED: refusal} if refusal else {Stall.NO_KAFKA: "no broker of Kafka answers"}
        return found | ({Stall.PARTITION_COUNT: "; ".join(self._raised)} if self._raised else {})

    @property
    def answered(self) -> str:
        """The newest challenge whose answer the group has, or nothing."""
        return self._membership.answered

    def _note_raised(self) -> None:
        before, self._raised = self._raised, raised_topics(self._topics.counts, self._datastore)
        if self._raised != before:
            for why in self._raised:
                log.error("a topic's partitions were raised", stall=Stall.PARTITION_COUNT, why=why)

    @property
    def asked(self) -> int:
        """The number of the last question to the group."""
        return self._membership.asked

    def ask(self) -> int:
        """Asks the group whether what it assigned is still this process's. Returns the last question that it confirmed.

        Revocations take effect meanwhile. Raises what `poll` does.
        """
        return self._membership.ask(CONFIRM_TIMEOUT_S)

    def close(self) -> None:
        """Leaves the group, so that others take over at once."""
        self._membership.close()


def _call_soon(
    loop: asyncio.AbstractEventLoop, call: Callable[[Sequence[int]], None], partitions: Sequence[int]
) -> None:
    loop.call_soon_threadsafe(call, partitions)
