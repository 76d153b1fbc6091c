"""An order to rejoin goes on when controllers are killed, and is done when the server follows."""

import shutil
import sys
import time
import uuid
from contextlib import closing

import msgspec
import pytest

from controller.service import Controller
from schemaless.config import ControllerMode
from schemaless.ops.datastores import create_shards
from schemaless.stack.local import running_topology
from schemaless.stack.mysql_server import make_template, prepare
from schemaless.storage import appointment_table
from schemaless.storage.admin_session import AdminSession
from schemaless.storage.appointment_table import OrderKind, OrderState, RejoinStep, TopologyOrder
from schemaless.storage.everywhere import after
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.failover_harness import leave_out, start_controller_process
from tests.log_harness import new_cell, put
from tests.waiting import until

pytestmark = [pytest.mark.storage, pytest.mark.timeout(240)]

KAFKA = "127.0.0.1:9"
REMAKE = """
import pathlib, sys, time

folder, *names = sys.argv[1:]
with pathlib.Path(folder, "runs").open("a") as runs:
    runs.write(" ".join(names) + chr(10))
while not pathlib.Path(folder, "done").exists():
    time.sleep(0.05)
sys.exit(pathlib.Path(folder, "done").read_text() or 0)
"""
ROW = "INSERT INTO schemaless.admin_action VALUES (4000000, UTC_TIMESTAMP(6), 'x', 'x', 'x', 'x')"


class Stage:
    """One cluster, a controller process that is killed and started, and the command that it runs."""

    def __init__(self, running, folder):
        self.running = running
        self.folder = folder
        self.storage = SyncStorage(running.topology)
        self.controller = None
        (folder / "remake.py").write_text(REMAKE)
        self.start()

    def start(self):
        command = f"{sys.executable} {self.folder / 'remake.py'} {self.folder}"
        self.controller = start_controller_process(self.running, KAFKA, ControllerMode.MANUAL, remake_command=command)

    def kill(self):
        self.controller.kill()
        self.controller.wait(30)

    def killed(self):
        self.kill()
        self.start()

    def until(self, condition, what):
        return until(condition, lambda: what)

    @property
    def known(self):
        self.storage.look()
        return self.storage.appointments.get("a")

    @property
    def master(self):
        return self.storage.master("a")

    @property
    def order(self):
        return self.master.run(appointment_table.orders)["a"]

    @property
    def steps(self):
        return self.master.run(appointment_table.steps, "a", 100)

    def step(self, name, since):
        """Waits for a step, and returns when it was: the controller may be further by now."""

        def found():
            steps = () if self.refused() else self.steps
            return next((one.at for one in steps if one.step == name and one.at > since), None)

        return self.until(found, name)

    def refused(self):
        """Whether the order was refused, as where a server stood for a moment. Then it is given again."""
        if is_refused := (order := self.order).state is OrderState.REFUSED:
            self.rejoin(order.node)
        return is_refused

    @property
    def runs(self):
        file = self.folder / "runs"
        return file.read_text().splitlines() if file.exists() else []

    def administrator(self, name):
        return next(node for node in self.running.administrators.cluster("a").nodes if node.name == name)

    def followed(self):
        """Returns the minions once they vote and have the tables."""
        voters = self.until(lambda: (known := self.known) and known.voters, "both vote")
        table = "SELECT 1 FROM information_schema.tables WHERE table_name = 'diverged'"
        for name in voters:
            with AdminSession(self.administrator(name)) as session:
                self.until(lambda session=session: session.query(table), f"{name} has the tables")
        return voters

    def fail(self, name):
        """Lets the replication of a minion stop with an error. Each time the row is another one."""
        with AdminSession(self.administrator(name)) as session:
            session.query(f"SET sql_log_bin = 0; {ROW}")
            with AdminSession(self.administrator(self.known.master)) as writer:
                writer.query(ROW)
            self.until(lambda: not session.replication().applying, "its replication fails")
        self.until(lambda: self.why(name), "the controller has seen it")

    def why(self, name):
        """What the controller says of a server that isn't well."""
        states = self.master.run(appointment_table.states)
        return "a" in states and next((one.why for one in states["a"].nodes if one.name == name), "")

    def rejoin(self, name):
        now = after(0)
        order = TopologyOrder("a", OrderKind.REJOIN, name, (), "ops", OrderState.OPEN, "", uuid.uuid4().hex, now)
        self.master.run(appointment_table.put_order, order)
        return now

    def empty(self, name):
        """Gives a server a new disk. Its master's log doesn't reach back to the beginning any more."""
        server, template = self.running.descriptions[name], self.folder / "template"
        self.running.servers[name].kill()
        shutil.rmtree(server.data)
        make_template(template, FLAVOUR, self.running.accounts)
        prepare(server, template)
        with AdminSession(self.administrator(self.known.master)) as session:
            session.query("FLUSH BINARY LOGS")
            until(lambda: self.purged(session))
        self.running.servers[name].start()
        self.until(lambda: self.why(name), "it can't follow")

    @staticmethod
    def purged(session):
        """Purges the log up to its newest file. A file that is still sent to a minion stays for now."""
        session.query("PURGE BINARY LOGS BEFORE NOW() + INTERVAL 1 DAY")
        return len(session.query("SHOW BINARY LOGS")) == 1

    def make_anew(self, name, donor):
        server, copied = self.running.descriptions[name], self.running.descriptions[donor]
        self.running.servers[name].kill()
        self.running.servers[donor].terminate()
        shutil.rmtree(server.data)
        shutil.copytree(copied.data, server.data)
        (server.data / "auto.cnf").unlink(missing_ok=True)
        self.running.servers[donor].start()
        self.running.servers[name].start()


