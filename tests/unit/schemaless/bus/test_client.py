"""What an error of Kafka's client becomes in a message of ours, and how clients take up another account."""

import weakref

import pytest
from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka.admin import AdminClient

from schemaless.bus import client
from schemaless.bus.client import AccountsHeard, open_client, translate
from schemaless.runtime.kafka_access import WRONG_PASSWORD, KafkaAccess, KafkaAccount, KafkaAddress
from schemaless.runtime.tls import write_private_text


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


def test_a_client_hears_that_its_account_is_refused_until_another_error_comes(tmp_path, monkeypatch):
    """That no broker is left says nothing of why: it follows a refusal as well as an outage."""
    file = tmp_path / "account.json"
    write_private_text(file, '{"user": "tailer", "password": "secret"}')
    monkeypatch.setenv("SCHEMALESS_KAFKA_ACCOUNT", str(file))
    heard = AccountsHeard("kafka:9092")
    said = (
        "sasl_plaintext://kafka-1:9092/1: SASL authentication error: invalid credentials (after 5ms in state AUTH_REQ)"
    )
    heard.note(KafkaError(KafkaError._AUTHENTICATION, said))
    heard.note(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert heard.refusal == f"Kafka at kafka-1:9092 refuses the account 'tailer': {WRONG_PASSWORD}"
    heard.note(KafkaError(KafkaError._TRANSPORT, "Connection refused"))
    heard.note(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert heard.refusal is None


@pytest.mark.parametrize("kind", [Consumer, Producer, AdminClient])
def test_every_kind_of_client_takes_up_the_account_that_replaces_its_own(kind, tmp_path, monkeypatch):
    """A consumer does so in the thread that polls. A client that was closed takes nothing, and disturbs nobody."""
    file, taken = tmp_path / "account.json", []
    write_private_text(file, '{"user": "tailer", "password": "old"}')
    monkeypatch.setenv("SCHEMALESS_KAFKA_ACCOUNT", str(file))
    monkeypatch.setattr(
        client, "keep_account", lambda file, client, account, take: taken.append((client, account, take))
    )
    opened = open_client(kind, "127.0.0.1:9", {"group.id": "g"} if kind is Consumer else {})
    ((kept, account, take),) = taken
    assert (kept, account.password) == (opened, "old")
    assert weakref.ref(opened)() is opened
    take(opened, KafkaAccount("tailer", "new"))
    if kind is Consumer:
        opened.poll(0.0)
        opened.close()
        take(opened, KafkaAccount("tailer", "newer"))


def test_a_client_whose_account_has_no_file_is_kept_by_nobody(monkeypatch):
    monkeypatch.setattr(client, "keep_account", None)
    address = KafkaAddress("127.0.0.1:9", KafkaAccess(KafkaAccount("tailer", "old")))
    assert type(open_client(Producer, address)) is Producer
