"""Which settings of a server break which promise."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from schemaless.errors import ForeignFormat, NotDurable, NotWhole
from schemaless.storage import shard_log
from schemaless.storage.operation import Result
from schemaless.storage.schema import FORMAT_VERSION
from schemaless.storage.server_settings import ServerSettings, faults_of
from schemaless.topology import Node, Role

GOOD = {
    "log_bin": "ON",
    "innodb_flush_log_at_trx_commit": "1",
    "sync_binlog": "1",
    "binlog_format": "ROW",
    "replica_preserve_commit_order": "ON",
    "replica_parallel_workers": "4",
    "read_only": "ON",
    "replicate_events_marked_for_skip": "REPLICATE",
    "slave_exec_mode": "STRICT",
    "replica_skip_errors": "OFF",
    "max_allowed_packet": "16777216",
    "replica_max_allowed_packet": "1073741824",
    "replica_net_timeout": "10",
}


FORMAT = [(FORMAT_VERSION,)]
NODE = Node("a1", "a", "127.0.0.1", 3306, "schemaless", "secret")


def answer(settings, values, *more):
    """Lets a server answer the questions. A minion is asked for more."""
    asking = settings.ask()
    next(asking)
    end(asking, list(values.items()), *more, FORMAT)


def replication_row(columns=(), *, is_mariadb=False):
    """Both kinds have the same columns to begin with. MariaDB tells of all sources with two more before them."""
    row = ["", *[""] * 7, 4711 if is_mariadb else "", *[""] * 51]
    for column, value in dict(columns).items():
        row[column] = value
    return ("", "", *row) if is_mariadb else tuple(row)


def end(asking, *answers):
    for rows in answers[:-1]:
        asking.send([Result(rows)])
    with pytest.raises(StopIteration):
        asking.send([Result(answers[-1])])


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
        ({"read_only": "OFF"}, {Role.MINION}, False),
        ({"log_slave_updates": "OFF"}, {Role.MINION}, False),
        ({"SHOW REPLICA STATUS": "refused"}, {Role.MINION}, False),
        ({"max_allowed_packet": "1048576"}, {Role.MASTER, Role.MINION}, False),
        ({"replica_max_allowed_packet": "1048576"}, {Role.MASTER, Role.MINION}, False),
        ({"slave_net_timeout": "60"}, {Role.MINION}, False),
        ({"replica_net_timeout": "11"}, {Role.MINION}, False),
    ],
)
def test_each_setting_counts_for_its_role(role, change, fault_of, loses):
    """Flush and sync are a master's, and commit order is a minion's. Without a binary log its settings say nothing."""
    faults = faults_of(role, GOOD | change)
    assert [(fault.name, fault.loses) for fault in faults] == (
        [(next(iter(change)), loses)] if role in fault_of else []
    )


@pytest.mark.parametrize(
    "change",
    [
        {"replicate_ignore_table": "trips_0000.entity"},
        {"replicate_wild_do_table": "other.%"},
        {"replica_skip_errors": "1062"},
        {"slave_exec_mode": "IDEMPOTENT"},
        {"replicate_events_marked_for_skip": "FILTER_ON_REPLICA"},
        {"replicate_ignore_server_ids": "11"},
        {"replicate_do_domain_ids": "1"},
        {"replication source": "nobody"},
    ],
)
def test_a_minion_that_may_lack_cells_is_not_read(change):
    """I3: it shows its heads all the same. A master with the same settings replicates nothing."""
    (fault,) = faults_of(Role.MINION, GOOD | change)
    assert (fault.name, fault.hides, fault.stall) == (next(iter(change)), True, "filter")
    assert faults_of(Role.MASTER, GOOD | change) == []


@pytest.mark.parametrize(("column", "of"), [(38, {True, False}), (44, {True}), (45, {True}), (54, {False})], ids=str)
@pytest.mark.parametrize("is_mariadb", [True, False])
def test_a_filter_that_is_no_variable_counts(column, of, is_mariadb):
    """By server, by domain, and of names. In these columns the other kind of server has something else."""
    settings = ServerSettings(NODE, Role.MINION)
    asking = settings.ask()
    next(asking)
    values = GOOD | ({"gtid_domain_id": "0"} if is_mariadb else {})
    end(asking, list(values.items()), [replication_row({column: "3"}, is_mariadb=is_mariadb)], FORMAT)
    assert [fault.hides for fault in settings.faults] == [True] * (is_mariadb in of)


def test_a_minion_that_replicates_from_nobody_is_not_read():
    """It shows what it had, and what somebody wrote there since."""
    settings = ServerSettings(NODE, Role.MINION)
    for rows, is_refused in (((), True), ([replication_row()], False)):
        asking = settings.ask()
        next(asking)
        end(asking, list(GOOD.items()), rows, FORMAT)
        with pytest.raises(NotWhole, match="replication source is nobody") if is_refused else nullcontext():
            settings.require_usable(writes=False)


def test_servers_with_one_server_id_are_named_and_a_minion_with_its_master_s_is_not_read():
    """B11: it takes what its master wrote for its own. Two minions only disturb each other, and two clusters nobody."""
    ids = {}
    master, elsewhere = ServerSettings(NODE, ids=ids), ServerSettings(replace(NODE, name="b1", cluster="b"), ids=ids)
    minion, other = (ServerSettings(replace(NODE, name=name), Role.MINION, ids=ids) for name in ("a2", "a3"))

    def give(settings, number):
        answer(settings, GOOD | {"server_id": number}, *[[replication_row()]] * (settings in (minion, other)))
        return [(str(fault), fault.hides) for fault in settings.faults]

    assert (give(master, "11"), give(other, "13")) == ([], [])
    assert give(elsewhere, "11") == [("server_id is 11, and must be another than that of a1", False)]
    assert give(minion, "11") == [("server_id is 11, and must be another than that of a1", True)]
    assert give(master, "11") == [("server_id is 11, and must be another than that of a2", False)]
    with pytest.raises(NotWhole, match="a2 may lack cells: server_id is 11"):
        minion.require_usable(writes=False)
    assert give(minion, "13") == [("server_id is 13, and must be another than that of a3", False)]
    minion.require_usable(writes=False)
    assert (give(minion, "12"), give(elsewhere, "21"), give(other, "13")) == ([], [], [])


def test_a_cell_that_a_server_lacks_counts_until_it_is_there():
    """Whoever reads finds it. A minion isn't read meanwhile, and a master is: somebody has to be."""
    minion, master = ServerSettings(NODE, Role.MINION), ServerSettings(NODE)
    for settings in (minion, master):
        settings.lacks(shard_log.hole("trips_0003", 7))
        (fault,) = settings.faults
        assert str(fault) == "entity is without added_id 7 of trips_0003, and must be whole"
    master.require_usable(writes=False)
    for head, cell in (([(1,)], []), ([(1,)], [(1,)])):
        with pytest.raises(NotWhole, match=r"a1 may lack cells: entity is without added_id 7"):
            minion.require_usable(writes=False)
        ask_of_cells(minion, head, cell)
    minion.require_usable(writes=False)


