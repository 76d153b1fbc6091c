"""Indexer and trigger workers killed under load: nothing is missing, and order holds (I9, I10, I11)."""

import asyncio
import os
import signal

import pytest

from examples.census import calls
from schemaless.audit.run import audit
from schemaless.bus.topics import ensure_topics
from schemaless.index.catalogue import create_index
from schemaless.index.definition import parse_definition
from tests.consumer_harness import heads, running_consumer, wait_until_finished
from tests.log_harness import running_tailers, write_for

pytestmark = pytest.mark.faults

LOAD_S = 60.0 if os.environ.get("SCHEMALESS_FAULTS_LONG") else 8.0
DEFINITION = parse_definition(
    {
        "name": "by_n",
        "shard_field": "n",
        "fields": [{"name": "n", "column": "BASE", "path": "kind", "type": "int"}],
        "stored": [{"name": "value", "column": "BASE", "path": "n", "type": "float"}],
    }
)


async def test_kills_at_random_moments_lose_nothing(
    running, kafka, make_datastore, async_storage, storage, tmp_path, chance
):
    """Two indexers and two workers share the partitions; one or another is killed, again and again."""
    datastore = make_datastore(shards=8, partitions=4)
    ensure_topics(kafka, datastore)
    await create_index(async_storage, datastore, DEFINITION)
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    census = ["consumers", write_census(tmp_path), "--datastore", datastore.name]
    environment = {"CENSUS_DIR": str(tmp_path / "calls")}
    with (
        running_tailers(1, running.path, kafka, datastore),
        running_consumer(["indexer"], settings) as indexer_0,
        running_consumer(["indexer"], settings) as indexer_1,
        running_consumer(census, settings, environment) as worker_0,
        running_consumer(census, settings, environment) as worker_1,
    ):
        victims = [indexer_0, indexer_1, worker_0, worker_1]
        writing = asyncio.create_task(write_for(async_storage, datastore, LOAD_S, writers=3))
        while not writing.done():
            await asyncio.sleep(chance.uniform(1.0, 2.5))
            await asyncio.to_thread(chance.choice(victims).kill_and_restart)
        cells = await writing
        for consumer in ("index:by_n", "trigger:census_of_base"):
            await asyncio.to_thread(wait_until_finished, storage, datastore, consumer)
        # One that was started a moment ago may not listen to SIGTERM yet.
        assert {victim.stop() for victim in victims} <= {0, -signal.SIGTERM}
        report = await asyncio.to_thread(audit, running.topology, kafka, datastore, stall_s=15)
    assert report.findings.named == []
    called = calls(tmp_path / "calls")
    assert len(called) == cells == sum(heads(storage, datastore).values())


def write_census(folder):
    """examples/census.py, over the column that the writers write."""
    path = folder / "census_of_base.py"
    path.write_text(
        "from examples.census import count_status\n"
        "from schemaless import trigger\n\n\n"
        "@trigger(column='BASE')\n"
        "def count(cell):\n"
        "    count_status(cell)\n"
    )
    return str(path)
