"""Whose turn it is: one controller's that hears servers, on real servers and a real broker."""

import subprocess
from contextlib import closing, contextmanager

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from schemaless.bus.client import client_settings
from schemaless.bus.turn import CONTROLLERS, Turn
from schemaless.config import ControllerMode
from schemaless.stack.local import LocalServer, running_kafka, running_topology
from schemaless.storage.pymysql_driver import SyncStorage
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.failover_harness import start_controller_process
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)


def test_one_that_can_do_nothing_gives_its_turn_up(kafka):
    """The other one gets it. Once it is able again, it takes part, and the turn is still one controller's."""
    with closing(Turn(kafka)) as first:
        until(lambda: first.is_ours)
        with closing(Turn(kafka)) as second:
            until(lambda: first.is_ours is not second.is_ours)
            first.take_part(False)
            until(lambda: second.is_ours)
            assert not first.is_ours
            first.take_part(True)
            until(lambda: first.is_ours is not second.is_ours)
            second.take_part(False)
            until(lambda: first.is_ours)
            assert not second.is_ours


@pytest.mark.parametrize("harm", [LocalServer.stop, LocalServer.kill])
def test_somebody_always_has_the_turn(harm, tmp_path):
    """While the broker hangs or is gone, and when it is back. Then it is one controller's again."""
    with (
        running_kafka(tmp_path) as (bootstrap, broker),
        closing(Turn(bootstrap)) as first,
        closing(Turn(bootstrap)) as second,
    ):
        are_ours = []

        def look():
            are_ours.append(first.is_ours + second.is_ours)
            return are_ours[-1]

        until(lambda: look() == 1)
        harm(broker)
        until(lambda: look() == 2)
        if broker.alive():
            broker.cont()
        else:
            broker.start(wait=False)
        until(lambda: look() == 1)
        assert min(are_ours) == 1


@contextmanager
def ending(process: subprocess.Popen[bytes]):
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def members(kafka):
    """How many the group has, None while its coordinator can't tell."""
    admin = AdminClient(client_settings(kafka))
    try:
        return len(admin.describe_consumer_groups([CONTROLLERS])[CONTROLLERS].result().members)
    except KafkaException:
        return None


def test_a_controller_that_hears_no_server_leaves_the_group(kafka, tmp_path):
    """So one that does gets the turn. It comes back once it hears one, and acts."""
    with running_topology(tmp_path, ("a",), 1, FLAVOUR, options=SMALL_REDO_LOGS, controlled=True) as running:
        for server in running.servers.values():
            server.kill()
        with ending(start_controller_process(running, kafka, ControllerMode.MANUAL)):
            until(lambda: members(kafka) == 1)
            until(lambda: members(kafka) == 0)
            for server in running.servers.values():
                server.start()
            with SyncStorage(running.topology) as storage:
                until(lambda: storage.look() or storage.appointments)
            until(lambda: members(kafka) == 1)  # it may act before the group has it
