"""Kafka's address with the account and the certificates that belong to it."""

import copy

from schemaless.runtime.kafka_access import KafkaAccess, KafkaAddress


def test_an_address_can_be_copied_with_its_access() -> None:
    """Plans of processes hold it, and are copied when they are stored."""
    address = KafkaAddress("kafka:9092", KafkaAccess())
    copied = copy.deepcopy(address)
    assert (copied, copied.access) == (address, address.access)
