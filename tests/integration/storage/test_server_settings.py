"""Settings of real servers are changed, noticed, and changed back (I3, I5)."""

import base64
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from schemaless.errors import NotDurable, NotWhole
from schemaless.storage import entity_table
from schemaless.storage.asyncmy_driver import Traffic
from schemaless.storage.operation import query
from schemaless.storage.server_settings import ServerSettings
from schemaless.storage.standstill import of_server
from schemaless.topology import Role
from tests.integration.api.api_harness import api_process, assert_problem, row_in
from tests.log_harness import new_cell, replication_stopped, run_sql
from tests.seed import seeded
from tests.waiting import async_until

pytestmark = pytest.mark.storage

_noise = seeded("large bodies")


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
async def test_a_master_that_may_lose_a_put_takes_none(async_server, admin, topology, make_datastore, setting, value):
    """A read goes on. Once the setting is back, the next minute's look lets it in again."""
    datastore, now = make_datastore(placement=("b",)), [0.0]
    master = topology.cluster("b").nodes[0]
    node = async_server(master, settings=ServerSettings(master, clock=lambda: now[0]))
    cells = [new_cell(datastore)]

    async def put():
        return await node.run(entity_table.put_cells, datastore, cells, traffic=Traffic.WRITE)

    with capture_logs() as told, changed(admin.master("b"), setting, value):
        with pytest.raises(NotDurable, match=f"b1 may lose what it acknowledges: {setting} is {value}"):
            await put()
        assert await node.run(entity_table.get, datastore, [(cells[0].shard, cells[0].key)]) == [None]
    with pytest.raises(NotDurable):
        await put()
    now[0] = 60.0
    (placed,) = await put()
    assert placed.added_id == 1
    assert [(line["log_level"], line["node"]) for line in told] == [("warning", "b1")]


def test_a_put_is_buffered_while_its_home_may_lose_it(running, make_datastore, admin):
    """A process that starts then says so in its status and metrics, unless it is told to write there all the same."""
    datastore = make_datastore(placement=("b",))
    with changed(admin.master("b"), "sync_binlog", 0):
        with api_process(running.path) as api:
            call = api.at(datastore)
            assert call.put(row_in(datastore, 0), 1, {"v": 1}).status_code == 202
            nodes = {node["name"]: node["setting_faults"] for node in nodes_of(call.get("/status").json())}
            assert nodes["b1"] == ["sync_binlog is 0, and must be 1"]
            assert nodes["a1"] == []
            assert 'node="b1",role="master",setting="sync_binlog"} 1.0' in api.client.get("/metrics").text
        with api_process(running.path, lossy_masters=True) as api:
            assert api.at(datastore).put(row_in(datastore, 0), 1, {"v": 1}).status_code == 201


