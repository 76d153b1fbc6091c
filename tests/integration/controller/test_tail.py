"""A former master with a tail comes back, on real servers: it is kept and put again, and nothing stored changes."""

import uuid
from contextlib import contextmanager

import pytest

from controller.service import Controller
from controller.tail import Tail
from schemaless.cell import CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.config import ControllerMode
from schemaless.ops.datastores import create_shards
from schemaless.runtime.events import Event, observing
from schemaless.sharding import shard_of
from schemaless.stack.local import running_topology
from schemaless.storage import (
    append,
    appointment_table,
    buffer_table,
    conflict_table,
    diverged_table,
    entity_table,
    shard_head,
)
from schemaless.storage.admin_session import AdminSession
from schemaless.storage.buffer_table import BufferRow, Sizes
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.waiting import until

pytestmark = [pytest.mark.storage, pytest.mark.timeout(180)]

DATASTORE = Datastore("tails", 4, 2, ("a", "b"))
MINE, THEIRS = encode_body({"n": 1}), encode_body({"n": 2})


class KilledError(Exception):
    """Stands for the end of the process."""


def cell_of(home, body=MINE, *, key=None):
    """A new cell of a shard that lives on `home`."""
    row_key = RowKey(uuid.uuid4().bytes)
    while DATASTORE.home(shard := shard_of(row_key, DATASTORE.shards)) != home:
        row_key = RowKey(uuid.uuid4().bytes)
    return ShardCell(CellKey(row_key, ColumnName("BASE"), RefKey(1)), body, shard, idempotency_key=key)


def other_body(cell):
    return ShardCell(cell.key, THEIRS, cell.shard)


def buffered(cell):
    return BufferRow(
        cell.key, cell.body, cell.shard, DATASTORE.home(cell.shard), 7, idempotency_key=cell.idempotency_key
    )


class World:
    """Two clusters under a controller that the test drives."""

    def __init__(self, running):
        self.running = running
        self.servers = running.servers
        self.storage = SyncStorage(running.topology)
        self.controller = self.new_controller()

    def new_controller(self):
        return Controller(self.running.administrators, ControllerMode.AUTOMATIC, services=self.running.topology)

    def step_until(self, condition):
        def stepped():
            if not (holds := condition()):
                self.controller.step({})
            return holds

        until(stepped, lambda: self.controller.states)
        self.storage.look()

    def healthy(self):
        return {state.state for state in self.controller.states.values()} == {"healthy"} and len(
            self.controller.states
        ) == len(self.running.topology.clusters)

    def master_is(self, name):
        known = self.controller.known.get("a")
        return known is not None and known.master == name and known.is_open and self.healthy()

    def put(self, cluster, *cells):
        placed = self.storage.master(cluster).run(entity_table.put_cells, DATASTORE, cells)
        assert {place.status for place in placed} == {PutStatus.STORED}
        return placed

    def admin(self, name, statement):
        (node,) = [
            node for each in self.running.administrators.clusters.values() for node in each.nodes if node.name == name
        ]
        with AdminSession(node) as session:
            return session.query(statement)

    def conflicts(self, cluster):
        master = self.storage.master(cluster)
        ids = [one.conflict_id for one in master.run(conflict_table.newest, DATASTORE.name, 1 << 40, 100)]
        found = master.run(conflict_table.get, ids).values() if ids else ()
        return {(one.key, one.stored_body, one.buffered_body) for one in found}

    def kept(self, cell):
        (row,) = self.storage.master("a").run(diverged_table.of_row, DATASTORE.name, cell.key.row_key, 10)
        return row

    def everything(self):
        """All that a second run could change."""
        master = self.storage.master("a")
        tables = ("diverged", "conflict", "shard_head", "buffer", "idempotency")
        return [
            sorted(map(str, self.storage.master(cluster).run(query, f"SELECT * FROM schemaless.{table}")))
            for table in tables
            for cluster in ("a", "b")
        ] + [master.run(entity_table.read_after, DATASTORE, shard, 0, 1000) for shard in (0, 2)]

    def steps(self):
        return {step.step: step.told for step in self.storage.master("a").run(appointment_table.steps, "a", 100)}


@contextmanager
def controlled(folder):
    with running_topology(folder, ("a", "b"), 1, FLAVOUR, options=SMALL_REDO_LOGS, controlled=True) as running:
        world = World(running)
        try:
            world.step_until(world.healthy)
            create_shards(world.storage, DATASTORE, administrators=running.administrators)
            yield world
        finally:
            world.controller.close()


