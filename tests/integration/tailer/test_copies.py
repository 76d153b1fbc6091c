"""A copy of the databases beside its original, on the same Kafka: nothing of it joins a group or is published (I20).

The copy has the id of the installation. Its servers were minions of the original, as a restored snapshot would be.
"""

import json
import re
import uuid
from contextlib import ExitStack

import pytest
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.bus.membership import TailersGroup
from schemaless.bus.topics import ensure_topics
from schemaless.names import tailer_group, trigger_group
from schemaless.ops.datastores import create_shards
from schemaless.stack.local import running_topology
from schemaless.storage import challenge_table, shard_head
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore, load_topology
from tests.conftest import FLAVOUR
from tests.consumer_harness import running_consumer, wait_until_finished, write_program
from tests.log_harness import new_cell, put, records, run_sql, running_tailers, wait_for_records
from tests.waiting import until

PROGRAM = """
from schemaless import trigger

@trigger(column="BASE")
def called(cell):
    pass
"""


REFUSED = re.compile("tailers of .* don't answer what these databases ask|who tailed .* last read other databases")
"""While a tailer of the original is in the group, and where it is out of it just now."""


class World:
    """The original and its copy, each with its storage and its topology file."""

    def __init__(self, folder, running, kafka, opened):
        self.kafka = kafka
        self._folder = folder
        self._running = running
        self._opened = opened
        self.path = self.topology_of("original", 0)
        self.storage = opened.enter_context(SyncStorage(load_topology(self.path), timeout_s=60.0))
        self.datastore = create_shards(
            self.storage,
            Datastore(f"copied_{uuid.uuid4().hex[:8]}", 4, 2, ("a", "b")),
            administrators=running.administrators,
        )
        ensure_topics(kafka, self.datastore)

    def topology_of(self, name, place):
        """Writes a topology that has of each cluster the server at this place alone, as its master."""
        document = json.loads(self._running.path.read_text())
        for cluster, nodes in document["clusters"].items():
            document["clusters"][cluster] = [{**nodes[place], "name": nodes[0]["name"]}]
        path = self._folder / f"{name}.json"
        path.touch(0o600)
        path.write_text(json.dumps(document))
        return path

    def put(self, storage, count):
        put(storage, self.datastore, [new_cell(self.datastore) for _ in range(count)])

    def copy(self):
        """Makes the minions servers of their own, which know nothing of what comes."""
        admin = self._opened.enter_context(SyncStorage(self._running.administrators, timeout_s=60.0))
        for cluster in ("a", "b"):
            (minion,) = admin.minions(cluster)
            wanted = admin.master(cluster).run(shard_head.heads, self.datastore.name)
            until(lambda: minion.run(shard_head.heads, self.datastore.name) == wanted)  # noqa: B023  # waited for here
            run_sql(minion, "STOP REPLICA; RESET REPLICA ALL; SET GLOBAL read_only = 0")
        self.copied_path = self.topology_of("copy", 1)
        self.copied = self._opened.enter_context(SyncStorage(load_topology(self.copied_path), timeout_s=60.0))
        group = TailersGroup(self.kafka, self.datastore, timeout_s=30.0)
        master = self.copied.master("a")
        until(lambda: (said := group.answered()) and not master.run(challenge_table.has, self.datastore.name, said[0]))
        group.close()

    def tailing(self, path, name):
        return running_tailers(1, path, self.kafka, self.datastore, output=self._folder / name)

    def members(self, group):
        admin = AdminClient({"bootstrap.servers": self.kafka})
        return {member.client_id for member in admin.describe_consumer_groups([group])[group].result().members}


@pytest.fixture
def world(tmp_path, kafka):
    with running_topology(tmp_path, flavour=FLAVOUR) as running, ExitStack() as opened:
        yield World(tmp_path, running, kafka, opened)


def test_a_copy_is_refused_while_its_original_lives_and_afterwards(world, tmp_path):
    program = write_program(tmp_path, "copied", PROGRAM)
    datastore, groups = (
        world.datastore,
        (tailer_group(world.datastore.name), trigger_group(world.datastore.name, "copied")),
    )
    with world.tailing(world.path, "original.log") as (original,):
        world.put(world.storage, 20)
        wait_for_records(world.kafka, datastore, 20)
        world.copy()
        before = [world.members(group) for group in groups]
        world.put(world.copied, 20)
        settings = {"topology": world.copied_path, "kafka": world.kafka, "metrics_port": 0}
        with (
            world.tailing(world.copied_path, "copy.log") as (copy,),
            (tmp_path / "program.log").open("w") as said,
            running_consumer(
                ["consumers", program, "--datastore", world.datastore.name], settings, stdout=said
            ) as worker,
        ):
            until(lambda: REFUSED.search(copy.said()), copy.said)
            assert until(worker.process.poll) == 1
            assert REFUSED.search((tmp_path / "program.log").read_text())
            assert [world.members(group) for group in groups] == before
        original.kill_and_restart()  # and is proven again
        world.put(world.storage, 5)
        wait_for_records(world.kafka, datastore, 25)
        assert original.stop() == 0
    with world.tailing(world.copied_path, "later.log") as (copy,):
        until(lambda: "read other databases: these are a copy" in copy.said(), copy.said)
        assert world.members(groups[0]) == set()
    assert len(records(world.kafka, datastore)) == 25


def test_a_program_of_the_original_starts_beside_its_tailer(world, tmp_path):
    """Whoever reads the same databases is answered, also after a server that had the challenges is gone."""
    program = write_program(tmp_path, "copied", PROGRAM)
    settings = {"topology": world.path, "kafka": world.kafka, "metrics_port": 0}
    with world.tailing(world.path, "original.log"):
        world.put(world.storage, 20)
        with running_consumer(["consumers", program, "--datastore", world.datastore.name], settings) as worker:
            wait_until_finished(world.storage, world.datastore, "trigger:copied")
            assert worker.stop() == 0


def test_a_backup_takes_the_topics_over_by_order(world, tmp_path, monkeypatch):
    """As where all servers were lost: the copy goes on, and what it came from is the stranger then."""
    with world.tailing(world.path, "original.log") as (original,):
        world.put(world.storage, 20)
        wait_for_records(world.kafka, world.datastore, 20)
        world.copy()
        before = len(original.said())
        original.kill_and_restart()
        until(lambda: "partitions assigned" in original.said()[before:], original.said)
        order = ["tailer", "take-over", world.datastore.name]
        monkeypatch.setenv("SCHEMALESS_KAFKA", world.kafka)
        monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(world.copied_path))
        assert "stop them first" in str(CliRunner().invoke(app, order).exception)
        assert original.stop() == 0
    with world.tailing(world.copied_path, "copy.log") as (copy,):
        until(lambda: f"tailer take-over {world.datastore.name}" in copy.said(), copy.said)
        assert CliRunner().invoke(app, order).exit_code == 0
        world.put(world.copied, 5)
        wait_for_records(world.kafka, world.datastore, 25)
        with world.tailing(world.path, "again.log") as (original,):
            until(lambda: REFUSED.search(original.said()), original.said)
