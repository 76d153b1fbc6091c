"""What becomes of orders for indexes while a cluster is away: they count at once, and end when it is back."""

import pytest

from schemaless.bus.topics import ensure_topics
from schemaless.errors import StorageUnavailable
from schemaless.index.catalogue import create_index, drop_index, find_index, pause_index, read_versions
from schemaless.index.definition import parse_definition
from schemaless.storage import index_definition_table
from schemaless.storage.index_definition_table import IndexStage, IndexState
from tests.consumer_harness import running_consumer, wait_until_finished
from tests.integration.indexer.test_change import changed, make_active, versions
from tests.integration.indexer.test_indexer import Rows, definition, owners, wait_active
from tests.integration.indexer.test_life_cycle import fill, left_of
from tests.log_harness import running_tailers
from tests.waiting import async_until, until

pytestmark = pytest.mark.faults


@pytest.fixture
def datastore(make_datastore, kafka):
    made = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, made)
    return made


async def test_a_drop_waits_for_a_cluster_that_is_away(running, kafka, datastore, storage, async_storage, api):
    """It is ordered, and says what it waits for. Then nothing is left, and the name makes a second version."""
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    rows, b = Rows(storage, datastore), running.servers["b1"]
    call = api.at(datastore)
    with running_tailers(1, running.path, kafka, datastore), running_consumer(["indexer"], settings):
        fill(rows, 40)
        for name in ("dropped", "paused"):
            await create_index(async_storage, datastore, definition(name))
            await wait_active(async_storage, datastore, name)
        b.kill()
        try:
            ordered = call("DELETE", "/indexes/dropped")
            assert (ordered.status_code, ordered.json()["state"]) == (202, "deleting")
            assert "bring b back" in ordered.json()["what_to_do"]
            await pause_index(async_storage, datastore, "paused")
            with pytest.raises(StorageUnavailable):
                await create_index(async_storage, datastore, definition("dropped"))

            async def clean_on_a():
                return not left_of(storage, OneCluster(datastore, "a"), "dropped", 1)

            await async_until(clean_on_a)
            assert (await find_index(async_storage, datastore, "dropped")).state is IndexState.DELETING
            assert "b" in call.get("/indexes/dropped").json()["what_to_do"]
        finally:
            b.start()

        async def gone_everywhere():
            merged = (await read_versions(async_storage, datastore)).merged
            return merged["dropped", 1].stage is IndexStage.GONE

        async def paused_on_b():
            own = storage.master("b").run(index_definition_table.all_of, datastore.name)
            return [index for index in own if index.state is IndexState.PAUSED]

        await async_until(gone_everywhere)
        await async_until(paused_on_b)
        assert left_of(storage, datastore, "dropped", 1) == []
        await create_index(async_storage, datastore, definition("dropped"))
        await wait_active(async_storage, datastore, "dropped")
        last = (await find_index(async_storage, datastore, "dropped")).definition
        wait_until_finished(storage, datastore, last.consumer)
        assert rows.found(last) == rows.wanted(last)


async def test_a_switch_waits_for_a_cluster_that_is_away(running, kafka, datastore, storage, api):
    """Nobody can say whether the new version has all that the old one has. It says so, and the old one answers."""
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    rows, call = Rows(storage, datastore), api.at(datastore)
    owners_on_a = [owner for shard, owner in owners().items() if datastore.home(shard) == "a"]
    with running_tailers(1, running.path, kafka, datastore), running_consumer(["indexer"], settings):
        make_active(call, "away")  # of a datastore without a cell
        ordered = {"change": "true", "hold": "true"}
        assert call("PUT", "/indexes/away", json=changed("away", "twice"), params=ordered).status_code == 201
        until(lambda: versions(call, "away")[2]["state"] == "active")
        for master in ("b1", "a1"):
            running.servers[master].kill()
            try:
                refused = call("POST", "/indexes/away/switch", json={})
                assert refused.status_code == 503, refused.text
                assert refused.json()["retryable"]
                if master == "b1":
                    answered = call.get("/indexes/away/entries", params={"owner": owners_on_a[0]})
                    assert (answered.status_code, answered.json()["version"]) == (200, 1)
            finally:
                running.servers[master].start()
        fill(rows, 40)

        async def switched():
            return call("POST", "/indexes/away/switch", json={}).status_code == 200

        await async_until(switched)
        new = parse_definition(changed("away", "twice"), 2)
        wait_until_finished(storage, datastore, new.consumer)
        assert rows.found(new) == rows.wanted(new) != {}


async def test_a_drop_needs_one_master(running, datastore, async_storage):
    """With all of them away nobody has taken the order, and the caller is told so."""
    await create_index(async_storage, datastore, definition())
    masters = [running.servers[name] for name in ("a1", "b1")]
    for master in masters:
        master.kill()
    try:
        with pytest.raises(StorageUnavailable):
            await drop_index(async_storage, datastore, "by_owner")
    finally:
        for master in masters:
            master.start()

    async def untouched():
        found = await find_index(async_storage, datastore, "by_owner")
        return found.state is IndexState.BUILDING

    await async_until(untouched)


class OneCluster:
    """A datastore as one cluster has it."""

    def __init__(self, datastore, cluster):
        self.name, self.clusters = datastore.name, (cluster,)
