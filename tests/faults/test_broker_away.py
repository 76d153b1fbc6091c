"""One broker of two hangs: its partition waits, and the cells of the other partition are published as before (I7).

So it is also while the tailers' group isn't heard, and while another program's transaction hangs.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from schemaless.audit.run import audit
from schemaless.bus.partition_log import HangingTransactionsWatch, hanging_transactions
from schemaless.bus.topics import CELLS, PROGRESS
from schemaless.errors import BusUnavailable
from schemaless.stack import kafka_broker
from schemaless.stack.kafka_broker import KafkaBroker
from schemaless.stack.local import LocalServer, running_kafka
from schemaless.stack.plan import free_ports
from tests.log_harness import new_cell, put, running_tailers, wait_for_records
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

FAILURES = 3  # of the partition whose broker hangs: a publish, and openings of its log
WAIT_S = 90.0
FAILED = "a partition's log failed"
LET_GO = ("joining the group anew", "partitions released")
GROUP_PARTITIONS = int(re.search(r"offsets\.topic\.num\.partitions=(\d+)", kafka_broker.PROPERTIES)[1])
NOT_HEARD = "the group isn't heard"


@pytest.fixture
def brokers(tmp_path) -> Iterator[tuple[str, LocalServer]]:
    """The address of the first broker, which has the coordinators, and the handle of a second one."""
    with running_kafka(tmp_path / "first") as (kafka, _first):
        make_coordinators(kafka)
        with second_broker(tmp_path / "first", tmp_path / "second") as second:
            yield kafka, second


@pytest.fixture
def parted(tmp_path) -> Iterator[tuple[str, LocalServer]]:
    """The address of the first broker, which coordinates transactions, and the handle of a second one, which
    coordinates groups.
    """
    with running_kafka(tmp_path / "first") as (kafka, _first):
        Producer({"bootstrap.servers": kafka, "transactional.id": "first"}).init_transactions(30)
        with second_broker(tmp_path / "first", tmp_path / "second") as second:
            places = [[2]] * GROUP_PARTITIONS
            compacted = {"cleanup.policy": "compact"}
            offsets = NewTopic("__consumer_offsets", GROUP_PARTITIONS, replica_assignment=places, config=compacted)
            admin = AdminClient({"bootstrap.servers": kafka})
            (made,) = admin.create_topics([offsets]).values()
            made.result()
            yield kafka, second


def make_coordinators(kafka: str) -> None:
    """Lets the first broker make Kafka's own topics while it is alone."""
    Producer({"bootstrap.servers": kafka, "transactional.id": "first"}).init_transactions(30)
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "first"})
    with suppress(KafkaException):  # the coordinator may not be loaded yet, but its topic is made
        consumer.committed([TopicPartition("none", 0)], timeout=30)
    assert {"__transaction_state", "__consumer_offsets"} <= consumer.list_topics(timeout=30).topics.keys()
    consumer.close()


@contextmanager
def second_broker(first: Path, folder: Path) -> Iterator[LocalServer]:
    """A broker of the same cluster without a controller of its own."""
    (port,) = free_ports(1)
    settings = (first / "server.properties").read_text()
    controller_port = int(re.search(r"voters=1@127.0.0.1:(\d+)", settings)[1])
    broker = KafkaBroker(folder, port, controller_port, folder / "server.log")
    listener = f"PLAINTEXT://127.0.0.1:{port}"
    own = {"node.id": 2, "process.roles": "broker", "listeners": listener, "advertised.listeners": listener}
    own["log.dirs"] = broker.data
    broker.data.mkdir(parents=True)
    broker.properties.write_text(
        kafka_broker.with_settings(settings, "".join(f"{name}={value}\n" for name, value in own.items()))
    )
    cluster = re.search(r"cluster\.id=.*", (first / "data" / "meta.properties").read_text())[0]
    (broker.data / "meta.properties").write_text(f"version=1\nnode.id=2\n{cluster}\n")
    (folder / "log4j2.properties").write_text(kafka_broker.LOGGING)
    server = LocalServer(
        "second", broker.argv(), broker.log, lambda me: kafka_broker.wait_ready(broker, alive=me.alive)
    )
    try:
        server.start()
        yield server
    finally:
        server.kill()


def make_topics(kafka: str, datastore) -> None:
    """Each partition has one copy: the first on the first broker, the second on the other one."""
    admin = AdminClient({"bootstrap.servers": kafka})
    made = admin.create_topics(
        [
            NewTopic(topic, 2, replica_assignment=[[1], [2]], config=dict(config))
            for topic, config in ((datastore.topic, CELLS), (datastore.progress_topic, PROGRESS))
        ]
    )
    for future in made.values():
        future.result()


