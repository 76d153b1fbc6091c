"""What a log makes of the client's reports."""

from confluent_kafka import Message

from schemaless.bus.partition_log import PartitionLog
from schemaless.topology import Datastore


def test_a_record_that_is_delivered_without_an_offset_ends_nothing():
    """The client says nothing else of a batch that it sent twice."""
    log = PartitionLog("nowhere:1", Datastore("trips", 1, 1, ("a",)), 0)
    for offset in (-1, 7):
        log._note_offset(None, Message(topic="trips", offset=offset))
    assert log._offsets == {"trips": [7]}
