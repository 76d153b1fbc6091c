"""What an administrator may set for all sessions changes nothing of ours (B6)."""

from contextlib import contextmanager

import pytest

from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncNode
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
    "init_connect": "'SET NAMES latin1'",
    "innodb_lock_wait_timeout": 1000,
    "lock_wait_timeout": 1000,
    "max_execution_time": 500,
    "max_join_size": 1,
    "max_sort_length": 8,
    "max_statement_time": 0.5,
    "net_read_timeout": 1,
    "net_write_timeout": 1,
    "sql_auto_is_null": "ON",
    "sql_big_selects": "OFF",
    "sql_mode": "'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'",
    "sql_safe_updates": "ON",
    "sql_select_limit": 1,
    "time_zone": "'+05:00'",
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
    changes = {name: str(value) for name, value in DEFAULTS.items() if name in before}
    try:
        for name, value in changes.items():
            run_sql(node, f"SET GLOBAL {name} = {value}")
        yield
    finally:
        for name in changes:
            is_number = before[name].replace(".", "").isdigit()
            run_sql(node, f"SET GLOBAL {name} = " + (before[name] if is_number else f"'{before[name]}'"))


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
