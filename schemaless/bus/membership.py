"""Membership of the Kafka group that decides which tailer owns which partition. Nothing is read through it.

The group removes a member that halted or lost its connection after the session time-out. The group doesn't keep such a
member from publishing: the fencing of `schemaless/bus/partition_log.py` does.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence

import structlog
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, MemberDescription  # type: ignore[attr-defined]

from schemaless.bus.client import NOT_KNOWN_YET, REFUSALS, AccountsHeard, open_client, translate, translated
from schemaless.names import Stall, tailer_group
from schemaless.runtime.events import Event, emit
from schemaless.topology import Datastore

log = structlog.get_logger()

Partitions = Callable[[Sequence[int]], None]
"""Called with partition numbers, in the thread that polls."""

_SEPARATOR = ","
_POLL_INTERVAL_MAX_S = 30
_ANSWER_POLL_S = 0.05
_HEARTBEAT_MAX_S = 0.25  # members learn of a rebalance with their next heartbeat, so a partition waits that long


class Membership:
    """One member of the group. One thread at a time.

    `assigned` is called with the partitions that this process now owns, without those beyond the datastore's count,
    which somebody added to the topic. `revoked` is called before they are given to
    another process. `lost` is called when that may have happened already, because the group wasn't heard for a session
    time-out. The next call of `assigned` then says which of them are this process's. `poll` and `close` make these
    calls.
    """

    def __init__(
        self,
        bootstrap: str,
        datastore: Datastore,
        *,
        session_timeout_s: float,
        assigned: Partitions,
        revoked: Partitions,
        lost: Partitions,
    ) -> None:
        self._assigned = assigned
        self._revoked = revoked
        self._lost = lost
        self._partitions = range(datastore.partitions)
        self._group = tailer_group(datastore.name)
        self._progress_topic = datastore.progress_topic
        self._asked = self._answered = 0
        self._saying, self._said = "", ""  # in the group's offsets, beside the questions
        self._sayings: dict[int, str] = {}
        self._is_away = False
        self._heard = AccountsHeard(bootstrap)
        self._consumer = open_client(
            Consumer,
            bootstrap,
            {
                "client.id": f"tailer-{socket.gethostname()}-{os.getpid()}",  # `schemaless tailer status` shows it
                "group.id": self._group,
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": round(session_timeout_s * 1000),
                "heartbeat.interval.ms": round(min(session_timeout_s / 6, _HEARTBEAT_MAX_S) * 1000),
                # A process that hangs without dying loses its partitions, too.
                "max.poll.interval.ms": max(_POLL_INTERVAL_MAX_S, round(session_timeout_s)) * 1000,
                "enable.auto.commit": False,
                "on_commit": self._on_commit,
                "error_cb": self._on_error,
            },
        )
        with translated(f"joining group {self._group}"):
            self._consumer.subscribe(
                [datastore.topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )

    def poll(self, timeout_s: float) -> None:
        """Lets the group's decisions take effect. Raises Fenced, BusUnavailable, Misconfigured if they last."""
        with translated(f"taking part in group {self._group}"):
            message = self._consumer.poll(timeout_s)
        error = message.error() if message is not None else None
        if error is not None and (error.fatal() or error.code() in REFUSALS):
            raise translate(error, f"taking part in group {self._group}")

    @property
    def asked(self) -> int:
        """The number of the last question to the group."""
        return self._asked

    def ask(self, timeout_s: float) -> int:
        """Asks the group whether this process is a member of its present generation, and has not been replaced.

        Returns the number of the last question that the group has answered with yes, after `timeout_s` at the latest.
        A later call counts late answers, too. The numbers of questions begin with 1.

        The question is an offset commit, because the coordinator checks member and generation of one. Its offset is the
        number of the question, so an answer tells which one it belongs to. It is in the progress topic, to which nobody
        subscribes: Kafka forgets it after a week. An AdminClient may not ask for the group: librdkafka ends the process
        where that meets a broken connection (seen on 2.16.1). Raises what `poll` does.
        """
        self._ask()
        deadline = time.monotonic() + timeout_s
        while self._answered < self._asked and time.monotonic() < deadline:
            self.poll(_ANSWER_POLL_S)
        return self._answered

    def answer(self, challenges: Sequence[str]) -> None:
        """Answers what processes ask that read the same databases (I20). To be called often: what the group refused
        while it was being assigned is said again.
        """
        text = _SEPARATOR.join(challenges)
        if text != self._said and text not in self._sayings.values():
            self._saying = text
            self._ask()

    @property
    def answered(self) -> str:
        """The newest challenge whose answer the group has, or nothing."""
        return self._said.partition(_SEPARATOR)[0]

    def _ask(self) -> None:
        self._asked += 1
        self._sayings[self._asked] = self._saying
        question = TopicPartition(self._progress_topic, 0, self._asked, self._saying)
        with translated(f"asking group {self._group}"):
            self._consumer.commit(offsets=[question], asynchronous=True)

    @property
    def is_away(self) -> bool:
        """Whether no broker answered when this member asked last."""
        return self._is_away

    @property
    def refusal(self) -> str | None:
        """Which broker refuses this process's account, where that is why none answers."""
        return self._heard.refusal

    def kafka_answers(self) -> bool:
        """Returns whether Kafka was away until now, and says so in the log.

        The client tells of no connection that it made again. So somebody calls this who was answered.
        """
        was_away, self._is_away = self._is_away, False
        if was_away:
            log.info("Kafka answers again", group=self._group)
        return was_away

    def close(self) -> None:
        """Leaves the group, so that others take over at once."""
        self._consumer.close()

    def _on_commit(self, error: KafkaError | None, places: list[TopicPartition]) -> None:
        sayings = [self._sayings.pop(place.offset, "") for place in places]
        if error is None and all(place.error is None for place in places):
            self._answered = max(self._answered, *(place.offset for place in places))
            self._said = sayings[-1]

    def _on_error(self, error: KafkaError) -> None:
        # A member whose broker is away isn't told by an exception: it keeps what it has, or hears of nothing new.
        self._heard.note(error)
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._is_away = True
            if self._heard.refusal is not None:  # which the client's own words don't tell here
                return
            log.warning("no broker of Kafka answers", group=self._group, stall=Stall.NO_KAFKA, why=error.str())

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        at_end = [TopicPartition(partition.topic, partition.partition, OFFSET_END) for partition in partitions]
        consumer.incremental_assign(at_end)
        consumer.pause(at_end)
        self._assigned([place.partition for place in partitions if place.partition in self._partitions])

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        revoked = [partition.partition for partition in partitions]
        emit(Event.PARTITIONS_REVOKED, group=self._group, partitions=revoked)
        self._revoked(revoked)
        consumer.incremental_unassign(partitions)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._lost([partition.partition for partition in partitions])
        consumer.incremental_unassign(partitions)


