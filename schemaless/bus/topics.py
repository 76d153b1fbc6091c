"""The two topics of a datastore: makes them, refuses ones that don't fit, and notices when they were deleted (I7, I8).

The cells topic keeps history for ever and takes the largest body. The progress topic is compacted and kept for ever, so
that a shard's progress outlives every consumer group. A topic that was deleted and made anew has another id.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping, Sequence

import structlog
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._metadata import TopicMetadata
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic

from schemaless.bus.client import client_settings, metadata_of, translate, translated
from schemaless.bus.topic_settings import CELLS, PROGRESS, check_cells_settings, check_progress_settings
from schemaless.errors import BusUnavailable, Misconfigured, TopicMissing
from schemaless.topology import Datastore

log = structlog.get_logger()

_REPLICAS = 3
_POLL_S = 0.1
_ASKING = "asking Kafka for its topics"


def ensure_topics(bootstrap: str, datastore: Datastore, *, timeout_s: float = 10.0) -> None:
    """Makes the topics that are missing, and returns when both exist with the datastore's partition count.

    It waits for all leaders of a topic that it made, and for one of a topic that existed: a broker may be away, and the
    partitions of the others have to be tailed meanwhile.

    Logs unusual settings of a topic that exists. Raises Misconfigured for another partition count and for settings that
    would lose cells or progress, BusUnavailable after `timeout_s` at the latest.
    """
    deadline = time.monotonic() + timeout_s
    admin = AdminClient(client_settings(bootstrap))
    wanted = {datastore.topic: CELLS, datastore.progress_topic: PROGRESS}
    cluster = metadata_of(admin, bootstrap, _ASKING, timeout_s)
    missing = {topic: config for topic, config in wanted.items() if topic not in cluster.topics}
    if missing:
        _create(
            admin, missing, datastore.partitions, replicas=min(_REPLICAS, len(cluster.brokers)), timeout_s=timeout_s
        )
    while not _all_fit(metadata_of(admin, bootstrap, _ASKING, timeout_s).topics, wanted, missing, datastore):
        if time.monotonic() > deadline:
            raise BusUnavailable(f"topics of {datastore.name} have no leaders after {timeout_s} s")
        time.sleep(_POLL_S)
    if len(missing) < len(wanted):
        _check_settings(admin, datastore, timeout_s)


def ensure_topic(bootstrap: str, topic: str, partitions: int, *, timeout_s: float) -> None:
    """Makes a topic of cells that is missing, with settings as the cells topic has. Raises BusUnavailable."""
    admin = AdminClient(client_settings(bootstrap))
    cluster = metadata_of(admin, bootstrap, _ASKING, timeout_s)
    if topic not in cluster.topics:
        replicas = min(_REPLICAS, len(cluster.brokers))
        _create(admin, {topic: CELLS}, partitions, replicas=replicas, timeout_s=timeout_s)


def _check_settings(admin: AdminClient, datastore: Datastore, timeout_s: float) -> None:
    for topic, check in ((datastore.topic, check_cells_settings), (datastore.progress_topic, check_progress_settings)):
        resource = ConfigResource(ResourceType.TOPIC, topic)
        asked = admin.describe_configs([resource], request_timeout=timeout_s)
        with translated(f"asking for the settings of topic {topic}"):
            found = asked[resource].result()
        for warning in check(topic, {name: entry.value or "" for name, entry in found.items()}):
            log.warning("a topic has unusual settings", why=warning)


def _create(
    admin: AdminClient, missing: Mapping[str, Mapping[str, str]], partitions: int, *, replicas: int, timeout_s: float
) -> None:
    durable = {"min.insync.replicas": "2"} if replicas == _REPLICAS else {}
    topics = [NewTopic(topic, partitions, replicas, config={**config, **durable}) for topic, config in missing.items()]
    made = admin.create_topics(topics, operation_timeout=timeout_s, request_timeout=timeout_s)
    for topic, future in made.items():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another process was faster
                raise translate(error.args[0], f"creating topic {topic}") from error


def _all_fit(
    found: Mapping[str, TopicMetadata], wanted: Iterable[str], made: Container[str], datastore: Datastore
) -> bool:
    """Returns whether every topic exists and has leaders. Raises Misconfigured for another partition count."""
    for topic in wanted:
        partitions = found[topic].partitions if topic in found else {}
        led = [partition.leader >= 0 for partition in partitions.values()]
        if not any(led) or (topic in made and not all(led)):
            return False
        if len(partitions) != datastore.partitions:
            raise Misconfigured(
                f"topic {topic} has {len(partitions)} partitions, datastore {datastore.name} needs"
                f" {datastore.partitions}: delete the topic, or create the datastore with the topic's count"
            )
    return True


def topic_ids(admin: AdminClient, bootstrap: str, topics: Sequence[str], *, timeout_s: float) -> list[str]:
    """Returns the id of each topic. Raises TopicMissing when one doesn't exist, BusUnavailable."""
    asked = admin.describe_topics(TopicCollection(list(topics)), request_timeout=timeout_s)
    with translated(f"asking Kafka at {bootstrap} which topics {' and '.join(topics)} are"):
        return [str(asked[topic].result().topic_id) for topic in topics]


def topic_id(bootstrap: str, topic: str, *, timeout_s: float) -> str:
    """Returns the id of one topic. Raises TopicMissing, BusUnavailable."""
    return topic_ids(AdminClient(client_settings(bootstrap)), bootstrap, [topic], timeout_s=timeout_s)[0]


class TopicsWatch:
    """Notices that topics were deleted, or made anew, since it was created. One thread at a time."""

    def __init__(self, bootstrap: str, topics: Sequence[str], *, every_s: float, timeout_s: float) -> None:
        self._admin = AdminClient(client_settings(bootstrap))
        self._bootstrap = bootstrap
        self._topics = topics
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._asked_at = time.monotonic()
        self._ids = topic_ids(self._admin, bootstrap, topics, timeout_s=timeout_s)
        self.answered = 0
        """How many questions of `changed` the broker has answered."""

    def changed(self) -> bool:
        """Returns whether they were, and False while the broker is unreachable. It asks once in `every_s`."""
        if time.monotonic() - self._asked_at < self._every_s:
            return False
        self._asked_at = time.monotonic()
        try:
            changed = topic_ids(self._admin, self._bootstrap, self._topics, timeout_s=self._timeout_s) != self._ids
        except TopicMissing:
            changed = True
        except BusUnavailable:
            return False
        self.answered += 1
        return changed
