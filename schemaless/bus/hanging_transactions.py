"""Records that nobody sees yet, because the transaction before or around them has no end (docs/exactly-once.md).

For a moment that is so after every commit. Where it stays so, nobody will end it.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from schemaless.bus.client import client_settings
from schemaless.bus.translation import NOT_KNOWN_YET, translate
from schemaless.errors import BusUnavailable, TopicMissing

Place = tuple[str, int]
"""Topic and partition."""


MARKERS_S = 2.0
"""The markers of a transaction's end take milliseconds. What is hidden for longer stays so until somebody ends it."""

_POLL_S = 0.05


def hidden_records(admin: AdminClient, places: Collection[Place], *, timeout_s: float) -> dict[Place, int]:
    """Where some are hidden: the offset of the first one. Raises BusUnavailable, or TopicMissing."""
    if not places:
        return {}
    ends = _ends(admin, places, IsolationLevel.READ_UNCOMMITTED, timeout_s)
    seen = _ends(admin, places, IsolationLevel.READ_COMMITTED, timeout_s)  # later: it may be further, never behind
    return {place: seen[place] for place in places if seen[place] < ends[place]}


def records_that_stay_hidden(bootstrap: str, places: Collection[Place], *, timeout_s: float) -> dict[Place, int]:
    """As `hidden_records`, after `MARKERS_S` where there are some. `timeout_s` bounds each question."""
    admin = AdminClient(client_settings(bootstrap))
    deadline = time.monotonic() + MARKERS_S
    while (hidden := hidden_records(admin, places, timeout_s=timeout_s)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return hidden


class HiddenRecordsWatch:
    """Tells which partitions of a topic hide the same records for longer than a transaction lasts.

    One thread at a time.
    """

    def __init__(self, bootstrap: str, topic: str, *, every_s: float, patience_s: float, timeout_s: float) -> None:
        self._admin = AdminClient(client_settings(bootstrap))
        self._topic = topic
        self._every_s = every_s
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._asked_at = time.monotonic()
        self._since: dict[tuple[Place, int], float] = {}

    def stuck(self, partitions: Collection[int]) -> list[int]:
        """Of these partitions. Call it often: it asks every `every_s`. Nothing while the broker can't tell."""
        now = time.monotonic()
        if now - self._asked_at < self._every_s:
            return []
        self._asked_at = now
        try:
            hidden = hidden_records(self._admin, [(self._topic, p) for p in partitions], timeout_s=self._timeout_s)
        except (BusUnavailable, TopicMissing):
            return []
        self._since = {found: self._since.get(found, now) for found in hidden.items()}
        return sorted(place[1] for (place, _), since in self._since.items() if now - since >= self._patience_s)


def _ends(
    admin: AdminClient, places: Collection[Place], isolation: IsolationLevel, timeout_s: float
) -> dict[Place, int]:
    """A leader that was chosen just now may not know it yet: it is asked again."""
    wanted = {TopicPartition(*place): OffsetSpec.latest() for place in places}  # type: ignore[no-untyped-call]
    deadline = time.monotonic() + timeout_s
    while True:
        found = admin.list_offsets(wanted, isolation_level=isolation, request_timeout=timeout_s)
        try:
            return {(asked.topic, asked.partition): future.result().offset for asked, future in found.items()}
        except KafkaException as error:
            if error.args[0].code() not in NOT_KNOWN_YET or time.monotonic() > deadline:
                raise translate(error.args[0], "asking where partitions end") from error
        time.sleep(_POLL_S)
