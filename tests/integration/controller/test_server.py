"""What a controller does to one server, each act on real ones: promises, the fence, positions, opening, following."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from controller.server import Server, acting
from schemaless.errors import LockTimeout, Misconfigured, NotWhole, Outvoted, StorageUnavailable
from schemaless.location import Location
from schemaless.ops.datastores import create_shards
from schemaless.stack.admin import REPLICATION_USER
from schemaless.stack.local import running_topology
from schemaless.storage.admin_session import AdminSession
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.topology import Appointment, Ballot, Datastore
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.storage

DATASTORE = Datastore("acts", 4, 2, ("a",))
WRITE = "INSERT INTO schemaless.admin_action (at, who, what, peer, outcome) VALUES (UTC_TIMESTAMP(6), '', '', '', '')"
WRITTEN = "SELECT COUNT(*) AS written FROM schemaless.admin_action"


class StorageServers:
    """One master and two minions with our tables, as administrators and services reach them."""

    def __init__(self, running):
        self.processes = running.servers
        self.administrators = {node.name: node for node in running.administrators.cluster("a").nodes}
        self.services = {node.name: node for node in running.topology.cluster("a").nodes}
        self.replication = (REPLICATION_USER, running.accounts.replication_password)
        self._epochs = itertools.count(1)

    def ballot(self):
        """A higher one than all before."""
        return Ballot(next(self._epochs), "x")

    def acting(self, name, ballot=None):
        return acting(self.administrators[name], ballot or self.ballot())

    def look(self, name):
        with closing(Server(self.administrators[name])) as server:
            return server.look()

    def heads(self, name):
        with closing(Server(self.administrators[name])) as server:
            return server.heads()

    def lacks(self, have, wanted):
        with closing(Server(self.administrators["a2"])) as server:
            return server.lacks(have, wanted)

    def admin(self, name, *statements):
        """The rows of the last statement, all run in one session."""
        with AdminSession(self.administrators[name]) as session:
            return [session.query(statement) for statement in statements][-1]

    def write(self, name, rows=1):
        """As a service does."""
        with closing(SyncNode(self.services[name])) as node:
            for _ in range(rows):
                node.run(query, WRITE)

    def written(self, name):
        return self.admin(name, WRITTEN)[0]["written"]

    def caught_up(self, name, master):
        """Waits until a server contains what another one has executed."""
        wanted = self.look(master).executed
        until(lambda: not self.lacks(self.look(name).executed, wanted))


@contextmanager
def three_servers(folder):
    with running_topology(folder, ("a",), 2, FLAVOUR, options=SMALL_REDO_LOGS) as running:
        yield running, StorageServers(running)


def make_tables(running, servers):
    with SyncStorage(running.topology) as storage:
        create_shards(storage, DATASTORE, administrators=running.administrators)
    for minion in ("a2", "a3"):
        servers.caught_up(minion, "a1")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Each test leaves a1 open and both minions following it."""
    with three_servers(tmp_path_factory.mktemp("acts")) as (running, started):
        make_tables(running, started)
        yield started


def test_a_server_obeys_no_lower_ballot(servers):
    """An equal epoch counts for its own controller only. The promise is no transaction of the server's history."""
    ballot, before = Ballot(servers.ballot().epoch, "m"), servers.look("a2").executed
    for _ in range(2):
        with servers.acting("a2", ballot):
            pass
    for late in (Ballot(ballot.epoch, "a"), Ballot(ballot.epoch, "z"), Ballot(0, "z")):
        with pytest.raises(Outvoted, match=f"promised ballot {ballot}") as caught, servers.acting("a2", late):
            pass
        assert caught.value.epoch == ballot.epoch
    seen = servers.look("a2")
    assert (seen.promise, seen.executed) == (ballot, before)
    with servers.acting("a2") as higher:
        assert higher.look().promise == higher.ballot > ballot


def test_a_promise_is_durable_and_counts_for_its_own_server_only(servers):
    """A minion flushes once a second by itself. The row of another server came with a copy of its data."""
    servers.admin("a3", "SET GLOBAL innodb_flush_log_at_trx_commit = 2")
    with servers.acting("a3"):
        flush = servers.admin("a3", "SELECT @@GLOBAL.innodb_flush_log_at_trx_commit AS flush")
        assert flush == [{"flush": 1}]
    servers.admin("a3", "SET sql_log_bin = 0", "UPDATE schemaless.promise SET server_id = 7")
    assert servers.look("a3").promise is None


