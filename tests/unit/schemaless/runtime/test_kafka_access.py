"""Kafka's address with the account and the certificates that belong to it."""

import copy
import io
import socket
from types import SimpleNamespace

import pytest

from schemaless.errors import BusRefuses, BusUnavailable
from schemaless.runtime import kafka_access
from schemaless.runtime.kafka_access import KafkaAccess, KafkaAddress, require_account, require_certificate_of
from schemaless.runtime.tls import Tls
from tests.certificates import make_certificates

WANTS_AN_ACCOUNT = bytes.fromhex("0000000a 00000001 0021")


class Broker:
    """A connection to a broker that lets in nobody without an account."""

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        pass

    def makefile(self, mode):
        return io.BytesIO(WANTS_AN_ACCOUNT)

    def sendall(self, data):
        pass


@pytest.fixture
def connected(monkeypatch):
    """Where connections went. The host names that begin with "no" can't be resolved or reached."""
    addresses = []

    def connect(address, timeout):
        addresses.append(address)
        if address[0] == "nobody":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if address[0] == "nowhere":
            raise OSError(101, "Network is unreachable")
        return Broker()

    monkeypatch.setattr(kafka_access, "socket", SimpleNamespace(create_connection=connect))
    return addresses


def test_a_broker_that_cant_be_resolved_or_reached_hides_none_that_answers(connected):
    """The others are asked, and say why nobody gets in."""
    with pytest.raises(BusRefuses, match="Kafka at kafka-2:9092"):
        require_account("nobody:9092,nowhere:9092,kafka-2:9092", None)
    assert [host for host, _ in connected] == ["nobody", "nowhere", "kafka-2"]


def test_where_no_broker_can_be_reached_kafkas_client_says_so(connected, tmp_path):
    """It tries for as long as it was told to."""
    require_account("nobody:9092,no port", None)
    require_certificate_of("nobody:9092,nowhere:9092", make_certificates(tmp_path).tls)


def test_a_ca_that_cant_be_read_is_named(tmp_path):
    with pytest.raises(BusUnavailable, match=r"none\.pem"):
        require_certificate_of("kafka:9092", Tls(str(tmp_path / "none.pem")))


def test_an_ipv6_address_has_brackets(connected):
    """As everywhere where a port follows. The connection itself has none."""
    with pytest.raises(BusRefuses, match=r"Kafka at \[::1\]:9092"):
        require_account("[::1]:9092", None)
    assert connected == [("::1", 9092)]


def test_an_address_can_be_copied_with_its_access() -> None:
    """Plans of processes hold it, and are copied when they are stored."""
    address = KafkaAddress("kafka:9092", KafkaAccess())
    copied = copy.deepcopy(address)
    assert (copied, copied.access) == (address, address.access)
