"""OwnedPartition: a partition from its assignment to its revocation. Its log is opened, tailed and closed.

A log that failed is opened anew in place. Where another process may own the partition, the group has to confirm first
that it is still ours. Else two processes could fence each other for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from schemaless.bus.partition_log import LogState, PartitionLog
from schemaless.errors import BusUnavailable, Corrupt, Fenced, Misconfigured
from schemaless.location import Location
from schemaless.runtime.lifecycle import pause
from schemaless.topology import Datastore
from tailer.partition_tail import RETRY_S, PartitionTail, TailerContext, in_thread
from tailer.shard_queue import ShardQueue

log = structlog.get_logger()

FENCED_RETRY_S = 2.0  # an operator's seek fences, too, and must not be fenced by us in the middle
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
        place = {"topic": self._datastore.topic, "partition": self.partition}
        try:
            async with self._context.openings.taken():
                if self._stopping.is_set() or self._is_lost:  # while it waited
                    return 0.0
                progress = await in_thread(self._context.opening, partition_log.open)
            if self._is_lost:  # meanwhile: a new owner may have been fenced, and opens it again
                return 0.0
            self._tail = PartitionTail(self._datastore, partition_log, progress, self._context)
            known = self._context.heads(self._datastore.name)
            shards = self._datastore.shards_of_partition(self.partition)
            self.heads_moved({shard: known[shard] for shard in shards if shard in known})
            if not self._stopping.is_set():
                await self._tail.run()
            return 0.0
        except (Corrupt, Misconfigured) as error:
            log.error("partition is not tailed", **place, why=str(error))
            return REFUSED_RETRY_S
        except (BusUnavailable, Fenced) as error:
            if partition_log.state is not LogState.ABORTED and not self._stopping.is_set():
                self._confirmed.clear()
            log.warning("a partition's log failed", **place, state=partition_log.state.value, why=str(error))
            return FENCED_RETRY_S if isinstance(error, Fenced) else RETRY_S
        finally:
            self._tail = None
            await in_thread(self._context.closing, partition_log.close)
