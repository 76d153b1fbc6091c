"""A former master of the embedded stack comes back with a tail: the controller keeps it, and makes the server anew."""

import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controller.server import Server
from schemaless.cell import CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.config import StackSettings
from schemaless.errors import Misconfigured, NotFound
from schemaless.stack import embedded, remake, supervision
from schemaless.stack.admin import session
from schemaless.stack.plan import DEFAULT_DATASTORE, StackPlan, require_plan
from schemaless.stack.supervision import CONTROLLER, service_programs
from schemaless.storage import appointment_table, diverged_table, entity_table, schema
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import load_topology
from tests.conftest import FLAVOUR
from tests.waiting import until

pytestmark = [pytest.mark.storage, pytest.mark.timeout(240)]

SHARD = 0
CELL = ShardCell(CellKey(RowKey(uuid.UUID(int=7).bytes), ColumnName("BASE"), RefKey(1)), encode_body({"n": 1}), SHARD)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackPlan]:
    """A stack with no service but a controller."""
    settings = StackSettings(home=tmp_path_factory.mktemp("remake") / "my home", mysql_flavour=FLAVOUR, warm_up_s=0)
    embedded.up(settings, services=lambda plan: [one for one in service_programs(plan) if one.name == CONTROLLER])
    try:
        yield require_plan(settings.home)
    finally:
        embedded.down(settings)


def admin(plan: StackPlan, name: str, statement: str) -> list[dict[str, Any]]:
    (server,) = [server for server in plan.servers() if server.name == name]
    with session(server.administrator(plan.accounts)) as connected:
        return connected.query(statement)


def test_a_former_master_with_a_tail_joins_as_a_minion(plan: StackPlan) -> None:
    """Its last cell, which no minion received, is stored again, and it is a copy of another minion by itself."""
    home = plan.home
    with SyncStorage(load_topology(plan.topology_file)) as storage:
        datastore = storage.master("a").run(schema.datastores)[DEFAULT_DATASTORE]
        supervision.stop(home, CONTROLLER)
        for minion in ("a2", "a3"):
            admin(plan, minion, "STOP REPLICA IO_THREAD")
        storage.master("a").run(entity_table.put_cells, datastore, [CELL])
        supervision.stop(home, "a1")
        supervision.start(home, CONTROLLER)

        def known() -> Any:
            storage.look()
            return storage.appointments["a"]

        until(lambda: known().master == "a2" and known().is_open)
        supervision.start(home, "a1")

        def told() -> list[str]:
            return [
                step.step for step in storage.master("a").run(appointment_table.steps, "a", 100) if "a1" in step.told
            ]

        until(lambda: told()[-5:] == ["diverged", "kept", "put again", "made anew", "follows"])
        master = storage.master("a")
        (row,) = master.run(diverged_table.of_row, DEFAULT_DATASTORE, CELL.key.row_key, 10)
        assert (row.server, row.outcome, "a1" in known().voters) == ("a1", PutStatus.STORED, True)
        another = ShardCell(CellKey(CELL.key.row_key, CELL.key.column_name, RefKey(2)), CELL.body, SHARD)
        master.run(entity_table.put_cells, datastore, [another])
        for name in ("a1", "a3"):
            until(lambda name=name: len(storage.nodes[name].run(entity_table.read_after, datastore, SHARD, 0, 9)) == 2)
        ids = {
            name: admin(plan, name, "SELECT @@server_id AS id, @@GLOBAL.read_only AS closed")[0]
            for name in ("a1", "a3")
        }
        assert ids == {"a1": {"id": 100, "closed": 1}, "a3": {"id": 102, "closed": 1}}


def test_what_can_not_be_copied_is_refused(plan: StackPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stopped then."""
    with pytest.raises(NotFound, match="no server a9"):
        remake.remake(plan.home, "a9", "a3")
    for name, donor in (("a1", "a1"), ("a1", "b2")):
        with pytest.raises(Misconfigured, match="another server of the same cluster"):
            remake.remake(plan.home, name, donor)
    for name, donor in (("a1", "a2"), ("a2", "a3")):
        with pytest.raises(Misconfigured, match="a2 is a master"):
            remake.remake(plan.home, name, donor)
    with pytest.raises(Misconfigured, match="a1 is master or votes"):
        remake.remake(plan.home, "a1", "a3")
    monkeypatch.setattr(remake, "START_BYTES", 1 << 60)
    with pytest.raises(embedded.DiskFull, match="a copy of a3 needs"):
        remake.remake(plan.home, "a1", "a3")
    assert {process.name for process in supervision.processes(plan.home) if process.held_down} == set()


HANGS = "import time; from schemaless.stack import remake; remake.copy_data = lambda *_: time.sleep(600); remake.main()"


def vote(plan: StackPlan, *voters: str) -> None:
    """Makes these the voters of cluster a, while no controller runs."""
    (node,) = [node for node in load_topology(plan.admin_topology_file).cluster("a").nodes if node.name == "a2"]
    with Server(node) as master:
        (known,) = [one for one in master.look().appointments if one.cluster == "a"]
        master.appoint([msgspec.structs.replace(known, revision=known.revision + 1, voters=voters)])


def test_a_command_that_is_killed_leaves_no_server_down(plan: StackPlan) -> None:
    """Here while it copies. Both servers serve again, and the next run makes the server anew."""
    home = plan.home
    supervision.stop(home, CONTROLLER)
    vote(plan, "a3")

    def down() -> set[str]:
        return {process.name for process in supervision.processes(home) if process.held_down} - {CONTROLLER}

    with subprocess.Popen([sys.executable, "-c", HANGS, str(home), "a1", "a3"]) as command:
        try:
            until(lambda: down() == {"a1", "a3"})
        finally:
            command.kill()
    until(lambda: bool(admin(plan, "a1", "SELECT 1") and admin(plan, "a3", "SELECT 1")))
    assert down() == set()
    remake.remake(home, "a1", "a3")
    assert down() == set()
    assert not admin(plan, "a1", "SELECT 1 FROM schemaless.promise WHERE server_id = @@server_id")
    supervision.start(home, CONTROLLER)


def test_a_command_that_was_late_replaces_nothing(plan: StackPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server votes again when the command stops it: another controller was faster. Both are started again."""
    home, stop_all = plan.home, supervision.stop_all
    (server,) = [server for server in plan.servers() if server.name == "a1"]
    supervision.stop(home, CONTROLLER)

    def stop_later(home: Path, names: Iterable[str]) -> None:
        vote(plan, "a3", "a1")
        stop_all(home, names)

    vote(plan, "a3")
    before = server.data.stat().st_ino
    monkeypatch.setattr(supervision, "stop_all", stop_later)
    with pytest.raises(Misconfigured, match="a1 is master or votes"):
        remake.remake(home, "a1", "a3")
    assert server.data.stat().st_ino == before
    assert {process.name for process in supervision.processes(home) if process.held_down} == {CONTROLLER}
    supervision.start(home, CONTROLLER)
