"""What both drivers share: the pool of idle connections, and how an operation learns of a failed script."""

import socket
from contextlib import ExitStack

import pymysql
import pytest
from structlog.testing import capture_logs

from schemaless.errors import Busy, Corrupt, DuplicateKey, Invalid, PacketTooLarge, StorageUnavailable
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.node_core import IDLE_MAX_S, ConnectionPool, Storage, on_node, stamp
from schemaless.storage.operation import query
from schemaless.topology import Appointment, Ballot, Node, Role, StorageCluster, Topology


@pytest.fixture
def closed():
    return []


@pytest.fixture
def pool(closed):
    """Its connections are words; those in capitals are within a transaction."""
    pool = ConnectionPool(closed.append, str.isupper, lambda: pool.now)
    pool.now = 0.0
    return pool


def test_the_one_used_last_is_taken_first(pool, closed):
    """So that a quiet pool shrinks."""
    for name in "abc":
        pool.give(name)
    assert [pool.take() for _ in range(4)] == ["c", "b", "a", None]
    assert closed == []


def test_a_connection_that_was_idle_too_long_is_closed(pool, closed):
    """The server would close it in the middle of an operation."""
    pool.give("old")
    pool.now = IDLE_MAX_S
    pool.give("young")
    pool.now = IDLE_MAX_S + 1
    assert [pool.take(), pool.take()] == ["young", None]
    assert closed == ["old"]


def test_after_a_loss_all_are_closed(pool, closed):
    """A server that came back doesn't fail once for each."""
    for name in "ab":
        pool.give(name)
    pool.give_after("lost", StorageUnavailable("gone"))
    assert (sorted(closed), pool.take()) == (["a", "b", "lost"], None)


def test_connections_that_know_a_packet_s_bound_go_when_it_was_met(pool, closed):
    """B21: it may be raised, and a session keeps the bound that it began with."""
    for name in "ab":
        pool.give(name)
    pool.give_after("refused", PacketTooLarge("1153"))
    assert (sorted(closed), pool.take()) == (["a", "b", "refused"], None)


@pytest.mark.parametrize(
    ("connection", "error", "kept"),
    [
        ("idle", Invalid("field", "is wrong"), True),
        ("idle", Busy("give way"), True),
        ("IN A TRANSACTION", Invalid("field", "is wrong"), False),
        ("idle", KeyboardInterrupt(), False),
        ("idle", ValueError("a bug"), False),
    ],
)
def test_only_a_refusal_outside_a_transaction_keeps_the_connection(pool, closed, connection, error, kept):
    """After anything else nobody knows its state. The others stay."""
    pool.give("other")
    pool.give_after(connection, error)
    assert closed == ([] if kept else [connection])
    assert pool.take() == (connection if kept else "other")


def test_a_refused_script_is_rolled_back_before_the_operation_hears_of_it():
    """It receives our error, with the driver's as its cause, and may go on with another script."""
    heard = []

    def operation():
        try:
            yield "INSERT"
        except DuplicateKey as error:
            heard.append(error)
        (result,) = yield "SELECT"
        return result

    run = on_node(operation(), "a1")
    assert next(run) == "INSERT"
    refusal = pymysql.err.IntegrityError(1062, "Duplicate entry")
    assert run.throw(refusal) == "ROLLBACK"
    assert heard == []
    assert run.send([None]) == "SELECT"
    assert heard[0].__cause__ is refusal
    with pytest.raises(StopIteration, match="row"):
        run.send(["row"])


@pytest.mark.parametrize("failure", [pymysql.err.OperationalError(2013, "lost"), ConnectionResetError("reset")])
def test_a_lost_server_is_not_asked_to_roll_back(failure):
    """It has rolled back by itself, and would not answer."""
    run = on_node(query("SELECT 1"), "a1")
    next(run)
    with pytest.raises(StorageUnavailable, match="a1") as caught:
        run.throw(failure)
    assert caught.value.__cause__ is failure


def test_a_server_that_can_not_roll_back_is_unavailable():
    """Even an operation that handles refusals doesn't get the connection back."""

    def operation():
        try:
            yield "INSERT"
        except DuplicateKey:
            raise Corrupt("must not be reached") from None

    run = on_node(operation(), "a1")
    next(run)
    run.throw(pymysql.err.IntegrityError(1062, "Duplicate entry"))
    with pytest.raises(StorageUnavailable):
        run.throw(ConnectionResetError("reset"))


