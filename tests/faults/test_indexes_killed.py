"""Indexers and masters are killed while indexes come, change and go: the last version is exact, and no other is left
(I11).
"""

import asyncio
import os
import time

import pytest
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.audit.run import audit
from schemaless.bus.topics import ensure_topics
from schemaless.index.catalogue import build_progress, create_index, drop_index, find_index, throttle_index
from schemaless.index.definition import parse_definition
from schemaless.storage.index_definition_table import IndexState
from tests.consumer_harness import running_consumer, wait_until_finished
from tests.integration.api.api_harness import api_process
from tests.integration.indexer.test_change import ask, changed, make_active, versions
from tests.integration.indexer.test_indexer import Rows, definition, wait_active
from tests.integration.indexer.test_life_cycle import fill, left_of, wait_gone
from tests.log_harness import running_tailers
from tests.waiting import until

pytestmark = pytest.mark.faults

ROUNDS = 40 if os.environ.get("SCHEMALESS_FAULTS_LONG") else 2
CHANGES = 40 if os.environ.get("SCHEMALESS_FAULTS_LONG") else 1


async def test_kills_while_indexes_come_and_go(running, kafka, make_datastore, storage, async_storage, chance):
    """Whatever the indexer was doing, its successor finishes it. The last version is complete and exact."""
    datastore = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, datastore)
    rows = Rows(storage, datastore)
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    with running_tailers(1, running.path, kafka, datastore), running_consumer(["indexer"], settings) as indexer:
        fill(rows, 300)
        for _ in range(ROUNDS):
            await create_index(async_storage, datastore, definition())
            await asyncio.sleep(chance.uniform(0.0, 4.0))
            await drop_index(async_storage, datastore, "by_owner")
            await asyncio.sleep(chance.uniform(0.0, 1.0))
            indexer.kill_and_restart()
        await create_index(async_storage, datastore, definition())
        await wait_active(async_storage, datastore, "by_owner")
        last = await find_index(async_storage, datastore, "by_owner")
        assert (last.state, last.number) == (IndexState.ACTIVE, ROUNDS + 1)
        for number in range(1, last.number):
            await wait_gone(async_storage, datastore, "by_owner", number)
            assert left_of(storage, datastore, "by_owner", number) == []
        wait_until_finished(storage, datastore, last.definition.consumer)
        assert rows.found(last.definition) == rows.wanted(last.definition)


async def test_kills_while_an_index_is_built_by_row(running, kafka, make_datastore, storage, async_storage, chance):
    """Two indexers share the walks, and one of them is killed again and again while cells are put. It goes on."""
    datastore = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, datastore)
    rows = Rows(storage, datastore)
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    fill(rows, 2000)
    with (
        running_tailers(1, running.path, kafka, datastore),
        running_consumer(["indexer"], settings) as first,
        running_consumer(["indexer"], settings) as second,
    ):
        await create_index(async_storage, datastore, definition())
        await throttle_index(async_storage, datastore, "by_owner", {"cells_per_s": 300})
        done = []
        for n in range(ROUNDS):
            await asyncio.sleep(chance.uniform(0.5, 2.0))
            (first, second)[n % 2].kill_and_restart()
            fill(rows, 20)
            index = await find_index(async_storage, datastore, "by_owner")
            done.append((await build_progress(async_storage, datastore, index)).done)
        assert done == sorted(done), "what was walked stays walked"
        await throttle_index(async_storage, datastore, "by_owner", {"cells_per_s": None})
        await wait_active(async_storage, datastore, "by_owner")
        index = (await find_index(async_storage, datastore, "by_owner")).definition
        wait_until_finished(storage, datastore, index.consumer)
        assert rows.found(index) == rows.wanted(index)


def test_kills_while_an_index_is_changed(running, kafka, make_datastore, storage, chance):
    """During the build and around the switch: one version answers all the time, and the last one is exact."""
    datastore = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, datastore)
    rows = Rows(storage, datastore)
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    with (
        api_process(running.path) as api,
        running_tailers(1, running.path, kafka, datastore),
        running_consumer(["indexer"], settings) as indexer,
    ):
        call = api.at(datastore)
        fill(rows, 200)
        make_active(call, "killed")
        for number in range(2, 2 + ROUNDS):
            document = changed("killed", f"field_{number}")
            asked = call("PUT", "/indexes/killed", json=document, params={"change": "true", "keep": "0s"})
            assert asked.status_code == 201
            for _ in range(2):
                time.sleep(chance.uniform(0.0, 1.5))
                indexer.kill_and_restart()
                assert ask(call, "killed").status_code == 200
            until(lambda wanted=number: versions(call, "killed").keys() == {wanted})
        last = parse_definition(document, number)
        wait_until_finished(storage, datastore, last.consumer)
        assert rows.found(last) == rows.wanted(last)
        for gone in range(1, number):
            assert left_of(storage, datastore, "killed", gone) == []


def test_masters_and_indexers_killed_during_a_build_and_a_switch(
    running, kafka, make_datastore, storage, chance, monkeypatch
):
    """A master is killed, often an indexer with it, and started again. The index ends exact, and proven."""
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", kafka)
    datastore = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, datastore)
    rows = Rows(storage, datastore)
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    with (
        api_process(running.path) as api,
        running_tailers(1, running.path, kafka, datastore),
        running_consumer(["indexer"], settings) as indexer,
    ):
        call = api.at(datastore)

        def strike():
            time.sleep(chance.uniform(0.0, 1.0))
            master = running.servers[chance.choice(["a1", "b1"])]
            master.kill()
            try:
                if chance.random() < 0.7:
                    indexer.kill_and_restart()
                time.sleep(chance.uniform(0.0, 1.0))
            finally:
                master.start()

        def answered():
            """The versions, once the API has seen that the master is back."""
            return call.get("/indexes/killed").status_code == 200 and versions(call, "killed")

        fill(rows, 1500)
        for number in range(1, 2 + CHANGES):
            document = changed("killed", f"field_{number}")

            def is_made(document=document, number=number):
                call("PUT", "/indexes/killed", json=document, params={"change": "true", "keep": "0s"})
                return number in (answered() or ())

            until(is_made)
            strike()

            def is_alone(number=number):
                found = answered() or {}
                return found.keys() == {number} and found[number]["state"] == "active"

            until(is_alone)
            fill(rows, 20)
        last = parse_definition(document, number)
        wait_until_finished(storage, datastore, last.consumer)
        assert rows.found(last) == rows.wanted(last)
        verified = CliRunner().invoke(app, ["index", "verify", "killed", "--datastore", datastore.name])
        assert verified.exit_code == 0, verified.output
        assert audit(running.topology, kafka, datastore, stall_s=15).findings.named == []
