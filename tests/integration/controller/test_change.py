"""How the master of a cluster changes where servers are late or busy, on real ones."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from controller.change import READY_TIMEOUT_S, ClusterChange
from controller.decide import Follow, Promote, Switch
from schemaless.errors import NotWhole, SchemalessError, StateConflict
from schemaless.runtime.events import Event, observing
from schemaless.storage.admin_session import AdminSession
from schemaless.topology import Appointment
from tests.integration.controller.test_server import WRITE, make_tables, promote, three_servers
from tests.waiting import until

pytestmark = [pytest.mark.storage, pytest.mark.timeout(120)]

LONG = f"{WRITE.partition('VALUES')[0]} SELECT UTC_TIMESTAMP(6), SLEEP(8), '', '', ''"


class Cluster:
    """Three servers that know who is appointed, and what changes that."""

    def __init__(self, running, servers):
        self.running, self.servers = running, servers
        self.known = {}
        self.told = []

    @property
    def appointment(self):
        return self.known["a"]

    def appoint(self, master, *voters):
        ballot = self.servers.ballot()
        self.known = {"a": Appointment("a", ballot, 0, master, True, voters, 0, 1)}
        for name in ("a1", "a2", "a3"):
            with self.servers.acting(name, ballot) as act:
                act.appoint([self.appointment])
                if name == master:
                    act.open_heads(ballot.epoch)

    @property
    def change(self):
        seen = {name: self.servers.look(name) for name in ("a1", "a2", "a3")}
        return ClusterChange(
            self.running.administrators,
            "a",
            "x",
            self.known,
            seen,
            lambda ballot, step, told: self.told.append(step),
            lambda datastores: {},
        )

    def epochs(self):
        """Of the heads of a1, which a put compares with the appointment's."""
        return {row["epoch"] for row in self.servers.admin("a1", "SELECT epoch FROM schemaless.shard_head")}

    @contextmanager
    def busy(self):
        """A statement runs on a1 meanwhile, which a fence would wait for."""

        def run():
            with suppress(SchemalessError):
                session.query(LONG)

        with AdminSession(self.servers.administrators["a1"]) as session:
            number = session.query("SELECT CONNECTION_ID() AS id")[0]["id"]
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(run)
                try:
                    until(lambda: self.statements("a1"))
                    yield
                finally:
                    self.servers.admin("a1", f"KILL {number}")
                running.result()

    def statements(self, name):
        """The long statement, while it runs."""
        return [one for one in self._sessions(name) if "SLEEP" in (one["Info"] or "")]

    def _sessions(self, name):
        return self.servers.admin(name, "SHOW PROCESSLIST")

    def stopping(self, name):
        return any((one["Info"] or "").startswith("STOP REPLICA") for one in self._sessions(name))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with three_servers(tmp_path_factory.mktemp("change")) as (running, servers):
        make_tables(running, servers)
        yield Cluster(running, servers)


@contextmanager
def lagging(cluster, name):
    """A minion applies nothing meanwhile."""
    with AdminSession(cluster.servers.administrators[name]) as session:
        session.query("LOCK TABLES schemaless.admin_action READ")
        yield session


def test_a_switch_to_a_late_minion_closes_nothing(cluster):
    """It is refused before anybody promises."""
    cluster.appoint("a1", "a2", "a3")
    before = cluster.appointment
    with lagging(cluster, "a2"):
        cluster.servers.write("a1")
        with pytest.raises(NotWhole, match=f"a2 hasn't applied .* after {READY_TIMEOUT_S} s"):
            cluster.change.switch(Switch("a1", "a2"))
    assert cluster.appointment == before
    assert {cluster.servers.look(name).promise for name in ("a1", "a2")} == {before.ballot}
    cluster.servers.write("a1")


def test_a_minion_that_is_late_after_all_promised_gives_way_again(cluster):
    """The old master was closed, and takes writes again."""
    cluster.appoint("a1", "a2", "a3")
    before = cluster.appointment
    with lagging(cluster, "a2") as lock:
        lock.query("UNLOCK TABLES")

        def fall_behind(*_):
            lock.query("LOCK TABLES schemaless.admin_action READ")
            cluster.servers.write("a1")

        with (
            observing(fall_behind, Event.VOTERS_PROMISED),
            pytest.raises(StateConflict, match="a1 is open again: a2 hasn't applied"),
        ):
            cluster.change.switch(Switch("a1", "a2"))
    cluster.servers.write("a1")
    assert cluster.appointment.ballot > before.ballot
    assert cluster.epochs() == {cluster.appointment.ballot.epoch}


def test_a_switch_during_a_long_statement_closes_nothing(cluster):
    cluster.appoint("a1", "a2", "a3")
    before = cluster.appointment
    with cluster.busy():
        until(lambda: any(one["Time"] > 1 for one in cluster.statements("a1")))
        with pytest.raises(StateConflict, match="before the end of a long statement: INSERT"):
            cluster.change.switch(Switch("a1", "a2"))
        cluster.servers.write("a1")
    assert cluster.appointment == before
    assert cluster.servers.look("a1").promise == before.ballot


def test_a_master_that_can_not_be_fenced_stays_open(cluster):
    """The statement began after the process list was read. Puts find the epoch that they are told."""
    cluster.appoint("a1", "a2", "a3")
    before = cluster.appointment
    with cluster.busy():
        with pytest.raises(StateConflict, match="a1 is open again: "):
            cluster.change.switch(Switch("a1", "a2"))
        cluster.servers.write("a1")
    after = cluster.appointment
    assert (after.master, after.is_open, after.voters) == ("a1", True, before.voters)
    assert after.ballot > before.ballot
    assert cluster.epochs() == {after.ballot.epoch}
    assert cluster.servers.look("a1").appointments == [after]


def test_a_master_that_a_dead_controller_left_is_appointed_again_during_a_long_statement(cluster):
    """Somebody got its promise and died. What it writes meanwhile is never refused."""
    cluster.appoint("a1", "a2", "a3")
    with cluster.servers.acting("a1"):
        pass
    with cluster.busy():
        cluster.change.promote(Promote("a1", ["a2", "a3"], "a1"))
        assert not cluster.servers.look("a1").read_only
        cluster.servers.write("a1")
    assert (cluster.appointment.master, cluster.appointment.is_open) == ("a1", True)
    assert cluster.epochs() == {cluster.appointment.ballot.epoch}
    for name in ("a2", "a3"):
        cluster.servers.admin(name, "START REPLICA")


def test_a_server_that_was_left_out_joins_with_no_tail_in_its_relay_log(cluster):
    """a3 received what a2 lacks, which was promoted without it, and applies it only when it is told to stop."""
    servers = cluster.servers
    cluster.appoint("a1", "a2")
    for name in ("a2", "a3"):
        servers.caught_up(name, "a1")
    servers.admin("a2", "STOP REPLICA IO_THREAD")
    with ThreadPoolExecutor(1) as pool, lagging(cluster, "a3") as lock:
        servers.write("a1")
        tail = servers.look("a1").executed
        until(lambda: not servers.lacks(servers.look("a3").received, tail))
        servers.admin("a1", "SET GLOBAL read_only = ON")
        promote(servers, "a2", servers.ballot().epoch)
        cluster.appoint("a2")
        joining = pool.submit(cluster.change.follow, Follow("a3"))
        until(lambda: cluster.stopping("a3") or joining.done())
        lock.query("UNLOCK TABLES")
        followed = joining.result()
    assert not servers.lacks(servers.look("a3").executed, tail)
    assert followed != ""
    assert "a3" not in cluster.appointment.voters
