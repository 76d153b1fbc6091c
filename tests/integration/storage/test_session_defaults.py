"""What an administrator may set for all sessions changes nothing of ours (B6)."""

from contextlib import ExitStack, closing, contextmanager

import pytest

from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncNode, connect
from tests.integration.api.api_harness import api_process, row_in
from tests.log_harness import run_sql

pytestmark = pytest.mark.storage

DEFAULTS = {
    "autocommit": "OFF",
    "completion_type": "'RELEASE'",
    "group_concat_max_len": 4,
    "idle_readonly_transaction_timeout": 1,
    "idle_transaction_timeout": 1,
    "idle_write_transaction_timeout": 1,
    "div_precision_increment": 0,
    "init_connect": "'SET NAMES latin1, autocommit = 0'",
    "innodb_lock_wait_timeout": 1000,
    "lock_wait_timeout": 1000,
    "max_execution_time": 500,
    "max_join_size": 1,
    "max_session_mem_used": 1 << 20,
    "max_sort_length": 64,
    "max_statement_time": 0.5,
    "net_read_timeout": 1,
    "net_write_timeout": 1,
    "sql_auto_is_null": "ON",
    "sql_big_selects": "OFF",
    "sql_mode": "'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'",
    "sql_safe_updates": "ON",
    "sql_select_limit": 1,
    "time_zone": "'+05:00'",
    "tmp_disk_table_size": 1 << 20,
    "transaction_isolation": "'SERIALIZABLE'",
    "transaction_read_only": "ON",
    "tx_isolation": "'SERIALIZABLE'",
    "tx_read_only": "ON",
    "unique_checks": "OFF",
    "wait_timeout": 1,
}
CHARACTERS = "character_set_client", "character_set_connection", "character_set_results", "collation_connection"


@contextmanager
def defaults_changed(node):
    """Sets all that this kind of server has."""
    before = dict(node.run(query, "SHOW GLOBAL VARIABLES"))
    with ExitStack() as changes:
        for name in DEFAULTS.keys() & before.keys():
            is_number = before[name].replace(".", "").isdigit()
            value = before[name] if is_number else f"'{before[name]}'"
            changes.callback(run_sql, node, f"SET GLOBAL {name} = {value}")
            run_sql(node, f"SET GLOBAL {name} = {DEFAULTS[name]}")
        yield


def session_of(rows):
    return {name: value for name, value in rows if name in DEFAULTS.keys() - {"init_connect"} or name in CHARACTERS}


async def test_sessions_are_the_same_whatever_the_server_s_defaults_are(async_server, admin, topology):
    """Of both drivers. The administrator's own session was open before."""
    node, show = topology.cluster("b").nodes[0], "SHOW SESSION VARIABLES"
    usual = session_of(await async_server(node).run(query, show))
    assert len(usual) > len(CHARACTERS) + 20
    sync = SyncNode(node)
    try:
        with defaults_changed(admin.master("b")):
            assert session_of(await async_server(node).run(query, show)) == usual
            assert session_of(sync.run(query, show)) == usual
    finally:
        sync.close()


def test_a_copy_in_a_buffer_is_committed_whatever_the_server_s_defaults_are(running, make_datastore, admin):
    """It is one INSERT, and another session sees it as soon as it is acknowledged."""
    datastore = make_datastore(placement=("a",))
    secondary = admin.master("b")
    with defaults_changed(secondary), api_process(running.path) as api, held_head(admin.master("a"), datastore):
        call = api.at(datastore)
        for n in range(3):
            row = row_in(datastore, 0)
            assert call.put(row, 1, {"n": n}).status_code == 202
            assert secondary.run(query, f"SELECT COUNT(*) FROM schemaless.buffer WHERE row_key = x'{row.hex}'") == (
                (1,),
            )


@contextmanager
def held_head(master, datastore):
    """Somebody's transaction has the head of shard 0, so its puts are only buffered."""
    with closing(connect(master.node, 1.0, 60.0)) as connection, connection.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT * FROM schemaless.shard_head WHERE datastore = '{datastore.name}' FOR UPDATE")
        yield
        connection.rollback()


def test_puts_keep_both_copies_whatever_the_server_s_defaults_are(running, make_datastore, admin):
    """A process that starts then. Its texts arrive as they were sent."""
    datastore = make_datastore(placement=("b",))
    with defaults_changed(admin.master("b")), api_process(running.path) as api:
        call = api.at(datastore)
        for n in range(10):
            row = row_in(datastore, n % datastore.shards)
            put = call.put(row, 1, {"n": n, "text": "na\u00efve \u2603"})
            assert (put.status_code, put.json()["copies"]) == (201, 2), put.text
            assert call.get(f"/cells/{row}/BASE/1").json()["body"] == {"n": n, "text": "na\u00efve \u2603"}
        page = call.get("/shards/0/cells").json()
        assert (page["pending"], len(page["cells"])) == (0, len(range(0, 10, datastore.shards)))
