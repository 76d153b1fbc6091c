"""GroupMember: one membership in the group of a datastore's tailers, and what is watched while it lasts.

Kafka's client calls back in the thread that polls. The callbacks hand over to the event loop and, where partitions are
revoked, wait until their tails have stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from enum import Enum
from functools import partial

import structlog

from schemaless.bus.hanging_transactions import HangingTransactionsWatch
from schemaless.bus.membership import Membership
from schemaless.bus.topics import TopicsWatch, ensure_topics
from schemaless.config import TailerSettings
from schemaless.topology import Datastore

log = structlog.get_logger()

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
        """Makes the topics that are missing, and joins the group. Raises BusUnavailable, Misconfigured."""
        ensure_topics(settings.kafka, datastore, timeout_s=TOPICS_TIMEOUT_S)
        topics = (datastore.topic, datastore.progress_topic)

        self._datastore = datastore
        self._topics = TopicsWatch(settings.kafka, topics, every_s=WATCH_PERIOD_S, timeout_s=WATCH_TIMEOUT_S)
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

    def poll(self, tailed: Collection[int]) -> LeaveReason | None:
        """Lets the group's decisions take effect. Returns why the group has to be left, if it has to.

        `tailed` are the partitions whose log is open. Raises BusUnavailable or Misconfigured.
        """
        self._membership.poll(POLL_S)
        answered, changed = self._topics.answered, self._topics.changed()
        if self._topics.answered > answered:
            self._membership.kafka_answers()
        if changed:
            return LeaveReason.TOPICS_DELETED
        if hanging := self._transactions.hanging(tailed):
            log.error("partitions have a hanging transaction", topic=self._datastore.topic, partitions=hanging)
            return LeaveReason.TRANSACTION_HANGS
        return None

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
