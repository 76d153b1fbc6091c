"""A broker with accounts refuses whoever has none, and lets each do what it needs (I17)."""

import asyncio
import json
import os
import re
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import msgspec
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AclBinding, AclBindingFilter, AdminClient
from typer.testing import CliRunner

from schemaless import Client, Subscriber, kafka_address
from schemaless.__main__ import app
from schemaless.bus import kafka_accounts
from schemaless.bus.client import client_settings, metadata_of
from schemaless.bus.faust_cells import cells_topic, each_cell
from schemaless.bus.faust_transport import FaustTransport, faust_app
from schemaless.bus.kafka_accounts import KafkaUser, new_kafka_accounts
from schemaless.bus.membership import Membership
from schemaless.bus.parked_topic import ParkedCopy, ParkedTopic
from schemaless.bus.partition_log import PartitionLog
from schemaless.bus.plain_transport import GroupReader, PlainTransport
from schemaless.bus.topics import ensure_topics
from schemaless.cell import StoredCell, row_key_text
from schemaless.errors import BusRefuses, BusUnavailable, Misconfigured
from schemaless.names import KIND_CELL, indexer_group, tailer_group, trigger_group
from schemaless.runtime import kafka_access
from schemaless.runtime.kafka_access import WRONG_PASSWORD, KafkaAccess, KafkaAccount, KafkaAddress, access_of
from schemaless.stack.kafka_broker import KafkaBroker, answers, prepare
from schemaless.stack.local import running_kafka
from schemaless.stack.plan import free_ports
from schemaless.storage import entity_table
from tests.log_harness import new_cell, running_tailers, wait_for_cells
from tests.topic_harness import publish
from tests.waiting import LIMIT_S, async_until, until

ACCOUNTS = new_kafka_accounts()


@pytest.fixture(scope="module")
def starter():
    """A thread that lives as long as the broker, which ends with the thread that started it."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def broker(starter, tmp_path_factory):
    """The address of a broker with accounts, for administrators, and its process."""
    with running_kafka(tmp_path_factory.mktemp("kafka"), ACCOUNTS) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(broker):
    return broker[0]


@pytest.fixture(scope="module")
def as_user(guarded):
    """The same broker's address for another account."""
    return lambda user: KafkaAddress(guarded, KafkaAccess(ACCOUNTS.account(user)))


@pytest.fixture
def datastore(guarded, make_datastore):
    """With topics that an administrator has made."""
    made = make_datastore(shards=2, partitions=2)
    ensure_topics(guarded, made)
    kafka_accounts.grant_on_datastore(guarded, made.name)
    return made


@pytest.fixture
def account_file(tmp_path):
    """A file that only its owner can read, as SCHEMALESS_KAFKA_ACCOUNT names it."""

    def write(user, password=None):
        file = tmp_path / f"{user}.json"
        file.touch(mode=0o600)
        file.write_text(json.dumps({"user": user, "password": password or ACCOUNTS.passwords[user]}))
        return file

    return write


def test_no_password_is_an_argument_of_a_process(tmp_path):
    """Everybody on a machine can see those, also of the process that gives the accounts to the broker's storage."""
    broker = KafkaBroker(tmp_path, *free_ports(2), tmp_path / "server.log", new_kafka_accounts())
    seen, over = set(), threading.Event()

    def look():
        while not over.wait(0.01):
            seen.update(found for found in map(arguments_of, Path("/proc").glob("[0-9]*")) if str(tmp_path) in found)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            prepare(broker)
        finally:
            over.set()
        looking.result()
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
    until(lambda: answers(guarded))
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
        found = await asyncio.to_thread(wait_for_cells, as_user(KafkaUser.READER), datastore, 3)
    assert {cell.key for cell in found} == {cell.key for cell in cells}
    for user in (KafkaUser.READER, KafkaUser.SERVICE):
        assert refusal_of_a_record(as_user(user), datastore) == "TOPIC_AUTHORIZATION_FAILED"
        with pytest.raises(Misconfigured, match="Authorization failed"):
            ensure_topics(as_user(user), make_unlike(datastore))


