"""Clusters and servers are added to a running embedded stack, and removed, while puts go on and commands are killed.
All passwords of its servers were rotated before.
"""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from schemaless.access import Scope
from schemaless.audit.run import audit
from schemaless.client.client import Client
from schemaless.config import StackSettings
from schemaless.ops.datastores import create_datastore
from schemaless.ops.tokens import create_token
from schemaless.stack import embedded
from schemaless.stack.admin import ADMIN_USER, REPLICATION_USER, SERVICE_USER, session
from schemaless.stack.endpoints import present_masters
from schemaless.stack.plan import require_plan, write_private_json
from schemaless.stack.programs import Flavour
from schemaless.stack.supervision import processes, service_programs
from schemaless.storage import schema, token_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import load_topology
from tests.conftest import FLAVOUR
from tests.waiting import until

TAKES_TOO_LONG = FLAVOUR is Flavour.MYSQL and "SCHEMALESS_FAULTS_LONG" not in os.environ
pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        TAKES_TOO_LONG, reason="takes minutes on MySQL: `make faults`; the statements run in ops/test_growth.py"
    ),
]

SERVICES = ("controller-0", "api-0", "cleaner-0", "tailer-0", "indexer-0")
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    settings = StackSettings(home=tmp_path_factory.mktemp("growth") / "my home", mysql_flavour=FLAVOUR, warm_up_s=0)
    try:
        embedded.up(settings, services=lambda plan: [one for one in service_programs(plan) if one.name in SERVICES])
        rotate(require_plan(settings.home))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SCHEMALESS_TOKEN", asyncio.run(a_token(settings)))
            yield settings
    finally:
        embedded.down(settings)


def rotate(plan):
    """As docs/production.md says. A server that comes later has to get the new passwords."""
    masters = present_masters(load_topology(plan.topology_file))
    how = (
        "CHANGE MASTER TO MASTER_PASSWORD"
        if FLAVOUR is Flavour.MARIADB
        else "CHANGE REPLICATION SOURCE TO SOURCE_PASSWORD"
    )
    with ExitStack() as stack:
        sessions = {server.name: stack.enter_context(session(plan.administrator(server))) for server in plan.servers()}
        for name in masters:
            for user in (SERVICE_USER, REPLICATION_USER, ADMIN_USER):
                sessions[name].query(f"ALTER USER '{user}'@'%' IDENTIFIED BY 'rotated'")
        for name in sessions.keys() - masters:
            for statement in ("STOP REPLICA", f"{how} = 'rotated'", "START REPLICA"):
                sessions[name].query(statement)
    for file in (plan.topology_file, plan.admin_topology_file):
        document = json.loads(file.read_bytes())
        for entry in (*itertools.chain(*document["clusters"].values()), document.get("replication", {})):
            entry["password"] = "rotated"
        write_private_json(file, document)


async def a_token(settings):
    """Access is on, so that a cluster that knew no token would be a hole."""
    async with AsyncStorage(load_topology(require_plan(settings.home).topology_file)) as storage:
        return (await create_token(storage, "before", ("*",), Scope.ADMIN, "1h")).secret


def command(stack, *words, killed_at=None):
    """Runs a command. Returns its exit status with what it said, or None when it was killed as it said that."""
    environment = {**os.environ, "SCHEMALESS_HOME": str(stack.home)}
    argv = [sys.executable, "-m", "schemaless", "topology", *words]
    with subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if killed_at is not None and line.startswith(killed_at):
                process.send_signal(signal.SIGKILL)
                return None
        process.wait()
    said = "".join(lines)
    print(said)
    return process.returncode, said


def ordered(stack, *words, kills=()):
    """Kills a command at each of these lines, and then lets it end."""
    for line in kills:
        assert command(stack, *words, killed_at=line) is None, line
    status, said = command(stack, *words)
    assert status == 0, said
    return said


def refused(stack, *words):
    status, said = command(stack, *words)
    assert status not in (0, None)
    return " ".join(said.split())


