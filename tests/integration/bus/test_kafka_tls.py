"""Connections to Kafka are encrypted and verified, with an account: librdkafka's and Faust's (I17)."""

import socket
import ssl
import threading
import uuid
from pathlib import Path

import pytest

from schemaless.bus.client import client_settings
from schemaless.bus.faust_transport import faust_app
from schemaless.bus.kafka_accounts import KafkaUser, new_kafka_accounts
from schemaless.bus.reader import PartitionReader
from schemaless.bus.topics import ensure_topics
from schemaless.errors import BusUnavailable
from schemaless.runtime.kafka_access import KafkaAccess, KafkaAddress
from schemaless.stack.kafka_broker import BrokerTls, answers
from schemaless.stack.local import running_kafka
from schemaless.topology import Datastore
from tests.certificates import make_certificates
from tests.waiting import async_until, until

ACCOUNTS = new_kafka_accounts()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory, certificates):
    """The address of a broker that encrypts and wants an account."""
    tls = BrokerTls(Path(certificates.tls.ca), certificates.keystore)
    with running_kafka(tmp_path_factory.mktemp("kafka"), ACCOUNTS, tls) as (address, _):
        yield address


def through(address, tls, host="127.0.0.1"):
    """Another way to the same broker, with a reader's account."""
    port = address.rpartition(":")[2]
    return KafkaAddress(f"{host}:{port}", KafkaAccess(ACCOUNTS.account(KafkaUser.READER), tls))


@pytest.fixture(params=["librdkafka", "Faust"])
def opens(request):
    """Makes a client, as far as its settings: there the certificate is looked at."""
    make = {"librdkafka": client_settings, "Faust": lambda address: faust_app("g", address)}
    return make[request.param]


def test_topics_are_made_and_read_over_tls(encrypted, certificates):
    """An administrator makes them, a reader sees them, and an open connection gets nothing."""
    datastore = Datastore(f"t{uuid.uuid4().hex[:8]}", 2, 2, ("a", "b"))
    ensure_topics(encrypted, datastore)
    with PartitionReader(through(encrypted, certificates.tls)) as reader:
        assert reader is not None
    until(lambda: answers(through(encrypted, certificates.tls)))
    assert not answers(through(encrypted, None))


@pytest.mark.usefixtures("faust_garbage")
async def test_faust_gets_in_over_tls(encrypted, certificates):
    """Its consumer joins a group."""
    datastore = Datastore(f"t{uuid.uuid4().hex[:8]}", 2, 2, ("a", "b"))
    ensure_topics(encrypted, datastore)
    app = faust_app(f"g{uuid.uuid4().hex}", through(encrypted, certificates.tls))

    @app.agent(app.topic(datastore.topic))
    async def nothing(stream):
        async for _ in stream:
            pass

    async with app:
        await async_until(app.consumer.assignment)


def test_a_wrong_ca_is_refused(opens, encrypted, certificates):
    with pytest.raises(BusUnavailable, match=r"Kafka at 127.*: its certificate is refused: .*certificate"):
        opens(through(encrypted, certificates.other_tls))


def test_a_wrong_host_name_is_refused(opens, encrypted, certificates):
    with pytest.raises(BusUnavailable, match=r"its certificate is refused: .* not valid for 'localhost'"):
        opens(through(encrypted, certificates.tls, "localhost"))


def test_an_expired_certificate_is_refused(opens, tmp_path):
    """A broker with it can't even talk to itself, so a bare TLS server stands for it."""
    bad = make_certificates(tmp_path)
    bad.issue(for_s=-60)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(bad.certificate, bad.key)

    def serve():
        client, _ = listener.accept()
        with client, pytest.raises(OSError):
            context.wrap_socket(client, server_side=True)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        address = KafkaAddress(f"127.0.0.1:{listener.getsockname()[1]}", KafkaAccess(None, bad.tls))
        with pytest.raises(BusUnavailable, match="its certificate is refused: certificate has expired"):
            opens(address)
