"""A switch that breaks in the middle ends either way, and an order begins with what is so then (I3, I6, I13)."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from schemaless.cell import ColumnName, RowKey
from schemaless.codec import encode_body
from schemaless.errors import SchemalessError, StateConflict
from schemaless.location import GenerationStart, Location
from schemaless.ops.datastores import create_shards
from schemaless.ops.move_orders import arrivals, cancel, complete, move_shards, plan_move, reverse
from schemaless.ops.moves import LOCK, Mover, MoveStep, ShardMover
from schemaless.stack.local import running_topology
from schemaless.storage import entity_table, post_version, shard_head, shard_move_table
from schemaless.storage.operation import query
from schemaless.storage.post_version import NewVersion
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.mover_harness import fill, home_of, new_cell

pytestmark = [pytest.mark.storage, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Servers of its own, which are killed and stopped."""
    folder = tmp_path_factory.mktemp("moves")
    with running_topology(folder, ("a", "b", "c"), flavour=FLAVOUR, options=SMALL_REDO_LOGS) as started:
        yield started


@pytest.fixture(scope="module")
def topology(running):
    return running.topology


@pytest.fixture
def storage(topology):
    with SyncStorage(topology) as opened:
        yield opened


@pytest.fixture
def datastore(storage, running):
    wanted = Datastore(f"t{uuid.uuid4().hex[:12]}", 2, 2, ("a",))
    made = create_shards(storage, wanted, administrators=running.administrators)
    fill(storage, made, 0, 500)
    return made


class Killed(BaseException):
    pass


def kill():
    raise Killed


def at(step, act):
    """Returns a listener that acts when a step was done for the first time."""
    acts = [act]

    def told(passed, move):
        if passed is step and acts:
            acts.pop()()

    return told


def move(storage, datastore, target, told=lambda step, move: None):
    move_shards(storage, datastore, plan_move(storage, datastore, [0], target), target, told)


def park(storage, datastore, cluster):
    storage.master(cluster).run(
        query,
        "INSERT INTO schemaless.parked (datastore, consumer, shard, added_id, generation, row_key, column_name,"
        " ref_key, function_name, cause, holds_row, error, attempts, attempted_at, version, parked_at)"
        f" VALUES ('{datastore.name}', 'p', 0, 3, 1, '0123456789abcdef', 'BASE', 1, 'f', 'error', 0, 'e', 5, '[]', 'v',"
        " UTC_TIMESTAMP(6))",
    )


def parked(storage, datastore, cluster):
    ((count,),) = storage.master(cluster).run(
        query, f"SELECT COUNT(*) FROM schemaless.parked WHERE datastore = '{datastore.name}'"
    )
    return count


def test_a_minion_of_the_target_dies_after_the_opening(storage, datastore, running):
    """No controller runs here, so nobody is promoted, and nobody has to have the shard before it is told."""
    move(storage, datastore, "b", at(MoveStep.OPENED, running.servers["b2"].kill))
    assert home_of(storage, datastore, 0) == "b"
    running.servers["b2"].start()
    running.servers["b2"].wait_ready()


def test_a_minion_of_the_source_stands_still_after_the_close(storage, datastore, running):
    """The switch is taken back as soon as its time is over, and not after a read's time-out."""
    undone = threading.Event()

    def told(step, move):
        if step is MoveStep.CLOSED and not undone.is_set():
            running.servers["a2"].stop()
        if step is MoveStep.UNDONE:
            undone.set()

    def try_it():
        with suppress(SchemalessError):
            move(storage, datastore, "b", told)

    with ThreadPoolExecutor(1) as pool:
        trying = pool.submit(try_it)
        try:
            in_time = undone.wait(8)
        finally:
            running.servers["a2"].cont()
        trying.result()
    assert in_time
    assert home_of(storage, datastore, 0) == "a"


def test_the_target_stands_still_after_the_close(storage, datastore, running):
    """The mover's sessions are lost. It takes the switch back in new ones, once the target answers."""
    resume = threading.Timer(14, running.servers["b1"].cont)
    resume.start()
    with pytest.raises(SchemalessError):
        move(storage, datastore, "b", at(MoveStep.CLOSED, running.servers["b1"].stop))
    resume.join()
    assert home_of(storage, datastore, 0) == "a"


