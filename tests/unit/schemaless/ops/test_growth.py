"""What keeps a server from joining, asked of sessions that answer what a test says; and which names are taken."""

import pytest

from schemaless.errors import Misconfigured, NotFound
from schemaless.ops.growth import Joining, verify_new_cluster, verify_new_node
from schemaless.topology import Node, StorageCluster, Topology

SETTINGS = {"log_bin": "ON", "binlog_format": "ROW", "read_only": "ON", "max_allowed_packet": "67108864"}


class Session:
    def __init__(self, name, mariadb=True, version="10.11.6-MariaDB", now=1000.0, **settings):
        self.node, self.mariadb = Node(name, "m", "h", 1, "u", "p"), mariadb
        self._version, self._now, self._settings = version, now, SETTINGS | settings

    def query(self, script):
        if "VERSION" in script:
            return [{"it": self._version}]
        if "UNIX_TIMESTAMP" in script:
            return [{"it": self._now}]
        return [{"Variable_name": name, "Value": value} for name, value in self._settings.items()]


MYSQL = {"mariadb": False, "version": "9.7.0"}
FAULTS = {
    "another kind": (MYSQL, "n1 is MySQL and m1 is MariaDB"),
    "another version": ({"version": "11.4.2-MariaDB"}, "n1 has version 11.4.2-MariaDB and m1 has 10.11.6-MariaDB"),
    "a clock that is behind": ({"now": 990.0}, "the clock of n1 is -10 s from that of m1"),
    "a clock that is ahead": ({"now": 1006.0}, "the clock of n1 is +6 s from that of m1"),
    "no binary log": ({"log_bin": "OFF"}, "log_bin is OFF on n1, and ON on m1"),
    "no rows in it": ({"binlog_format": "STATEMENT"}, "binlog_format is STATEMENT on n1, and ROW on m1"),
    "writes": ({"read_only": "OFF"}, "on n1 read_only is OFF, and must be ON"),
}


def faults(**how):
    joining = Joining(Session("n1").node, Session("n1", **how), Session("m1"))
    return [*joining._kind(), *joining._settings(), *joining._clock()]


def test_a_server_like_the_others_has_no_fault():
    """Nor has one of a later patch, or whose clock is some seconds from the other's."""
    assert faults() == faults(version="10.11.9-MariaDB", now=1004.0) == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_a_sentence(name):
    how, why = FAULTS[name]
    assert any(why in fault for fault in faults(**how))


@pytest.fixture
def topology():
    clusters = [StorageCluster(name, (Session(f"{name}1").node, Session(f"{name}2").node)) for name in "mn"]
    return Topology({cluster.name: cluster for cluster in clusters})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("n", "there is a cluster 'n' already"),
        ("a", "'a' comes before 'm' in the alphabet, and the first cluster has to stay m"),
        ("O", "can't be called 'O'"),
        ("", "can't be called ''"),
        ("o" * 33, "can't be called"),
    ],
)
def test_a_cluster_s_name_is_new_and_comes_last(topology, name, why):
    """The first master decides between two writers, and processes learn of a cluster one after the other."""
    with pytest.raises(Misconfigured, match=why):
        verify_new_cluster(topology, name)
    verify_new_cluster(topology, "o")


def test_a_server_s_name_is_new(topology):
    with pytest.raises(NotFound, match="there is no storage cluster 'x': there are m, n"):
        verify_new_node(topology, "x", "x1")
    with pytest.raises(Misconfigured, match="cluster m has a server 'm2' already"):
        verify_new_node(topology, "n", "m2")
    verify_new_node(topology, "n", "n3")
