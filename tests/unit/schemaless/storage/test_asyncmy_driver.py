"""Connections of the asynchronous driver."""

import asyncio
import contextlib
import socket
import threading
from types import SimpleNamespace

import pytest

from schemaless.errors import AccountRefused, Overloaded, StaleTopology, StorageUnavailable
from schemaless.runtime.loop_lag import LoopLag
from schemaless.storage import asyncmy_driver, placement_table
from schemaless.storage.asyncmy_driver import AsyncServer, AsyncStorage, Traffic, shares_of
from schemaless.storage.operation import query
from schemaless.topology import Appointment, Ballot, Node, Role, StorageCluster, Topology


async def test_a_cancellation_that_meets_a_new_connection_is_not_lost(monkeypatch):
    """Python 3.11's wait_for, which the driver uses, drops it. A task would live on though it was cancelled."""
    made = asyncio.get_running_loop().create_future()
    answered = asyncio.Event()

    async def connect(**options):
        await asyncio.wait_for(made, 60)
        return SimpleNamespace(close=lambda: None, query=answers)

    async def answers(script):
        answered.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncmy_driver.asyncmy, "connect", connect)
    node = AsyncServer(Node(name="a", cluster="a", host="127.0.0.1", port=1, user="", password=""))
    task = asyncio.create_task(node.run(query, "SELECT 1"))
    for _ in range(5):
        await asyncio.sleep(0)
    made.set_result(None)
    task.cancel()
    lives_on = asyncio.create_task(answered.wait())
    await asyncio.wait([task, lives_on], return_when=asyncio.FIRST_COMPLETED)
    lives_on.cancel()
    assert task.cancelled()
    with contextlib.suppress(asyncio.CancelledError):
        await lives_on


async def test_a_look_for_masters_ends_with_its_storage(monkeypatch):
    """Its connections would stay open. Nobody else ends it: those who waited for it are gone."""
    began, ended = asyncio.Event(), []

    async def answers(server, operation, *args, **options):
        return [], 0, []

    async def hangs(server, operation, *args, **options):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(server.node.name)

    monkeypatch.setattr(AsyncServer, "run", answers)
    a1 = Node("a1", "a", host="127.0.0.1", port=1, user="", password="")
    async with AsyncStorage(Topology({"a": StorageCluster("a", (a1,))})) as storage:
        monkeypatch.setattr(AsyncServer, "run", hangs)
        waiting = asyncio.create_task(storage.look())
        await began.wait()
        waiting.cancel()
    assert ended == ["a1"]


async def test_the_master_that_is_asked_is_the_one_that_the_servers_name(monkeypatch):
    """A late process asks the former master, is refused, looks, and asks the present one. One that isn't late hears
    the refusal.
    """
    known, asked = [], []

    async def run(server, operation, *args, **options):
        if operation is placement_table.look:
            return known, 0, []
        asked.append((server.node.name, server.role))
        raise StaleTopology(f"{server.node.name} takes no writes")

    monkeypatch.setattr(AsyncServer, "run", run)
    nodes = tuple(Node(name, "a", host="127.0.0.1", port=1, user="", password="") for name in ("a1", "a2"))
    async with AsyncStorage(Topology({"a": StorageCluster("a", nodes)})) as storage:
        with pytest.raises(StaleTopology, match="a1"):
            await storage.master("a").run(query, "SELECT 1")
        known.append(
            Appointment(
                cluster="a",
                ballot=Ballot(1, "c"),
                master="a2",
                is_open=True,
                voters=(),
                revision=0,
                generation=0,
                changed_at=0,
            )
        )
        with pytest.raises(StaleTopology, match="a2"):
            await storage.master("a").run(query, "SELECT 1")
        assert storage.nodes["a1"].role is Role.MINION
    assert asked == [("a1", Role.MASTER), ("a1", Role.MASTER), ("a2", Role.MASTER)]


@pytest.mark.parametrize("connections_max", [4, 8, 16, 17, 100])
def test_the_kinds_of_traffic_share_the_connections_to_a_server(connections_max):
    """No more in all than there were. Two hundred processes would fill a server."""
    shares = shares_of(connections_max)
    assert sum(shares.values()) == connections_max
    assert min(shares.values()) >= 1
    assert shares.keys() == set(Traffic)


