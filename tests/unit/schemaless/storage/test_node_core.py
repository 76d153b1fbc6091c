"""What both drivers share: the pool of idle connections, and how an operation learns of a failed script."""

import socket
from contextlib import ExitStack

import pymysql
import pytest

from schemaless.errors import Busy, Corrupt, DuplicateKey, Invalid, StorageUnavailable
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.node_core import IDLE_MAX_S, ConnectionPool, on_node
from schemaless.storage.operation import query
from schemaless.topology import Node, Role, StorageCluster, Topology


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

    run = on_node(operation(), "a-master")
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
    run = on_node(query("SELECT 1"), "a-master")
    next(run)
    with pytest.raises(StorageUnavailable, match="a-master") as caught:
        run.throw(failure)
    assert caught.value.__cause__ is failure


def test_a_server_that_can_not_roll_back_is_unavailable():
    """Even an operation that handles refusals doesn't get the connection back."""

    def operation():
        try:
            yield "INSERT"
        except DuplicateKey:
            raise Corrupt("must not be reached") from None

    run = on_node(operation(), "a-master")
    next(run)
    run.throw(pymysql.err.IntegrityError(1062, "Duplicate entry"))
    with pytest.raises(StorageUnavailable):
        run.throw(ConnectionResetError("reset"))


async def test_a_server_that_takes_no_connection_is_given_up_after_the_connect_timeout():
    """`connect_timeout_s` reaches the driver: four attempts of 0.05 s, and not the 60 s of a statement."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = listener.getsockname()[1]
        for _ in range(3):  # its queue is full: the kernel answers nobody else
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        master = Node("a-master", "a", Role.MASTER, "127.0.0.1", port, "user", "password")
        storage = AsyncStorage(Topology({"a": StorageCluster("a", master)}), connect_timeout_s=0.05, timeout_s=60.0)
        async with storage:
            with pytest.raises(StorageUnavailable) as caught:
                await storage.master("a").run(query, "SELECT 1")
    assert "within 60" not in str(caught.value)
