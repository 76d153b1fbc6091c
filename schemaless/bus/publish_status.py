"""Publish status: how far a datastore is published, and which processes own its partitions. It only reads."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from confluent_kafka.admin import AdminClient

from schemaless.bus.client import client_settings, translated
from schemaless.bus.published_progress import committed_progress
from schemaless.bus.reader import PartitionReader
from schemaless.bus.topics import topic_ids
from schemaless.location import Location
from schemaless.names import tailer_group
from schemaless.position import Position
from schemaless.topology import Datastore


class Owner(msgspec.Struct, frozen=True):
    """A process that tails a partition: the client id that it chose, and its address."""

    client: str
    host: str


class PublishStatus(msgspec.Struct, frozen=True):
    positions: Mapping[int, Position]
    """How far each shard was published, by shard."""
    emptied: frozenset[int]
    """Partitions of a topic that was made anew after cells were published to them."""
    owners: Mapping[int, Owner]
    """The process that tails a partition, by partition."""

    @property
    def locations(self) -> dict[int, Location]:
        return {shard: position.location for shard, position in self.positions.items()}


def read_publish_status(bootstrap: str, datastore: Datastore, *, timeout_s: float = 10.0) -> PublishStatus:
    """Reads the status, which is empty while the topics don't exist. Raises BusUnavailable."""
    admin = AdminClient(client_settings(bootstrap))
    with translated("asking Kafka for its topics"):
        topics = admin.list_topics(timeout=timeout_s).topics
    group = tailer_group(datastore.name)
    asked = admin.describe_consumer_groups([group], request_timeout=timeout_s)
    with translated("asking Kafka for the group of the tailers"):
        members = asked[group].result().members
    owners = {
        assigned.partition: Owner(member.client_id, member.host)
        for member in members
        for assigned in member.assignment.topic_partitions
    }
    if not {datastore.topic, datastore.progress_topic} <= topics.keys():
        return PublishStatus({}, frozenset(), owners)
    (topic_id,) = topic_ids(admin, [datastore.topic], timeout_s=timeout_s)
    positions: dict[int, Position] = {}
    emptied: set[int] = set()
    with PartitionReader(bootstrap, timeout_s=timeout_s) as reader:
        for partition in range(datastore.partitions):
            progress = committed_progress(reader, datastore, partition, topic_id)
            positions.update(progress.positions)
            if progress.elsewhere:
                emptied.add(partition)
    return PublishStatus(positions, frozenset(emptied), owners)
