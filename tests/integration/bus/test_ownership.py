"""Whose the topics of a datastore are: claims against a real broker (I20)."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemaless.bus.ownership import owner_of, require_ours
from schemaless.bus.partition_log import LogState, PartitionLog
from schemaless.bus.topics import ensure_topics
from schemaless.errors import AnotherInstallation
from tests.topic_harness import new_topic, publish, stored_cell
from tests.waiting import until


def of(datastore, installation):
    return dataclasses.replace(datastore, installation=installation)


@pytest.fixture
def unclaimed(kafka):
    """Topics that an operator made, with a record in them that is nobody's."""
    made = new_topic(kafka)
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.delete_topics([made.progress_topic])[made.progress_topic].result()
    anew = NewTopic(made.progress_topic, made.partitions, 1, config={"cleanup.policy": "compact"})
    until(lambda: admin.create_topics([anew])[made.progress_topic].exception() is None)
    producer = Producer({"bootstrap.servers": kafka})
    producer.produce(made.progress_topic, b"not ours", b"x", 0)
    producer.flush()
    return made


def test_the_first_claim_counts(kafka, unclaimed):
    """Also where many claim at once. Whoever comes later is told whose the topics are."""
    assert owner_of(kafka, unclaimed, timeout_s=10) is None
    assert not require_ours(kafka, unclaimed)
    claimants = [of(unclaimed, f"{n:016x}") for n in range(6)]

    def claim(datastore):
        try:
            ensure_topics(kafka, datastore)
        except AnotherInstallation as error:
            return str(error)
        return None

    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(claim, claimants))
    owner = owner_of(kafka, unclaimed, timeout_s=10)
    assert [one.installation for one, why in zip(claimants, said, strict=True) if why is None] == [owner]
    assert [one.installation for one in claimants if claim(one) is None] == [owner]


def test_a_partition_that_another_one_has_published_to_is_refused(kafka):
    """As where a claim was lost with the progress topic: each record of progress says whose it is."""
    datastore = of(new_topic(kafka), "")
    publish(kafka, datastore, [stored_cell(0, 1)])
    log = PartitionLog(kafka, of(datastore, "b" * 16), 0)
    with pytest.raises(AnotherInstallation, match="another installation"):
        log.open()
    assert log.state is not LogState.OPEN
    log.close()
    publish(kafka, datastore, [stored_cell(0, 2)])