def test_each_account_joins_its_own_groups_only(as_user, datastore):
    """A member gets partitions. In the tailers' group it would keep theirs from being published."""
    tailers, indexers = tailer_group(datastore.name), indexer_group(datastore.name)
    triggers = trigger_group(datastore.name, "billing")
    let_in = {
        KafkaUser.READER: {f"g{uuid.uuid4().hex}"},
        KafkaUser.SERVICE: {indexers, triggers},
        KafkaUser.TAILER: {tailers},
    }
    for user, own in let_in.items():
        for group in own:
            assert refusal_of_a_member(as_user(user), datastore, group) is None
    refused = {KafkaUser.READER: (tailers, indexers, triggers), KafkaUser.SERVICE: (tailers, f"g{uuid.uuid4().hex}")}
    for user, others in refused.items():
        for group in others:
            assert refusal_of_a_member(as_user(user), datastore, group) == "GROUP_AUTHORIZATION_FAILED"


def test_the_groups_of_a_datastore_open_when_it_is_granted(guarded, as_user, make_datastore):
    """Its creation grants, and `datastore grant` does so again. The tailers' group stays closed."""
    datastore = make_datastore(shards=2, partitions=2)
    ensure_topics(guarded, datastore)
    group = indexer_group(datastore.name)
    assert refusal_of_a_member(as_user(KafkaUser.SERVICE), datastore, group) == "GROUP_AUTHORIZATION_FAILED"
    kafka_accounts.grant(guarded, [datastore.name])
    assert refusal_of_a_member(as_user(KafkaUser.SERVICE), datastore, group) is None
    refusal = refusal_of_a_member(as_user(KafkaUser.SERVICE), datastore, tailer_group(datastore.name))
    assert refusal == "GROUP_AUTHORIZATION_FAILED"


def test_only_a_tailer_uses_the_transactional_ids_of_tailers(as_user, datastore):
    """Whoever uses one fences its tailer, so that nothing is published any more (I7)."""
    log = PartitionLog(as_user(KafkaUser.TAILER), datastore, 0)
    log.open()
    for user in (KafkaUser.SERVICE, KafkaUser.READER):
        lacking = rf"opening {datastore.topic} \[0\].*has no ACL with Write on this transactional id"
        with pytest.raises(BusRefuses, match=lacking):
            PartitionLog(as_user(user), datastore, 0).open()
    log.publish([first_cell(datastore)])
    log.close()


def first_cell(datastore):
    """The first cell of shard 0, as its tailer reads it."""
    cell = new_cell(datastore, shard=0)
    return StoredCell(*msgspec.structs.astuple(cell.key), 0, 1, 1, 1_700_000_000_000_000, cell.body)


def test_a_tailer_with_another_account_ends_with_a_sentence(as_user, datastore):
    """It would wait for partitions for ever."""
    calls = dict.fromkeys(("assigned", "revoked", "lost"), lambda _: None)
    member = Membership(as_user(KafkaUser.SERVICE), datastore, session_timeout_s=6, **calls)
    lacking = f"group {tailer_group(datastore.name)}.*the account has no ACL with Read on this group"
    with closing(member), pytest.raises(BusRefuses, match=lacking):
        poll_until_refused(member.poll)


def poll_until_refused(poll):
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        poll(0.1)


def test_copies_of_parked_cells_need_a_grant_for_their_program(guarded, as_user, datastore):
    """Without it the error names the right. With it they are written, and to no other topic."""
    copy = ParkedCopy(first_cell(datastore), "bill_rider", "error", "no card", 5, 1_700_000_000_000_000)
    topic = ParkedTopic(as_user(KafkaUser.SERVICE), datastore, "billing")
    with pytest.raises(BusRefuses, match=rf"{topic.name}.*the account has no ACL for this topic.*Create to make it"):
        topic.publish([copy])
    assert kafka_accounts.grant_copies(guarded, datastore, "billing")
    topic.publish([copy])
    with pytest.raises(BusRefuses, match="the account has no ACL for this topic"):
        ParkedTopic(as_user(KafkaUser.SERVICE), datastore, "census").publish([copy])
    assert refusal_of_a_record(as_user(KafkaUser.SERVICE), datastore) == "TOPIC_AUTHORIZATION_FAILED"


