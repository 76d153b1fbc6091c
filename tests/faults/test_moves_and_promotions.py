"""Masters change while a shard moves: the same command ends the move, and the shard has one home (I3, I13)."""

import pytest

from schemaless.errors import SchemalessError
from schemaless.ops.datastores import list_datastores
from schemaless.ops.move_orders import move_shards, plan_move
from schemaless.ops.moves import MoveStep
from schemaless.storage.appointment_table import OrderKind
from schemaless.storage.pymysql_driver import SyncStorage
from tests.failover_harness import drill, make_datastore
from tests.mover_harness import Putter, fill, verify
from tests.waiting import until

pytestmark = [pytest.mark.storage, pytest.mark.faults, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def drilled(tmp_path_factory):
    with drill(tmp_path_factory.mktemp("moves")) as running:
        yield running


@pytest.fixture
def moved(drilled):
    """Moves a shard from a to b while something happens at a step, and says how often the command ran."""
    datastore = make_datastore(drilled.running)

    def move(shard, step, act, acknowledged=True):
        happened = []

        def told(passed, one):
            if passed == step and not happened:
                happened.append(step)
                act()

        with SyncStorage(drilled.running.topology) as storage:
            fill(storage, datastore, shard, 2500)
        with Putter(drilled.running.topology, datastore, shard) as putter:
            runs = []

            def is_moved():
                try:
                    with SyncStorage(drilled.running.topology) as storage:
                        known = list_datastores(drilled.running.topology)[datastore.name]
                        move_shards(storage, known, plan_move(storage, known, [shard], "b"), "b", told)
                except SchemalessError as error:
                    runs.append(str(error))
                    raise
                return True

            until(is_moved, lambda: runs)
            assert happened
            count = len(putter.stored)
            until(lambda: len(putter.stored) >= count + 10)
        with SyncStorage(drilled.running.topology) as storage:
            head = verify(storage, datastore, shard, "b", "a", putter.stored if acknowledged else [])
        print(f"{step}: head {head.location}, longest put {putter.longest_s:.1f} s, refused before: {runs}")
        return runs

    yield move
    drilled.order("a", OrderKind.ACKNOWLEDGE)
    drilled.order("b", OrderKind.ACKNOWLEDGE)
    drilled.whole()


def test_masters_are_switched_while_a_shard_is_copied(drilled, moved):
    """A planned switch of the target's master, and then of the source's: the command says who the master is now."""
    for shard, cluster in ((0, "b"), (2, "a")):
        assert moved(shard, MoveStep.PAGE, lambda cluster=cluster: drilled.switch(cluster))


def test_masters_are_killed_in_a_switch(drilled, moved):
    """The source's master dies when it is closed, the target's when it is open. Others are promoted."""
    for shard, step, cluster in ((4, MoveStep.CLOSED, "a"), (6, MoveStep.OPENED, "b")):

        def kill(cluster=cluster):
            old = drilled.master(cluster)
            drilled.running.servers[old].kill()
            drilled.another_master(cluster, old)

        moved(shard, step, kill, acknowledged=False)
        drilled.whole()
