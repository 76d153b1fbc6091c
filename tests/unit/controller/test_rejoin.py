"""What a controller remembers of servers with a tail, and what it does when nothing can be done. No server answers."""

import threading

import msgspec
import pytest

from controller.decide import Diverged, Keep, Remake
from controller.rejoin import Rejoining
from controller.server import Observed
from schemaless.stack.plan import free_ports
from schemaless.topology import Appointment, Ballot, Node, StorageCluster, Topology

BALLOT = Ballot(5, "x")
APPOINTMENT = Appointment("a", BALLOT, 0, "a2", True, ("a3",), 5, 0)
SEEN = {"a1": Observed(100, 1_000, True, True, True, None, [], None, "", "")}


@pytest.fixture
def rejoining():
    nodes = [
        Node(name, "a", "127.0.0.1", port, "root", "")
        for name, port in zip(("a1", "a2", "a3"), free_ports(3), strict=True)
    ]
    topology = Topology({"a": StorageCluster("a", tuple(nodes))})
    return Rejoining(topology, topology, "true")


def test_a_tail_is_known_until_the_server_or_its_master_is_another(rejoining):
    """Then it is looked at again, as after the server was made anew by a person."""
    assert rejoining.tails(SEEN, APPOINTMENT) == {}
    rejoining.found("a1", SEEN["a1"], BALLOT)
    assert rejoining.tails(SEEN, APPOINTMENT) == {"a1": Diverged(None, is_due=True)}
    assert rejoining.tails({}, APPOINTMENT) == {}
    started_again = {"a1": msgspec.structs.replace(SEEN["a1"], started_at=1_001)}
    assert rejoining.tails(started_again, APPOINTMENT) == {}
    assert rejoining.tails(SEEN, msgspec.structs.replace(APPOINTMENT, ballot=Ballot(6, "x"))) == {}


@pytest.mark.parametrize("decided", [Keep("a1"), Remake("a1", "a3")])
def test_what_fails_is_told_and_tried_again_later(rejoining, decided):
    """Until then the cluster has nothing to do for this server."""
    told, over = [], threading.Event()

    def tell(ballot, step, sentence):
        told.append((ballot, step))
        assert not rejoining.tails(SEEN, APPOINTMENT)["a1"].is_due
        assert sentence.startswith("a1: ")
        over.set()

    rejoining.found("a1", SEEN["a1"], BALLOT)
    rejoining.begin(decided, [APPOINTMENT], "a2", tell)
    assert over.wait(30)
    assert told == [(BALLOT, "waits")]
