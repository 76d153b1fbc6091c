"""Servers go away under indexers and trigger workers and come back: they wait, and go on by themselves (I9)."""

import asyncio
import os

import pytest

from examples.census import calls
from indexer.definitions import create_index
from schemaless.audit import audit
from schemaless.bus.topics import ensure_topics
from schemaless.stack.local import running_kafka
from tests.consumer_harness import heads, running_consumer, wait_until_finished
from tests.faults.test_consumers_killed import DEFINITION, write_census
from tests.log_harness import new_cell, put, running_tailers

pytestmark = [pytest.mark.storage, pytest.mark.faults]

OUTAGE_S = 20.0 if os.environ.get("SCHEMALESS_FAULTS_LONG") else 3.0


def cells(datastore, count, home=None):
    found = [new_cell(datastore, {"kind": n % 9, "n": n}) for n in range(count)]
    return [cell for cell in found if home in (None, datastore.home(cell.shard))]


@pytest.mark.timeout(300)
async def test_a_broker_and_a_master_go_away_and_come_back(running, make_datastore, async_storage, storage, tmp_path):
    """Cells written before, during and after both outages reach the index and the program, without a restart by us."""
    with running_kafka(tmp_path / "kafka") as (kafka, broker):
        datastore = make_datastore(shards=8, partitions=4)
        ensure_topics(kafka, datastore)
        await create_index(async_storage, datastore, DEFINITION)
        settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
        census = ["consumers", write_census(tmp_path), "--datastore", datastore.name]
        consumers = ("index:by_n", "trigger:census_of_base")
        with (
            running_tailers(1, running.path, kafka, datastore) as (tailer,),
            running_consumer(["indexer"], settings) as indexer,
            running_consumer(census, settings, {"CENSUS_DIR": str(tmp_path / "calls")}) as worker,
        ):
            processes = [tailer.process, indexer.process, worker.process]
            put(storage, datastore, cells(datastore, 200))
            for consumer in consumers:
                wait_until_finished(storage, datastore, consumer)
            broker.kill()
            put(storage, datastore, cells(datastore, 200))
            await asyncio.sleep(OUTAGE_S)
            broker.start()
            put(storage, datastore, cells(datastore, 100))
            running.servers["a-master"].kill()
            try:
                put(storage, datastore, cells(datastore, 100, home="b"))
                await asyncio.sleep(OUTAGE_S)
            finally:
                running.servers["a-master"].start()
            put(storage, datastore, cells(datastore, 100))
            for consumer in consumers:
                wait_until_finished(storage, datastore, consumer, 60.0)
            assert [process.poll() for process in processes] == [None, None, None]
            report = audit(running.topology, kafka, datastore, stall_s=30)
    assert report.findings.named == []
    assert len(calls(tmp_path / "calls")) == sum(heads(storage, datastore).values())