def test_a_server_that_is_away_leaves_a_session_that_refuses(storage, running):
    """It may come back, and until then nothing is written without its lock."""
    with Mover(storage, ["a", "c"]) as mover:
        running.servers["c1"].kill()
        for _ in range(2):
            with pytest.raises(SchemalessError):
                mover.open_sessions()
            with pytest.raises(SchemalessError):
                mover.sessions["c"].run(query, "SELECT 1")
        running.servers["c1"].start()
        running.servers["c1"].wait_ready()
        mover.open_sessions()
        assert mover.sessions["c"].run(query, "SELECT 1") == ((1,),)


def test_a_master_that_was_opened_meanwhile_begins_a_generation(storage, datastore):
    """It may lack cells that came after an earlier reopening, and a place is never given twice (I13)."""
    source = storage.master("a")
    with Mover(storage, ["a", "b"]) as mover:
        one = ShardMover(mover, datastore, 0, "a", "b")
        one.begin()
        one.copy()
        source.run(shard_move_table.close_source, one.move)
        # What a controller does to the heads when it opens a master, seen from the row of the move.
        source.run(query, f"UPDATE schemaless.shard_head SET epoch = 7 WHERE datastore = '{datastore.name}'")
        source.run(shard_move_table.reopen_source, one.move)
        source.run(query, f"UPDATE schemaless.shard_head SET epoch = 0 WHERE datastore = '{datastore.name}'")
    head, starts = source.run(shard_head.history, datastore.name, 0)
    assert head.location == Location(7, 500)
    assert starts == [GenerationStart(1, 1), *(GenerationStart(number, 501) for number in range(2, 8))]
    (placed,) = source.run(entity_table.put_cells, datastore, [new_cell(0)])
    assert (placed.generation, placed.added_id) == (7, 501)


def test_a_plan_is_older_than_another_move(storage, datastore, topology):
    """The shard is elsewhere by the time of the lock. Nothing is told or changed, and the next order is right."""
    plan = plan_move(storage, datastore, [0], "c")
    with SyncStorage(topology) as other:
        move(other, datastore, "b")
    with pytest.raises(StateConflict, match="doesn't live on a any more"):
        move_shards(storage, datastore, plan, "c", lambda step, move: None)
    assert home_of(storage, datastore, 0) == "b"


def test_a_reversal_after_a_move_that_was_killed_reverses_it(storage, datastore):
    """It finishes what was switched, and then takes it back."""
    with pytest.raises(Killed):
        move(storage, datastore, "b", at(MoveStep.PUBLISHED, kill))
    reverse(storage, datastore, [0], lambda step, move: None)
    assert home_of(storage, datastore, 0) == "a"


def test_a_reversal_that_was_killed_is_finished_by_the_same_order(storage, datastore):
    move(storage, datastore, "b")
    with pytest.raises(Killed):
        reverse(storage, datastore, [0], at(MoveStep.PUBLISHED, kill))
    reverse(storage, datastore, [0], lambda step, move: None)
    assert home_of(storage, datastore, 0) == "a"


def test_a_cancel_leaves_nothing_at_the_target(storage, datastore):
    """What was copied beside the cells would be counted twice."""
    park(storage, datastore, "a")
    with pytest.raises(Killed):
        move(storage, datastore, "b", at(MoveStep.PREPARED, kill))
    cancel(storage, datastore, [0], lambda step, move: None)
    assert [parked(storage, datastore, cluster) for cluster in "ab"] == [1, 0]
    assert home_of(storage, datastore, 0) == "a"


