"""A minion whose replication leaves cells out shows its heads all the same. It is left out and named (I3)."""

from contextlib import contextmanager

import pymysql
import pytest

from schemaless.ops.datastores import create_shards
from schemaless.stack.local import running_topology
from schemaless.stack.programs import Flavour
from schemaless.storage.node_core import connect_options
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.integration.api.api_harness import api_process, row_in
from tests.integration.storage.test_server_settings import nodes_of
from tests.log_harness import LOCAL_WRITE, REPLICATED_WRITE, replication_stopped, run_sql
from tests.waiting import until

pytestmark = pytest.mark.storage

CELLS = 30


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """One cluster with two minions, of its own: whoever reads the first one would remember what it lacked."""
    folder = tmp_path_factory.mktemp("lacking")
    with running_topology(folder, ("a",), 2, FLAVOUR, options=SMALL_REDO_LOGS) as running:
        yield running


@pytest.fixture
def lacking(servers, request):
    """A datastore, calls of it, and the servers by an administrator's account.

    Minions lose its heads in the end, so nobody remembers what they lacked.
    """
    with SyncStorage(servers.topology) as storage, SyncStorage(servers.administrators) as admin:
        datastore = create_shards(
            storage,
            Datastore(f"lacks_{request.node.originalname[-8:]}", 4, 2, ("a",)),
            administrators=servers.administrators,
        )
        with api_process(servers.path, {"schemaless.storage.server_settings.PERIOD_S": 1.0}) as api:
            yield datastore, api.at(datastore), admin
        for minion in admin.minions("a"):
            heads = f"DELETE FROM schemaless.shard_head WHERE datastore = '{datastore.name}'"
            run_sql(minion, f"{LOCAL_WRITE}; {heads}; {REPLICATED_WRITE}")


@contextmanager
def filtered(minion, table):
    """A replication filter that a migration left behind."""
    ((version,),) = minion.run(query, "SELECT @@version")
    change = (
        "SET GLOBAL replicate_ignore_table = '{}'"
        if "MariaDB" in version
        else "CHANGE REPLICATION FILTER REPLICATE_IGNORE_TABLE = ({})"
    )
    with replication_stopped(minion):
        run_sql(minion, change.format(table))
    yield
    with replication_stopped(minion):
        run_sql(minion, change.format(""))


def put_cells(call, datastore, first):
    rows = [row_in(datastore, 0) for _ in range(CELLS)]
    for n, row in enumerate(rows):
        assert call.put(row, 1, {"n": first + n}, "BASE" if n % 2 else "OTHER").status_code == 201
    return rows


def pages_of(call, until, **options):
    """Reads the log of shard 0 from minions until each of them has shown its head."""
    for _ in range(8):
        answer = call.get("/shards/0/cells", params={"read_from": "minion", "limit": 1000, **options})
        if answer.status_code == 200:
            page = answer.json()
            yield page, [cell["added_id"] for cell in page["cells"]]


def test_a_minion_that_lost_one_cell_is_left_out_by_the_page_that_misses_it(lacking, eventually):
    """What a skipped event leaves is no filter, and the cell at the head is there."""
    datastore, call, admin = lacking
    minion = admin.minions("a")[0]
    rows = put_cells(call, datastore, 0)
    eventually(lambda: call.get(f"/cells/{rows[-1]}/BASE/1", params={"read_from": "minion"}), 200)
    run_sql(minion, f"{LOCAL_WRITE}; DELETE FROM {datastore.database(0)}.entity WHERE added_id = 7; {REPLICATED_WRITE}")
    seen = [shown for page, shown in pages_of(call, CELLS) if page["head"] == CELLS]
    assert seen == [list(range(1, CELLS + 1))] * 8
    assert [shown for _, shown in pages_of(call, CELLS, columns="OTHER")] == [list(range(1, CELLS + 1, 2))] * 8

    def named():
        return {node["name"]: node["setting_faults"] for node in nodes_of(call.get("/status").json())}["a2"]

    assert until(named) == [f"entity is without added_id 7 of {datastore.database(0)}, and must be whole"]
    answers = [call.get(f"/cells/{rows[6]}", params={"read_from": "minion"}).status_code for _ in range(8)]
    assert answers == [200] * 8


def setting_faults(call, name):
    (faults,) = [node["setting_faults"] for node in nodes_of(call.get("/status").json()) if node["name"] == name]
    return faults


def test_what_a_minion_lost_before_a_process_began_is_found_without_a_read(lacking, servers, eventually):
    """Below the head. The minion is read again once it has the cell."""
    datastore, call, admin = lacking
    minion, entity = admin.minions("a")[0], f"{datastore.database(0)}.entity"
    rows = put_cells(call, datastore, 0)
    eventually(lambda: call.get(f"/cells/{rows[-1]}/BASE/1", params={"read_from": "minion"}), 200)
    until(lambda: minion.run(query, f"SELECT 1 FROM {entity} WHERE added_id = {CELLS}"))
    kept = f"CREATE TABLE {entity}_kept SELECT * FROM {entity} WHERE added_id = 9"
    run_sql(minion, f"{LOCAL_WRITE}; {kept}; DELETE FROM {entity} WHERE added_id = 9; {REPLICATED_WRITE}")
    with api_process(servers.path) as later:
        status = later.at(datastore)
        named = [f"entity is without added_id 9 of {datastore.database(0)}, and must be whole"]
        until(lambda: setting_faults(status, "a2") == named)
        back = f"INSERT INTO {entity} SELECT * FROM {entity}_kept; DROP TABLE {entity}_kept"
        run_sql(minion, f"{LOCAL_WRITE}; {back}; {REPLICATED_WRITE}")
        until(lambda: setting_faults(status, "a2") == [])