@pytest.mark.parametrize(("passes_s", "error"), [(1.0, Overloaded), (0.0555, StorageUnavailable)])
async def test_a_statement_that_a_late_loop_gives_up_blames_no_server(monkeypatch, passes_s, error):
    """S8: the loop stood still, so nobody read the answer, and no breaker may open. A server that had all its time, of
    a loop that was on time, is to blame.
    """
    now = [0.0]
    lag = LoopLag(lambda: now[0])
    lag.tick()

    async def never(script):
        now[0] += passes_s
        await asyncio.Event().wait()

    async def connect(**options):
        return SimpleNamespace(close=lambda: None, query=never)

    monkeypatch.setattr(asyncmy_driver.asyncmy, "connect", connect)
    node = Node(name="a", cluster="a", host="127.0.0.1", port=1, user="", password="")
    with pytest.raises(error):
        await AsyncServer(node, loop_lag=lag).run(query, "SELECT 1", timeout_s=0.055, again_on=())


async def test_a_server_that_is_gone_before_the_stamp_is_away(monkeypatch):
    """The stamp is the first statement on a connection, before those of the operation. Its errors are ours, too."""
    connection = SimpleNamespace(close=lambda: None)

    async def answers(script):
        if script.startswith("SET @epoch"):
            raise asyncmy_driver.asyncmy.errors.OperationalError(2006, "MySQL server has gone away")
        connection._result = SimpleNamespace(rows=((1 << 24,),), affected_rows=0, has_next=False)

    async def connect(**options):
        connection.query = answers
        return connection

    monkeypatch.setattr(asyncmy_driver.asyncmy, "connect", connect)
    node = Node(name="a", cluster="a", host="127.0.0.1", port=1, user="", password="")
    with pytest.raises(StorageUnavailable, match="gone away"):
        await AsyncServer(node).run(query, "SELECT 1", again_on=())


async def test_a_server_that_refuses_the_account_is_known_until_it_says_something_else(monkeypatch):
    """Who skips it tells why. What is kept has no frames, which hold what was asked."""
    errors = [asyncmy_driver.asyncmy.errors.OperationalError(1045, "Access denied"), OSError("nobody listens")]

    async def connect(**options):
        raise errors.pop(0)

    monkeypatch.setattr(asyncmy_driver.asyncmy, "connect", connect)
    server = AsyncServer(Node(name="a", cluster="a", host="127.0.0.1", port=1, user="u", password=""))
    with pytest.raises(AccountRefused):
        await server.run(query, "SELECT 1", again_on=())
    assert (server.refused.shown, server.refused.__traceback__) == ("a refuses the account 'u'", None)
    with pytest.raises(StorageUnavailable, match="nobody listens"):
        await server.run(query, "SELECT 1", again_on=())
    assert server.refused is None


async def test_a_name_that_hangs_costs_its_own_node_only(monkeypatch):
    """B9: the driver's look-up would fill the four threads in which all nodes' names are looked up."""
    hangs, asked, connected = threading.Event(), [], []

    def getaddrinfo(name, *args, **options):
        asked.append(name)
        if name == "a.internal":
            hangs.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    async def connect(**options):
        connected.append(options["host"])
        raise OSError("nobody listens")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(asyncmy_driver.asyncmy, "connect", connect)
    nodes = [
        AsyncServer(
            Node(name=name, cluster=name, host=f"{name}.internal", port=1, user="", password=""),
            connect_timeout_s=timeout_s,
        )
        for name, timeout_s in (("a", 0.05), ("b", 60.0))
    ]
    try:
        for _ in range(8):
            with pytest.raises(StorageUnavailable, match=r"a: .*no address of a\.internal within 0.05 s"):
                await nodes[0].run(query, "SELECT 1", again_on=())
        with pytest.raises(StorageUnavailable, match="b: nobody listens"):
            await nodes[1].run(query, "SELECT 1", again_on=())
    finally:
        hangs.set()
    assert (asked, connected) == (["a.internal", "b.internal"], ["b.internal"])
