"""A master that starts again is compared with what was published, which its minions may lack as well (I13, I16)."""

import time
from contextlib import closing, contextmanager

import pytest

from controller.service import Controller
from schemaless.bus.published import PublishedLocations
from schemaless.config import ControllerMode
from schemaless.errors import BusUnavailable
from schemaless.location import Location
from schemaless.ops.datastores import create_shards
from schemaless.stack.local import running_topology
from schemaless.storage import shard_head
from schemaless.storage.appointment_table import OrderKind, OrderState, TopologyOrder
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests import waiting
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.log_harness import new_cell, put, restore, running_tailers, wait_for_records

pytestmark = [pytest.mark.storage, pytest.mark.timeout(180)]

DATASTORE = Datastore("told", 4, 2, ("a", "b"))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("told")
    with running_topology(folder, ("a", "b"), 1, FLAVOUR, options=SMALL_REDO_LOGS, controlled=True) as started:
        with controlled(started) as until:
            until("a", "healthy")
            until("b", "healthy")
            with SyncStorage(started.topology) as storage:
                create_shards(storage, DATASTORE, administrators=started.administrators)
        yield started


@contextmanager
def controlled(running, published=lambda datastores: {}):
    """Yields what lets a controller act until a cluster is in a state, and returns how long that took and why."""
    how = {"services": running.topology, "published": published}
    with closing(Controller(running.administrators, ControllerMode.MANUAL, **how)) as controller:

        def until(cluster, state, order=None):
            def reached():
                if cluster in controller.states and controller.states[cluster].state == state:
                    return True
                controller.step({cluster: order} if order else {})
                return False

            waiting.until(reached, lambda: controller.states)
            return controller.states[cluster].why

        yield until


def is_open(running, name):
    with SyncStorage(running.topology) as storage:
        ((read_only,),) = storage.nodes[name].run(query, "SELECT @@GLOBAL.read_only")
    return not read_only


def restart(running, name):
    running.servers[name].kill()
    running.servers[name].start()


def heads(node):
    found = node.run(shard_head.heads, DATASTORE.name)
    return {(DATASTORE.name, head.shard): Location(head.generation, head.added_id) for head in found}


def test_a_master_that_has_what_was_published_is_opened(running):
    """Shards of other clusters don't count: their heads are elsewhere."""
    with SyncStorage(running.topology) as storage:
        here = heads(storage.master("a")) | {(DATASTORE.name, 1): Location(1, 99)}
    restart(running, "a1")
    with controlled(running, lambda datastores: here) as until:
        until("a", "healthy")
    assert is_open(running, "a1")


def test_while_kafka_is_away_it_is_opened(running):
    def away(datastores):
        raise BusUnavailable("Kafka is away")

    restart(running, "a1")
    with controlled(running, away) as until:
        until("a", "healthy")
    assert is_open(running, "a1")


def test_a_cluster_that_was_restored_as_a_whole_stays_closed(running, kafka):
    """Master and minion are from one backup, so they agree. The order of a person opens it."""
    with closing(PublishedLocations(kafka)) as watch, SyncStorage(running.topology) as storage:
        published = lambda datastores: watch.of(datastores, 5.0)  # noqa: E731
        put(storage, DATASTORE, [new_cell(DATASTORE, shard=shard) for shard in (0, 0, 0, 2)])
        with running_tailers(1, running.path, kafka, DATASTORE) as (tailer,):
            wait_for_records(kafka, DATASTORE, 4)
            assert tailer.stop() == 0
        restart(running, "a1")
        with controlled(running, published) as until:
            until("a", "healthy")
        restore(storage.nodes["a1"], DATASTORE, 0, kept=1)  # a2 receives that
        while heads(storage.nodes["a2"])[DATASTORE.name, 0].added_id != 1:
            time.sleep(0.05)
        restart(running, "a1")
        with controlled(running, published) as until:
            why = until("a", "lost_history")
            assert "a1 lacks what was published of shard 0 of told, and no minion has it" in why
            assert "`schemaless topology open a`" in why
            assert not is_open(running, "a1")
            now = time.time_ns() // 1000
            order = TopologyOrder("a", OrderKind.OPEN, None, (), "ops", OrderState.OPEN, "", "1", now)
            until("a", "healthy", order)
    assert is_open(running, "a1")
