"""Which settings of a server break which promise."""

import pytest

from schemaless.errors import NotDurable
from schemaless.storage.operation import Result
from schemaless.storage.server_settings import ServerSettings, faults_of
from schemaless.topology import Node, Role

GOOD = {
    "log_bin": "ON",
    "innodb_flush_log_at_trx_commit": "1",
    "sync_binlog": "1",
    "binlog_format": "ROW",
    "replica_preserve_commit_order": "ON",
    "replica_parallel_workers": "4",
}


def node(role=Role.MASTER):
    return Node("a-node", "a", role, "127.0.0.1", 3306, "schemaless", "secret")


def answer(settings, values):
    """Lets a server answer the question."""
    asking = settings.ask()
    next(asking)
    with pytest.raises(StopIteration):
        asking.send([Result(list(values.items()))])


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("lacking", [(), ("replica_preserve_commit_order", "replica_parallel_workers"), GOOD])
def test_what_the_stack_sets_breaks_nothing(role, lacking):
    """MariaDB has no setting for the commit order, and a later MySQL may have lost one that has one value left."""
    assert faults_of(role, {name: value for name, value in GOOD.items() if name not in lacking}) == []


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("change", "fault_of", "loses"),
    [
        ({"innodb_flush_log_at_trx_commit": "2"}, {Role.MASTER}, True),
        ({"sync_binlog": "0"}, {Role.MASTER}, True),
        ({"sync_binlog": "0", "log_bin": "OFF", "binlog_format": "MIXED"}, set(), True),
        ({"binlog_format": "MIXED"}, {Role.MASTER, Role.MINION}, False),
        ({"replica_preserve_commit_order": "OFF"}, {Role.MINION}, False),
        ({"replica_preserve_commit_order": "OFF", "replica_parallel_workers": "1"}, set(), False),
    ],
)
def test_each_setting_counts_for_its_role(role, change, fault_of, loses):
    """Flush and sync are a master's, and commit order is a minion's. Without a binary log its settings say nothing."""
    faults = faults_of(role, GOOD | change)
    assert [(fault.name, fault.loses) for fault in faults] == (
        [(next(iter(change)), loses)] if role in fault_of else []
    )


def test_a_server_is_asked_when_it_is_first_used_and_every_minute():
    """A question that failed is due again at once."""
    now = [100.0]
    settings = ServerSettings(node(), clock=lambda: now[0])
    asking = settings.ask()
    next(asking)
    with pytest.raises(OSError, match="gone"):
        asking.throw(OSError("gone"))
    assert settings.due()
    answer(settings, GOOD)
    assert not settings.due()
    now[0] += 60
    assert settings.due()
    asking = settings.ask()
    next(asking)
    assert not settings.due()  # one asks, and the others go on


def test_a_lossy_master_is_refused_by_name_unless_that_is_allowed():
    """The error names server, setting and value, and its hint the way out. A setting that was corrected is forgiven."""
    refusing, allowing = ServerSettings(node()), ServerSettings(node(), lossy_allowed=True)
    for settings in (refusing, allowing):
        answer(settings, GOOD | {"sync_binlog": "0"})
    with pytest.raises(NotDurable, match=r"a-node may lose .*: sync_binlog is 0, and must be 1") as refused:
        refusing.require_durable()
    assert "SCHEMALESS_MYSQL_LOSSY_MASTERS" in refused.value.hint
    allowing.require_durable()
    answer(refusing, GOOD)
    refusing.require_durable()
