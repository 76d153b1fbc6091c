"""How far a datastore is published, and by whom, as anybody may look at it while tailers work. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from schemaless.bus.client import client_settings
from schemaless.bus.progress import committed_progress
from schemaless.bus.reader import PartitionReader
from schemaless.bus.topic_identity import topic_ids
from schemaless.bus.translation import translate, translated
from schemaless.location import Location
from schemaless.names import tailer_group
from schemaless.topology import Datastore


class Owner(msgspec.Struct, frozen=True):
    """A process that tails a partition: what it calls itself, and the address it comes from."""

    client: str
    host: str


class Publication(msgspec.Struct, frozen=True):
    """`locations`: last published of each shard; `refused`: the head at which its tailer gave it up; `emptied`:
    partitions made anew after cells were published to them; `owners`: by partition.
    """

    locations: Mapping[int, Location]
    refused: Mapping[int, Location]
    emptied: frozenset[int]
    owners: Mapping[int, Owner]


def read_publication(bootstrap: str, datastore: Datastore, *, timeout_s: float = 10.0) -> Publication:
    """Raises BusUnavailable. Nothing is published where the topics don't exist yet."""
    admin = AdminClient(client_settings(bootstrap))
    with translated("asking Kafka for its topics"):
        topics = admin.list_topics(timeout=timeout_s).topics
    owners = _owners(admin, datastore, timeout_s)
    if not {datastore.topic, datastore.progress_topic} <= topics.keys():
        return Publication({}, {}, frozenset(), owners)
    (topic_id,) = topic_ids(admin, [datastore.topic], timeout_s=timeout_s)
    locations: dict[int, Location] = {}
    refused: dict[int, Location] = {}
    emptied: set[int] = set()
    with PartitionReader(bootstrap, timeout_s=timeout_s) as reader:
        for partition in range(datastore.partitions):
            progress = committed_progress(reader, datastore, partition, topic_id)
            locations.update(progress.locations)
            refused.update(progress.refused)
            if progress.elsewhere:
                emptied.add(partition)
    return Publication(locations, refused, frozenset(emptied), owners)


def _owners(admin: AdminClient, datastore: Datastore, timeout_s: float) -> dict[int, Owner]:
    asked = admin.describe_consumer_groups([tailer_group(datastore.name)], request_timeout=timeout_s)
    try:
        members = asked[tailer_group(datastore.name)].result().members
    except KafkaException as error:
        raise translate(error.args[0], "asking Kafka for the group of the tailers") from error
    return {
        assigned.partition: Owner(member.client_id, member.host)
        for member in members
        for assigned in member.assignment.topic_partitions
    }
