"""A topology's file that changes while a process runs: what is taken over, and what is refused and said once."""

import json
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.node_core import Storage
from schemaless.topology import AccountFile, Appointment, Ballot, FollowedFile, Topology, load_topology


def entry(name, port=1, user="u", password="p"):
    return {"name": name, "host": "127.0.0.1", "port": port, "user": user, "password": password}


class File:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._written = 0

    def write(self, text=None, **clusters):
        document = {"version": 2, "clusters": {name: list(map(entry, nodes)) for name, nodes in clusters.items()}}
        self.path.write_text(json.dumps(document) if text is None else text)
        self._written += 1
        os.utime(self.path, ns=(0, self._written))  # two writes within one tick of the clock are two


@pytest.fixture
def file(tmp_path):
    file = File(tmp_path / "topology.json")
    file.write(a=["a1", "a2"], b=["b1"])
    return file


class Server:
    def __init__(self, node):
        self.node, self.stamp = node, ""

    def appoint(self, role):
        self.role = role


@pytest.fixture
def storage(file):
    return Storage(load_topology(file.path), Server)


def appointed(cluster, master, epoch, voters=()):
    return Appointment(cluster, Ballot(epoch, "c"), 0, master, True, tuple(voters), 0, 0)


def test_servers_that_are_the_same_stay_and_others_are_opened(file, storage):
    before = dict(storage.nodes)
    assert not storage.read_again()
    file.write(a=["a1", "a3"], b=["b1"], c=["c1", "c2"])
    assert storage.read_again()
    assert not storage.read_again()
    assert list(storage.nodes) == ["a1", "a3", "b1", "c1", "c2"]
    assert all(storage.nodes[name] is before[name] for name in ("a1", "b1"))
    assert [one.node.name for one in storage.others("c")] == ["c2"]


def test_a_server_with_another_address_is_another_server(file, storage):
    before = storage.nodes["a2"]
    file.write(json.dumps({"version": 2, "clusters": {"a": [entry("a1"), entry("a2", port=2)], "b": [entry("b1")]}}))
    assert storage.read_again()
    assert storage.nodes["a2"] is not before
    assert storage.nodes["a2"].node.port == 2


def rotated(*entries):
    return json.dumps({"version": 2, "clusters": {"a": list(entries)}})


def test_a_server_with_another_account_is_the_same_one(file, storage):
    """So its connections stay, and new ones are made with the new account."""
    before = storage.nodes["a2"]
    file.write(json.dumps({"version": 2, "clusters": {"a": [entry("a1"), entry("a2", user="v")], "b": [entry("b1")]}}))
    assert storage.read_again()
    assert storage.nodes["a2"] is before
    assert (before.node.user, before.node.password) == ("v", "p")


def test_a_refused_account_is_looked_up_in_its_file_once_a_second(file):
    """Whoever asks in between gets what the last look found. What is the same account, or another server, is nothing
    to try.
    """
    now, known = [0.0], load_topology(file.path).nodes
    accounts = AccountFile(file.path, lambda: now[0])
    assert accounts.present(known["a1"]) is None
    file.write(rotated(entry("a1", password="new"), entry("a2", port=2, password="new")))
    assert accounts.present(known["a1"]) is None
    now[0] = 1.0
    assert [accounts.present(known["a1"]).password for _ in range(2)] == ["new", "new"]
    assert accounts.present(accounts.present(known["a1"])) is None
    assert accounts.present(known["a2"]) is None
    assert accounts.present(known["b1"]) is None


@pytest.mark.parametrize("written", ["", "{", '{"version": 2, "clusters": {"a": [{"name": "a1"}]}}'])
def test_a_file_that_is_half_written_costs_a_line_and_no_account(file, written):
    now, known = [0.0], load_topology(file.path).nodes
    accounts = AccountFile(file.path, lambda: now[0])
    file.write(rotated(entry("a1", password="new")))
    assert accounts.present(known["a1"]).password == "new"
    file.write(written)
    with capture_logs() as logs:
        for now[0] in (1.0, 2.0):
            assert accounts.present(known["a1"]).password == "new"
    assert [line["event"] for line in logs] == ["the topology's file was changed, and isn't used"]
    file.write(rotated(entry("a1", password="newer")))
    now[0] = 3.0
    assert accounts.present(known["a1"]).password == "newer"


def test_a_cluster_that_came_later_joins_until_its_master_is_appointed(file, storage):
    """Nobody takes it for a secondary before. A cluster of the first file is none, whether it has a master or not."""
    storage.learn([appointed("a", "a1", 1)])
    file.write(a=["a1", "a2"], b=["b1"], c=["c1"])
    storage.read_again()
    assert [storage.is_joining(name) for name in "abc"] == [False, False, True]
    storage.learn([appointed("c", "c1", 2)])
    assert not storage.is_joining("c")


REFUSED = {
    "no JSON": ({"text": "{"}, "no topology can be read"),
    "another version": ({"text": '{"version": 3}'}, "version '3' is not known"),
    "without the master of a cluster": ({"a": ["a1"], "b": ["b1"]}, "lacks a2, which is the master of cluster a"),
    "without a cluster": ({"a": ["a1", "a2"]}, "lacks b1, which is the master of cluster b"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_used_is_said_once_and_changes_nothing(file, storage, name):
    written, why = REFUSED[name]
    storage.learn([appointed("a", "a2", 3)])
    file.write(**written)
    with capture_logs() as logs:
        assert not storage.read_again()
        assert not storage.read_again()
    (said,) = logs
    assert why in said["why"]
    assert (list(storage.nodes), sorted(storage.topology.clusters)) == (["a1", "a2", "b1"], ["a", "b"])
    file.write(a=["a1", "a2", "a3"], b=["b1"])
    assert storage.read_again()


def test_a_file_without_a_former_master_is_used_once_the_switch_is_known(file, storage):
    """A process may learn of the file before it learns who is master."""
    storage.learn([appointed("a", "a1", 1)])
    file.write(a=["a2", "a3"], b=["b1"])
    assert not storage.read_again()
    storage.learn([appointed("a", "a2", 2)])
    assert storage.read_again()
    assert list(storage.nodes) == ["a2", "a3", "b1"]


def test_a_file_that_is_gone_changes_nothing(file, storage):
    file.path.unlink()
    assert not storage.read_again()
    assert list(storage.nodes) == ["a1", "a2", "b1"]


def test_a_master_that_the_file_lacks_is_said_once(storage):
    with capture_logs() as logs:
        for _ in range(3):
            assert not storage.learn([appointed("c", "c1", 2)])
    assert [one["event"] for one in logs] == ["the topology's file lacks a master"]


def test_a_topology_of_no_file_never_changes():
    assert FollowedFile(Topology({})).changed({}) is None


async def test_masters_that_were_kept_serve_on_and_new_servers_are_asked(file):
    async with AsyncStorage(load_topology(file.path), connect_timeout_s=0.1) as storage:
        kept = storage.master("a")
        file.write(a=["a1"], b=["b1"], c=["c1"])
        await storage.look()
        assert kept.node is storage.master("a").node
        assert {node.node.name for node in storage._looks} <= {"a1", "b1", "c1", "a2"}
        assert storage.master("c").node.name == "c1"
