"""Connections of the asynchronous driver."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from schemaless.errors import Overloaded, StorageUnavailable
from schemaless.runtime.loop_lag import LoopLag
from schemaless.storage import asyncmy_driver
from schemaless.storage.asyncmy_driver import AsyncNode, Traffic, shares_of
from schemaless.storage.operation import query
from schemaless.topology import Node, Role


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
    node = AsyncNode(Node(name="a", cluster="a", role=Role.MINION, host="", port=1, user="", password=""))
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


@pytest.mark.parametrize("connections_max", [3, 8, 16, 17, 100])
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
    node = Node(name="a", cluster="a", role=Role.MINION, host="", port=1, user="", password="")
    with pytest.raises(error):
        await AsyncNode(node, loop_lag=lag).run(query, "SELECT 1", timeout_s=0.055, again_on=())
