"""A lone broker that is killed while it ends transactions may never end them: whoever opens the logs next does (I7)."""

import os
import threading
import time
import uuid
from collections.abc import Sequence

import pytest
from confluent_kafka.admin import AdminClient

from schemaless.bus.partition_log import PartitionLog, open_transactions
from schemaless.bus.topics import ensure_topics
from schemaless.cell import ColumnName, RefKey, RowKey, StoredCell
from schemaless.codec import encode_body
from schemaless.errors import BusUnavailable, Fenced, SchemalessError
from schemaless.runtime.events import Event, observing
from schemaless.stack.local import LocalServer, running_kafka
from schemaless.topology import Datastore
from tests.log_harness import wait_for_cells
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))

PARTITIONS = 8
UNDER_WAY = 160  # transactions, before the broker is killed
KILLS_MAX = 20
OPENED_WITHIN_S = 60.0
TIMEOUT_S = 3.0  # all fail: a killed broker is let in again after 9 s
BODY = encode_body({"n": 1})


class Writer(threading.Thread):
    """Publishes the cells of one shard, one in each transaction, until its log fails; then opens it anew."""

    def __init__(self, kafka: str, datastore: Datastore, shard: int) -> None:
        super().__init__(daemon=True)
        self.published = 0
        self.failure: SchemalessError | None = None
        self.next_added_id = 0
        self.shard = shard
        self.log = PartitionLog(kafka, datastore, datastore.partition(shard), transaction_timeout_s=TIMEOUT_S)

    def open(self) -> None:
        self.next_added_id = self.log.open().positions[self.shard].added_id + 1

    def run(self) -> None:
        try:
            while True:
                self.log.publish([cell(self.shard, self.next_added_id)])
                self.next_added_id += 1
                self.published += 1
        except SchemalessError as error:
            self.failure = error
            self.log.close()


def cell(shard: int, added_id: int) -> StoredCell:
    key = RowKey(uuid.uuid4().bytes)
    return StoredCell(key, ColumnName("BASE"), RefKey(1), shard, 1, added_id, 1_700_000_000_000_000 + added_id, BODY)


def opened(kafka: str, datastore: Datastore) -> list[Writer]:
    return [opened_writer(kafka, datastore, shard) for shard in range(datastore.shards)]


def opened_writer(kafka: str, datastore: Datastore, shard: int) -> Writer:
    """As a tailer opens its logs: again and again, while the broker can't answer yet.

    A request whose answer came too late fences the same producer's next one.
    """

    def opened() -> Writer:
        writer = Writer(kafka, datastore, shard)
        try:
            writer.open()
        except (BusUnavailable, Fenced):
            writer.log.close()
            raise
        return writer

    return until(opened)


def kill_amid_commits(broker: LocalServer, writers: Sequence[Writer]) -> None:
    for writer in writers:
        writer.start()
    while sum(writer.published for writer in writers) < UNDER_WAY:  # a broker that has just come may refuse some
        assert any(writer.is_alive() for writer in writers), [writer.failure for writer in writers]
        time.sleep(0.01)
    broker.kill()
    broker.start()
    for writer in writers:
        writer.join()


def still_open(kafka: str, datastore: Datastore) -> dict[tuple[str, int], int]:
    places = [(topic, n) for topic in (datastore.topic, datastore.progress_topic) for n in range(PARTITIONS)]
    found = open_transactions(AdminClient({"bootstrap.servers": kafka}), places, timeout_s=10)
    assert not found.errors
    return dict(found.first)


if LONG:

    def test_what_a_killed_broker_left_open_is_ended_by_the_next_owner(tmp_path):
        """Every cell stands in the topic once and in order, though some transactions were decided and never ended: the
        broker is killed until an owner had to end one.
        """
        ended: list[object] = []
        datastore = Datastore(f"k{uuid.uuid4().hex[:8]}", PARTITIONS, PARTITIONS, ("a",))
        counting = observing(lambda event, fields: ended.append(fields), Event.HANGING_TRANSACTION_ENDED)
        with running_kafka(tmp_path / "kafka") as (kafka, broker), counting:
            ensure_topics(kafka, datastore)
            writers = opened(kafka, datastore)
            for _ in range(KILLS_MAX):
                kill_amid_commits(broker, writers)
                writers = opened(kafka, datastore)
                if ended:
                    break
            else:
                pytest.fail("no kill left a transaction without its end: this test has shown nothing")
            assert not still_open(kafka, datastore)
            last = [writer.next_added_id for writer in writers]
            for writer in writers:
                assert writer.log.publish([cell(writer.shard, writer.next_added_id)])
            found = wait_for_cells(kafka, datastore, sum(last))
            for shard in range(PARTITIONS):
                assert [each.added_id for each in found if each.shard == shard] == list(range(1, last[shard] + 1))