@pytest.fixture
def stage(tmp_path):
    options = {"options": SMALL_REDO_LOGS, "controlled": True}
    with running_topology(tmp_path, ("a",), 2, FLAVOUR, **options) as running:
        found = Stage(running, tmp_path)
        try:
            yield found
        finally:
            (tmp_path / "done").touch()
            found.kill()


def test_a_rejoin_outlives_its_controllers(stage):
    """Each is killed at the next step. One command runs, also while its controller is dead and another one acts."""
    failed, donor = stage.followed()
    stage.fail(failed)
    since = stage.rejoin(failed)
    for step in ("left out", "rejoins", "kept", "put again"):
        since = stage.step(step, since)
        assert stage.order.state is OrderState.OPEN
        stage.killed()
    stage.until(lambda: stage.runs, "it is made anew")
    since = after(0)
    stage.killed()
    stage.step("waits", since)
    assert stage.runs == [f"{failed} {donor}"]
    assert stage.order.step is RejoinStep.BEGUN
    stage.kill()
    stage.make_anew(failed, donor)
    (stage.folder / "done").touch()
    stage.start()
    # A controller that hasn't read the order yet when it sees the copy lets it follow at once.
    seen = RejoinStep.MADE_ANEW, OrderState.DONE
    stage.until(lambda: {stage.order.step, stage.order.state} & set(seen), "the copy is seen")
    stage.killed()
    stage.until(lambda: stage.order.state is not OrderState.OPEN, "it is settled")
    told = f"{failed} follows {stage.known.master} again"
    assert (stage.order.state, stage.order.told) == (OrderState.DONE, told)
    assert set(stage.known.voters) == {failed, donor}
    assert len(stage.runs) == 1
    with AdminSession(stage.administrator(failed)) as session:
        assert session.replication().healthy


def test_an_empty_server_rejoins_by_order(stage):
    emptied, donor = stage.followed()
    stage.empty(emptied)
    stage.rejoin(emptied)
    stage.until(lambda: not stage.refused() and stage.runs, "it is made anew")
    told = next(one.told for one in stage.steps if one.step == "kept")
    assert told == f"the tail of {emptied} is kept: 0 cells"
    stage.make_anew(emptied, donor)
    (stage.folder / "done").touch()
    stage.until(lambda: stage.order.state is not OrderState.OPEN, "it is settled")
    assert (stage.order.state, set(stage.known.voters)) == (OrderState.DONE, {emptied, donor})


def test_a_controller_that_began_a_rejoin_does_not_begin_it_again_when_another_one_went_on(stage):
    """It remembers an earlier step than the row has, and the server has promised again since."""
    failed, donor = stage.followed()
    stage.fail(failed)
    stage.kill()

    def settle(order, state, told):
        stage.master.run(appointment_table.settle_order, order, state, told, after(order.changed_at))

    how = {"services": stage.running.topology, "remake_command": "false", "settle": settle}
    with closing(Controller(stage.running.administrators, ControllerMode.MANUAL, **how)) as first:
        time.sleep(1.5)
        stage.rejoin(failed)
        stage.until(lambda: first.step({"a": stage.order}) or stage.order.step, "it is begun")
        stage.start()
        stage.until(lambda: stage.runs, "it is made anew")
        stage.make_anew(failed, donor)
        (stage.folder / "done").touch()
        stage.until(lambda: stage.order.state is OrderState.DONE, "it is settled")
        stage.kill()
        epoch = stage.known.ballot.epoch
        read = msgspec.structs.replace(stage.order, state=OrderState.OPEN)
        for _ in range(10):
            first.step({"a": read})
            time.sleep(0.1)
    assert stage.known.ballot.epoch == epoch
    assert set(stage.known.voters) == {failed, donor}


def test_a_minion_that_left_a_cell_out_votes_no_more_and_is_made_anew(stage):
    """Nobody orders it. The controller counts the cells of each minion, and names what one lacks."""
    first, second = stage.followed()
    topology = stage.running
    with SyncStorage(topology.topology) as storage, SyncStorage(topology.administrators) as admin:
        datastore = create_shards(storage, Datastore("holed", 4, 2, ("a",)), administrators=topology.administrators)
        put(storage, datastore, [new_cell(datastore, shard=0) for _ in range(5)])
        head = "SELECT COUNT(*) FROM schemaless.shard_head WHERE head = 5"
        stage.until(lambda: admin.nodes[first].run(query, head)[0][0], "it has the cells")
        leave_out(admin.nodes[first], datastore)
    stage.until(lambda: stage.known.voters == (second,), "it votes no more")
    stage.until(lambda: stage.why(first) == f"lacks added_id 5 of {datastore.database(0)}", "it says why")
    stage.until(lambda: stage.runs, "it is made anew")
    assert stage.runs == [f"{first} {second}"]
    stage.make_anew(first, second)
    (stage.folder / "done").touch()
    stage.until(lambda: set(stage.known.voters) == {first, second}, "it votes again")
    stage.until(lambda: stage.why(first) == "", "it has all")
    assert len(stage.runs) == 1


def test_a_rejoin_whose_command_fails_says_so(stage):
    """The order has the command's last line. The server is treated as a former master from then on."""
    failed, _ = stage.followed()
    (stage.folder / "done").write_text("the disk has no room")
    stage.fail(failed)
    stage.rejoin(failed)
    stage.until(lambda: not stage.refused() and stage.order.state is not OrderState.OPEN, "it is settled")
    told = f"{failed} couldn't be made anew: the disk has no room"
    assert (stage.order.state, stage.order.told) == (OrderState.FAILED, told)
    assert failed not in stage.known.voters