def test_a_cell_that_no_head_promises_any_more_isn_t_lacking():
    """Its shard moved away, or was restored: the server could never show it."""
    minion = ServerSettings(NODE, Role.MINION)
    minion.lacks(shard_log.hole("trips_0003", 7))
    ask_of_cells(minion, [])
    minion.require_usable(writes=False)


def test_each_cell_that_a_server_lacks_counts():
    """They are filled one after the other."""
    minion = ServerSettings(NODE, Role.MINION)
    for added_id in (7, 8):
        minion.lacks(shard_log.hole("trips_0003", added_id))
    ask_of_cells(minion, [(1,)], [(1,)], [(1,)], [])
    with pytest.raises(NotWhole, match="without added_id 8"):
        minion.require_usable(writes=False)


def ask_of_cells(settings, *answers):
    """Lets a minion answer, for each cell that it lacked whether its head is as high, and whether it has it."""
    asking = settings.ask()
    next(asking)
    end(asking, list(GOOD.items()), [replication_row()], *answers, FORMAT)


def test_a_server_is_asked_when_it_is_first_used_and_every_minute():
    """A question that failed is due again at once."""
    now = [100.0]
    settings = ServerSettings(NODE, clock=lambda: now[0])
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


def test_a_server_that_gets_another_role_is_asked_again():
    """It has other promises to keep. An answer that comes after the change was judged by the former ones."""
    settings = ServerSettings(NODE, clock=lambda: 100.0)
    answer(settings, GOOD | {"sync_binlog": "0"})
    assert ([fault.name for fault in settings.faults], settings.due()) == (["sync_binlog"], False)
    settings.appoint(Role.MINION)
    assert (settings.faults, settings.due()) == ([], True)
    settings.appoint(Role.MASTER)
    asking = settings.ask()
    next(asking)
    settings.appoint(Role.MINION)
    end(asking, list(GOOD.items()), FORMAT)
    assert settings.due()


def test_a_server_with_a_fault_is_asked_again_once_a_master_was_appointed():
    """A controller corrects the settings of a master just before it says so. Until then the fault counts."""
    settings = ServerSettings(NODE, clock=lambda: 100.0)
    settings.appoint(Role.MASTER)
    answer(settings, GOOD | {"sync_binlog": "0"})
    assert settings.faults
    assert not settings.due()
    settings.appoint(Role.MASTER)
    assert settings.due()
    assert settings.faults
    answer(settings, GOOD)
    assert not settings.faults
    settings.appoint(Role.MASTER)
    assert not settings.due()


def test_a_lossy_master_is_refused_by_name_unless_that_is_allowed():
    """The error names server, setting and value, and its hint the way out. A setting that was corrected is forgiven."""
    refusing, allowing = ServerSettings(NODE), ServerSettings(NODE, lossy_allowed=True)
    for settings in (refusing, allowing):
        answer(settings, GOOD | {"sync_binlog": "0"})
    with pytest.raises(NotDurable, match=r"a1 may lose .*: sync_binlog is 0, and must be 1") as refused:
        refusing.require_usable(writes=True)
    assert "SCHEMALESS_MYSQL_LOSSY_MASTERS" in refused.value.hint
    allowing.require_usable(writes=True)
    answer(refusing, GOOD)
    refusing.require_usable(writes=True)


@pytest.mark.parametrize("writes", [True, False])
def test_databases_of_another_release_are_neither_read_nor_written(writes):
    """A server whose tables are being made has no format yet."""
    settings = ServerSettings(NODE)
    for formats, is_foreign in (([(FORMAT_VERSION - 1,)], True), ([], False), (FORMAT, False)):
        asking = settings.ask()
        next(asking)
        end(asking, list(GOOD.items()), formats)
        with pytest.raises(ForeignFormat, match="a1 has databases") if is_foreign else nullcontext():
            settings.require_usable(writes=writes)
