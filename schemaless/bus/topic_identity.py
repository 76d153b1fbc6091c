"""Which topic stands under a name: one that was deleted and made anew has another id, and knows nothing (I7)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

from schemaless.bus.client import client_settings
from schemaless.bus.translation import translated
from schemaless.errors import BusUnavailable, TopicMissing


def topic_ids(admin: AdminClient, topics: Sequence[str], *, timeout_s: float) -> list[str]:
    """Raises TopicMissing when one of them does not exist, BusUnavailable when the broker can't tell."""
    asked = admin.describe_topics(TopicCollection(list(topics)), request_timeout=timeout_s)
    with translated(f"asking which topics {' and '.join(topics)} are"):
        return [str(asked[topic].result().topic_id) for topic in topics]


def topic_id(bootstrap: str, topic: str, *, timeout_s: float) -> str:
    return topic_ids(AdminClient(client_settings(bootstrap)), [topic], timeout_s=timeout_s)[0]


class TopicsWatch:
    """Tells that topics were deleted, or made anew, since it was made. One thread at a time."""

    def __init__(self, bootstrap: str, topics: Sequence[str], *, every_s: float, timeout_s: float) -> None:
        self._admin = AdminClient(client_settings(bootstrap))
        self._topics = topics
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._asked_at = time.monotonic()
        self._ids = topic_ids(self._admin, topics, timeout_s=timeout_s)

    def changed(self) -> bool:
        """Call it often: it asks every `every_s`. False while the broker can't tell."""
        if time.monotonic() - self._asked_at < self._every_s:
            return False
        self._asked_at = time.monotonic()
        try:
            return topic_ids(self._admin, self._topics, timeout_s=self._timeout_s) != self._ids
        except TopicMissing:
            return True
        except BusUnavailable:
            return False
