"""Both drivers on a server that closes, hangs, is killed and comes back; and what they do with a failed operation."""

import asyncio
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace

import pymysql
import pytest
import uvloop

from schemaless.errors import Busy, DuplicateKey, Invalid, NodeRefuses, Overloaded, StorageUnavailable, TableMissing
from schemaless.runtime.loop_lag import LoopLag
from schemaless.storage import entity_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncServer, AsyncStorage, Traffic, _execute
from schemaless.storage.node_core import connect_options, stamp
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncNode
from schemaless.topology import Node
from tests.log_harness import new_cell
from tests.refusing_node import RefusingNode
from tests.waiting import LIMIT_S, async_until

pytestmark = pytest.mark.storage


class Sync:
    """The synchronous driver with the face of the other one."""

    def __init__(self, node, **options) -> None:
        self.driver = SyncNode(node, **options)

    async def run(self, operation, *args, **options):
        return await asyncio.to_thread(self.driver.run, operation, *args, **options)

    async def close(self):
        self.driver.close()


@pytest.fixture(params=["pymysql", "asyncmy"])
async def open_node(request, topology):
    """Opens a node of cluster b, by default its master, with options."""
    opened = []

    def open_one(node=None, **options):
        kind = Sync if request.param == "pymysql" else AsyncServer
        opened.append(kind(node or topology.cluster("b").nodes[0], **options))
        return opened[-1]

    yield open_one
    for node in opened:
        await node.close()


@pytest.fixture
def server(running):
    """Cluster b's master; it runs again afterwards."""
    handle = running.servers["b1"]
    yield handle
    if handle.alive():
        handle.cont()
    else:
        handle.start()


def connection_id():
    ((number,),) = yield from query("SELECT CONNECTION_ID()")
    return number


async def test_a_connection_is_used_again(open_node):
    """One after the other: one connection."""
    node = open_node()
    assert await node.run(connection_id) == await node.run(connection_id)


async def test_a_connection_that_can_t_be_set_up_is_closed(open_node, topology):
    """A server that refuses every statement for a minute has no connection left otherwise."""
    master = topology.cluster("b").nodes[0]
    with RefusingNode(master.port) as relay:
        node = open_node(replace(master, host="127.0.0.1", port=relay.port, socket=None), timeout_s=0.5)
        relay.refuses.set()
        for _ in range(10):
            with pytest.raises(StorageUnavailable):
                await node.run(connection_id)
        assert relay.refused >= 10
        await async_until(lambda: relay.connected == 0)
        relay.refuses.clear()
        await node.run(connection_id)


async def test_a_refusal_keeps_the_connection(open_node):
    """An operation that refuses what it was asked has read its answers: opening anew would cost more than asking."""
    node = open_node(connections_max=1)
    before = await node.run(connection_id)

    def refusing():
        yield "SELECT 1"
        raise Invalid("field", "is wrong")

    def misspelt():
        yield "SELECT nothing FROM schemaless.nowhere"

    for operation, error in ((refusing, Invalid), (misspelt, TableMissing)):
        with pytest.raises(error):
            await node.run(operation)
        assert await node.run(connection_id) == before


async def test_every_session_is_set(open_node):
    """I3, I4: READ COMMITTED, UTC, strict; a lost client's locks don't outlive a minute."""
    rows = await open_node().run(query, "SELECT @@time_zone, @@sql_mode, @@innodb_lock_wait_timeout, @@wait_timeout")
    zone, mode, lock_wait_s, idle_s = rows[0]
    assert (zone, lock_wait_s, idle_s) == ("+00:00", 1, 60)
    assert "STRICT_ALL_TABLES" in mode


async def test_a_writer_that_stands_still_loses_its_locks(async_server, topology, make_datastore):
    """A process stopped between lock and commit holds up its shard for seconds; MySQL's minute is shortened here."""
    datastore = make_datastore(shards=1, partitions=1, placement=("b",))
    node = async_server(topology.cluster("b").nodes[0], timeout_s=3.0)
    standing = await node._connect()
    await _execute(standing, "SET wait_timeout = 5 /*M! * 12 */")
    await _execute(standing, next(shard_head.lock(datastore.name, [0])))
    outcomes = await async_until(lambda: node.run(entity_table.put_cells, datastore, [new_cell(datastore)]))
    assert [placed.added_id for placed in outcomes] == [1]
    standing.close()


