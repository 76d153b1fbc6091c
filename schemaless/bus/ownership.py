"""Whose a datastore's topics are (I20): the installation is named by the first record of the progress topic.

Names of topics and groups follow from a datastore's name, which another installation may have given, too. So who makes
topics claims them before anybody publishes, and who is about to join a group looks first. Of two claims the first one
counts. A claim is a record of its own key, which is written once: compaction never moves it.
"""

from __future__ import annotations

import msgspec
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from schemaless.bus.client import metadata_of, open_client, translated
from schemaless.bus.reader import PartitionReader
from schemaless.errors import AnotherInstallation, BusUnavailable
from schemaless.location import BEGINNING
from schemaless.topology import Datastore

PROGRESS_FORMAT = 3
"""The version of progress records. Those of version 1 have no digest, and of version 2 no installation."""
NO_SHARD = -1
"""The shard of a record that only claims."""
_PARTITION = 0
_TIMEOUT_S = 10.0


class _Claim(msgspec.Struct):
    """Value of a claim. It has the members that a record of progress has."""

    installation: str
    shard: int = NO_SHARD
    generation: int = BEGINNING.generation
    added_id: int = BEGINNING.added_id
    format: int = PROGRESS_FORMAT


_decode = msgspec.msgpack.Decoder(_Claim).decode
_encode = msgspec.msgpack.Encoder().encode


def claim_topics(bootstrap: str, datastore: Datastore, *, timeout_s: float) -> None:
    """Claims topics that nobody has claimed. Raises AnotherInstallation, BusUnavailable."""
    if owner_of(bootstrap, datastore, timeout_s=timeout_s) is None:
        producer = open_client(Producer, bootstrap, {"enable.idempotence": True})
        with translated(f"claiming {datastore.progress_topic}"):
            errors: list[object] = []
            claim, key = _encode(_Claim(datastore.installation)), datastore.installation.encode()
            producer.produce(
                datastore.progress_topic, claim, key, _PARTITION, on_delivery=lambda error, _: errors.append(error)
            )
            left = producer.flush(timeout_s)
        if left or errors != [None]:
            raise BusUnavailable(f"{datastore.progress_topic} took no claim: {errors[0] if errors else 'no answer'}")
    require_ours(bootstrap, datastore, timeout_s=timeout_s)


def owner_of(bootstrap: str, datastore: Datastore, *, timeout_s: float) -> str | None:
    """Returns the installation whose topics they are, or None for topics that nobody has claimed, or that are missing.

    Raises BusUnavailable.
    """
    topic = datastore.progress_topic
    asking = f"asking Kafka at {bootstrap} whose {topic} is"
    if topic not in metadata_of(open_client(AdminClient, bootstrap), bootstrap, asking, timeout_s).topics:
        return None
    with PartitionReader(bootstrap, timeout_s=timeout_s) as reader:
        for records in reader.read(topic, _PARTITION, reader.committed_span(topic, _PARTITION)):
            for record in records:
                try:
                    return _decode(record.value).installation
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue  # it isn't ours, or of an older format: tailers refuse it
    return None


def require_ours(bootstrap: str, datastore: Datastore, *, timeout_s: float = _TIMEOUT_S) -> bool:
    """Returns whether the topics are claimed. Raises AnotherInstallation where they aren't ours, BusUnavailable."""
    owner = owner_of(bootstrap, datastore, timeout_s=timeout_s)
    if owner is not None:
        verify_owner(datastore, owner)
    return owner is not None


def verify_owner(datastore: Datastore, owner: str) -> None:
    """Raises AnotherInstallation."""
    if owner != datastore.installation:
        raise AnotherInstallation(
            f"{datastore.topic} belongs to another installation, {owner}, and these databases are of"
            f" {datastore.installation}"
        )