def asked(stack, name, statement):
    plan = require_plan(stack.home)
    (server,) = [server for server in plan.servers() if server.name == name]
    with session(plan.administrator(server)) as connected:
        return connected.query(statement)


def receives(stack, name):
    (followed,) = asked(stack, name, "SHOW REPLICA STATUS")
    return "Yes" in (followed.get("Slave_IO_Running"), followed.get("Replica_IO_Running"))


def voters(stack, cluster):
    with SyncStorage(load_topology(require_plan(stack.home).topology_file)) as storage:
        storage.look()
        return set(storage.appointments[cluster].voters)


def pids(stack):
    return {one.name: one.pid for one in processes(stack.home) if one.name in SERVICES}


class Puts:
    """Puts to the API that never stop, and what became of them."""

    def __init__(self, stack, datastore="mezzanine"):
        self.outcomes, self.failures, self.keys = Counter(), [], []
        self._hosts, self._datastore, self._over = require_plan(stack.home).api_urls()[:1], datastore, threading.Event()

    def __enter__(self):
        self._pool = ThreadPoolExecutor(1)
        self._putting = self._pool.submit(self._run)
        return self

    def __exit__(self, *_):
        self._over.set()
        self._pool.shutdown()
        self._putting.result()

    def _run(self):
        with Client(self._hosts, datastore=self._datastore) as client:
            while not self._over.is_set():
                key = str(uuid.uuid4())
                try:
                    answer = client.put_cell(key, "BASE", 1, {"n": len(self.keys)})
                    self.outcomes[answer.status, answer.copies] += 1
                    self.keys.append(key)
                except Exception as error:
                    self.failures.append(repr(error))
                time.sleep(0.01)


@pytest.mark.storage
def test_a_cluster_is_added_while_puts_flow_and_the_command_is_killed(stack):
    """No put fails, no service starts again, and all use the cluster: the API buffers there, the cleaner empties it,
    the tailer publishes what a new datastore has there, and the indexer keeps entries there.
    """
    plan = require_plan(stack.home)
    before = pids(stack)
    with Puts(stack) as puts:
        ordered(stack, "add-cluster", "c", kills=("making", "starting", "the controller opens"))
        until(lambda: asked(stack, "c1", "SELECT COUNT(*) AS n FROM schemaless.buffer")[0]["n"])
    assert not puts.failures
    assert {copies for _, copies in puts.outcomes} <= {1, 2}
    print(puts.outcomes)
    until(lambda: not asked(stack, "c1", "SELECT COUNT(*) AS n FROM schemaless.buffer")[0]["n"])
    topology = load_topology(plan.topology_file)
    with SyncStorage(topology) as storage:
        have = [(master.run(schema.datastores), master.run(token_table.all_rows)) for master in storage.masters]
        assert len(have) == 3
        assert have[0] == have[1] == have[2]
        assert have[0][1]
        administrators = load_topology(plan.admin_topology_file)
        datastore = create_datastore(topology, plan.broker().bootstrap, "young", 12, 4, administrators=administrators)
        assert datastore.clusters == ("a", "b", "c")
    assert voters(stack, "c") == {"c2", "c3"}
    assert receives(stack, "c2")
    with Puts(stack, "young") as puts:
        until(lambda: len(puts.keys) > 60)
    assert not puts.failures
    with Client(plan.api_urls()[:1], datastore="young") as client:
        for number, key in enumerate(puts.keys):
            assert client.get_cell(key, "BASE", 1).body == {"n": number}
        field = {"name": "n", "column": "BASE", "path": "n", "type": "int"}
        client.index("by_n").define({"shard_field": "n", "fields": [field]})
        client.index("by_n").wait(TIMEOUT_S)
        found = [
            str(entry.row_key) for number in range(len(puts.keys)) for entry in client.index("by_n").entries(n=number)
        ]
        assert found == puts.keys
    until(lambda: is_whole(topology, plan, datastore))
    assert pids(stack) == before


