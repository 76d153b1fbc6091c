"""`schemaless tailer status|pause|resume` on real servers: what operators see and say; nothing is lost (I7)."""

import asyncio
import json
import time

import pytest
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.audit.run import audit
from schemaless.ops.tailers import read_tailer_status
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import load_topology
from tests.log_harness import new_cell, put, records, run_sql, running_tailers, wait_for_cells
from tests.rotated_account import rotated_account
from tests.waiting import async_until


@pytest.fixture
def tailer(running, kafka, monkeypatch):
    """tailer("status", name, …) -> what the command says, as JSON where it is asked for."""
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", kafka)

    def call(*arguments):
        told = CliRunner().invoke(app, ["tailer", *arguments])
        assert told.exit_code == 0, told.output
        return json.loads(told.output)["datastores"] if "--json" in arguments else told.output

    return call


def put_in_both(storage, datastore, count):
    put(storage, datastore, [new_cell(datastore, shard=shard) for shard in (0, 1) for _ in range(count)])


async def test_a_paused_datastore_waits_and_comes_in_order(tailer, running, kafka, new_datastore, storage, tmp_path):
    """Paused while a tailer works: nothing more is published, not by the next tailer either, and another datastore is;
    the status shows the lag; resumed, every cell comes, in order.
    """
    datastore, other = new_datastore(shards=2, partitions=2), new_datastore(shards=2, partitions=2)
    name, output = datastore.name, tmp_path / "tailer"
    settings = {"datastores": f"{name},{other.name}", "output": output}
    with running_tailers(1, running.path, kafka, datastore, **settings) as (process,):
        put_in_both(storage, datastore, 2)
        await asyncio.to_thread(wait_for_cells, kafka, datastore, 4)
        assert f"{name}: ordered to pause" in await asyncio.to_thread(tailer, "pause", name)
        await async_until(lambda: "datastore is paused" in output.read_text())
        put_at = [time.monotonic()]
        put_in_both(storage, datastore, 3)
        put_at.append(time.monotonic())
        put_in_both(storage, other, 1)
        await asyncio.to_thread(wait_for_cells, kafka, other, 2)
        assert len(records(kafka, datastore)) == 4
        await asyncio.to_thread(process.kill_and_restart)
        await async_until(lambda: f"-{process.process.pid}" in str(tailer("status", name, "--json")))
        put_in_both(storage, other, 1)
        await asyncio.to_thread(wait_for_cells, kafka, other, 4)
        assert len(records(kafka, datastore)) == 4
        asked_at = time.monotonic()
        (told,) = await asyncio.to_thread(tailer, "status", name, "--shards", "--json")
        assert (told["paused"], told["shards_behind"], told["lag"], told["problems"]) == (True, 2, 6, [])
        assert asked_at - put_at[1] - 0.1 < told["lag_s"] < time.monotonic() - put_at[0] + 0.1
        assert [(shard["published"], shard["head"], shard["lag"]) for shard in told["shards"]] == [
            ("1:2", "1:5", 3)
        ] * 2
        assert "tailer resume`. behind in 2 of 2 shards, by 6 cells" in await asyncio.to_thread(tailer, "status", name)
        await asyncio.to_thread(tailer, "resume", name)
        await asyncio.to_thread(wait_for_cells, kafka, datastore, 10)
    report = await asyncio.to_thread(audit, running.topology, kafka, datastore, stall_s=10)
    assert (report.findings.named, report.cells()["matched"]) == ([], 10)


@pytest.mark.faults
async def test_an_order_counts_where_one_cluster_was_away(tailer, running, new_datastore, storage):
    """Paused and resumed while a master is dead: what was said last counts when it is back with what it knew."""
    datastore = new_datastore(shards=2, partitions=1)
    tailer("pause", datastore.name)
    running.servers["b1"].kill()
    try:
        assert "cluster b is unreachable" in tailer("resume", datastore.name)
    finally:
        running.servers["b1"].start()
    (told,) = tailer("status", datastore.name, "--json")
    assert told["paused"] is False


async def test_the_status_names_the_account_that_a_master_refuses(running, kafka, new_datastore, tmp_path):
    """The server runs: nobody has to look for one that is down."""
    datastore = new_datastore(shards=2, partitions=1)
    with rotated_account(running, tmp_path / "topology.json") as account:
        account.rotate("second")
        with SyncStorage(load_topology(account.path)) as storage:
            told = await asyncio.to_thread(read_tailer_status, storage, kafka, datastore)
    starts = [
        f"refused: the master of cluster {name} can't be asked: {name}1 refuses the account '{account.user}'"
        for name in ("a", "b")
    ]
    assert [shard.problem[: len(start)] for shard, start in zip(told.shards, starts, strict=True)] == starts


async def test_the_status_names_what_holds_a_shard_up(tailer, running, kafka, new_datastore, storage):
    """A partition that nobody tails, its owner, a cell that is missing, a master that lost one."""
    datastore = new_datastore(shards=2, partitions=1)
    put_in_both(storage, datastore, 2)
    (told,) = tailer("status", datastore.name, "--json")
    assert [partition["owner"] for partition in told["partitions"]] == [None]
    assert (told["lag"], {problem["why"] for problem in told["problems"]}) == (4, {"no progress record yet"})
    with running_tailers(1, running.path, kafka, datastore) as (process,):
        await asyncio.to_thread(wait_for_cells, kafka, datastore, 4)
        set_head(storage.master("a"), datastore, shard=0, head=1)
        set_head(storage.master("b"), datastore, shard=1, head=3)
        (told,) = await asyncio.to_thread(tailer, "status", datastore.name, "--json")
        assert told["partitions"][0]["owner"]["client"].endswith(f"-{process.process.pid}")
    assert {problem["shard"]: problem["why"] for problem in told["problems"]} == {
        0: "MySQL has another history than the topic: 1:2 was published, and 2 is past the head, 1",
        1: "cell 3 is missing in MySQL",
    }


def set_head(master, datastore, shard, head):
    """Damage: cells above it are lost, or the last ones are missing."""
    where = f"datastore = '{datastore.name}' AND shard = {shard}"
    run_sql(
        master,
        f"BEGIN;DELETE FROM {datastore.database(shard)}.entity WHERE added_id > {head};"
        f"UPDATE schemaless.shard_head SET head = {head} WHERE {where};COMMIT",
    )
