"""Settings of real servers are changed, noticed, and changed back (I3, I5)."""

from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from schemaless.errors import NotDurable
from schemaless.storage import entity_table
from schemaless.storage.asyncmy_driver import AsyncNode, Traffic
from schemaless.storage.operation import query
from schemaless.storage.server_settings import ServerSettings
from tests.integration.api.api_harness import api_process, row_in
from tests.log_harness import new_cell, replication_stopped, run_sql

pytestmark = pytest.mark.storage


@contextmanager
def changed(node, setting, value):
    """By an administrator, as somebody would who wants a faster server."""
    ((before,),) = node.run(query, f"SELECT @@GLOBAL.{setting}")
    run_sql(node, f"SET GLOBAL {setting} = {value}")
    try:
        yield
    finally:
        run_sql(node, f"SET GLOBAL {setting} = {before!r}")


@pytest.mark.parametrize(("setting", "value"), [("innodb_flush_log_at_trx_commit", 2), ("sync_binlog", 0)])
async def test_a_master_that_may_lose_a_put_takes_none(admin, topology, make_datastore, setting, value):
    """A read goes on. Once the setting is back, the next minute's look lets it in again."""
    datastore, now = make_datastore(placement=("b",)), [0.0]
    master = topology.cluster("b").master
    node = AsyncNode(master, settings=ServerSettings(master, clock=lambda: now[0]))
    cells = [new_cell(datastore)]

    async def put():
        return await node.run(entity_table.put_cells, datastore, cells, traffic=Traffic.WRITE)

    with capture_logs() as told, changed(admin.master("b"), setting, value):
        with pytest.raises(NotDurable, match=f"b-master may lose what it acknowledges: {setting} is {value}"):
            await put()
        assert await node.run(entity_table.get, datastore, [(cells[0].shard, cells[0].key)]) == [None]
    with pytest.raises(NotDurable):
        await put()
    now[0] = 60.0
    (placed,) = await put()
    assert placed.added_id == 1
    assert [(line["log_level"], line["node"]) for line in told] == [("warning", "b-master")]
    await node.close()


def test_a_put_is_buffered_while_its_home_may_lose_it(running, make_datastore, admin):
    """A process that starts then says so in its status and metrics, unless it is told to write there all the same."""
    datastore = make_datastore(placement=("b",))
    with changed(admin.master("b"), "sync_binlog", 0):
        with api_process(running.path) as api:
            call = api.at(datastore)
            assert call.put(row_in(datastore, 0), 1, {"v": 1}).status_code == 202
            nodes = {node["name"]: node["setting_faults"] for node in nodes_of(call.get("/status").json())}
            assert nodes["b-master"] == ["sync_binlog is 0, and must be 1"]
            assert nodes["a-master"] == []
            assert 'node="b-master",role="master",setting="sync_binlog"} 1.0' in api.client.get("/metrics").text
        with api_process(running.path, lossy_masters=True) as api:
            assert api.at(datastore).put(row_in(datastore, 0), 1, {"v": 1}).status_code == 201


def nodes_of(status):
    return [node for cluster in status["clusters"].values() for node in cluster["nodes"]]


async def test_a_minion_that_could_show_disorder_is_warned_about(admin, topology):
    """It is read all the same. Row format on both kinds of server. Flush and sync of a minion don't count."""
    minion = topology.cluster("a").minions[0]
    node = AsyncNode(minion)
    by_hand = admin.minions("a")[0]
    with capture_logs() as told, replication_stopped(by_hand), changed(by_hand, "binlog_format", "'MIXED'"):
        assert await node.run(query, "SELECT 1") == ((1,),)
    assert [fault.name for fault in node.settings.faults] == ["binlog_format"]
    assert told[0]["faults"] == ["binlog_format is MIXED, and must be ROW"]
    await node.close()


async def test_a_mysql_minion_s_commit_order_counts(admin, topology):
    """MariaDB has no such setting. It commits what comes from one master in order."""
    node, by_hand = AsyncNode(topology.cluster("a").minions[0]), admin.minions("a")[0]
    ((version,),) = by_hand.run(query, "SELECT @@version")
    if "MariaDB" in version:
        await node.run(query, "SELECT 1")
        assert node.settings.faults == []
    else:
        with replication_stopped(by_hand), changed(by_hand, "replica_preserve_commit_order", 0):
            await node.run(query, "SELECT 1")
        assert [fault.name for fault in node.settings.faults] == ["replica_preserve_commit_order"]
    await node.close()