def test_a_controller_whose_session_was_ended_acts_no_more(servers):
    """The next one ends it before it gets a promise, also in the middle of a transaction, which is undone."""
    heads = servers.heads("a1")
    with servers.acting("a1") as late:
        late._session.query("BEGIN; UPDATE schemaless.shard_head SET generation = 99")
        with servers.acting("a1") as next_one:
            for act in (late.open, late.fence, late.stop_receiving, late.look):
                with pytest.raises(StorageUnavailable):
                    act()
            assert next_one.heads() == heads
            next_one.stop_receiving()


def test_a_late_controller_does_not_end_the_session_of_the_next(servers):
    lower = servers.ballot()
    with servers.acting("a1") as next_one:
        with pytest.raises(Outvoted), servers.acting("a1", lower):
            pass
        next_one.stop_receiving()


def test_an_act_needs_the_promise(servers):
    """The row may be lost while the session lives, as in a restore by hand."""
    with servers.acting("a1") as act:
        servers.admin("a1", "SET sql_log_bin = 0", "DELETE FROM schemaless.promise")
        with pytest.raises(Outvoted, match="has promise None"):
            act.open()


def test_eight_writers_are_fenced(servers):
    """No row is added after it returned, an open transaction is undone, and minions go on receiving."""
    before, over = servers.written("a1"), threading.Event()

    def write_on():
        with closing(SyncNode(servers.services["a1"])) as node:
            try:
                while not over.is_set():
                    node.run(query, WRITE, again_on=())
            except StorageUnavailable:
                return "refused"

    with ThreadPoolExecutor(8) as pool, AdminSession(servers.services["a1"]) as idle, ExitStack() as ended:
        ended.callback(over.set)
        idle.query(f"BEGIN; {WRITE}; UPDATE schemaless.shard_head SET generation = 99")
        writers = [pool.submit(write_on) for _ in range(8)]
        until(lambda: servers.written("a1") > before + 100)
        with servers.acting("a1") as act:
            act.fence()
            after = servers.written("a1")
            assert [writer.result(LIMIT_S) for writer in writers] == ["refused"] * 8
            with pytest.raises(StorageUnavailable):
                idle.query("COMMIT")
            assert servers.written("a1") == after
            assert servers.admin("a1", "SELECT * FROM information_schema.innodb_trx") == []
            with pytest.raises(StorageUnavailable, match="read-only"):
                servers.write("a1")
            servers.caught_up("a2", "a1")
            assert servers.written("a2") == after
            act.open()
            servers.write("a1")


def test_a_statement_that_takes_long_is_not_fenced(servers):
    """Nothing has changed then, and the caller may try again."""
    slow = f"{WRITE.partition('VALUES')[0]} SELECT UTC_TIMESTAMP(6), SLEEP(4), '', '', ''"
    with closing(SyncNode(servers.services["a1"])) as node, ThreadPoolExecutor(1) as pool:
        writer = pool.submit(node.run, query, slow)
        until(lambda: any("SLEEP" in (one["Info"] or "") for one in servers.admin("a1", "SHOW PROCESSLIST")))
        with servers.acting("a1") as act:
            with pytest.raises(LockTimeout):
                act.fence()
            assert not act.look().read_only
            writer.result(LIMIT_S)
            act.fence()
            assert act.look().read_only
            act.open()


def test_opening_makes_commits_durable(servers):
    servers.admin("a1", "SET GLOBAL innodb_flush_log_at_trx_commit = 2", "SET GLOBAL sync_binlog = 0")
    with servers.acting("a1") as act:
        act.open()
    wanted = "SELECT @@GLOBAL.innodb_flush_log_at_trx_commit AS flush, @@GLOBAL.sync_binlog AS sync"
    assert servers.admin("a1", wanted) == [{"flush": 1, "sync": 1}]


