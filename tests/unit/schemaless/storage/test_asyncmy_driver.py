"""Connections of the asynchronous driver."""

import asyncio
import contextlib
from types import SimpleNamespace

from schemaless.storage import asyncmy_driver
from schemaless.storage.asyncmy_driver import AsyncNode
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
