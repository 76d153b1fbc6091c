"""The services' MySQL account has what they need and no more, so that `read_only` binds it (I17)."""

import uuid

import pytest

from schemaless.errors import NodeRefuses, RefusedForGood, StaleTopology
from schemaless.ops.datastores import create_shards
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncNode
from schemaless.topology import Datastore

pytestmark = pytest.mark.storage


def refused(node, statement):
    """The number of the server's error."""
    with pytest.raises(NodeRefuses) as caught:
        node.run(query, statement)
    return caught.value.__cause__.args[0]


def test_a_service_can_not_write_on_a_minion(storage, make_datastore):
    """The rights are there, and `read_only` takes them away: nothing of ours gets by it."""
    datastore = make_datastore()
    minion = storage.minions("a")[0]
    insert = f"INSERT INTO schemaless.shard_head VALUES ('{datastore.name}', 99, 1, 0, NOW(), 0, NULL)"
    with pytest.raises(StaleTopology, match="read-only"):
        minion.run(query, insert)
    assert refused(minion, "SET GLOBAL read_only = OFF") == 1227


def test_a_service_reads_no_accounts_and_no_files(storage):
    """Nor does it grant, or touch databases that aren't ours."""
    master = storage.master("a")
    assert refused(master, "SELECT * FROM mysql.user") == 1142
    assert refused(master, "SELECT 1 INTO OUTFILE '/tmp/x'") in (1045, 1227, 1290)
    assert refused(master, "SELECT LOAD_FILE('/etc/passwd') FROM mysql.db") == 1142
    assert master.run(query, "SELECT LOAD_FILE('/etc/hostname')") == ((None,),)
    assert refused(master, "GRANT SELECT ON *.* TO CURRENT_USER()") in (1044, 1045, 1227)
    assert refused(master, "CREATE USER stranger") == 1227
    assert refused(master, "CREATE DATABASE strange") == 1044
    assert refused(master, "SET GLOBAL sync_binlog = 0") == 1227


def test_a_service_sees_other_accounts_sessions_and_ends_only_its_own(storage, admin):
    """PROCESS is for the watcher of idle transactions. Ending a stranger's session needs another right."""
    master = storage.master("a")
    ((other,),) = admin.master("a").run(query, "SELECT CONNECTION_ID()")
    assert refused(master, f"KILL {other}") == 1095


def test_a_datastore_brings_the_rights_for_its_own_databases_only(running, storage):
    """An administrator grants them. The underscore of a name stands for itself: a_b doesn't open axb_0000."""
    suffix = uuid.uuid4().hex[:8]
    made = Datastore(f"a_{suffix}", 2, 2, ("a", "b"))
    create_shards(storage, made, administrators=running.administrators)
    master = storage.master("a")
    assert refused(master, f"CREATE DATABASE ax{suffix}_0000") == 1044
    master.run(query, f"CREATE DATABASE a_{suffix}_9999")


def test_without_an_administrator_a_creation_says_what_is_missing(storage):
    """The name of the setting is in the hint. What was written before is finished by the next creation."""
    with pytest.raises(RefusedForGood, match="SCHEMALESS_ADMIN_TOPOLOGY"):
        create_shards(storage, Datastore(f"b{uuid.uuid4().hex[:8]}", 2, 2, ("a", "b")))


def test_a_minion_gets_the_rights_by_replication(storage, make_datastore, topology):
    """A promoted one must let services in to what they had."""
    datastore = make_datastore(placement=("a",))
    minion = SyncNode(topology.cluster("a").nodes[1])
    for _ in range(100):
        try:
            assert minion.run(query, f"SELECT COUNT(*) FROM {datastore.database(0)}.entity") == ((0,),)
            break
        except NodeRefuses:
            minion.run(query, "SELECT SLEEP(0.1)")
    else:
        pytest.fail("the minion never got the rights")
    minion.close()