def test_a_look_shows_how_a_minion_follows(servers):
    """Stopping to receive doesn't stop applying. The start that a look names is the same in each connection."""
    seen, again = servers.look("a2"), servers.look("a2")
    assert (seen.tables, seen.read_only, seen.server_id) == (True, True, 101)
    assert seen.mariadb == (FLAVOUR == "mariadb")
    assert seen.started_at == again.started_at
    assert seen.replication.healthy
    assert seen.replication.seconds_behind is not None
    assert (seen.replication.host, seen.replication.port) == ("127.0.0.1", servers.administrators["a1"].port)
    assert servers.look("a1").replication is None
    with servers.acting("a2") as act:
        act.stop_receiving()
        stopped = act.look().replication
        assert (stopped.receiving, stopped.applying, stopped.connected) == (False, True, False)
        act.start_receiving()
        until(lambda: act.look().replication.healthy)


def receive_without_applying(servers, rows):
    """Returns the position that a2 has received, and not applied."""
    servers.admin("a2", "STOP REPLICA SQL_THREAD")
    servers.write("a1", rows)
    wanted = servers.look("a1").executed
    until(lambda: not servers.lacks(servers.look("a2").received, wanted))
    assert servers.lacks(servers.look("a2").executed, wanted)
    return wanted


def test_what_was_received_is_applied(servers):
    """The position that is returned contains it, though the minion receives no more. A stopped applier is named, and
    starts before receiving stops.
    """
    wanted = receive_without_applying(servers, 200)
    with servers.acting("a2") as act:
        with pytest.raises(NotWhole, match="it was stopped"):
            act.apply_received(10)
        act.stop_receiving()
        assert not act.lacks(act.apply_received(10), wanted)
        act.start_receiving()


def test_what_was_dropped_is_missing_in_the_position(servers):
    """MariaDB drops what it received when its applier starts alone. MySQL keeps it."""
    wanted = receive_without_applying(servers, 3)
    with servers.acting("a2") as act:
        servers.admin("a2", "STOP REPLICA IO_THREAD")
        servers.admin("a2", "START REPLICA SQL_THREAD")
        assert bool(act.lacks(act.apply_received(10), wanted)) == (FLAVOUR == "mariadb")
        act.start_receiving()
    servers.caught_up("a2", "a1")


def test_an_applier_that_waits_for_a_lock_is_late(servers):
    with AdminSession(servers.administrators["a2"]) as holder:
        holder.query("LOCK TABLES schemaless.admin_action READ")
        servers.write("a1")
        wanted = servers.look("a1").executed
        until(lambda: not servers.lacks(servers.look("a2").received, wanted))
        with servers.acting("a2") as act, pytest.raises(NotWhole, match="hasn't applied"):
            act.apply_received(0.2)
    servers.caught_up("a2", "a1")


def test_an_applier_with_an_error_says_which(servers):
    """The row that the minion holds is one that its master writes later."""
    row = f"{WRITE.replace('(at,', '(action_id, at,').replace('(UTC', '(4000000, UTC')}"
    servers.admin("a2", "SET sql_log_bin = 0", row)
    servers.admin("a1", row)
    until(lambda: not servers.look("a2").replication.applying)
    with servers.acting("a2") as act:
        with pytest.raises(NotWhole, match=r"Duplicate entry|failed executing transaction"):
            act.apply_received(10)
        heal = "DELETE FROM schemaless.admin_action WHERE action_id = 4000000"
        servers.admin("a2", "SET sql_log_bin = 0", heal, "SET sql_log_bin = 1", "START REPLICA")
        act.apply_received(10)


def test_heads_are_opened_once(servers):
    """Generations between begin where the new one does. A second run is no transaction, and minions get the first."""
    servers.admin("a1", "UPDATE schemaless.shard_head SET head = 7 WHERE shard = 2")
    with servers.acting("a1") as act:
        act.open_heads(11)
        assert {head.generation for head in act.heads().values()} == {1}
        act.open_heads(12, 4)
        opened = act.look().executed
        act.open_heads(12, 4)
        assert act.look().executed == opened
        with pytest.raises(Misconfigured, match="3 can't begin"):
            act.open_heads(13, 3)
    servers.admin("a1", "UPDATE schemaless.shard_head SET generation = 5 WHERE shard = 0")
    with servers.acting("a1") as act, pytest.raises(Misconfigured, match="4 can't begin"):
        act.open_heads(13, 4)
    servers.admin("a1", "UPDATE schemaless.shard_head SET generation = 4 WHERE shard = 0")
    servers.caught_up("a2", "a1")
    wanted = {("acts", shard): Location(4, 7 if shard == 2 else 0) for shard in range(4)}
    starts = "SELECT generation, starts_at FROM schemaless.shard_generation WHERE shard = 2 ORDER BY generation"
    for name in ("a1", "a2"):
        assert servers.heads(name) == wanted
        assert [tuple(row.values()) for row in servers.admin(name, starts)] == [(1, 1), (2, 8), (3, 8), (4, 8)]
        assert servers.admin(name, "SELECT DISTINCT epoch FROM schemaless.shard_head") == [{"epoch": 12}]