def wait_for_partition(kafka: str, datastore, partition: int, cells: int) -> None:
    """Returns once committed readers see so many cells in one partition."""
    settings = {"group.id": "none", "isolation.level": "read_committed", "enable.auto.commit": False}
    consumer = Consumer({"bootstrap.servers": kafka, **settings})
    consumer.assign([TopicPartition(datastore.topic, partition, 0)])
    seen = []

    def has_all():
        if (message := consumer.poll(1.0)) is not None and message.error() is None:
            seen.append(message)
        return len(seen) >= cells

    until(has_all, lambda: f"{len(seen)} of {cells} cells of partition {partition}")
    consumer.close()


def test_a_broker_that_hangs_delays_only_its_own_partition(running, storage, make_datastore, brokers, tmp_path):
    """The tailer keeps its other partition, and the group's word is enough to open the log again."""
    kafka, second = brokers
    datastore = make_datastore(shards=2, partitions=2, placement=("a",))
    make_topics(kafka, datastore)
    output = tmp_path / "tailer"
    with running_tailers(1, running.path, kafka, datastore, output=output, session_timeout_s=60.0) as (tailer,):
        put(storage, datastore, [new_cell(datastore, shard=shard) for shard in (0, 1)])
        wait_for_records(kafka, datastore, 2)
        second.stop()
        put(storage, datastore, [new_cell(datastore, shard=1)])
        for number in range(1, FAILURES + 1):
            until(
                lambda number=number: (
                    tailer.said().count(FAILED) >= number or any(word in tailer.said() for word in LET_GO)
                ),
                tailer.said,
            )
            put(storage, datastore, [new_cell(datastore, shard=0)])
            wait_for_partition(kafka, datastore, 0, 1 + number)
        assert [word for word in LET_GO if word in tailer.said()] == []
        second.cont()
        wait_for_records(kafka, datastore, 3 + FAILURES)
        assert audit(running.topology, kafka, datastore, stall_s=20).findings.named == []


def test_a_broker_that_hangs_with_the_group_delays_only_its_own_partition(
    running, storage, make_datastore, parted, tmp_path
):
    """Its session ends, and nobody can tell whose the partitions are. The fence keeps what is published right."""
    kafka, second = parted
    datastore = make_datastore(shards=2, partitions=2, placement=("a",))
    make_topics(kafka, datastore)
    output = tmp_path / "tailer"
    with running_tailers(1, running.path, kafka, datastore, output=output) as (tailer,):
        put(storage, datastore, [new_cell(datastore, shard=shard) for shard in (0, 1)])
        wait_for_records(kafka, datastore, 2)
        second.stop()
        put(storage, datastore, [new_cell(datastore, shard=1)])
        until(lambda: any(word in tailer.said() for word in (NOT_HEARD, *LET_GO)), tailer.said)
        for number in range(1, FAILURES + 1):
            put(storage, datastore, [new_cell(datastore, shard=0)])
            wait_for_partition(kafka, datastore, 0, 1 + number)
        second.cont()
        wait_for_records(kafka, datastore, 3 + FAILURES)
        assert audit(running.topology, kafka, datastore, stall_s=20).findings.named == []


def test_a_transaction_that_hangs_is_found_while_another_broker_is_away(make_datastore, brokers):
    """Whether that broker hangs, or its partition has no leader any more."""
    kafka, second = brokers
    datastore = make_datastore(shards=2, partitions=2, placement=("a",))
    make_topics(kafka, datastore)
    foreign = Producer({"bootstrap.servers": kafka, "transactional.id": "foreign", "transaction.timeout.ms": 300_000})
    foreign.init_transactions(30)
    foreign.begin_transaction()
    foreign.produce(datastore.topic, b"unended", partition=0)
    assert foreign.flush(30) == 0
    watch = HangingTransactionsWatch(kafka, datastore.topic, every_s=0.0, patience_s=0.0, timeout_s=1.0)
    assert watch.hanging([0, 1]) == [0]
    second.stop()
    assert watch.hanging([0, 1]) == [0]
    with pytest.raises(BusUnavailable):  # nobody knows whether one hangs there
        hanging_transactions(kafka, [(datastore.topic, 1)], timeout_s=1.0)
    admin = AdminClient({"bootstrap.servers": kafka})
    until(lambda: admin.list_topics(datastore.topic, 60).topics[datastore.topic].partitions[1].leader == -1)
    assert watch.hanging([0, 1]) == [0]
    fresh = HangingTransactionsWatch(kafka, datastore.topic, every_s=0.0, patience_s=0.0, timeout_s=5.0)
    assert fresh.hanging([0, 1]) == [0]
    foreign.abort_transaction(30)