def test_a_broker_that_asks_nobody_for_rights_gets_none(kafka, make_datastore):
    """A datastore is created there as ever."""
    assert not kafka_accounts.grant_on_datastore(kafka, make_datastore(shards=2, partitions=2).name)


def refusal_of_a_member(address, datastore, group):
    """The name of the broker's error for a member of a group, None if it gets partitions."""
    consumer = Consumer({**client_settings(address), "group.id": group, "enable.auto.commit": False})

    def told():
        if consumer.assignment():
            return [None]
        message = consumer.poll(0.1)
        return [message.error().name()] if message is not None and message.error() is not None else []

    try:
        consumer.subscribe([datastore.topic])
        return until(told)[0]
    finally:
        consumer.close()


def refusal_of_a_record(address, datastore):
    """The name of the broker's error for a record in the cells topic."""
    told = []
    producer = Producer({**client_settings(address), "message.timeout.ms": 60_000})
    producer.produce(datastore.topic, b"forged", b"key", on_delivery=lambda error, _: told.append(error))
    producer.flush(LIMIT_S)
    return told[0].name() if told and told[0] else None


def make_unlike(datastore):
    return type(datastore)(f"t{uuid.uuid4().hex[:8]}", 2, 2, datastore.placement)


@pytest.fixture
async def published(guarded, as_user, datastore, running, storage, account_file, monkeypatch):
    """A cell that a tailer process has published. It has its account from a file."""
    cell = new_cell(datastore)
    storage.master(datastore.home(cell.shard)).run(entity_table.put_cells, datastore, [cell])
    with monkeypatch.context() as tailers:
        tailers.setenv("SCHEMALESS_KAFKA_ACCOUNT", str(account_file(KafkaUser.TAILER)))
        with running_tailers(1, running.path, str(guarded), datastore):
            await asyncio.to_thread(wait_for_cells, as_user(KafkaUser.READER), datastore, 1)
    return cell


@pytest.mark.usefixtures("faust_garbage")
async def test_a_faust_agent_reads_with_a_reader_s_account(as_user, datastore, published):
    """The account of the address is Faust's, too."""
    seen = []
    app = faust_app(f"g{uuid.uuid4().hex}", as_user(KafkaUser.READER))

    @app.agent(cells_topic(app, datastore.name))
    async def note(stream):
        async for found in each_cell(stream):
            seen.append(str(found.row_key))

    async with app:
        await async_until(lambda: bool(seen))
    assert seen == [row_key_text(published.key.row_key)]


@pytest.fixture(scope="module")
def stranger(guarded):
    """An account that may join groups and has no right on a topic. Its password is "another"."""
    account, admin = KafkaAccount("stranger", "another"), AdminClient(client_settings(guarded))
    kafka_accounts.let_in(guarded, account)
    right = ("GROUP", "*", "LITERAL", f"User:{account.user}", "*", "READ", "ALLOW")
    for made in admin.create_acls([AclBinding(*right)]).values():
        made.result(LIMIT_S)
    until(lambda: admin.describe_acls(AclBindingFilter(*right)).result(LIMIT_S))  # the broker knows it a moment later
    until(lambda: answers(KafkaAddress(guarded, KafkaAccess(account))))
    return account.user


@pytest.fixture(params=["nobody", "wrong password", "stranger"])
def refused_account(request, stranger, account_file, monkeypatch):
    """Who tries to read, and what they are told."""
    if request.param == "nobody":
        return "lets in nobody without an account.*SCHEMALESS_KAFKA_ACCOUNT"
    monkeypatch.setenv("SCHEMALESS_KAFKA_ACCOUNT", str(account_file(request.param, "another")))
    if request.param == "wrong password":
        return "account 'wrong password'.*name or password is wrong"
    return "topic.*the account has no ACL for this topic: Read to read it"


def test_tail_says_why_kafka_refuses_it(guarded, datastore, refused_account):
    result = CliRunner().invoke(app, ["tail", datastore.name, "--kafka", str(guarded), "--no-follow"])
    assert isinstance(result.exception, BusRefuses)
    assert re.search(refused_account, str(result.exception))


