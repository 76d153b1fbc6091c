"""Hanging transactions (KIP-664): ones without an end, which readers of committed records don't pass.

Every transaction is open for a moment. One that stays open has lost its end, and somebody has to end it:
docs/exactly-once.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from schemaless.bus.client import NOT_KNOWN_YET, client_settings, translate

Place = tuple[str, int]
"""Topic and partition."""

MARKERS_S = 2.0
"""The markers that end a transaction take milliseconds. One that is open for longer than this hangs."""

_POLL_S = 0.05
_LEADERS_S = 0.5


class OpenTransactions(msgspec.Struct, frozen=True):
    """What brokers said of some partitions: `first` is the offset of the first record of an open transaction.

    `errors` has the partitions of which nothing is known.
    """

    first: Mapping[Place, int]
    errors: Mapping[Place, KafkaError]


def open_transactions(admin: AdminClient, places: Collection[Place], *, timeout_s: float) -> OpenTransactions:
    """Asks the brokers that lead these partitions. One of them that is away hides nothing of the others.

    The client learns first who leads them. librdkafka 2.16 may miss the answer to a question of its own about that, and
    asks again three seconds later (docs/experiments.md).
    """
    for topic in {topic for topic, _ in places}:
        with suppress(KafkaException):  # the broker that was asked may be away, and the leaders not
            admin.list_topics(topic, min(timeout_s, _LEADERS_S))
    ends, errors = _ends(admin, places, IsolationLevel.READ_UNCOMMITTED, timeout_s)
    # Asked later, so it may be further, and never behind.
    stable, more_errors = _ends(admin, ends, IsolationLevel.READ_COMMITTED, timeout_s)
    return OpenTransactions(
        {place: stable[place] for place in stable if stable[place] < ends[place]}, errors | more_errors
    )


def hanging_transactions(bootstrap: str, places: Collection[Place], *, timeout_s: float) -> dict[Place, int]:
    """Returns the open transactions that are still there after `MARKERS_S`, and the offsets of their first records.

    `timeout_s` bounds each question. Raises BusUnavailable or TopicMissing where one of the partitions isn't known.
    """
    admin = AdminClient(client_settings(bootstrap))
    deadline = time.monotonic() + MARKERS_S
    while True:
        found = open_transactions(admin, places, timeout_s=timeout_s)
        for (topic, partition), error in found.errors.items():
            raise translate(error, f"asking where {topic} [{partition}] ends")
        if not found.first or time.monotonic() > deadline:
            return dict(found.first)
        time.sleep(_POLL_S)


class HangingTransactionsWatch:
    """Finds partitions of a topic in which one transaction is open for longer than `patience_s`.

    One thread at a time.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        every_s: float,
        patience_s: float,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admin = AdminClient(client_settings(bootstrap))
        self._topic = topic
        self._every_s = every_s
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked_at = clock()
        self._open_since: dict[tuple[Place, int], float] = {}

    def hanging(self, partitions: Collection[int]) -> list[int]:
        """Returns those of the partitions that have a hanging transaction, as far as their brokers answer.

        Call it often: it asks the broker once in `every_s`.
        """
        now = self._clock()
        if now - self._asked_at < self._every_s:
            return []
        self._asked_at = now
        found = open_transactions(self._admin, [(self._topic, p) for p in partitions], timeout_s=self._timeout_s)
        # A broker that doesn't answer ends nothing: what was open there counts from its beginning.
        known = {first: since for first, since in self._open_since.items() if first[0] in found.errors}
        self._open_since = known | {first: self._open_since.get(first, now) for first in found.first.items()}
        return sorted(
            place[1] for place, first in found.first.items() if now - self._open_since[place, first] >= self._patience_s
        )


def _ends(
    admin: AdminClient, places: Collection[Place], isolation: IsolationLevel, timeout_s: float
) -> tuple[dict[Place, int], dict[Place, KafkaError]]:
    """Returns where partitions end, and the errors of those whose brokers don't say it."""
    deadline = time.monotonic() + timeout_s
    ends, errors = _ask(admin, [places], isolation, timeout_s)
    alone = len(places) == 1
    # A leader that was chosen just now may not know its end yet. One that is missing may fail the question for all, and
    # take all its time. So each partition is asked alone at least once.
    while errors:
        if alone and (time.monotonic() >= deadline or all(e.code() not in NOT_KNOWN_YET for e in errors.values())):
            break
        alone = True
        time.sleep(_POLL_S)
        more, errors = _ask(admin, [[place] for place in errors], isolation, timeout_s)
        ends |= more
    return ends, errors


def _ask(
    admin: AdminClient, questions: Sequence[Collection[Place]], isolation: IsolationLevel, timeout_s: float
) -> tuple[dict[Place, int], dict[Place, KafkaError]]:
    """Asks all questions at once. Returns the ends of partitions, and the errors of the others."""
    answers = [
        admin.list_offsets(
            {TopicPartition(*place): OffsetSpec.latest() for place in question},  # type: ignore[no-untyped-call]
            isolation_level=isolation,
            request_timeout=timeout_s,
        )
        for question in questions
        if question
    ]
    ends: dict[Place, int] = {}
    errors: dict[Place, KafkaError] = {}
    for asked, answer in [pair for found in answers for pair in found.items()]:
        place = (asked.topic, asked.partition)
        try:
            offset = answer.result().offset
        except KafkaException as error:
            errors[place] = error.args[0]
            continue
        if offset < 0:  # librdkafka 2.16.1 gives no error for a broker that doesn't answer in time
            errors[place] = KafkaError(KafkaError._TIMED_OUT)
        else:
            ends[place] = offset
    return ends, errors