async def test_a_killed_connection_is_opened_again(open_node):
    """The operation runs again from its start; the caller notices nothing."""
    node, other = open_node(), open_node()
    victim = await node.run(connection_id)
    await other.run(query, f"KILL {victim}")
    assert await node.run(connection_id) != victim


async def test_a_killed_connection_is_opened_again_also_after_a_promotion(open_node):
    """Its first statement tells the session what the process believes now. A loss then is a loss like any other."""
    node, other = open_node(), open_node()
    victim = await node.run(connection_id)
    await other.run(query, f"KILL {victim}")
    getattr(node, "driver", node).stamp = stamp(1, 1)
    assert await node.run(connection_id) != victim


async def test_a_server_that_came_back_is_served_at_once(open_node, server):
    """Connections from before its death don't fail one by one."""
    node = open_node(connections_max=8)
    await asyncio.gather(*(node.run(query, "SELECT SLEEP(0.05)") for _ in range(8)))
    server.kill()
    with pytest.raises(StorageUnavailable):
        await node.run(connection_id)
    server.start()
    for _ in range(10):
        assert await node.run(connection_id)


async def test_a_hung_server_is_given_up_in_time(open_node, server):
    """I14: SIGSTOP leaves the port open; the time-out holds all the same."""
    node = open_node(timeout_s=1.0)
    await node.run(connection_id)
    server.stop()
    with pytest.raises(StorageUnavailable):
        await node.run(connection_id)
    server.cont()
    assert await node.run(connection_id)


async def test_errors_are_ours(open_node, make_datastore):
    """I15: translated in one place, the driver's error kept as the cause."""
    make_datastore(placement=("b",))
    node = open_node()
    for statement, kind in (
        ("SELECT * FROM schemaless.nothing", TableMissing),
        ("SELECT nothing", NodeRefuses),
        ("INSERT INTO schemaless.format SELECT version FROM schemaless.format", DuplicateKey),
    ):
        with pytest.raises(kind, match="b1") as caught:
            await node.run(query, statement)
        assert caught.value.__cause__ is not None
    assert await node.run(connection_id)


async def test_a_failed_operation_leaves_no_transaction_behind(open_node, make_datastore):
    """What an operation wrote before it raised is rolled back, and its locks are free."""
    datastore = make_datastore(placement=("b",))
    node = open_node(connections_max=1)
    lock = f"SELECT head FROM schemaless.shard_head WHERE datastore = '{datastore.name}' AND shard = 0 FOR UPDATE"

    def failing():
        yield f"BEGIN; {lock}"
        raise Invalid("field", "is wrong")

    with pytest.raises(Invalid):
        await node.run(failing)
    await open_node().run(query, lock)


async def test_an_operation_may_handle_its_error(open_node, make_datastore):
    """A refused script is thrown into the operation, rolled back; it may go on with another."""
    make_datastore(placement=("b",))

    def handling():
        try:
            yield "INSERT INTO schemaless.format SELECT version FROM schemaless.format"
        except DuplicateKey:
            return (yield from query("SELECT 'handled'"))
        return None

    assert await open_node().run(handling) == (("handled",),)


async def test_busy_is_tried_again(open_node):
    """A bounded number of times, each from the start."""
    attempts = []

    def busy():
        attempts.append(1)
        yield "SELECT 1"
        raise Busy("give way")

    with pytest.raises(Busy):
        await open_node().run(busy)
    assert len(attempts) == 4


async def test_what_is_not_idempotent_is_not_run_again_after_a_loss(open_node):
    """A connection lost with the outcome unknown: the caller decides, not the driver."""
    attempts = []

    def lost():
        attempts.append(1)
        ((number,),) = yield from query("SELECT CONNECTION_ID()")
        yield f"KILL {number}"

    with pytest.raises(StorageUnavailable):
        await open_node().run(lost, again_on=(Busy,))
    assert len(attempts) == 1


