"""What an error of Kafka's client becomes in a message of ours."""

import pytest
from confluent_kafka import KafkaError

from schemaless.bus.client import translate


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("ConsumerGroupDescribe: ", "ConsumerGroupDescribe: NOT_COORDINATOR"),
        ("Local: Timed out", "Local: Timed out"),
        ("", "NOT_COORDINATOR"),
    ],
)
def test_a_message_never_ends_where_its_reason_should_be(said, reason):
    """A broker that has just started answers with a number alone."""
    error = translate(KafkaError(KafkaError.NOT_COORDINATOR, said), "asking Kafka")
    assert str(error) == f"asking Kafka: {reason}"
