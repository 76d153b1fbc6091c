"""A broker hangs and dies, longer than any time-out, then a master dies: all who need them wait, and lose nothing.

One broker for both who are looked at meanwhile: a tailer with a large backlog, whose memory is bounded (I7), and the
consumers of another datastore (I9).
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from examples.census import calls
from schemaless.audit.run import audit
from schemaless.bus.topics import ensure_topics
from schemaless.index.catalogue import create_index
from schemaless.stack.local import running_kafka
from tests.consumer_harness import heads, running_consumer, wait_until_finished
from tests.faults.test_consumers_killed import DEFINITION, write_census
from tests.log_harness import new_cell, put, running_tailers, wait_for_records, write_for
from tests.seed import seeded

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
# Sessions, transactions and deliveries time out after 2 s here. A lone broker that hangs beyond its own session, 9 s,
# may leave a transaction without its end (docs/exactly-once.md).
HANG_S = 7.0
DOWN_S = 60.0  # beside the 9 s that a broker which was killed is not let in again
MASTER_DOWN_S = 20.0
BATCHES = {"tailer.partition_tail.TRANSACTION_BYTES_MAX": 1 << 20, "tailer.service.TRANSACTIONS_MAX": 2}
BODY_BYTES = 200_000
BACKLOG_BODIES = 200
GROWTH_BYTES_MAX = 20 << 20
CONSUMERS = ("index:by_n", "trigger:census_of_base")


class Backlog:
    """A datastore of large bodies, and its tailer with small batches."""

    def __init__(self, running, kafka, storage, datastore, tailer) -> None:
        self.running, self.kafka, self.storage, self.datastore, self.tailer = running, kafka, storage, datastore, tailer
        self.bodies = 0
        self._noise = seeded("noise")
        self.put(BACKLOG_BODIES // 2)  # so many that it has had as many full batches at once as it ever has
        wait_for_records(kafka, datastore, self.bodies)
        self._before = tailer.resident_bytes_max()

    def put(self, count: int) -> None:
        """Bodies that compression hardly makes smaller."""
        for number in range(count):
            body = {"noise": self._noise.randbytes(BODY_BYTES).decode("latin-1")}
            put(self.storage, self.datastore, [new_cell(self.datastore, body, shard=number % self.datastore.shards)])
        self.bodies += count

    def assert_all_published(self, small_cells: int) -> None:
        """Once each, in order, by the same process, whose memory grew by a few batches, not by the backlog."""
        report = audit(self.running.topology, self.kafka, self.datastore, stall_s=20)
        assert (report.findings.named, report.cells()["matched"]) == ([], self.bodies + small_cells)
        assert self.tailer.process.poll() is None, "the tailer lived through it"
        growth = self.tailer.resident_bytes_max() - self._before
        print(f"the tailer grew by {growth >> 20} MiB with {BODY_BYTES * BACKLOG_BODIES >> 20} MiB waiting")
        assert growth < GROWTH_BYTES_MAX


class Consumed:
    """A datastore with a tailer, an indexer and a trigger program."""

    def __init__(self, running, kafka, storage, datastore, processes, called) -> None:
        self.running, self.kafka, self.storage, self.datastore = running, kafka, storage, datastore
        self._processes, self._called = processes, called

    def put(self, count: int, home: str | None = None) -> None:
        found = [new_cell(self.datastore, {"kind": n % 9, "n": n}) for n in range(count)]
        put(self.storage, self.datastore, [c for c in found if home in (None, self.datastore.home(c.shard))])

    def await_finished(self) -> None:
        for consumer in CONSUMERS:
            wait_until_finished(self.storage, self.datastore, consumer)

    def assert_all_reached(self) -> None:
        """The index and the program, each cell, without a restart by us."""
        assert [process.poll() for process in self._processes] == [None] * len(self._processes)
        report = audit(self.running.topology, self.kafka, self.datastore, stall_s=30)
        assert report.findings.named == []
        assert len(calls(self._called)) == sum(heads(self.storage, self.datastore).values())


@contextmanager
def consuming(running, kafka, storage, datastore, folder) -> Iterator[Consumed]:
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    census = ["consumers", write_census(folder), "--datastore", datastore.name]
    called = folder / "calls"
    with (
        running_tailers(1, running.path, kafka, datastore) as (tailer,),
        running_consumer(["indexer"], settings) as indexer,
        running_consumer(census, settings, {"CENSUS_DIR": str(called)}) as worker,
    ):
        processes = [tailer.process, indexer.process, worker.process]
        yield Consumed(running, kafka, storage, datastore, processes, called)


async def harm_broker(broker, backlog: Backlog, consumed: Consumed) -> None:
    """Stopped until every time-out is over, then killed and started again, while cells are put."""
    broker.stop()
    hung_at = time.monotonic()
    await asyncio.to_thread(backlog.put, BACKLOG_BODIES)
    await asyncio.sleep(HANG_S - (time.monotonic() - hung_at))
    broker.cont()
    await asyncio.sleep(1)
    broker.kill()
    await asyncio.to_thread(consumed.put, 200)
    await asyncio.sleep(DOWN_S)
    await asyncio.to_thread(broker.start)
    await asyncio.to_thread(consumed.put, 100)


async def harm_master(master, consumed: Consumed) -> None:
    """Killed and started again, while cells are put into the other cluster."""
    master.kill()
    try:
        await asyncio.to_thread(consumed.put, 100, home="b")
        await asyncio.sleep(MASTER_DOWN_S)
    finally:
        master.start()  # in this thread, with whose end it would end
    await asyncio.to_thread(consumed.put, 100)


if LONG:

    async def test_a_broker_and_a_master_that_go_away_cost_nothing_but_time(
        running, storage, async_storage, make_datastore, tmp_path
    ):
        """Nothing is lost or repeated in the topic, and what was written before, during and after both outages reaches
        the index and the program; every process lives through it, in bounded memory.
        """
        large, followed = make_datastore(shards=8, partitions=4), make_datastore(shards=8, partitions=4)
        with running_kafka(tmp_path / "kafka") as (kafka, broker):
            ensure_topics(kafka, followed)
            await create_index(async_storage, followed, DEFINITION)
            with (
                running_tailers(1, running.path, kafka, large, constants=BATCHES) as (tailer,),
                consuming(running, kafka, storage, followed, tmp_path) as consumed,
            ):
                await asyncio.to_thread(consumed.put, 200)
                backlog = await asyncio.to_thread(Backlog, running, kafka, storage, large, tailer)
                await asyncio.to_thread(consumed.await_finished)
                writing = asyncio.create_task(write_for(async_storage, large, HANG_S + DOWN_S + 4, writers=2))
                await harm_broker(broker, backlog, consumed)
                await asyncio.to_thread(backlog.assert_all_published, await writing)
                await harm_master(running.servers["a1"], consumed)
                await asyncio.to_thread(consumed.await_finished)
                await asyncio.to_thread(consumed.assert_all_reached)