def test_a_post_that_the_source_lost_may_be_sent_again(storage, datastore):
    """The answer of its cell came with the copy, and goes with the cell."""
    source, target = storage.master("a"), storage.master("b")
    new = NewVersion(0, RowKey(uuid.uuid4().bytes), ColumnName("BASE"), encode_body({"x": 1}), "key-1")
    source.run(post_version.put_next, datastore, [new])
    with Mover(storage, ["a", "b"]) as mover:
        one = ShardMover(mover, datastore, 0, "a", "b")
        one.begin()
        one.copy()
        for statement in (  # as after a promotion of a minion that lacks the cell
            f"DELETE FROM {datastore.database(0)}.entity WHERE added_id = 501",
            f"DELETE FROM schemaless.idempotency WHERE datastore = '{datastore.name}'",
            f"UPDATE schemaless.shard_head SET head = 500 WHERE datastore = '{datastore.name}' AND shard = 0",
        ):
            source.run(query, statement)
        source.run(shard_head.open_generation, datastore, 0, GenerationStart(2, 501))
        one.copy()
        one.switch()
    (again,) = target.run(post_version.put_next, datastore, [new])
    assert again.placed.added_id == 501
    assert not again.replayed


def recover(storage, datastore):
    """Does what a controller does where a mover stands still."""
    for cluster in "ab":
        master = storage.master(cluster)
        master.run(query, f"KILL {master.run(shard_move_table.mover_session, LOCK)}")
    with Mover(storage, ["a", "b"]) as mover:
        ShardMover(mover, datastore, 0, "a", "b").begin()


def moves(storage, datastore):
    """Returns from where to where rows say that the shard moves, or moved."""
    return {(one.move.source, one.move.target, one.move.is_back) for one in arrivals(storage, datastore.name)}


ORDERS = {
    "move b": lambda storage, datastore: move(storage, datastore, "b"),
    "move c": lambda storage, datastore: move(storage, datastore, "c"),
    "complete": lambda storage, datastore: complete(storage, datastore, [0], lambda step, move: None),
    "reverse": lambda storage, datastore: reverse(storage, datastore, [0], lambda step, move: None),
    "cancel": lambda storage, datastore: cancel(storage, datastore, [0], lambda step, move: None),
}


@pytest.mark.parametrize(
    ("step", "orders", "home"),
    [
        (MoveStep.CLOSED, [], "a"),
        (MoveStep.CLOSED, ["move b"], "b"),
        (MoveStep.CLOSED, ["move b", "complete"], "b"),
        (MoveStep.CLOSED, ["move b", "reverse"], "a"),
        (MoveStep.CLOSED, ["move b", "complete", "move c"], "c"),
        (MoveStep.CLOSED, ["cancel", "move c"], "c"),
        (MoveStep.OPENED, [], "b"),
        (MoveStep.OPENED, ["complete"], "b"),
        (MoveStep.OPENED, ["reverse"], "a"),
        (MoveStep.OPENED, ["complete", "move c"], "c"),
        (MoveStep.PUBLISHED, ["reverse"], "a"),
    ],
)
def test_a_mover_that_is_late_changes_nothing(step, orders, home, storage, datastore, topology):
    """Its sessions were ended, and its switch, too. Whatever was ordered then, the shard stays where it is."""

    known = set()

    def meanwhile():
        with SyncStorage(topology) as other:
            recover(other, datastore)
            for order in orders:
                ORDERS[order](other, datastore)
            assert home_of(other, datastore, 0) == home
            park(other, datastore, home)
            known.update(moves(other, datastore))

    with SyncStorage(topology) as late, suppress(SchemalessError):
        move(late, datastore, "b", at(step, meanwhile))
    assert home_of(storage, datastore, 0) == home
    assert parked(storage, datastore, home) == 1
    assert moves(storage, datastore) == known


def test_a_mover_that_is_late_finds_a_reversal_that_was_killed(storage, datastore, topology):
    """The shard left the target, and nobody was told: it isn't published there again."""

    def meanwhile():
        with SyncStorage(topology) as other:
            recover(other, datastore)
            with suppress(Killed):
                reverse(other, datastore, [0], at(MoveStep.OPENED, kill))

    with pytest.raises(StateConflict, match="left b"):
        move(storage, datastore, "b", at(MoveStep.OPENED, meanwhile))
    assert storage.live(datastore).home(0) == "b"
    reverse(storage, datastore, [0], lambda step, move: None)
    assert home_of(storage, datastore, 0) == "a"