class TailersGroup:
    """The tailers' group as a process sees it that isn't in it. One thread at a time."""

    def __init__(self, bootstrap: str, datastore: Datastore, *, timeout_s: float) -> None:
        self._group = tailer_group(datastore.name)
        self._place = TopicPartition(datastore.progress_topic, 0)
        self._timeout_s = timeout_s
        self._consumer = open_client(Consumer, bootstrap, {"group.id": self._group})
        self._admin = open_client(AdminClient, bootstrap)

    def answered(self) -> Sequence[str]:
        """Returns the challenges that the group answered last, the newest first."""
        with translated(f"asking what group {self._group} has answered"):
            (found,) = self._consumer.committed([self._place], timeout=self._timeout_s)
        return found.metadata.split(_SEPARATOR) if found.metadata else []

    def has_members(self) -> bool:
        return bool(members_of(self._admin, self._group, timeout_s=self._timeout_s))

    def close(self) -> None:
        self._consumer.close()


def members_of(admin: AdminClient, group: str, *, timeout_s: float) -> list[MemberDescription]:
    deadline = time.monotonic() + timeout_s
    with translated(f"asking Kafka for group {group}"):
        while True:
            try:
                asked = admin.describe_consumer_groups([group], request_timeout=timeout_s)
                members: list[MemberDescription] = asked[group].result().members
                return members
            except KafkaException as error:
                if error.args[0].code() not in NOT_KNOWN_YET or time.monotonic() > deadline:
                    raise
                time.sleep(_ANSWER_POLL_S)