def test_threads_share_a_bounded_pool(topology):
    """I14: never more connections than allowed, and everybody is served."""
    node = SyncNode(topology.cluster("b").nodes[0], connections_max=2)
    seen = set()

    def work():
        for _ in range(20):
            seen.add(node.run(connection_id))

    with closing(node), ThreadPoolExecutor(6) as pool:
        for working in [pool.submit(work) for _ in range(6)]:
            working.result()
    assert 1 <= len(seen) <= 2


def test_a_server_that_dies_while_it_is_connected_to_is_away():
    """It resets each connection at once, as a kill does. Whatever the driver makes of it, on the loop of the services,
    is our error (I15).
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=reset_all, args=(listener,), daemon=True).start()
        dying = AsyncServer(Node("n", "a", "127.0.0.1", listener.getsockname()[1], "u", "p"))
        assert uvloop.run(errors_of(dying, 150)) == {StorageUnavailable}


def reset_all(listener):
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()


async def errors_of(node, tries):
    answers = [node.run(shard_head.position, again_on=()) for _ in range(tries)]
    return {type(error) for error in await asyncio.gather(*answers, return_exceptions=True)}


async def test_each_kind_of_traffic_has_connections_of_its_own(async_server, topology):
    """S9: time in our own queue is nobody's failure, and a probe doesn't wait behind slow reads."""
    node = async_server(topology.cluster("b").nodes[0], shares=dict.fromkeys(Traffic, 1))
    with closing(pymysql.connect(**connect_options(node.node))) as holder, holder.cursor() as cursor:
        cursor.execute("SELECT GET_LOCK('slow', 0)")
        slow = asyncio.create_task(node.run(query, "SELECT GET_LOCK('slow', 600)", timeout_s=LIMIT_S))
        await asyncio.sleep(0)  # it has the only connection for reads
        with pytest.raises(Overloaded, match="for read was free"):
            await node.run(query, "SELECT 1", timeout_s=0.1)
        for traffic in (Traffic.PROBE, Traffic.WRITE):
            assert await node.run(query, "SELECT 1", timeout_s=LIMIT_S, traffic=traffic) == ((1,),)
        assert not slow.done()
        cursor.execute("SELECT RELEASE_LOCK('slow')")
        assert await slow == ((1,),)


async def test_a_loop_that_stands_still_while_it_connects_blames_no_server():
    """S8: the server's greeting lies in the socket. No breaker may open for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node = Node("n", "a", "127.0.0.1", listener.getsockname()[1], "u", "p")
        lag = LoopLag()
        ticking = asyncio.create_task(lag.run())
        silent = AsyncServer(node, connect_timeout_s=0.2, loop_lag=lag)
        asked = asyncio.create_task(silent.run(shard_head.position, again_on=()))
        await asyncio.sleep(0.05)
        time.sleep(0.8)  # noqa: ASYNC251
        with pytest.raises(Overloaded):
            await asked
        await blamed(lambda: silent.run(shard_head.position, again_on=()))
        ticking.cancel()


async def blamed(ask):
    """Returns when an answer that doesn't come is the server's fault: the loop may stand still again meanwhile."""

    async def is_blamed():
        with suppress(Overloaded):
            try:
                await ask()
            except StorageUnavailable:
                return True

    await async_until(is_blamed)


async def test_a_loop_that_stood_still_is_not_taken_for_a_dead_server(topology):
    """S8: the answer lies in the socket when the time-out fires, and the call gets it."""
    async with AsyncStorage(topology) as storage:
        node = storage.master("b")
        await node.run(query, "SELECT 1")
        await asyncio.sleep(0.2)

        async def late_answers():  # again where the server stood still, too
            asked = [asyncio.create_task(node.run(query, "SELECT SLEEP(0.05)", timeout_s=0.5)) for _ in range(4)]
            await asyncio.sleep(0.01)
            time.sleep(0.8)  # noqa: ASYNC251
            return await asyncio.gather(*asked)

        assert await async_until(late_answers) == [((0,),)] * 4
        assert storage.loop_lag.longest_s > 0.5
        await blamed(lambda: node.run(query, "SELECT SLEEP(30)", timeout_s=0.2))