@pytest.fixture(scope="module")
def tail(tmp_path_factory):
    with controlled(tmp_path_factory.mktemp("tail")) as world:
        yield world, diverge(world)


def diverge(world):
    """a1 dies with cells, buffer rows and a conflict that a2 never got, a2 is promoted, and a1 comes back."""
    cells = {
        "before": cell_of("a"),
        "new": cell_of("a", key="key of a lost POST"),
        "same": cell_of("a"),
        "other": cell_of("a"),
        "buffered": cell_of("b", key="key of a buffered POST"),
        "arrived": cell_of("b"),
        "differs": cell_of("b"),
        "both have": cell_of("b"),
        "conflict": cell_of("b"),
    }
    a1, b1 = world.storage.master("a"), world.storage.master("b")
    world.put("a", cells["before"])
    a1.run(buffer_table.insert, DATASTORE, [buffered(cells["both have"])])
    until(lambda: world.admin("a2", "SELECT * FROM schemaless.buffer"))
    world.admin("a2", "STOP REPLICA IO_THREAD")
    for name in ("new", "same", "other"):
        world.put("a", cells[name])
    rows = [buffered(cells[name]) for name in ("buffered", "arrived", "differs", "conflict")]
    a1.run(buffer_table.insert, DATASTORE, rows)
    world.put("b", cells["arrived"], other_body(cells["differs"]), other_body(cells["conflict"]))
    page = buffer_table.page("b", 0, 1 << 40, Sizes(), rows_max=10, bytes_max=1 << 20)
    (row,) = [row for row in a1.run(lambda: page) if row.key == cells["conflict"].key]
    assert a1.run(buffer_table.record_conflict, row, THEIRS, "b", world.storage.epoch("b"))
    world.servers["a1"].kill()
    world.step_until(lambda: world.master_is("a2"))
    assert world.storage.master("b") is b1
    world.put("a", cells["same"], other_body(cells["other"]))
    world.servers["a1"].start()
    return cells


def test_a_kill_at_any_point_goes_on(tail):
    """Killed after keeping, and after a put whose outcome isn't written. Rows whose home is away wait for it."""
    world, _ = tail

    def die(event, fields):
        raise KilledError

    keeper = Tail(world.storage, "a1")
    with observing(die, Event.TAIL_KEPT), pytest.raises(KilledError):
        keeper.keep()
    epoch = keeper.keep()
    assert keeper.counts(epoch) == {None: 7}
    with observing(die, Event.TAIL_PAGE_PUT), pytest.raises(KilledError):
        keeper.put_again(epoch)
    assert keeper.counts(epoch) == {None: 7}
    world.servers["b1"].kill()
    keeper.put_again(epoch)
    left = keeper.counts(epoch)
    assert (left[None], sum(left.values())) == (4, 7)
    world.servers["b1"].start()


def test_a_tail_is_kept_and_put_again(tail):
    """Each cell has its outcome and its place, and the cluster is healthy without the server."""
    world, cells = tail
    world.step_until(lambda: "0 wait" in world.steps().get("put again", ""))
    rows = {name: world.kept(cell) for name, cell in cells.items() if name not in ("before", "both have")}
    assert {name: row.outcome for name, row in rows.items()} == {
        "new": PutStatus.ALREADY_STORED,  # by the put whose outcome was lost
        "same": PutStatus.ALREADY_STORED,
        "other": PutStatus.CONFLICT,
        "buffered": PutStatus.STORED,
        "arrived": PutStatus.ALREADY_STORED,
        "differs": PutStatus.CONFLICT,
        "conflict": PutStatus.CONFLICT,
    }
    assert not world.storage.master("a").run(diverged_table.of_row, DATASTORE.name, cells["before"].key.row_key, 1)
    for name, row in rows.items():
        cell = cells[name]
        home = DATASTORE.home(cell.shard)
        (stored,) = world.storage.master(home).run(entity_table.get, DATASTORE, [(cell.shard, cell.key)])
        assert (stored.generation, stored.added_id) == (row.home_generation, row.home_added_id)
        assert (stored.body == cell.body) == (row.outcome is not PutStatus.CONFLICT)
        assert bool(row.added_id) == (home == "a")
    different = {(cells[name].key, THEIRS, MINE) for name in ("other", "differs", "conflict")}
    assert world.conflicts("a") == different
    keys = [cells["new"].key, cells["before"].key]
    assert world.storage.master("a").run(append.idempotency_keys, DATASTORE.name, keys) == ["key of a lost POST", None]
    (key,) = world.storage.master("b").run(append.idempotency_keys, DATASTORE.name, [cells["buffered"].key])
    assert key == "key of a buffered POST"
    # A put that shared its row may be refused by the home only now. What a1 said of the row is still true (I6).
    world.storage.master("a").run(buffer_table.remove, DATASTORE, [buffered(cells["both have"])])
    copied = {copy for name in cells for copy in copies(world, cells[name])}
    assert copied == {cells[name].key for name in ("both have", "buffered", "arrived")}
    world.step_until(lambda: "its data folder is to be made anew" in world.controller.states["a"].why)
    assert world.healthy()


