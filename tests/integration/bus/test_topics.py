"""The topics of a datastore as they are made, and those of somebody else's making: refused or told (I7, I8)."""

import uuid

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType
from structlog.testing import capture_logs

from schemaless.bus.topics import check_copies, ensure_topics
from schemaless.errors import Misconfigured
from schemaless.topology import Datastore


@pytest.fixture
def admin(kafka):
    return AdminClient({"bootstrap.servers": kafka})


@pytest.fixture
def datastore():
    return Datastore(f"o{uuid.uuid4().hex[:8]}", 2, 1, ("a",))


@pytest.fixture
def made_elsewhere(admin, datastore):
    """Makes one of the two topics with settings of its own."""

    def make(topic, settings):
        admin.create_topics([NewTopic(topic, datastore.partitions, 1, config=settings)])[topic].result()

    return make


def settings_of(admin, topic):
    resource = ConfigResource(ResourceType.TOPIC, topic)
    return {name: entry.value for name, entry in admin.describe_configs([resource])[resource].result().items()}


def test_topics_are_made_as_the_contract_says(admin, kafka, datastore):
    """History without end, room for the largest body, any timestamp; progress is compacted and never expires."""
    ensure_topics(kafka, datastore)
    cells, progress = (settings_of(admin, topic) for topic in (datastore.topic, datastore.progress_topic))
    assert {name: cells[name] for name in ("retention.ms", "retention.bytes", "cleanup.policy")} == {
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "cleanup.policy": "delete",
    }
    assert int(cells["max.message.bytes"]) == 4 << 20
    assert int(cells["message.timestamp.after.max.ms"]) == 2**63 - 1
    assert (progress["cleanup.policy"], progress["retention.ms"]) == ("compact", "-1")


@pytest.mark.parametrize(
    ("which", "settings", "told"),
    [
        ("topic", {"cleanup.policy": "compact", "max.message.bytes": "4194304"}, "cleanup.policy=compact"),
        ("progress_topic", {"cleanup.policy": "delete"}, "cleanup.policy=delete: progress would expire"),
    ],
)
def test_settings_that_would_lose_something_are_refused(kafka, datastore, made_elsewhere, which, settings, told):
    """The message names topic, setting, value and what would happen."""
    topic = getattr(datastore, which)
    made_elsewhere(topic, settings)
    with pytest.raises(Misconfigured, match=f"{topic} has {told}"):
        ensure_topics(kafka, datastore)


@pytest.mark.parametrize(("replicas", "least", "told"), [(3, "1", 1), (3, "2", 0), (2, "1", 1), (1, "1", 0)])
def test_a_commit_that_one_of_several_brokers_has_is_told(replicas, least, told):
    warnings = check_copies("t", {"min.insync.replicas": least}, replicas)
    assert [f"topic t has {replicas} replicas and min.insync.replicas={least}" in one for one in warnings] == [
        True
    ] * told


def test_settings_that_shorten_history_are_told(kafka, datastore, made_elsewhere):
    """Somebody may want less history in the topic: it is used, and said loudly each time."""
    made_elsewhere(datastore.topic, {"max.message.bytes": "4194304", "retention.ms": "86400000"})
    with capture_logs() as told:
        ensure_topics(kafka, datastore)
    (warning,) = (entry["why"] for entry in told if entry["log_level"] == "warning" and "retention" in entry["why"])
    assert "retention.ms=86400000" in warning
    assert "is made with -1" in warning