def test_what_kafka_said_of_an_account_is_told_though_it_stands_still_before_and_after(broker):
    """Whoever asks then has no answer. Another client goes on asking all the time."""
    guarded, process = broker
    wrong = KafkaAddress(guarded, KafkaAccess(KafkaAccount(KafkaUser.READER, "wrong")))
    client = AdminClient(client_settings(wrong))
    process.stop()
    timers = [threading.Timer(3.0, process.cont), threading.Timer(11.0, process.stop)]
    for timer in timers:
        timer.start()
    try:
        with pytest.raises(BusRefuses, match="name or password is wrong"):
            metadata_of(client, wrong, "asking", 12.0)
    finally:
        for timer in timers:
            timer.join()
        process.cont()


def test_a_subscriber_says_why_kafka_refuses_it(guarded, datastore, refused_account):
    client = Client(["http://127.0.0.1:1"], datastore=datastore.name)  # Kafka is asked first
    with client, pytest.raises(BusRefuses, match=refused_account):
        Subscriber(str(guarded), datastore.name, client=client)


@pytest.mark.usefixtures("faust_garbage")
async def test_a_faust_agent_ends_with_why_kafka_refuses_it(guarded, datastore, refused_account):
    """It would wait for partitions, or for a broker, for ever."""
    with pytest.raises(BusRefuses, match=refused_account):
        await end_of_agent(f"g{uuid.uuid4().hex}", str(guarded), datastore)


@pytest.mark.usefixtures("faust_garbage")
async def test_groups_of_ours_refuse_a_reader_with_a_sentence(as_user, datastore):
    """Subscriber reads through a GroupReader."""
    group, address = indexer_group(datastore.name), as_user(KafkaUser.READER)
    lacking = f"joining group {group}: .*the account has no ACL with Read on this group"
    reader = GroupReader(address, datastore.topic, group, lambda _: None)
    reader.join(())
    with closing(reader), pytest.raises(BusRefuses, match=lacking):
        poll_until_refused(reader.consume)
    with pytest.raises(BusRefuses, match=lacking):
        await end_of_agent(group, address, datastore)


async def end_of_agent(group, address, datastore):
    """Runs an agent until its app crashes. Raises why."""
    app = faust_app(group, address)

    @app.agent(cells_topic(app, datastore.name))
    async def nothing(stream):
        async for _ in each_cell(stream):
            pass

    async with app:
        await async_until(lambda: app.crash_reason is not None)
        raise app.crash_reason


async def test_programs_read_with_what_endpoints_json_says(guarded, api, datastore, published, monkeypatch, tmp_path):
    """`tail` and a Subscriber find address and account there, and need no setting."""
    account = {"user": "reader", "password": ACCOUNTS.passwords["reader"]}
    found = {"api": [f"http://127.0.0.1:{api.port}"], "kafka": str(guarded), "kafka_account": account}
    (tmp_path / "endpoints.json").write_text(json.dumps(found))
    monkeypatch.setenv("SCHEMALESS_HOME", str(tmp_path))
    arguments = ["tail", datastore.name, "--from", "beginning", "--no-follow", "--json"]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert (result.exit_code, json.loads(result.stdout)["ref_key"]) == (0, 1)
    with Subscriber(kafka_address(), datastore.name) as subscriber:
        batch = await asyncio.to_thread(subscriber.poll, LIMIT_S)
    assert [str(cell.row_key) for cell in batch.cells] == [row_key_text(published.key.row_key)]


def test_a_plain_address_takes_the_account_of_the_process(guarded, account_file, monkeypatch):
    """A subscriber needs no more than the two variables. An account file that others can read is refused."""
    plain, file = str(guarded), account_file(KafkaUser.READER)
    assert not answers(plain)
    monkeypatch.setenv("SCHEMALESS_KAFKA_ACCOUNT", str(file))
    until(lambda: answers(plain))
    assert ACCOUNTS.passwords[KafkaUser.READER] not in repr(access_of(plain))
    os.chmod(file, 0o644)
    with pytest.raises(Misconfigured, match="others may read it"):
        answers(plain)