def copies(world, cell):
    """What waits in the buffer of a until a minion of b has it."""
    return [
        CellKey(cell.key.row_key, copy.column_name, copy.ref_key)
        for copy in world.storage.master("a").run(buffer_table.of_row, DATASTORE.name, cell.key.row_key, 10)
    ]


def test_a_second_controller_changes_nothing(tail):
    """It finds the tail, keeps it, and tells the same."""
    world, _ = tail
    world.step_until(lambda: "0 wait" in world.steps().get("put again", ""))
    before, told = world.everything(), world.steps()
    world.controller.close()
    world.controller = world.new_controller()
    world.step_until(lambda: "to be made anew" in getattr(world.controller.states.get("a"), "why", ""))
    assert world.everything() == before
    assert {step: world.steps()[step] for step in ("diverged", "kept", "put again")} == {
        step: told[step] for step in ("diverged", "kept", "put again")
    }
    assert told["kept"] == "the tail of a1 is kept: 7 cells"
    assert told["put again"] == "of the tail of a1: 1 stored, 3 already there, 3 conflicts, 0 wait"


def test_a_minion_that_somebody_wrote_to_follows_no_more(tail):
    """What it has beside its master's log is no cell, so nothing is put again. It is stopped, and holds nothing up."""
    world, _ = tail
    world.step_until(world.healthy)
    row = "INSERT INTO schemaless.admin_action (at, who, what, peer, outcome) VALUES (UTC_TIMESTAMP(6), '', '', '', '')"
    world.admin("b1", row)
    count = "SELECT COUNT(*) AS n FROM schemaless.admin_action"
    until(lambda: world.admin("b2", count) == world.admin("b1", count))  # MariaDB knows no event before its last one
    world.admin("b2", row)
    world.admin("b2", "STOP REPLICA IO_THREAD")
    world.step_until(lambda: "what only b2 had is kept" in world.controller.states["b"].why)
    assert world.healthy()
    assert not world.admin("b2", "SHOW REPLICA STATUS")
    told = {step.step: step.told for step in world.storage.master("b").run(appointment_table.steps, "b", 100)}
    assert told["kept"] == "the tail of b2 is kept: 0 cells"
    world.put("b", cell_of("b"))


def test_what_a_minion_alone_has_in_the_same_generation_is_kept(tmp_path):
    """A master that lacked it was opened without hearing the minion, and has given the same added_ids since."""
    with controlled(tmp_path) as world:
        shared, own, later = cell_of("a"), cell_of("a"), cell_of("a")
        while len({shared.shard, own.shard, later.shard}) > 1:
            own, later = cell_of("a"), cell_of("a")
        world.put("a", shared)
        master = world.storage.master("a").node.name
        (minion,) = [node.node.name for node in world.storage.others("a")]
        old = world.storage.nodes[minion]
        until(lambda: 1 in [head.added_id for head in old.run(shard_head.heads, DATASTORE.name)])
        world.admin(minion, "STOP REPLICA")
        database = DATASTORE.database(own.shard)
        world.admin(
            minion,
            f"SET sql_log_bin = 0; INSERT INTO {database}.entity (added_id, generation, row_key, column_name, ref_key,"
            f" body, created_at, cause) SELECT 2, generation, x'{own.key.row_key.hex()}',"
            f" column_name, ref_key, body, created_at, cause FROM {database}.entity;"
            f"UPDATE schemaless.shard_head SET head = 2 WHERE datastore = '{DATASTORE.name}' AND shard = {own.shard}",
        )
        world.put("a", later)
        assert world.storage.master("a").node.name == master
        Tail(world.storage, minion).keep()
        assert world.kept(own)
        assert not world.storage.master("a").run(diverged_table.of_row, DATASTORE.name, shared.key.row_key, 10)
