"""Servers that an operator started join by files: each is checked first, and the controller learns of them last."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest

from controller.service import Controller
from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.config import ControllerMode
from schemaless.errors import Misconfigured, NotFound, StateConflict, Unavailable
from schemaless.ops.datastores import create_shards
from schemaless.ops.growth import FileSite, GrowthOrder, await_no_voter, read_nodes, verify_removable
from schemaless.stack.admin import session
from schemaless.stack.local import running_topology
from schemaless.stack.plan import admin_document, topology_document, write_private_json
from schemaless.stack.programs import Flavour
from schemaless.storage import appointment_table, entity_table, placement_table
from schemaless.storage.appointment_table import OrderKind, OrderState
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore, Placement, load_topology
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.waiting import until

pytestmark = pytest.mark.storage

STEP_S = 0.2


def without(document, *names):
    clusters = {
        name: kept
        for name, nodes in document["clusters"].items()
        if (kept := [node for node in nodes if node["name"] not in names])
    }
    return {**document, "clusters": clusters}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """a1, a2, b1, b2, c1, c2 run. The files have a1 and b1, b2. A controller uses its file."""
    folder = tmp_path_factory.mktemp("growth")
    with running_topology(
        folder, ("a", "b", "c"), minions=1, flavour=FLAVOUR, options=SMALL_REDO_LOGS, controlled=True
    ) as running:
        whole = topology_document(list(running.descriptions.values()), running.accounts)
        files = {name: folder / f"{name}.json" for name in ("services", "administrators", "new")}
        some = without(whole, "a2", "c1", "c2")
        write_private_json(files["services"], some)
        write_private_json(files["administrators"], admin_document(some, running.accounts))
        write_private_json(files["new"], whole)
        over = threading.Event()
        how = {"services": load_topology(files["services"]), "name": "grower"}
        with closing(Controller(load_topology(files["administrators"]), ControllerMode.AUTOMATIC, **how)) as controller:

            def keep_stepping():
                while not over.wait(STEP_S):
                    controller.step({})

            with ThreadPoolExecutor(1) as pool:
                stepping = pool.submit(keep_stepping)
                try:
                    until(lambda: "b2" in voters(files, "b") and appointed(files, "a"))
                    site = FileSite(files["services"], files["administrators"], files["new"])
                    yield SimpleNamespace(files=files, whole=whole, site=site, running=running)
                finally:
                    over.set()
                stepping.result()


def storage_of(files):
    storage = SyncStorage(load_topology(files["services"]))
    storage.look()
    return storage


def appointed(files, cluster):
    with storage_of(files) as storage:
        return cluster in storage.appointments


def voters(files, cluster):
    with storage_of(files) as storage:
        return storage.appointments[cluster].voters if cluster in storage.appointments else ()


def run(servers, name, *statements):
    (node,) = (one for one in servers.running.administrators.nodes.values() if one.name == name)
    with session(node) as connected:
        return [row for statement in statements for row in connected.query(statement)]


def described(servers, tmp_path, name, **other):
    """A file in which one server is described otherwise."""
    document = json.loads(json.dumps(servers.whole))
    for nodes in document["clusters"].values():
        for node in nodes:
            if node["name"] == name:
                node.update(other)
    write_private_json(tmp_path / "new.json", document)
    return servers.site._replace(source=tmp_path / "new.json")


DAMAGES = {
    "a database": ("CREATE DATABASE mine", "DROP DATABASE mine", "c2 isn't empty: it has mine"),
    "the id of another server": (
        "SET GLOBAL server_id = 100", "SET GLOBAL server_id = 301", "c2 has the server_id 100 of a1"
    ),
    "another setting": (
        "SET GLOBAL max_allowed_packet = 33554432", "SET GLOBAL max_allowed_packet = 67108864",
        "max_allowed_packet is 33554432 on c2, and 67108864 on a1",
    ),
    "writes": ("SET GLOBAL read_only = OFF", "SET GLOBAL read_only = ON", "on c2 read_only is OFF, and must be ON"),
}  # fmt: skip


if FLAVOUR is Flavour.MARIADB:
    DAMAGES["another cluster's domain"] = (
        "SET GLOBAL gtid_domain_id = 1", "SET GLOBAL gtid_domain_id = 3", "c2 has the gtid_domain_id 1: give it 3"
    )  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_server_with_a_fault_doesn_t_join(servers, name):
    """Each fault is a sentence, and nothing was changed."""
    damage, repair, why = DAMAGES[name]
    before = servers.files["services"].read_text()
    run(servers, "c2", damage)
    try:
        with pytest.raises(Misconfigured, match=why):
            servers.site.add_cluster("c")
    finally:
        run(servers, "c2", repair)
    assert servers.files["services"].read_text() == before


def test_a_description_with_a_fault_is_refused(servers, tmp_path):
    cases = [
        ({"port": 1, "socket": None}, "c1 can't be used at 127.0.0.1:1 .*: start it, or correct its address"),
        ({"password": "wrong"}, "the account schemaless of services can't log in to c1"),
    ]
    for other, why in cases:
        with pytest.raises(Misconfigured, match=why):
            described(servers, tmp_path, "c1", **other).check_cluster("c")
    (tmp_path / "new.json").write_text("{")
    with pytest.raises(Misconfigured, match="no topology can be read from"):
        servers.site._replace(source=tmp_path / "new.json").check_cluster("c")
    with pytest.raises(Misconfigured, match=r"name a file in the form of topology\.json"):
        servers.site._replace(source=None).check_cluster("c")
    with pytest.raises(NotFound, match="has no server c9 in cluster c"):
        read_nodes(servers.files["new"], "c", "c9")


@pytest.fixture
def c_as_a_whole(servers):
    """After a test c has joined, or no file has it."""
    yield
    if not appointed(servers.files, "c"):
        for file in (servers.files["administrators"], servers.files["services"]):
            write_private_json(file, without(json.loads(file.read_text()), "c1", "c2"))


@pytest.mark.usefixtures("c_as_a_whole")
def test_a_cluster_joins_in_two_calls(servers):
    """Services know it first. After the second call it is open, and has the tables, and where shards were moved to."""
    moved = Placement("trips", 3, 2, "b", None, 1)
    with storage_of(servers.files) as storage:
        storage.master("a").run(placement_table.write, [moved])
    assert "copy that file to every machine" in servers.site.add_cluster("c")
    assert not appointed(servers.files, "c")
    assert "c" not in load_topology(servers.files["administrators"]).clusters
    for _ in range(2):  # again, as after a kill: what its servers have is theirs now
        assert servers.site.add_cluster("c") == "cluster c is open"
    until(lambda: "c2" in voters(servers.files, "c"))
    with storage_of(servers.files) as storage:
        assert storage.epoch("c") > max(storage.epoch("a"), storage.epoch("b"))
        assert storage.master("c").run(placement_table.TABLE.rows) == [moved]
    account = load_topology(servers.files["administrators"])
    assert {account.nodes[name].user for name in ("a1", "c1", "c2")} == {account.nodes["b1"].user}
    assert oct(os.stat(servers.files["administrators"]).st_mode & 0o777) == "0o600"


@pytest.fixture
def a2_left(servers):
    """Whatever a test did with a2, it is no voter afterwards, and in no file."""
    yield
    servers.site.remove_node("a", "a2", delete=False)


@pytest.mark.usefixtures("a2_left")
def test_a_server_joins_in_two_calls_and_leaves(servers, tmp_path):
    assert "copy that file to every machine" in servers.site.add_node("a", "a2")
    with pytest.raises(Misconfigured, match="describes a2 otherwise than"):
        described(servers, tmp_path, "a2", host="localhost").add_node("a", "a2")
    assert servers.site.add_node("a", "a2") == "a2 is a voter of a"
    with pytest.raises(StateConflict, match="a1 is the master of a"):
        verify_removable(load_topology(servers.files["services"]), "a1", last=True)
    with pytest.raises(StateConflict, match="a2 is the last voter of a"):
        verify_removable(load_topology(servers.files["services"]), "a2", last=False)
    with pytest.raises(StateConflict, match="a1 is the master of a now: put it back"):
        await_no_voter(load_topology(servers.files["services"]), "a", "a1")
    with pytest.raises(Misconfigured, match="leave out --delete"):
        servers.site.remove_node("a", "a2", delete=True)
    assert "is no voter any more" in servers.site.remove_node("a", "a2", delete=False)
    assert voters(servers.files, "a") == ()
    assert "a2" not in load_topology(servers.files["services"]).nodes


@pytest.fixture
def a2_follows(servers):
    """a2 receives from a1, and is in no file, as after it joined and left."""
    if not run(servers, "a2", "SHOW REPLICA STATUS"):
        for _ in range(2):
            servers.site.add_node("a", "a2")
        servers.site.remove_node("a", "a2", delete=False)


@pytest.mark.usefixtures("a2_follows")
def test_a_copy_has_the_history_of_its_master(servers):
    """a2 still receives from a1. A server of another installation would bring its cells along."""
    with storage_of(servers.files) as storage:
        wanted = Datastore("copied", 2, 1, ("a", "b"))
        datastore = create_shards(storage, wanted, administrators=servers.running.administrators)
        key = CellKey(RowKey(bytes(16)), ColumnName("BASE"), RefKey(1))
        storage.master("a").run(entity_table.put_cells, datastore, [ShardCell(key, encode_body({"n": 1}), 0)])
    head = "SELECT head FROM schemaless.shard_head WHERE datastore = 'copied' AND shard = 0 AND head = 1"
    until(lambda: run(servers, "a2", head))
    servers.site.check_node("a", "a2")
    unlogged = "SET sql_log_bin = 0"
    change = "UPDATE copied_0000.entity SET created_at = created_at + INTERVAL {} SECOND"
    for damage, repair, why in (
        (change.format(1), change.format(-1), "a2 has shard 0 of copied otherwise than a1"),
        (
            "UPDATE schemaless.datastore SET name = 'other' WHERE name = 'copied'",
            "UPDATE schemaless.datastore SET name = 'copied' WHERE name = 'other'",
            "a2 has the datastore other otherwise than a1",
        ),
    ):
        run(servers, "a2", unlogged, damage)
        try:
            with pytest.raises(Misconfigured, match=why):
                servers.site.check_node("a", "a2")
        finally:
            run(servers, "a2", unlogged, repair)
    servers.site.check_node("a", "a2")


def test_an_empty_server_needs_a_whole_log(servers):
    """It couldn't follow from the start, so the operator makes it a copy first. a2 is made the empty one, for good."""
    with storage_of(servers.files) as storage:
        master = storage.master("b").node.name
    run(servers, master, "FLUSH BINARY LOGS")

    def is_purged():  # not while a minion still reads it
        run(servers, master, "PURGE BINARY LOGS TO 'binlog.000002'")
        return run(servers, master, "SHOW BINARY LOGS")[0]["Log_name"] != "binlog.000001"

    until(is_purged)
    described = servers.files["new"].with_name("b3.json")
    document = json.loads(json.dumps(servers.whole))
    (empty,) = [node for node in document["clusters"]["a"] if node["name"] == "a2"]
    document["clusters"]["b"].append(empty | {"name": "b3"})
    document["clusters"]["a"] = [node for node in document["clusters"]["a"] if node["name"] != "a2"]
    write_private_json(described, document)
    run(
        servers,
        "a2",
        "STOP REPLICA; RESET REPLICA ALL",
        *("DROP DATABASE IF EXISTS " + name for name in ("schemaless", "copied_0000")),
    )
    with pytest.raises(Misconfigured, match=r"hasn't its whole log any more: make b3 a copy of a minion of b first"):
        servers.site._replace(source=described).check_node("b", "b3")


def test_one_order_at_a_time(servers):
    """Who comes second reads who was first. The same command of the same caller goes on."""
    with storage_of(servers.files) as storage:

        def order(cluster, actor):
            return GrowthOrder(storage, OrderKind.ADD_NODE, cluster, f"{cluster}9", actor)

        with pytest.raises(KeyboardInterrupt), order("a", "first"):  # killed
            raise KeyboardInterrupt
        with pytest.raises(StateConflict, match=r"first ordered `add-node a a9` at .* isn't settled yet"):
            order("b", "second")
        with pytest.raises(Unavailable), order("a", "first"):
            raise Unavailable("it waited in vain")
        again = order("a", "first")
        assert again.again
        with pytest.raises(NotFound), again:
            raise NotFound("what came of it")
        with order("b", "second"):
            pass
        for master in storage.masters:
            orders = master.run(appointment_table.orders)
            assert (orders["a"].state, orders["a"].told) == (OrderState.REFUSED, "what came of it")
            assert orders["b"].state is OrderState.DONE
