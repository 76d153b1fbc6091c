"""Tailers that join, leave and die: partitions move, only those that must; nothing is repeated (I7)."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from schemaless.audit.run import audit
from schemaless.names import tailer_group
from tests.log_harness import new_cell, put, running_tailers, wait_for_records
from tests.waiting import until

pytestmark = pytest.mark.faults

PARTITIONS = 6
SESSION_S = 6.0  # the default: how long the group takes to notice that a tailer is dead
LONG_SESSION_S = 120.0  # nobody waits here until it ends
VISIBLE_WITHIN_S = 60


class Group:
    """Tailers of one datastore, and what is written to it."""

    def __init__(self, running, kafka, storage, datastore, folder) -> None:
        self.running, self.kafka, self.storage, self.datastore, self.folder = running, kafka, storage, datastore, folder
        self._admin = AdminClient({"bootstrap.servers": kafka})
        self.tailers = []
        self.cells = 0

    def join(self, stack: ExitStack, *shares: int, session_s: float = SESSION_S, module=("tailer",)) -> None:
        """Another tailer starts; returns when the members have so many partitions each."""
        settings = {"session_timeout_s": session_s, "transaction_timeout_s": 5.0, "module": module}
        output = self.folder / f"tailer-{len(self.tailers)}"
        arguments = (self.running.path, self.kafka, self.datastore)
        self.tailers += stack.enter_context(running_tailers(1, *arguments, output=output, **settings))
        self.await_shares(*shares)

    def await_shares(self, *shares: int) -> None:
        until(lambda: self._shares() == sorted(shares), self._shares)

    def write(self) -> None:
        """A cell to every shard, so to every partition."""
        shards = range(self.datastore.shards)
        put(self.storage, self.datastore, [new_cell(self.datastore, shard=shard) for shard in shards])
        self.cells += len(shards)

    def await_published(self) -> None:
        wait_for_records(self.kafka, self.datastore, self.cells)

    @contextmanager
    def all_visible(self, when: str) -> Iterator[None]:
        """Until a read_committed consumer has a cell of every shard that was written inside. Prints the seconds."""
        settings = {"group.id": "-", "isolation.level": "read_committed", "fetch.wait.max.ms": 20}
        consumer = Consumer({"bootstrap.servers": self.kafka, **settings})
        ends = [TopicPartition(self.datastore.topic, number) for number in range(PARTITIONS)]
        for end in ends:
            end.offset = consumer.get_watermark_offsets(end, timeout=5)[1]
        consumer.assign(ends)
        began = time.monotonic()
        yield
        found = consumer.consume(self.datastore.shards, timeout=VISIBLE_WITHIN_S)
        print(f"{len(found)} cells visible {time.monotonic() - began:.2f} s {when}")
        consumer.close()
        assert len(found) == self.datastore.shards

    def let_go(self) -> list[list[int]]:
        """By tailer, the partitions that it let go so far."""
        return [_partitions("released", tailer.said()) for tailer in self.tailers]

    def _shares(self) -> list[int]:
        (asked,) = self._admin.describe_consumer_groups([tailer_group(self.datastore.name)]).values()
        try:
            return sorted(len(member.assignment.topic_partitions) for member in asked.result().members)
        except KafkaException:  # no coordinator yet: the broker makes the topic of the groups with the first one
            return []


def _partitions(what, said):
    lists = re.findall(rf"partitions {what}.*partitions=\[([\d, ]*)\]", said)
    return [int(partition) for found in lists for partition in found.split(",") if partition]


def test_partitions_move_only_when_they_must(running, kafka, storage, make_datastore, tmp_path):
    """Three join one by one, one leaves by SIGTERM, one is killed with a transaction flushed and not committed.

    Nobody lets go a partition that may stay. New cells of every shard become visible long before the session of the
    one that left would end, so its leaving was heard; and once the killed one's session has ended.
    """
    datastore = make_datastore(shards=PARTITIONS, partitions=PARTITIONS)
    group = Group(running, kafka, storage, datastore, tmp_path)
    armed = tmp_path / "armed"
    with ExitStack() as stack:
        group.join(stack, 6)
        group.write()
        group.await_published()
        group.join(stack, 3, 3, module=("tests.faults.halting_tailer", "flushed", "SIGKILL", str(armed)))
        group.join(stack, 2, 2, 2, session_s=LONG_SESSION_S)
        assert sorted(len(released) for released in group.let_go()) == [0, 1, 4], "5 had to move, and no more"

        before = group.let_go()
        leaving = group.tailers[2]
        with group.all_visible("after SIGTERM"):
            leaving.send(signal.SIGTERM)
            group.write()
        group.await_shares(3, 3)
        assert group.let_go()[:2] == before[:2]
        assert leaving.process.wait(VISIBLE_WITHIN_S) == 0

        armed.touch()
        with group.all_visible("after SIGKILL"):
            group.write()
            assert group.tailers[1].process.wait(VISIBLE_WITHIN_S) == -signal.SIGKILL
        assert group.let_go()[0] == before[0]
    report = audit(running.topology, kafka, datastore, stall_s=5)
    assert (report.findings.named, report.cells()["matched"]) == ([], group.cells)