def test_the_higher_appointment_counts(servers):
    """Within a ballot the later revision counts. No minion gets it from its master."""

    def appointed(epoch, master, revision, controller="x"):
        return Appointment("a", Ballot(epoch, controller), revision, master, bool(revision), ("a3",), 0, 1)

    before = servers.look("a1").executed
    with servers.acting("a1") as act:
        for given, known in (
            (appointed(5, "one", 0), appointed(5, "one", 0)),
            (appointed(5, "one", 1), appointed(5, "one", 1)),
            (appointed(5, "one", 0), appointed(5, "one", 1)),
            (appointed(4, "two", 1), appointed(5, "one", 1)),
            (appointed(5, "two", 0, "a"), appointed(5, "one", 1)),
            (appointed(6, "three", 0, "a"), appointed(6, "three", 0, "a")),
        ):
            act.appoint([given])
            assert act.look().appointments == [known]
        assert act.look().executed == before
    assert servers.look("a2").appointments == []


def test_minions_are_cut_off(servers):
    """Both come back by themselves."""

    def dumps():
        rows = servers.admin("a1", "SHOW PROCESSLIST")
        return {row["Id"] for row in rows if row["Command"].startswith("Binlog Dump")}

    until(lambda: len(dumps()) == 2)
    before = dumps()
    with servers.acting("a1") as act:
        act.cut_off()
    assert not before & dumps()
    until(lambda: len(dumps()) == 2)


def promote(servers, name, epoch, generation=0):
    with servers.acting(name) as act:
        act.stop_receiving()
        act.apply_received(10)
        act.detach()
        act.open_heads(epoch, generation)
        act.open()


def point(servers, name, master):
    with servers.acting(name) as act:
        act.fence()
        act.stop_following()
        act.follow("127.0.0.1", servers.administrators[master].port, *servers.replication)
        act.start_receiving()


def test_masters_change_with_and_without_a_tail(tmp_path):
    """A master that dies with rows that nobody received has a tail, also when its successor has written more. MariaDB
    sends it nothing then, and MySQL does. One that was fenced first has no tail, and follows its successor. The time of
    a start changes with a restart.
    """
    with three_servers(tmp_path) as (running, servers):
        assert not servers.look("a1").tables
        make_tables(running, servers)
        started_at = servers.look("a1").started_at
        for minion in ("a2", "a3"):
            with servers.acting(minion) as act:
                act.stop_receiving()
        servers.write("a1", 3)
        servers.processes["a1"].kill()
        promote(servers, "a2", 21, 21)
        point(servers, "a3", "a2")
        servers.caught_up("a3", "a2")

        until(lambda: time.time() > started_at + 1)
        servers.processes["a1"].start()
        old = servers.look("a1")
        assert old.started_at > started_at
        tail = servers.lacks(servers.look("a2").executed, old.executed)
        assert tail
        servers.write("a2", 10)
        assert servers.lacks(servers.look("a2").executed, old.executed) == tail
        assert servers.written("a2") == 10

        servers.caught_up("a3", "a2")
        with servers.acting("a2") as act:
            act.fence()
        promote(servers, "a3", 22)
        servers.write("a3", 5)
        assert not servers.lacks(servers.look("a3").executed, servers.look("a2").executed)
        point(servers, "a2", "a3")
        servers.caught_up("a2", "a3")
        assert servers.written("a2") == 15
        assert servers.heads("a2") == servers.heads("a3")
        assert servers.look("a2").replication.healthy

        point(servers, "a1", "a3")
        if FLAVOUR == "mariadb":
            until(lambda: "error 1236" in servers.look("a1").replication.error)
        else:
            until(lambda: servers.look("a1").replication.connected)
            assert servers.lacks(servers.look("a3").executed, servers.look("a1").executed) == tail
