"""The two topics of a datastore: makes them, and refuses ones that don't fit (I7, I8).

The cells topic keeps history for ever and takes the largest body; the progress topic is compacted and kept without
end, so that a shard's progress outlives every consumer group.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import structlog
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._metadata import ClusterMetadata, TopicMetadata
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic

from schemaless.bus.client import client_settings
from schemaless.bus.topic_settings import CELLS, PROGRESS, check_cells_settings, check_progress_settings
from schemaless.bus.translation import translate, translated
from schemaless.errors import BusUnavailable, Misconfigured
from schemaless.topology import Datastore

log = structlog.get_logger()

_REPLICAS = 3
_CHECKS = (check_cells_settings, check_progress_settings)
_POLL_S = 0.1


def ensure_topics(bootstrap: str, datastore: Datastore, *, timeout_s: float = 10.0) -> None:
    """Both topics exist with the datastore's partition count when this returns. Idempotent.

    What is unusual about one that exists is logged. Raises Misconfigured for a topic with another partition count or
    with settings that would lose cells or progress, BusUnavailable after `timeout_s` at the latest.
    """
    deadline = time.monotonic() + timeout_s
    admin = AdminClient(client_settings(bootstrap))
    wanted = {datastore.topic: CELLS, datastore.progress_topic: PROGRESS}
    cluster = _cluster(admin, timeout_s)
    missing = {topic: config for topic, config in wanted.items() if topic not in cluster.topics}
    if missing:
        _create(
            admin, missing, datastore.partitions, replicas=min(_REPLICAS, len(cluster.brokers)), timeout_s=timeout_s
        )
    while not _all_fit(_cluster(admin, timeout_s).topics, wanted, datastore):
        if time.monotonic() > deadline:
            raise BusUnavailable(f"topics of {datastore.name} have no leaders after {timeout_s} s")
        time.sleep(_POLL_S)
    if len(missing) < len(wanted):
        _check_settings(admin, list(wanted), timeout_s)


def _check_settings(admin: AdminClient, topics: Sequence[str], timeout_s: float) -> None:
    """Of the cells topic and the progress topic."""
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    asked = admin.describe_configs(resources, request_timeout=timeout_s)
    for topic, resource, check in zip(topics, resources, _CHECKS, strict=True):
        with translated(f"asking for the settings of topic {topic}"):
            found = asked[resource].result()
        for told in check(topic, {name: entry.value or "" for name, entry in found.items()}):
            log.warning("a topic is not as it should be", why=told)


def _cluster(admin: AdminClient, timeout_s: float) -> ClusterMetadata:
    with translated("asking Kafka for its topics"):
        return admin.list_topics(timeout=timeout_s)


def _create(
    admin: AdminClient, missing: Mapping[str, Mapping[str, str]], partitions: int, *, replicas: int, timeout_s: float
) -> None:
    durable = {"min.insync.replicas": "2"} if replicas == _REPLICAS else {}
    topics = [NewTopic(topic, partitions, replicas, config={**config, **durable}) for topic, config in missing.items()]
    made = admin.create_topics(topics, operation_timeout=timeout_s, request_timeout=timeout_s)
    for topic, future in made.items():
        _wait(topic, future)


def _wait(topic: str, future: Future[None]) -> None:
    try:
        future.result()
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another process was faster
            raise translate(error.args[0], f"creating topic {topic}") from error


def _all_fit(found: Mapping[str, TopicMetadata], wanted: Mapping[str, object], datastore: Datastore) -> bool:
    """Whether every topic is there with leaders. Raises Misconfigured for another partition count."""
    for topic in wanted:
        partitions = found[topic].partitions if topic in found else {}
        if not partitions or any(partition.leader < 0 for partition in partitions.values()):
            return False
        if len(partitions) != datastore.partitions:
            raise Misconfigured(
                f"topic {topic} has {len(partitions)} partitions, datastore {datastore.name} needs"
                f" {datastore.partitions}: delete the topic, or create the datastore with the topic's count"
            )
    return True
