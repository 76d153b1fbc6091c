"""One node answers every statement with an unknown error: that costs its own shards, and no process (I5, I15)."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from examples.census import calls
from schemaless.audit.run import audit
from schemaless.bus.topics import ensure_topics
from schemaless.config import CleanerSettings
from schemaless.index.catalogue import create_index
from tests.consumer_harness import heads, running_consumer, wait_until_finished
from tests.environment import environment_of
from tests.faults.test_consumers_killed import DEFINITION, write_census
from tests.integration.api.api_harness import ROOT, production_api, row_in
from tests.log_harness import running_tailers, wait_for_records
from tests.processes import stopping
from tests.refusing_node import RefusingNode, topology_through
from tests.waiting import async_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
REFUSES_S = 60.0 if LONG else 0.5
SESSION_WORKS = (b"SET SESSION", b"ROLLBACK")
"""Then the errors reach the operations. Without them no connection can be made or kept."""
KINDS = [("b1", SESSION_WORKS)]
if LONG:
    KINDS += [("b1", ()), ("b2", SESSION_WORKS), ("b2", ())]
CELLS = 5
CONSUMERS = ("index:by_n", "trigger:census_of_base")


@contextmanager
def running_cleaner(topology) -> Iterator[subprocess.Popen]:
    env = os.environ | environment_of(CleanerSettings, {"topology": topology, "kafka": "127.0.0.1:9"})
    process = subprocess.Popen([sys.executable, "-m", "cleaner"], cwd=ROOT, env=env)
    with stopping(process):
        yield process


class Writer:
    """Puts cells into shards over HTTP, and counts them."""

    def __init__(self, call, datastore) -> None:
        self._call, self._datastore = call, datastore
        self.cells = 0

    def put(self, shards: Iterable[int], count: int = CELLS) -> set[int]:
        """Returns the statuses."""
        bodies = [(shard, {"kind": n, "n": n}) for shard in shards for n in range(count)]
        self.cells += len(bodies)
        return {self._call.put(row_in(self._datastore, shard), 1, body).status_code for shard, body in bodies}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_node_that_refuses_everything_ends_no_process(
    running, kafka, storage, async_storage, make_datastore, tmp_path, kind
):
    """API, cleaner, tailer, indexer and trigger worker live through it. Shards of the other cluster are published and
    reach their program meanwhile, and all others afterwards.
    """
    node, spared = kind
    datastore = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, datastore)
    await create_index(async_storage, datastore, DEFINITION)
    here, others = ([shard for shard in range(4) if datastore.home(shard) == home] for home in "ba")
    status_here = 202 if node == "b1" else 201
    called = tmp_path / "calls"
    port = next(each.node.port for name, each in storage.nodes.items() if name == node)
    with RefusingNode(port, spared) as relay:
        topology = topology_through(running.path, node, relay, tmp_path / "topology.json")
        settings = {"topology": topology, "kafka": kafka, "datastores": datastore.name}
        census = ["consumers", write_census(tmp_path), "--datastore", datastore.name]
        with (
            production_api(topology) as api,
            running_cleaner(topology) as cleaner,
            running_tailers(1, topology, kafka, datastore) as (tailer,),
            running_consumer(["indexer"], settings) as indexer,
            running_consumer(census, settings, {"CENSUS_DIR": str(called)}) as worker,
        ):
            processes = [api.process, cleaner, tailer.process, indexer.process, worker.process]
            writer = Writer(api.at(datastore), datastore)
            assert writer.put(range(4)) == {201}
            for consumer in CONSUMERS:
                wait_until_finished(storage, datastore, consumer)
            relay.refuses.set()
            assert writer.put(others) == {201}
            published = writer.cells
            assert writer.put(here) == {status_here}
            wait_for_records(kafka, datastore, published)
            await async_until(lambda: len(calls(called)) >= published)
            await asyncio.sleep(REFUSES_S)
            assert relay.refused
            assert api.client.get("/readyz").status_code == 200
            relay.refuses.clear()
            await async_until(lambda: writer.put(here, 1) == {201})
            await async_until(lambda: sum(heads(storage, datastore).values()) == writer.cells)
            for consumer in CONSUMERS:
                wait_until_finished(storage, datastore, consumer)
            assert [process.poll() for process in processes] == [None] * len(processes)
            assert audit(running.topology, kafka, datastore, stall_s=20).findings.named == []
            assert len(calls(called)) == writer.cells
