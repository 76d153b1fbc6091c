"""A server is made anew by one controller only, and not by one that was late: S1 of the rules, on real servers."""

import itertools
import sys
import threading
import time

import pytest

from controller.decide import Remake
from controller.rejoin import REMAKING, Rejoining
from controller.server import Server
from schemaless.errors import StateConflict
from schemaless.runtime.events import Event, observing
from schemaless.topology import Appointment, Ballot
from tests.integration.controller.test_server import StorageServers, make_tables, three_servers

pytestmark = [pytest.mark.storage, pytest.mark.timeout(120)]

REMADE = """
import pathlib, sys, time

folder = pathlib.Path(sys.argv[1])
(folder / sys.argv[2]).touch()
while not (folder / "done").exists():
    time.sleep(0.02)
"""


EPOCHS = itertools.count(10, 10)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """a1 is the master, a2 follows it, and a3 is the former master that waits to be made anew."""
    with three_servers(tmp_path_factory.mktemp("remake")) as (started, servers):
        make_tables(started, servers)
        yield started


class Late:
    """A controller that is about to make a3 anew, and stands still where it is told to."""

    def __init__(self, running, folder):
        self.servers = StorageServers(running)
        self.ballot = Ballot(next(EPOCHS), "x")
        self.folder = folder
        self.steps = []
        self.over = threading.Event()
        (folder / "remade.py").write_text(REMADE)
        (folder / "done").touch()
        command = f"{sys.executable} {folder / 'remade.py'} {folder}"
        self.rejoining = Rejoining(running.administrators, running.topology, command)
        for name in ("a1", "a2", "a3"):
            with self.servers.acting(name, self.ballot) as act:
                act.appoint([self.appointment(0, "a2")])
                if name == "a3":
                    act.detach()

    def appointment(self, revision, *voters):
        return Appointment("a", self.ballot, revision, "a1", True, voters, 0, 1)

    def appoint(self, appointment, *names):
        for name in names:
            with Server(self.servers.administrators[name]) as server:
                server.appoint([appointment])

    def begin(self):
        def tell(_, step, told):
            self.steps.append((step, told))
            self.over.set()

        self.rejoining.found("a3", self.servers.look("a3"), self.ballot)
        self.rejoining.begin(Remake("a3", "a2"), [], "a1", tell)

    def ends(self):
        """The step that it told, and whether the command ran."""
        assert self.over.wait(30)
        (told,) = self.steps
        return told, (self.folder / "a3").exists()


@pytest.fixture
def late(running, tmp_path):
    return Late(running, tmp_path)


def test_a_server_that_nobody_used_meanwhile_is_made_anew(late):
    late.begin()
    (step, _), ran = late.ends()
    assert (step, ran) == ("made anew", True)


def test_a_server_that_promised_more_meanwhile_is_not(late):
    with late.servers.acting("a3", Ballot(late.ballot.epoch + 1, "y")):
        pass
    late.begin()
    (step, told), ran = late.ends()
    assert (step, ran) == ("waits", False)
    assert "a3 promised ballot" in told


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_controller_that_stands_still_before_the_command_is_late(late, epochs):
    """Another one acts there meanwhile, under the same ballot or a higher one, and so ends the late one's session."""

    def act(*_):
        with late.servers.acting("a3", Ballot(late.ballot.epoch + epochs, "x")):
            pass

    with observing(act, Event.REMAKE_BEGINS):
        late.begin()
        (step, _), ran = late.ends()
    assert (step, ran) == ("waits", False)


@pytest.mark.parametrize("names", [("a1", "a2"), ("a3",)])
def test_a_voter_is_not_made_anew(late, names):
    """It may have what was confirmed, and would forget what it promised. The ballot is still the same."""
    with observing(lambda *_: late.appoint(late.appointment(1, "a2", "a3"), *names), Event.REMAKE_BEGINS):
        late.begin()
        (step, told), ran = late.ends()
    assert (step, ran) == ("waits", False)
    assert "a3 is another one meanwhile" in told


def test_a_server_that_started_again_meanwhile_is_not_made_anew(late, running):
    """Somebody else may have made it anew. So it is looked at again first."""
    seen = late.servers.look("a3")
    running.servers["a3"].terminate()
    time.sleep(1.1)
    running.servers["a3"].start()
    late.servers.look = lambda name: seen
    late.begin()
    (step, _), ran = late.ends()
    assert (step, ran) == ("waits", False)


def test_two_controllers_make_no_server_of_a_cluster_anew_at_the_same_time(late):
    """The second one can't have the lock before the first one's command has ended."""
    (late.folder / "done").unlink()
    late.begin()
    while not (late.folder / "a3").exists():
        assert not late.over.is_set(), late.steps
        time.sleep(0.02)
    with Server(late.servers.administrators["a1"]) as other:
        with pytest.raises(StateConflict, match="another controller holds"):
            other.hold(REMAKING)
        (late.folder / "done").touch()
        assert late.ends()[0][0] == "made anew"
        other.hold(REMAKING)
