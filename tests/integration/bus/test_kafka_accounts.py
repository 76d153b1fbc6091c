"""A broker with accounts refuses whoever has none, and lets each do what it needs (I17)."""

import asyncio
import json
import os
import threading
import time
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer

from schemaless.bus.client import client_settings
from schemaless.bus.faust_app import faust_app
from schemaless.bus.faust_cells import cells_topic, each_cell
from schemaless.bus.kafka_accounts import KafkaUser, new_kafka_accounts
from schemaless.bus.topics import ensure_topics
from schemaless.errors import BusUnavailable, Misconfigured
from schemaless.names import tailer_group, trigger_group
from schemaless.runtime.kafka_access import KafkaAccess, KafkaAccount, KafkaAddress, access_of
from schemaless.stack.kafka_broker import KafkaBroker, answers, prepare
from schemaless.stack.local import running_kafka
from schemaless.stack.ports import free_ports
from schemaless.storage import entity_table
from tests.log_harness import new_cell, running_tailers, until, wait_for_cells

pytestmark = [pytest.mark.storage, pytest.mark.timeout(120)]

ACCOUNTS = new_kafka_accounts()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """The address of a broker with accounts, for administrators."""
    with running_kafka(tmp_path_factory.mktemp("kafka"), ACCOUNTS) as (address, _):
        yield address


@pytest.fixture(scope="module")
def as_user(guarded):
    """The same broker's address for another account."""
    return lambda user: KafkaAddress(guarded, KafkaAccess(ACCOUNTS.account(user)))


@pytest.fixture
def datastore(guarded, make_datastore):
    """With topics that an administrator has made."""
    made = make_datastore(shards=2, partitions=2)
    ensure_topics(guarded, made)
    return made


@pytest.fixture
def account_file(tmp_path):
    """A file that only its owner can read, as SCHEMALESS_KAFKA_ACCOUNT names it."""

    def write(user):
        file = tmp_path / f"{user}.json"
        file.touch(mode=0o600)
        file.write_text(json.dumps({"user": user, "password": ACCOUNTS.passwords[user]}))
        return file

    return write


def test_no_password_is_an_argument_of_a_process(tmp_path):
    """Everybody on a machine can see those, also of the process that gives the accounts to the broker's storage."""
    broker = KafkaBroker(tmp_path, *free_ports(2), tmp_path / "server.log", new_kafka_accounts())
    seen, over = set(), threading.Event()

    def look():
        while not over.wait(0.01):
            seen.update(found for found in map(arguments_of, Path("/proc").glob("[0-9]*")) if str(tmp_path) in found)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        prepare(broker)
    finally:
        over.set()
        looking.join()
    assert seen, "the process that formats the storage was not seen"
    for password in broker.accounts.passwords.values():
        assert not any(password in found for found in (*seen, *broker.argv()))


def arguments_of(process):
    """The command line of a process, which may just end."""
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def test_who_has_no_account_or_a_wrong_password_gets_nothing(guarded):
    """Not even the list of topics."""
    assert answers(guarded)
    assert not answers(KafkaAddress(guarded, KafkaAccess()))
    wrong = KafkaAccount(KafkaUser.READER, "wrong")
    assert not answers(KafkaAddress(guarded, KafkaAccess(wrong)))


async def test_only_a_tailer_writes_cells_and_a_reader_reads_them(
    guarded, as_user, datastore, running, storage, account_file, monkeypatch
):
    """A tailer process has its account from a file, and a reader sees what it wrote."""
    monkeypatch.setenv("SCHEMALESS_KAFKA_ACCOUNT", str(account_file(KafkaUser.TAILER)))
    cells = [new_cell(datastore) for _ in range(3)]
    for cell in cells:
        storage.master(datastore.home(cell.shard)).run(entity_table.put_cells, datastore, [cell])
    with running_tailers(1, running.path, str(guarded), datastore):
        found = await asyncio.to_thread(wait_for_cells, as_user(KafkaUser.READER), datastore, 3, 40)
    assert {cell.key for cell in found} == {cell.key for cell in cells}
    for user in (KafkaUser.READER, KafkaUser.SERVICE):
        assert refusal_of_a_record(as_user(user), datastore) == "TOPIC_AUTHORIZATION_FAILED"
        with pytest.raises(Misconfigured, match="Authorization failed"):
            ensure_topics(as_user(user), make_unlike(datastore))