def is_whole(topology, plan, datastore):
    return audit(topology, plan.broker().bootstrap, datastore).clean


@pytest.mark.storage
def test_a_server_is_added_and_another_removed_while_puts_flow(stack):
    """Both commands are killed on their way, and the second time they go on."""
    before = pids(stack)
    with Puts(stack) as puts:
        ordered(stack, "add-node", "b", "b4", kills=("copying", "starting", "the controller lets"))
        assert voters(stack, "b") == {"b2", "b3", "b4"}
        assert receives(stack, "b4")
        said = ordered(stack, "remove-node", "b2", kills=("the controller leaves", "stopping"))
    assert not puts.failures
    assert voters(stack, "b") == {"b3", "b4"}
    plan = require_plan(stack.home)
    for file in (plan.topology_file, plan.admin_topology_file):
        assert next(iter(load_topology(file).cluster("b").nodes)).name == "b1"
        assert "b2" not in load_topology(file).nodes
    assert "b2" not in {one.name for one in processes(stack.home)}
    (folder,) = (stack.home / "mysql").glob("b2.removed-*")
    assert str(folder) in "".join(said.split("\n"))
    assert (folder / "data").is_dir()
    assert pids(stack) == before


def test_what_cant_be_done_is_refused_in_a_sentence(stack):
    assert "there is a cluster 'a' already" in refused(stack, "add-cluster", "a")
    assert "can't be called 'C!'" in refused(stack, "add-cluster", "C!")
    assert "no storage cluster 'x'" in refused(stack, "add-node", "x", "x1")
    assert "has a server 'a3' already" in refused(stack, "add-node", "a", "a3")
    assert "is another process of this stack" in refused(stack, "add-node", "a", "kafka")
    assert "leave out --nodes" in refused(stack, "add-node", "a", "a9", "--nodes", "nothing.json")
    assert "there is no server 'a9'" in refused(stack, "remove-node", "a9")
    assert "is the master of a: `schemaless topology switch a` first" in refused(stack, "remove-node", "a1")


def test_the_last_voter_stays_unless_that_is_said(stack):
    ordered(stack, "remove-node", "a3", "--delete")
    assert not list((stack.home / "mysql").glob("a3*"))
    assert "a2 is the last voter of a" in refused(stack, "remove-node", "a2")
    assert "nothing was changed" in ordered(stack, "remove-node", "a2", "--last", "--dry-run")
    assert voters(stack, "a") == {"a2"}
    ordered(stack, "remove-node", "a2", "--last")
    assert voters(stack, "a") == set()
    assert "a has no minion to copy" in refused(stack, "add-node", "a", "a4")


def test_an_order_beside_another_is_refused_with_who_and_what(stack):
    assert command(stack, "add-node", "c", "c4", killed_at="copying") is None
    said = refused(stack, "add-cluster", "d")
    assert re.search(r"ordered `add-node c c4` at .* and that isn't settled yet: wait until it is", said)
    ordered(stack, "add-node", "c", "c4")
    until(lambda: voters(stack, "c") == {"c2", "c3", "c4"})  # c3 was down for the first copy
    status, said = command(stack, "show", "--json")
    shown = json.loads(said[said.index("{") :])
    assert (status, {one["name"] for one in shown["clusters"]["c"]["minions"]}) == (0, {"c2", "c3", "c4"})


def test_a_stack_that_is_started_again_has_what_was_added(stack):
    embedded.down(stack)
    embedded.up(stack, services=lambda plan: [one for one in service_programs(plan) if one.name in SERVICES])
    topology = load_topology(require_plan(stack.home).topology_file)
    assert {name: [node.name for node in cluster.nodes] for name, cluster in topology.clusters.items()} == {
        "a": ["a1"],
        "b": ["b1", "b3", "b4"],
        "c": ["c1", "c2", "c3", "c4"],
    }
    with SyncStorage(topology) as storage:
        assert [master.run(query, "SELECT 1") for master in storage.masters]
