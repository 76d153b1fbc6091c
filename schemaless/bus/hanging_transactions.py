"""Hanging transactions (KIP-664): ones without an end, which readers of committed records don't pass.

Every transaction is open for a moment. One that stays open has lost its end, and somebody has to end it:
docs/exactly-once.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from schemaless.bus.client import NOT_KNOWN_YET, client_settings, translate
from schemaless.errors import BusUnavailable, TopicMissing

Place = tuple[str, int]
"""Topic and partition."""

MARKERS_S = 2.0
"""The markers that end a transaction take milliseconds. One that is open for longer than this hangs."""

_POLL_S = 0.05


def open_transactions(admin: AdminClient, places: Collection[Place], *, timeout_s: float) -> dict[Place, int]:
    """Returns the partitions with an open transaction, and the offset of its first record.

    Raises BusUnavailable, or TopicMissing.
    """
    if not places:
        return {}
    ends = _ends(admin, places, IsolationLevel.READ_UNCOMMITTED, timeout_s)
    stable = _ends(admin, places, IsolationLevel.READ_COMMITTED, timeout_s)  # later: it may be further, never behind
    return {place: stable[place] for place in places if stable[place] < ends[place]}


def hanging_transactions(bootstrap: str, places: Collection[Place], *, timeout_s: float) -> dict[Place, int]:
    """Returns what `open_transactions` still shows after `MARKERS_S`. `timeout_s` bounds each question."""
    admin = AdminClient(client_settings(bootstrap))
    deadline = time.monotonic() + MARKERS_S
    while (found := open_transactions(admin, places, timeout_s=timeout_s)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


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
        """Returns those of the partitions that have a hanging transaction, and none while the broker is unreachable.

        Call it often: it asks the broker once in `every_s`.
        """
        now = self._clock()
        if now - self._asked_at < self._every_s:
            return []
        self._asked_at = now
        try:
            found = open_transactions(self._admin, [(self._topic, p) for p in partitions], timeout_s=self._timeout_s)
        except (BusUnavailable, TopicMissing):
            return []
        self._open_since = {first: self._open_since.get(first, now) for first in found.items()}
        return sorted(place[1] for (place, _), since in self._open_since.items() if now - since >= self._patience_s)


def _ends(
    admin: AdminClient, places: Collection[Place], isolation: IsolationLevel, timeout_s: float
) -> dict[Place, int]:
    wanted = {TopicPartition(*place): OffsetSpec.latest() for place in places}  # type: ignore[no-untyped-call]
    deadline = time.monotonic() + timeout_s
    while True:
        found = admin.list_offsets(wanted, isolation_level=isolation, request_timeout=timeout_s)
        try:
            return {(asked.topic, asked.partition): future.result().offset for asked, future in found.items()}
        except KafkaException as error:  # a leader that was chosen just now may not know its end yet
            if error.args[0].code() not in NOT_KNOWN_YET or time.monotonic() > deadline:
                raise translate(error.args[0], "asking where partitions end") from error
        time.sleep(_POLL_S)
