"""What one API process shares, and what it is put together from: connections to each server, and what writes obey."""

import asyncio
import time

from api.state import opened_state
from schemaless.cell import Cell, CellKey, ColumnName, RefKey, RowKey
from schemaless.config import ApiSettings
from schemaless.errors import StorageUnavailable
from schemaless.storage import asyncmy_driver, buffer_table
from schemaless.storage.asyncmy_driver import AsyncServer, Traffic
from schemaless.storage.operation import query
from schemaless.storage.shard_head import CLOCK_AHEAD_MAX_S
from schemaless.topology import Datastore, Node, StorageCluster, Topology

MASTER = Node("a1", "a", "127.0.0.1", 1, "user", "password")
TOPOLOGY = Topology({"a": StorageCluster("a", (MASTER,))})


async def test_a_put_says_which_created_at_is_the_latest_to_believe(monkeypatch, tmp_path):
    """I4, S17: a minute ahead of the process's own clock, while no other master says more."""
    told = []

    async def run(node, operation, *args, **options):
        if operation is buffer_table.put_copies:
            told.append(args[-1])
        raise StorageUnavailable("nobody is there")

    monkeypatch.setattr(AsyncServer, "run", run)
    cell = Cell(CellKey(RowKey(bytes(16)), ColumnName("BASE"), RefKey(1)), b"body")
    before = time.time()
    async with opened_state(ApiSettings(topology=tmp_path, kafka="127.0.0.1:9"), TOPOLOGY) as state:
        await state.writer.put(Datastore("trips", 1, 1, ("a",)), [cell])
    (latest,) = told
    assert before + CLOCK_AHEAD_MAX_S - 1 < latest / 1e6 < time.time() + CLOCK_AHEAD_MAX_S + 1


async def test_reads_and_probes_dont_wait_for_writes(monkeypatch, tmp_path):
    """S9: writes that wait for a server hold all connections that writes may have. A read and a probe have theirs."""
    hangs = False
    connecting = set()

    async def connect(**options):
        if not hangs:
            raise OSError("nobody is there")
        connecting.add(asyncio.current_task())
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncmy_driver.asyncmy, "connect", connect)
    settings = ApiSettings(topology=tmp_path, kafka="127.0.0.1:9", connections_max=64)
    async with opened_state(settings, TOPOLOGY) as state:
        hangs = True

        def ask(traffic):
            node = state.storage.master("a")
            return asyncio.create_task(node.run(query, "SELECT 1", traffic=traffic, again_on=()))

        writes = [ask(Traffic.WRITE) for _ in range(settings.connections_max)]
        for _ in range(5):
            await asyncio.sleep(0)
        others = [ask(traffic) for traffic in (Traffic.READ, Traffic.PROBE)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert 0 < len(connecting.intersection(writes)) < len(writes)
        assert connecting.issuperset(others)
        for task in (*writes, *others):
            task.cancel()
        await asyncio.gather(*writes, *others, return_exceptions=True)
