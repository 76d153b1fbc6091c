"""Kafka's address with the account and the certificates that belong to it."""

import copy
import gc
import io
import os
import socket
import threading
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
from structlog.testing import capture_logs

from schemaless.errors import BusRefuses, BusUnavailable, Misconfigured
from schemaless.runtime import kafka_access
from schemaless.runtime.kafka_access import (
    KafkaAccess,
    KafkaAccount,
    KafkaAccountFile,
    KafkaAddress,
    require_account,
    require_certificate_of,
)
from schemaless.runtime.tls import Tls, write_private_text
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


class Living:
    """A client that lives, and the accounts that it was given."""

    def __init__(self):
        self.taken = []

    def take(self, account):
        self.taken.append(account.password)


def account(password):
    return KafkaAccount("tailer", password)


@pytest.fixture
def file(tmp_path):
    found = tmp_path / "account.json"
    write_private_text(found, msgspec.json.encode(account("old")).decode())
    return found


@pytest.fixture
def unwatched(monkeypatch):
    """No thread looks, so that the test does."""
    monkeypatch.setattr(kafka_access, "threading", SimpleNamespace(Lock=threading.Lock, Thread=Mock))


@pytest.mark.usefixtures("unwatched")
def test_clients_that_live_are_given_the_account_that_replaces_theirs(file):
    """Once. A file that is touched is no news."""
    kept, clients = KafkaAccountFile(file), [Living(), Living()]
    for client in clients:
        kept.keep(client, account("old"), Living.take)
    kept.look()
    os.utime(file)
    kept.look()
    assert [client.taken for client in clients] == [[], []]
    write_private_text(file, msgspec.json.encode(account("new")).decode())
    with capture_logs() as lines:
        kept.look()
        kept.look()
    assert [client.taken for client in clients] == [["new"], ["new"]]
    assert [line["event"] for line in lines] == ["the replaced account of Kafka is used"]
    assert "new" not in str(lines).replace(str(file), "")


@pytest.mark.usefixtures("unwatched")
def test_a_client_that_read_the_file_just_before_it_was_replaced_is_given_the_new_account(file):
    kept, early, late = KafkaAccountFile(file), Living(), Living()
    kept.keep(early, account("old"), Living.take)
    write_private_text(file, msgspec.json.encode(account("new")).decode())
    kept.keep(late, account("old"), Living.take)
    assert (early.taken, set(late.taken)) == (["new"], {"new"})


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("text", ["{", None, '{"user": "tailer"}'])
def test_a_file_that_cant_be_used_leaves_the_account_in_use_until_it_can(file, text):
    kept, client = KafkaAccountFile(file), Living()
    kept.keep(client, account("old"), Living.take)
    file.unlink()
    if text is not None:
        write_private_text(file, text)
    with capture_logs() as lines:
        kept.look()
        kept.look()
    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("error", "the replaced account of Kafka can't be used")
    ]
    assert client.taken == []
    assert kept.present() == account("old")  # which a client that is made now gets
    write_private_text(file, msgspec.json.encode(account("new")).decode())
    kept.look()
    assert client.taken == ["new"]


def test_a_file_that_cant_be_used_is_refused_while_no_client_lives(file):
    """What somebody starts now says so at once."""
    file.unlink()
    with pytest.raises(Misconfigured, match="there is no"):
        KafkaAccountFile(file).present()


@pytest.mark.usefixtures("unwatched")
def test_a_client_that_ended_is_kept_by_nobody(file):
    kept, client = KafkaAccountFile(file), Living()
    kept.keep(client, account("old"), Living.take)
    reference = weakref.ref(client)
    del client
    gc.collect()
    assert reference() is None


def test_a_refusal_is_counted_by_broker_and_account():
    before = kafka_access.refusals["kafka-1:9092", "tailer"]
    with capture_logs() as lines:
        said = kafka_access.note_refusal("kafka-1:9092", "tailer")
    assert said == "Kafka at kafka-1:9092 refuses the account 'tailer': the account's name or password is wrong"
    assert [(line["event"], line["broker"], line["account"]) for line in lines] == [
        ("Kafka refuses the account", "kafka-1:9092", "tailer")
    ]
    assert kafka_access.refusals["kafka-1:9092", "tailer"] == before + 1