def test_a_reader_joins_no_group_of_ours(as_user, datastore):
    """A member gets partitions. In the tailers' group it would keep theirs from being published."""
    for group in (tailer_group(datastore.name), trigger_group(datastore.name, "billing")):
        assert refusal_of_a_member(as_user(KafkaUser.READER), datastore, group) == "GROUP_AUTHORIZATION_FAILED"
    assert refusal_of_a_member(as_user(KafkaUser.READER), datastore, f"g{uuid.uuid4().hex}") is None


def refusal_of_a_member(address, datastore, group):
    """The name of the broker's error for a member of a group, None if it gets partitions."""
    assigned = threading.Event()
    consumer = Consumer({**client_settings(address), "group.id": group, "enable.auto.commit": False})
    try:
        consumer.subscribe([datastore.topic], on_assign=lambda *_: assigned.set())
        deadline = time.monotonic() + 40
        while not assigned.is_set():
            assert time.monotonic() < deadline, "the broker neither lets it in nor refuses it"
            message = consumer.poll(0.1)
            if message is not None and message.error() is not None:
                return message.error().name()
        return None
    finally:
        consumer.close()


def refusal_of_a_record(address, datastore):
    """The name of the broker's error for a record in the cells topic."""
    told = []
    producer = Producer({**client_settings(address), "message.timeout.ms": 10_000})
    producer.produce(datastore.topic, b"forged", b"key", on_delivery=lambda error, _: told.append(error))
    producer.flush(15)
    return told[0].name() if told and told[0] else None


def make_unlike(datastore):
    return type(datastore)(f"t{uuid.uuid4().hex[:8]}", 2, 2, datastore.placement)


async def test_a_faust_agent_reads_with_a_reader_s_account(
    guarded, as_user, datastore, running, storage, account_file, monkeypatch
):
    """The account of the address is Faust's, too. Without one its app never gets a cell."""
    cell = new_cell(datastore)
    storage.master(datastore.home(cell.shard)).run(entity_table.put_cells, datastore, [cell])
    monkeypatch.setenv("SCHEMALESS_KAFKA_ACCOUNT", str(account_file(KafkaUser.TAILER)))
    seen = []
    app = faust_app(f"g{uuid.uuid4().hex}", as_user(KafkaUser.READER))

    @app.agent(cells_topic(app, datastore.name))
    async def note(stream):
        async for found in each_cell(stream):
            seen.append(found.key)

    with running_tailers(1, running.path, str(guarded), datastore):
        async with app:
            await until(lambda: bool(seen), 60)
    assert seen == [cell.key]


def test_a_plain_address_takes_the_account_of_the_process(guarded, account_file, monkeypatch):
    """A subscriber needs no more than the two variables. An account file that others can read is refused."""
    plain, file = str(guarded), account_file(KafkaUser.READER)
    assert not answers(plain)
    monkeypatch.setenv("SCHEMALESS_KAFKA_ACCOUNT", str(file))
    assert answers(plain)
    assert ACCOUNTS.passwords[KafkaUser.READER] not in repr(access_of(plain))
    os.chmod(file, 0o644)
    with pytest.raises(Misconfigured, match="others may read it"):
        answers(plain)


def test_a_reader_may_not_grant_itself_more(as_user):
    """Rights are an administrator's."""
    from schemaless.bus import kafka_accounts

    with pytest.raises((Misconfigured, BusUnavailable)):
        kafka_accounts.grant(as_user(KafkaUser.READER))
