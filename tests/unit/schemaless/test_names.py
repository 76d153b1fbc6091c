"""Names on the wire are a contract: processes of different versions, and programs of others, meet at them."""

from schemaless import names
from schemaless.topology import Datastore


def test_names_on_the_wire_never_change():
    """Topics, groups, transactional ids, consumers, headers and record kinds, letter by letter."""
    datastore = Datastore("trips", 4, 2, ("a",))
    assert (datastore.topic, datastore.progress_topic) == ("schemaless.trips.cells", "schemaless.trips.progress")
    assert names.publisher_id("trips", 1) == "schemaless.trips.cells.1"
    assert names.tailer_group("trips") == "schemaless.trips.tailer"
    assert names.indexer_group("trips") == "schemaless.trips.indexer"
    assert names.trigger_group("trips", "billing") == "schemaless.trips.trigger.billing"
    assert names.index_consumer("by_city") == "index:by_city"
    assert names.trigger_consumer("billing") == "trigger:billing"
    assert (names.VERSION_HEADER, names.KIND_HEADER, names.COLUMN_HEADER) == ("v", "kind", "column")
    assert names.RECORD_VERSION == b"1"
    assert names.parked_topic_name("trips", "billing") == "schemaless.trips.billing.parked"
    assert (names.DLQ_TOPIC_HEADER, names.DLQ_PARTITION_HEADER) == ("__dlq.errors.topic", "__dlq.errors.partition")
    assert (names.DLQ_GROUP_HEADER, names.DLQ_COUNT_HEADER) == ("__dlq.errors.group", "__dlq.errors.delivery.count")
    assert names.DLQ_MESSAGE_HEADER == "__dlq.errors.message"
    assert (names.KIND_CELL, names.KIND_GENERATION, names.KIND_SEEK) == (b"cell", b"generation", b"seek")
