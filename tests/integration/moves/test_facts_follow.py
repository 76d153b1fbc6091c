"""The audit, subscribers, explanations and the status are right while a shard moves and after it."""

import asyncio
import uuid

import pytest

from schemaless.audit.report import FindingKind
from schemaless.audit.run import audit
from schemaless.bus.topics import ensure_topics
from tests.consumer_harness import running_consumer, wait_until_finished, write_program
from tests.integration.api.api_harness import api_process
from tests.integration.api.follow_harness import following
from tests.log_harness import new_cell, put, run_sql, running_tailers
from tests.move_harness_f import Move, Writers, move_shard
from tests.waiting import async_until, until

PROGRAM = """
from schemaless import trigger

@trigger(column="BASE")
def see(cell, context):
    pass
"""
INDEX = {
    "name": "by_n",
    "shard_field": "n",
    "fields": [{"name": "n", "column": "BASE", "path": "n", "type": "int"}],
}


@pytest.fixture
def datastore(make_datastore, kafka, running):
    made = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, made)
    with running_tailers(1, running.path, kafka, made):
        yield made


@pytest.fixture
def call(running, datastore):
    with api_process(running.path) as api:
        yield api.at(datastore)


def named(report):
    return [(finding.kind, finding.shard, finding.detail) for finding in report.findings.named]


async def test_the_audit_is_clean_while_shards_move_and_cells_are_written(
    tmp_path, running, kafka, async_storage, datastore, call
):
    """Nothing is compared twice, with a trigger program and an index that were there before."""
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    program = write_program(tmp_path, "sees", PROGRAM)
    with (
        running_consumer(["indexer"], settings),
        running_consumer(["consumers", program, "--datastore", datastore.name], settings),
    ):
        assert call("PUT", "/indexes/by_n", json=INDEX).status_code == 201
        await async_until(lambda: call.get("/indexes/by_n").json()["state"] == "active")
        async with Writers(async_storage, datastore, range(4)) as writers:
            await asyncio.sleep(1)
            auditing = asyncio.create_task(asyncio.to_thread(audit, running.topology, kafka, datastore, stall_s=30))
            for shard, target in ((0, "b"), (1, "a"), (0, "a"), (3, "a")):
                await asyncio.to_thread(move_shard, running, datastore, shard, target)
            assert named(await auditing) == []
        report = await asyncio.to_thread(audit, running.topology, kafka, datastore, stall_s=30)
        assert named(report) == []
        assert report.cells()["matched"] == writers.put
        assert {one.name for one in report.consumers} == {"trigger:sees", "index:by_n"}
        assert report.indexes[0].found == writers.put


async def test_a_shard_comes_to_a_cluster_that_has_no_tables_of_an_index(running, kafka, storage, make_datastore):
    """Its entries and its checkpoint stay where the version was made. Nobody waits for another checkpoint."""
    datastore = make_datastore(shards=4, partitions=2, placement=("a",))
    ensure_topics(kafka, datastore)
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    with (
        running_tailers(1, running.path, kafka, datastore),
        running_consumer(["indexer"], settings),
        api_process(running.path) as api,
    ):
        call = api.at(datastore)
        assert call("PUT", "/indexes/by_n", json=INDEX).status_code == 201
        await async_until(lambda: call.get("/indexes/by_n").json()["state"] == "active")
        move_shard(running, datastore, 0, "b")
        put(storage, datastore, [new_cell(datastore, shard=0) for _ in range(5)])
        report = await asyncio.to_thread(audit, running.topology, kafka, datastore, stall_s=30)
        assert named(report) == []
        assert [one.finished for one in report.consumers] == [5]
        await async_until(lambda: call.get("/indexes/by_n").json()["lag"] == 0)


@pytest.mark.parametrize(("moved_to", "told"), [("NULL", "a and b"), ("'c'", "no cluster")])
def test_a_shard_that_is_open_at_two_clusters_or_at_none_is_a_fault(moved_to, told, running, kafka, storage, datastore):
    """Its heads say so: two homes would give one place to two cells."""
    put(storage, datastore, [new_cell(datastore, shard=0)])
    move_shard(running, datastore, 0, "b")
    where = f"WHERE datastore = '{datastore.name}' AND shard = 0"
    for cluster in ("a", "b"):
        run_sql(storage.master(cluster), f"UPDATE schemaless.shard_head SET moved_to = {moved_to} {where}")
    assert named(audit(running.topology, kafka, datastore, stall_s=10)) == [
        (FindingKind.HOME_DIFFERS, 0, f"it is open at {told}, and its home is b")
    ]


def test_an_open_stream_and_a_long_poll_go_on_at_the_new_home(running, storage, datastore, call):
    """A subscriber sees every cell once, in order, and needs no new request."""
    put(storage, datastore, [new_cell(datastore, shard=0) for _ in range(3)])
    with following(call, 0) as stream:
        assert stream.added_ids(3) == [1, 2, 3]
        for target in ("b", "a", "b"):
            head = call.get("/shards").json()["shards"][0]["head"]
            move_shard(running, datastore, 0, target)
            put(storage, datastore, [new_cell(datastore, shard=0) for _ in range(2)])
            assert stream.added_ids(2) == [head + 1, head + 2]
    page = call.get("/shards/0/cells", params={"limit": 1000}).json()
    assert [cell["added_id"] for cell in page["cells"]] == list(range(1, 10))


def test_status_and_explanations_count_a_shard_once(tmp_path, running, kafka, storage, datastore, call):
    """The lags of consumers, the heads, the row's place and its program are those of the present home."""
    settings = {"topology": running.path, "kafka": kafka}
    program = write_program(tmp_path, "sees", PROGRAM)
    cells = [new_cell(datastore, shard=0) for _ in range(5)]
    put(storage, datastore, cells)
    with running_consumer(["consumers", program, "--datastore", datastore.name], settings):
        wait_until_finished(storage, datastore, "trigger:sees")
        Move(running, datastore, 0, "b").run()
        put(storage, datastore, [new_cell(datastore, shard=0) for _ in range(7)])
        wait_until_finished(storage, datastore, "trigger:sees")
        shards = until(lambda: (found := call.get("/shards").json()["shards"])[0]["cluster"] == "b" and found)
        assert [one["shard"] for one in shards] == [0, 1, 2, 3]
        assert shards[0]["head"] == 12
        until(lambda: {one["lag"] for one in call.get("/status").json()["consumers"]} == {0})
        shown = call.get("/triggers/sees").json()
        assert (shown["lag"], shown["counts"]["called"]) == (0, 12)
        assert (shown["shards"][0]["shard"], shown["shards"][0]["added_id"]) == (0, 12)
        told = call.get("/explain", params={"row_key": str(uuid.UUID(bytes=cells[0].key.row_key))}).json()
        assert (told["cluster"], told["head"]) == ("b", "0:1:12")
        assert [one["program"] for one in told["programs"]] == ["sees"]