class Opened:
    """What a driver's node keeps for `Storage`."""

    def __init__(self, node):
        self.node, self.stamp, self.role = node, None, None

    def appoint(self, role):
        self.role = role


@pytest.fixture
def storage():
    """Clusters a and b of two servers each, and no appointment."""
    clusters = {
        name: StorageCluster(name, tuple(Node(f"{name}{n}", name, "127.0.0.1", 1, "", "") for n in (1, 2)))
        for name in "ab"
    }
    return Storage(Topology(clusters), Opened)


def appointed(epoch, master, cluster="a", controller="c", voters=()):
    ballot = Ballot(epoch, controller)
    return Appointment(
        cluster=cluster,
        ballot=ballot,
        master=master,
        is_open=True,
        voters=voters,
        revision=0,
        generation=0,
        changed_at=0,
    )


def masters_of(storage):
    return [name for name, server in storage.nodes.items() if server.role is Role.MASTER]


def test_without_an_appointment_the_first_server_of_the_file_is_master(storage):
    assert masters_of(storage) == ["a1", "b1"]
    assert {server.stamp for server in storage.nodes.values()} == {stamp(0, 0)}


def test_roles_and_stamps_follow_an_appointment(storage):
    """The servers of another cluster hear of the later version, too: their buffer rows depend on it."""
    assert storage.learn([appointed(3, "a2")])
    assert masters_of(storage) == ["a2", "b1"]
    assert (storage.present_master("a").node.name, [one.node.name for one in storage.others("a")]) == ("a2", ["a1"])
    assert (storage.epoch("a"), storage.epoch("b"), storage.version) == (3, 0, 3)
    assert [server.stamp for server in storage.nodes.values()] == [stamp(3, 3)] * 2 + [stamp(0, 3)] * 2


def test_a_former_master_is_no_minion_until_it_follows(storage):
    """It may have cells that nobody else has. Without an appointment all others follow the first server."""
    assert [one.node.name for one in storage.minions("a")] == ["a2"]
    storage.learn([appointed(3, "a2")])
    assert storage.minions("a") == []
    storage.learn([appointed(4, "a2", voters=("a1",))])
    assert [one.node.name for one in storage.minions("a")] == ["a1"]


def test_what_is_known_of_masters_never_goes_back(storage):
    """A server that was away still names the former one. Of one epoch the later controller counts, and nothing is new
    twice.
    """
    assert storage.learn([appointed(3, "a1"), appointed(5, "a2", controller="k"), appointed(4, "a1")])
    stamps = [server.stamp for server in storage.nodes.values()]
    for known in (appointed(5, "a2", controller="k"), appointed(5, "a1", controller="c"), appointed(4, "a1")):
        assert not storage.learn([known])
    assert all(server.stamp is before for server, before in zip(storage.nodes.values(), stamps, strict=True))
    assert (storage.epoch("a"), masters_of(storage)) == (5, ["a2", "b1"])
    assert storage.learn([appointed(5, "a1", controller="l")])
    assert masters_of(storage) == ["a1", "b1"]


@pytest.mark.parametrize("unknown", [appointed(9, "a3"), appointed(9, "b1"), appointed(9, "c1", cluster="c")])
def test_a_master_that_the_file_lacks_is_passed_over(storage, unknown):
    """With a warning, and the others count."""
    with capture_logs() as told:
        assert storage.learn([unknown, appointed(2, "b2", cluster="b")])
    assert (masters_of(storage), storage.version) == (["a1", "b2"], 2)
    assert [line["node"] for line in told if line["log_level"] == "warning"] == [unknown.master]


async def test_a_server_that_takes_no_connection_is_given_up_after_the_connect_timeout():
    """`connect_timeout_s` reaches the driver: four attempts of 0.05 s, and not the 60 s of a statement."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = listener.getsockname()[1]
        for _ in range(3):  # its queue is full: the kernel answers nobody else
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        master = Node("a1", "a", "127.0.0.1", port, "user", "password")
        storage = AsyncStorage(Topology({"a": StorageCluster("a", (master,))}), connect_timeout_s=0.05, timeout_s=60.0)
        async with storage:
            with pytest.raises(StorageUnavailable) as caught:
                await storage.master("a").run(query, "SELECT 1")
    assert "within 60" not in str(caught.value)
