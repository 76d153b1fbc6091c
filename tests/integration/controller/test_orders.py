"""What operators order of a controller and what they see, on real servers, with a process of each."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import pytest

from controller.service import Controller
from schemaless.config import ConsumerSettings, ControllerMode
from schemaless.errors import StaleTopology
from schemaless.ops.datastores import create_shards
from schemaless.ops.growth import GrowthOrder
from schemaless.stack.local import running_topology
from schemaless.storage.admin_session import AdminSession
from schemaless.storage.appointment_table import OrderKind, OrderState, TopologyOrder
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore, load_topology
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.environment import environment_of
from tests.failover_harness import start_controller_process
from tests.integration.api.api_harness import ROOT, assert_problem, production_api
from tests.rotated_account import rotated_account
from tests.waiting import until

pytestmark = pytest.mark.storage

DATASTORE = Datastore("orders", 4, 2, ("a", "b"))
KAFKA = "127.0.0.1:9"


class Installation:
    """Servers, an API process and a controller process that may be started again."""

    def __init__(self, running):
        self.running = running
        self.servers = running.servers
        self.controller = None
        self.api = None

    def start_controller(self, mode=ControllerMode.MANUAL):
        self.controller = start_controller_process(self.running, KAFKA, mode)

    def end_controller(self):
        self.controller.kill()
        self.controller.wait(30)

    @contextmanager
    def ended_controller(self):
        """Another one is there afterwards, also if a test fails meanwhile."""
        self.end_controller()
        try:
            yield
        finally:
            self.start_controller()

    @contextmanager
    def without_controller(self):
        """It hangs meanwhile."""
        self.controller.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.controller.send_signal(signal.SIGCONT)

    @property
    def call(self):
        return self.api.at(DATASTORE)

    def order(self, order, cluster, **others):
        return self.call.post("/topology/orders", json={"order": order, "cluster": cluster, **others})

    def cluster(self, name):
        return self.call.get("/topology").json()["clusters"][name]

    def master(self, name):
        return self.cluster(name)["master"]["name"]

    def voters(self, name):
        return [voter["name"] for voter in self.cluster(name)["voters"]]

    def put(self):
        """Puts a cell, which is at home when this returns."""
        row = uuid.uuid4()
        until(lambda: self.call.put(row, 1, {"n": 1}).json().get("status") in ("stored", "already_stored"))
        return row

    def commands(self, *arguments, status=0):
        settings = {"topology": self.running.path, "kafka": KAFKA, "hosts": f"http://127.0.0.1:{self.api.port}"}
        env = os.environ | environment_of(ConsumerSettings, settings)
        line = [sys.executable, "-m", "schemaless", "topology", *arguments]
        done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == status, done
        return done.stdout if status == 0 else done.stderr

    def healthy(self):
        """Waits until each cluster has an open master and a minion that votes and follows."""
        until(lambda: all(self._follows(name) for name in ("a", "b")))

    def _follows(self, name):
        voters = self.voters(name)
        for voter in voters:
            with AdminSession(self.administrator(voter)) as session:
                status = session.replication()
                if status is None or not status.healthy:
                    return False
        return bool(voters) and self.cluster(name)["state"] == "healthy"

    def administrator(self, name):
        return next(node for node in self.running.administrators.cluster(name[0]).nodes if node.name == name)


def waits(controller, cluster):
    """Why it does nothing, by its own words."""
    return controller.states[cluster].why if cluster in controller.states else ""


def made(running):
    """Makes the datastore once the controller has opened the masters."""

    def make():
        with SyncStorage(running.topology) as storage:
            if len(storage.masters) == len(storage.appointments):
                with suppress(StaleTopology):  # appointed, and not open yet
                    return create_shards(storage, DATASTORE, administrators=running.administrators)
        return None

    until(make)


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    options = {"options": SMALL_REDO_LOGS, "controlled": True}
    with running_topology(folder, ("a", "b"), 1, FLAVOUR, **options) as running:
        found = Installation(running)
        found.start_controller()
        try:
            made(running)
            with production_api(running.path) as found.api:
                yield found
        finally:
            found.end_controller()


@pytest.fixture(autouse=True)
def whole(installation):
    installation.healthy()


def test_a_switch_changes_the_master_and_loses_nothing(installation):
    """The answer comes when it is done, and puts before and after are read from the new master."""
    old, (new,) = installation.master("a"), installation.voters("a")
    before = [installation.put() for _ in range(8)]
    answer = installation.order("switch", "a")
    assert answer.status_code == 200, answer.text
    assert answer.json()["state"] == "done"
    assert answer.json()["told"] == f"{new} is the master of a"
    assert answer.json()["master"] == new == installation.master("a")
    installation.healthy()
    assert installation.voters("a") == [old]
    for row in [*before, *(installation.put() for _ in range(8))]:
        assert installation.call.get(f"/cells/{row}/BASE/1", params={"read_from": "master"}).status_code == 200


def test_a_dry_run_orders_nothing(installation):
    answer = installation.order("switch", "a", dry_run=True)
    assert answer.status_code == 200
    assert (answer.json()["state"], answer.json()["job"]) == ("dry_run", None)
    assert answer.json()["master"] == installation.master("a")
    assert [voter["name"] for voter in answer.json()["voters"]] == installation.voters("a")
    assert installation.call.get("/topology").json()["operation"] is None


BAD = {
    "an unknown cluster": ({"order": "switch", "cluster": "z"}, 404, "there is no storage cluster 'z': there are a, b"),
    "an unknown server": ({"order": "switch", "cluster": "a", "node": "b1"}, 404, "cluster a has no server 'b1'"),
    "an unknown server that was fenced": (
        {"order": "promote", "cluster": "a", "without": ["a9"], "fenced": True}, 404, "cluster a has no server 'a9'"
    ),
    "a server that nobody fenced": (
        {"order": "promote", "cluster": "a", "without": ["a2"]}, 422, "would be a second master"
    ),
    "a switch that hears not all": (
        {"order": "switch", "cluster": "a", "without": ["a2"], "fenced": True}, 422, "only promote goes without one"
    ),
    "a rejoin of nobody": ({"order": "rejoin", "cluster": "a"}, 422, "which server is to be made anew"),
    "a server to open": ({"order": "open", "cluster": "a", "node": "a2"}, 422, "open takes no server"),
    "an unknown order": ({"order": "demote", "cluster": "a"}, 422, "demote"),
    "a promotion beside an open master": (
        {"order": "promote", "cluster": "a"}, 409, "is open: `schemaless topology switch a`"
    ),
    "an opening of an open master": ({"order": "open", "cluster": "b"}, 409, "is open already"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(installation, name):
    """Nothing is under way afterwards."""
    payload, status, why = BAD[name]
    problem = assert_problem(installation.call.post("/topology/orders", json=payload), status)
    assert why in problem["detail"]
    assert installation.call.get("/topology").json()["operation"] is None


def test_a_switch_to_the_master_is_refused(installation):
    master = installation.master("a")
    problem = assert_problem(installation.order("switch", "a", node=master), 409)
    assert problem["detail"] == f"{master} is the master already"


def test_a_server_that_is_well_is_not_made_anew(installation):
    master, (voter,) = installation.master("a"), installation.voters("a")
    of_master = assert_problem(installation.order("rejoin", "a", node=master), 409)["detail"]
    assert of_master == f"{master} is the master: `schemaless topology switch a` makes it a minion"
    of_voter = assert_problem(installation.order("rejoin", "a", node=voter), 409)["detail"]
    assert of_voter == f"{voter} follows {master} well, and needs no new copy"


def test_an_acknowledgement_without_a_promotion_is_done(installation):
    answer = installation.order("acknowledge", "b")
    assert answer.json()["told"] == "no automatic promotion of b waits to be acknowledged"


def test_an_order_beside_another_names_it(installation):
    """Who ordered what, and the same again is the same order. The controller carries it out when it runs again."""
    (new,) = installation.voters("b")
    with installation.without_controller():
        first = installation.order("switch", "b", wait=0)
        assert (first.status_code, first.json()["state"]) == (202, "open")
        assert installation.order("switch", "b", wait=0).json()["job"] == first.json()["job"]
        problem = assert_problem(installation.order("open", "b", wait=0), 409)
        assert f"anybody on loopback ordered `switch b {new}`" in problem["detail"]
        operation = installation.call.get("/topology").json()["operation"]
        assert (operation["cluster"], operation["order"], operation["node"]) == ("b", "switch", new)
    until(lambda: installation.call.get("/topology").json()["operation"] is None)
    settled = installation.call.get("/topology").json()["clusters"]["b"]["order"]
    assert (settled["job"], settled["state"]) == (first.json()["job"], "done")
    assert f"{new} is the master of b" in settled["told"]
    until(lambda: installation.master("b") == new)


def test_an_order_beside_a_command_that_changes_servers_is_refused(installation):
    """It says who runs the command. Controllers carry out other orders meanwhile, and leave that one alone."""
    with SyncStorage(installation.running.topology) as storage:
        with GrowthOrder(storage, OrderKind.ADD_NODE, "b", "b9", "ops@host"):
            problem = assert_problem(installation.order("switch", "b", wait=0), 409)
            assert problem["detail"].startswith("ops@host ordered `add-node b b9` at ")
            problem = assert_problem(installation.order("switch", "a", wait=0), 409)
            assert problem["detail"].endswith("and that changes servers: wait until it is settled")
            assert installation.order("acknowledge", "a").status_code == 200
            shown = installation.call.get("/topology").json()["operation"]
            assert (shown["cluster"], shown["order"], shown["node"], shown["state"]) == ("b", "add-node", "b9", "open")
            assert "is open: " in assert_problem(installation.order("promote", "b"), 409)["detail"]
        assert installation.call.get("/topology").json()["operation"] is None


def test_an_order_that_nobody_settles_may_be_replaced(installation):
    """After a minute, here after none. Who waits for the first one learns which order counts."""
    master, (voter,) = installation.master("b"), installation.voters("b")
    constants = {"api.routes.topology.REPLACED_AFTER_S": 0.0}
    with production_api(installation.running.path, constants) as api, ThreadPoolExecutor(1) as pool:
        with installation.without_controller():
            first = pool.submit(installation.order, "switch", "b", wait=20)
            until(lambda: installation.call.get("/topology").json()["operation"])
            payload = {"order": "acknowledge", "cluster": "b", "wait": 0}
            assert api.at(DATASTORE).post("/topology/orders", json=payload).status_code == 202
            problem = assert_problem(first.result(30), 409)
        assert "anybody on loopback ordered `acknowledge b`" in problem["detail"]
        until(lambda: installation.call.get("/topology").json()["operation"] is None)
    assert (installation.master("b"), installation.voters("b")) == (master, [voter])


def test_a_switch_to_a_minion_that_lags_changes_nothing(installation):
    """It is refused before the old master is closed."""
    master, (minion,) = installation.master("a"), installation.voters("a")
    with AdminSession(installation.administrator(minion)) as session:
        session.query("BEGIN")
        session.query("SELECT * FROM schemaless.shard_head FOR UPDATE")
        for _ in range(8):
            installation.put()
        problem = assert_problem(installation.order("switch", "a"), 409)
        session.query("ROLLBACK")
    assert f"{minion} hasn't applied" in problem["detail"]
    assert installation.master("a") == master
    installation.put()


def test_commands_order_and_show(installation):
    """`switch` asks or is told --yes, `show` and `history` have what came of it, and a refusal is an error."""
    (new,) = installation.voters("a")
    assert json.loads(installation.commands("switch", "a", "--dry-run", "--json", "-d", "orders"))["job"] is None
    assert f"{new} is the master of a" in installation.commands("switch", "a", new, "--yes", "-d", "orders")
    refused = installation.commands("promote", "a", "--yes", "-d", "orders", status=1)
    assert f"{new} is open" in refused
    shown = json.loads(installation.commands("show", "--json"))["clusters"]["a"]
    assert (shown["master"]["name"], shown["state"]) == (new, "healthy")
    installation.healthy()
    table = installation.commands("show")
    assert "yes" in next(line for line in table.splitlines() if f" {installation.voters('a')[0]} " in line)
    until(
        lambda: json.loads(installation.commands("show", "--json"))["clusters"]["a"]["controller"]["state"] == "healthy"
    )
    nodes = json.loads(installation.commands("show", "--json"))["clusters"]["a"]["controller"]["nodes"]
    assert sorted(node["state"] for node in nodes.values()) == ["master", "voter"]
    steps = json.loads(installation.commands("history", "a", "--json"))["steps"]
    assert {step["cluster"] for step in steps} == {"a"}
    assert [step["at"] for step in steps] == sorted(step["at"] for step in steps)
    epoch = shown["epoch"]
    told = [(step["step"], step["told"]) for step in steps if step["epoch"] == epoch]
    assert [step for step, _ in told][:2] == ["promised", "opened"]
    assert f"{new} takes writes" in told[1][1]
    assert len(json.loads(installation.commands("history", "--limit", "1", "--json"))["steps"]) == 2
    assert "there is no storage cluster 'z'" in installation.commands("history", "z", status=1)


def test_a_dead_master_is_replaced_by_order(installation):
    """The mode is manual, so nothing happens before. For a moment the controller still takes it for alive."""
    dead, (new,) = installation.master("a"), installation.voters("a")
    installation.servers[dead].kill()
    answer = until(lambda: (found := installation.order("promote", "a", node=new)).status_code == 200 and found)
    assert answer.json()["master"] == new
    installation.put()
    installation.servers[dead].start()


def test_a_voter_that_is_away_must_be_heard_or_fenced(installation):
    """The refusal has the command that goes without it. Here nobody is left to be promoted."""
    master, (voter,) = installation.master("b"), installation.voters("b")
    installation.servers[voter].kill()
    installation.servers[master].kill()
    command = f"`schemaless topology promote b --without {voter} --fenced`"
    until(lambda: command in assert_problem(installation.order("promote", "b"), 409)["detail"])
    until(lambda: command in installation.cluster("b")["controller"]["why"])
    assert installation.cluster("b")["controller"]["state"] == "dead"
    assert {node["name"]: node["state"] for node in installation.cluster("b")["nodes"]} == {
        master: "master",
        voter: "silent",
    }
    assert command in installation.commands("show")
    alone = assert_problem(installation.order("promote", "b", without=[voter], fenced=True), 409)
    assert "no minion of b can be promoted" in alone["detail"]
    installation.servers[master].start()
    answer = until(lambda: (found := installation.order("open", "b")).status_code == 200 and found)
    assert answer.json()["told"] == f"{master} is the master of b"
    installation.servers[voter].start()


def test_a_controller_s_rotated_password_opens_no_other_master(installation, tmp_path, monkeypatch):
    """The master runs and refuses it, and no minion hears the master either, so that it would be dead at once. The new
    password is taken up without a restart.
    """
    with installation.ended_controller():
        running, master, (minion,) = installation.running, installation.master("a"), installation.voters("a")
        with rotated_account(running, tmp_path / "admin.json", "ALL PRIVILEGES") as account:
            administrators = load_topology(account.path)
            with closing(Controller(administrators, ControllerMode.AUTOMATIC, services=running.topology)) as controller:

                def reaches(state):
                    def holds():
                        controller.step({})
                        return controller.states["a"].state == state

                    until(holds, lambda: f"{controller.states} {controller.view('a', None)}")

                reaches("healthy")
                epoch = controller.known["a"].ballot.epoch
                account.rotate_at(master, "second")
                reaches("refused")
                with AdminSession(installation.administrator(minion)) as session:
                    session.query("STOP REPLICA IO_THREAD")
                until(lambda: (seen := controller.view("a", None).seen.get(minion)) and not seen.replication.connected)
                with monkeypatch.context() as impatient:
                    impatient.setattr("controller.decide.DEAD_AFTER_S", 0.0)
                    for _ in range(3):
                        controller.step({})
                named = f"{master} refuses the account '{account.user}': Access denied"
                assert (controller.states["a"].state, controller.states["a"].why[: len(named)]) == ("refused", named)
                assert (controller.known["a"].master, controller.known["a"].ballot.epoch) == (master, epoch)
                with AdminSession(installation.administrator(minion)) as session:
                    session.query("START REPLICA IO_THREAD")  # its new password comes from the master
                account.rotate("second")
                account.write("second")
                reaches("healthy")
                assert controller.known["a"].master == master


@contextmanager
def carried_out(installation, order):
    """Yields a controller that read an order again and again, and what it said of it."""
    settled = []
    with (
        installation.ended_controller(),
        closing(
            Controller(
                installation.running.administrators,
                ControllerMode.MANUAL,
                services=installation.running.topology,
                settle=lambda order, state, told: settled.append((state, told)),
            )
        ) as controller,
    ):
        until(lambda: controller.step({"a": order}) or settled)
        until(lambda: controller.step({"a": order}) or len(settled) > 20)
        yield controller, set(settled)


def test_an_order_that_is_read_twice_is_carried_out_once(installation):
    """A late reading shows it open after it was settled. A switch without a name would go back then."""
    (new,) = installation.voters("a")
    order = TopologyOrder("a", OrderKind.SWITCH, None, (), "ops", OrderState.OPEN, "", "1", time.time_ns() // 1000)
    with carried_out(installation, order) as (controller, said):
        assert controller.known["a"].master == new
    assert said == {(OrderState.DONE, f"{new} is the master of a")}


def test_an_order_that_no_controller_began_for_long_is_refused(installation):
    """It was given for a trouble that may be over, while no controller ran."""
    (minion,) = installation.voters("a")
    ordered_at = time.time_ns() // 1000 - 700_000_000
    order = TopologyOrder("a", OrderKind.SWITCH, None, (), "ops", OrderState.OPEN, "", "2", ordered_at)
    with carried_out(installation, order) as (controller, said):
        assert controller.known["a"].master != minion
    ((state, told),) = said
    assert state is OrderState.REFUSED
    assert re.fullmatch("no controller began it for 7.. s: order it again", told)