def test_a_small_packet_costs_large_cells_only(running, make_datastore, admin):
    """B21: a server's bound is below a large cell. Small puts keep both copies, also in one script with large ones."""
    datastore = make_datastore(placement=("a", "b"))
    noise = base64.b64encode(_noise.randbytes(680_000)).decode()

    def put(call, n):
        """Each sixth body is large; even ones live on cluster a."""
        answer = call.put(row_in(datastore, n % 4), 1, {"noise": noise if n // 2 % 3 == 0 else n})
        return n // 2 % 3 == 0, "ab"[n % 2], answer.status_code, answer.json().get("copies")

    patient = {"api.write.queue.PATIENCE_S": 60.0}  # a master that is only slow costs a put a copy, or its 201
    with (
        changed(admin.master("a"), "max_allowed_packet", 1 << 20),
        api_process(running.path, patient, write_timeout_s=30.0) as api,
    ):
        call = api.at(datastore)
        with ThreadPoolExecutor(12) as pool:
            seen = set(pool.map(lambda n: put(call, n), range(60)))
        assert {outcome[1:] for outcome in seen if not outcome[0]} == {("a", 201, 2), ("b", 201, 2)}
        assert {outcome[1:] for outcome in seen if outcome[0]} == {("a", 202, 1), ("b", 201, 1)}
        posted = call.post(f"/cells/{row_in(datastore, 0)}/BASE", json={"noise": noise})
        assert_problem(posted, 503)
        assert call.post(f"/cells/{row_in(datastore, 0)}/BASE", json={}).status_code == 201
        (node,) = [node for node in nodes_of(call.get("/status").json()) if node["name"] == "a1"]
        assert (node["stall"], node["setting_faults"]) == (
            "bound",
            ["max_allowed_packet is 1048576, and must be 16777216 or more"],
        )


def nodes_of(status):
    return [node for cluster in status["clusters"].values() for node in cluster["nodes"]]


async def test_a_minion_that_could_show_disorder_is_warned_about(async_server, admin, topology):
    """It is read all the same. Row format on both kinds of server. Flush and sync of a minion don't count."""
    minion = topology.cluster("a").nodes[1]
    node = async_server(minion, settings=ServerSettings(minion, Role.MINION))
    by_hand = admin.minions("a")[0]
    with capture_logs() as told, replication_stopped(by_hand), changed(by_hand, "binlog_format", "'MIXED'"):
        assert await node.run(query, "SELECT 1") == ((1,),)
    assert [fault.name for fault in node.settings.faults] == ["binlog_format"]
    assert told[0]["faults"] == ["binlog_format is MIXED, and must be ROW"]


async def test_a_mysql_minion_s_commit_order_counts(async_server, admin, topology):
    """MariaDB has no such setting. It commits what comes from one master in order."""
    minion, by_hand = topology.cluster("a").nodes[1], admin.minions("a")[0]
    node = async_server(minion, settings=ServerSettings(minion, Role.MINION))
    ((version,),) = by_hand.run(query, "SELECT @@version")
    if "MariaDB" in version:
        await node.run(query, "SELECT 1")
        assert node.settings.faults == []
    else:
        with replication_stopped(by_hand), changed(by_hand, "replica_preserve_commit_order", 0):
            await node.run(query, "SELECT 1")
        assert [fault.name for fault in node.settings.faults] == ["replica_preserve_commit_order"]


async def test_a_server_that_replicates_from_nobody_is_no_minion_to_read(async_server, topology):
    """Such as one that was detached, whatever it had and got since. Probes learn it, and its status says why."""
    master = topology.cluster("b").nodes[0]
    node = async_server(master, settings=ServerSettings(master, Role.MINION))
    with pytest.raises(NotWhole, match="b1 may lack cells: replication source is nobody, and must be a master"):
        await node.run(query, "SELECT 1")
    found = await node.run(of_server, Role.MINION, traffic=Traffic.PROBE)
    assert (found.stall, found.why.partition(":")[0]) == ("refused", "it replicates from nobody")


async def test_a_minion_that_is_late_on_purpose_says_so(async_server, admin, topology):
    minion, by_hand = topology.cluster("a").nodes[1], admin.minions("a")[0]
    node = async_server(minion, settings=ServerSettings(minion, Role.MINION))
    ((version,),) = by_hand.run(query, "SELECT @@version")
    delay = "CHANGE MASTER TO MASTER_DELAY" if "MariaDB" in version else "CHANGE REPLICATION SOURCE TO SOURCE_DELAY"
    try:
        run_sql(by_hand, f"STOP REPLICA; {delay} = 3600; START REPLICA")

        async def is_late():
            found = await node.run(of_server, Role.MINION, traffic=Traffic.PROBE)
            return found is not None and found.why == "replication waits on purpose: SQL_Delay is 3600 s"

        await async_until(is_late)
    finally:
        run_sql(by_hand, f"STOP REPLICA; {delay} = 0; START REPLICA")
    found = await node.run(of_server, Role.MINION, traffic=Traffic.PROBE)
    assert "on purpose" not in str(found)