@contextmanager
def id_of_its_master(minion, master):
    (((own,),), ((of_master,),)) = (node.run(query, "SELECT @@server_id") for node in (minion, master))
    run_sql(minion, f"SET GLOBAL server_id = {of_master}")
    try:
        yield of_master
    finally:
        run_sql(minion, f"SET GLOBAL server_id = {own}")


def test_a_minion_that_had_its_master_s_server_id_is_left_out(lacking):
    """B11: it skipped what came then, and shows the master's heads and no lag all the same. The master may be away."""
    datastore, call, admin = lacking
    master, minion = admin.master("a"), admin.minions("a")[0]
    entity, heads = f"{datastore.database(0)}.entity", f"schemaless.shard_head WHERE datastore = '{datastore.name}'"

    def await_cell(node, added_id):
        until(lambda: node.run(query, f"SELECT 1 FROM {entity} WHERE added_id = {added_id}"))

    def counted():
        return minion.run(query, f"SELECT COUNT(*) FROM {entity}")[0][0]

    put_cells(call, datastore, 0)
    await_cell(minion, CELLS)
    with id_of_its_master(minion, master):
        skipped = put_cells(call, datastore, CELLS)
        await_cell(admin.minions("a")[1], 2 * CELLS)
    put_cells(call, datastore, 2 * CELLS)
    await_cell(minion, 3 * CELLS)
    assert minion.run(query, f"SELECT head FROM {heads} AND shard = 0") == ((3 * CELLS,),)
    assert counted() < 3 * CELLS
    until(lambda: any("added_id" in fault for fault in setting_faults(call, "a2")))
    reads = [call.get(f"/cells/{row}", params={"read_from": "minion"}).status_code for row in skipped * 4]
    assert reads == [200] * len(reads)
    run_sql(minion, "STOP REPLICA; START REPLICA")
    if FLAVOUR is Flavour.MYSQL:  # it knows by its positions what is missing, and gets it now
        until(lambda: counted() == 3 * CELLS)
        until(lambda: setting_faults(call, "a2") == [])


def test_a_minion_with_the_server_id_of_its_master_is_named(lacking):
    """And not read: it may skip what comes now."""
    _, call, admin = lacking
    minion = admin.minions("a")[0]
    with id_of_its_master(minion, admin.master("a")) as of_master:
        shared = [f"server_id is {of_master}, and must be another than that of a1"]
        until(lambda: setting_faults(call, "a2") == shared)
        assert [call.get("/shards/0/cells", params={"read_from": "minion"}).status_code for _ in range(4)] == [200] * 4
    until(lambda: setting_faults(call, "a2") == setting_faults(call, "a1") == [])


def test_a_filtered_minion_is_left_out_and_named(lacking, eventually):
    """B10: reads from minions find every cell, and no page of the log hides a hole, whatever columns are asked for."""
    datastore, call, admin = lacking
    minion = admin.minions("a")[0]
    with filtered(minion, f"{datastore.database(0)}.entity"):
        rows = put_cells(call, datastore, 0)
        eventually(lambda: call.get(f"/cells/{rows[-1]}/BASE/1", params={"read_from": "minion"}), 200)
        for page, shown in pages_of(call, CELLS):
            assert shown == list(range(1, page["next"]["added_id"] + 1))
        for page, shown in pages_of(call, CELLS, columns="BASE"):
            assert shown == list(range(2, page["next"]["added_id"] + 1, 2))

        def misses():
            reads = [call.get(f"/cells/{row}", params={"read_from": "minion"}) for row in rows * 2]
            return next((read for read in reads if read.status_code != 200), reads[0])

        eventually(misses, 200)
        nodes = {node["name"]: node for node in nodes_of(call.get("/status").json())}
        assert nodes["a2"]["stall"] == "filter"
        assert any(datastore.database(0) in fault for fault in nodes["a2"]["setting_faults"])
        assert nodes["a3"]["setting_faults"] == nodes["a1"]["setting_faults"] == []


def test_a_minion_that_stands_says_why(lacking, eventually):
    """B20 and R4: behind an open transaction, and behind an event that it can't apply. Puts and lag go on as usual."""
    datastore, call, admin = lacking
    minion = admin.minions("a")[0]
    table = f"{datastore.database(0)}.entity"

    def state():
        nodes = {node["name"]: node for node in nodes_of(call.get("/status").json())}
        return nodes["a2"]["stall"], nodes["a2"]["why"] or ""

    def await_why(text):
        def why():
            found = state()
            return found[1] if text in found[1] and (not found[1] or found[0] == "blocked") else None

        return until(why, state)

    connection = pymysql.connect(**connect_options(minion.node))
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT COUNT(*) FROM {table}")
        run_sql(admin.master("a"), f"ALTER TABLE {table} COMMENT = 'altered'")
        why = await_why("replication is waiting for table metadata lock")
    assert f"Connection {connection.thread_id()} of admin" in why
    assert call.put(row_in(datastore, 0), 1, {}).status_code == 201
    connection.close()
    until(lambda: minion.run(query, f"SELECT 1 FROM {table} WHERE added_id = 1"))  # or it comes after the delete
    run_sql(minion, f"{LOCAL_WRITE}; DELETE FROM {table} WHERE added_id = 1; {REPLICATED_WRITE}")
    run_sql(admin.master("a"), f"DELETE FROM {table} WHERE added_id = 1")
    why = await_why("replication stands: ")
    assert "entity" in why or "worker" in why  # the event that it can't apply, or the table that has it