@pytest.fixture
def rotated(broker, starter):
    """Gives an account another password, and ends the connections that were made with the old one. The old password is
    its own again afterwards.
    """
    guarded, process = broker
    altered = []

    def rotate(user):
        altered.append(user)
        kafka_accounts.let_in(guarded, KafkaAccount(user, "fresh"))
        process.terminate()
        process.start()

    yield lambda user: asyncio.wrap_future(starter.submit(rotate, user))
    for user in altered:
        kafka_accounts.let_in(guarded, ACCOUNTS.account(user))
        until(lambda user=user: answers(KafkaAddress(guarded, KafkaAccess(ACCOUNTS.account(user)))))


class Heard:
    """A receiver that is told of its partitions and of records."""

    def __init__(self):
        self.owned, self.values = [], []

    async def assigned(self, partitions, kept=()):
        self.owned = list(partitions)

    async def revoked(self, partitions):
        self.owned = [n for n in self.owned if n not in set(partitions)]

    def take(self, partition, records):
        self.values += [record.value for record in records if record.kind == KIND_CELL]


@pytest.mark.usefixtures("faust_garbage")
@pytest.mark.parametrize("make", [PlainTransport, FaustTransport])
async def test_a_member_of_a_group_takes_up_a_rotated_account(
    make, rotated, guarded, datastore, account_file, monkeypatch
):
    """It says meanwhile which broker refuses which account. Nothing is restarted (B5)."""
    monkeypatch.setenv("SCHEMALESS_KAFKA_ACCOUNT", str(account_file(KafkaUser.SERVICE)))
    before = kafka_access.refusals[str(guarded), "schemaless"]
    receiver = Heard()
    group = trigger_group(datastore.name, make.__name__.lower())
    transport = make(str(guarded), group, datastore.topic, receiver, session_timeout_s=6.0)
    running = asyncio.create_task(transport.run())

    async def is_member():  # in the loop: Faust makes its consumer when somebody first asks for it
        assert not running.done(), running
        return transport.is_alive() and receiver.owned

    try:
        await async_until(is_member)
        assert transport.refusal is None
        await rotated(KafkaUser.SERVICE)
        refusal = await async_until(lambda: not transport.kafka_answers and transport.refusal)
        assert refusal == f"Kafka at {guarded} refuses the account 'schemaless': {WRONG_PASSWORD}"
        assert kafka_access.refusals[str(guarded), "schemaless"] > before
        account_file(KafkaUser.SERVICE, "fresh")
        await async_until(is_member)
        publish(guarded, datastore, [first_cell(datastore)])
        await async_until(lambda: receiver.values)
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_a_tailer_takes_up_a_rotated_account(
    rotated, guarded, datastore, running, storage, account_file, monkeypatch
):
    """Its status, its metrics and its log say meanwhile that the account is refused, and never the password."""
    file = account_file(KafkaUser.TAILER)
    monkeypatch.setenv("SCHEMALESS_KAFKA_ACCOUNT", str(file))
    (port,) = free_ports(1)
    said = {"output": file.with_suffix(".log"), "metrics_port": port}

    def put():
        cell = new_cell(datastore)
        storage.master(datastore.home(cell.shard)).run(entity_table.put_cells, datastore, [cell])

    with running_tailers(1, running.path, str(guarded), datastore, **said) as (tailer,):
        put()
        await asyncio.to_thread(wait_for_cells, guarded, datastore, 1)
        await rotated(KafkaUser.TAILER)

        def is_named():
            text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
            labels = f'account="tailer",broker="{guarded}"'
            return f"schemaless_service_kafka_refusals_total{{{labels}}}" in text and REFUSED in text

        await async_until(is_named, tailer.said)
        account_file(KafkaUser.TAILER, "fresh")
        put()
        await asyncio.to_thread(wait_for_cells, guarded, datastore, 2)
        assert "Kafka refuses the account" in tailer.said()
        assert not {"fresh", ACCOUNTS.passwords[KafkaUser.TAILER]}.intersection(re.split(r"\W", tailer.said()))
        await async_until(lambda: REFUSED not in httpx.get(f"http://127.0.0.1:{port}/metrics").text, tailer.said)


REFUSED = 'stall="refused"} 1.0'


def test_a_reader_may_not_grant_itself_more(as_user):
    """Rights are an administrator's."""
    with pytest.raises((Misconfigured, BusUnavailable)):
        kafka_accounts.grant(as_user(KafkaUser.READER))
