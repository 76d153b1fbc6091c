"""MySQLParkedStore: how much of a master it takes when many rows fail at once."""

import asyncio
import types

from schemaless.consume.parked_store import MySQLParkedStore
from schemaless.topology import Datastore


async def test_rows_are_read_a_few_at_a_time_from_each_master():
    """Whatever fails, the checkpoints, the orders and the report of a worker get their connections."""
    running, most = {"a": 0, "b": 0}, {"a": 0, "b": 0}

    def master(cluster):
        async def run(*_):
            running[cluster] += 1
            most[cluster] = max(most[cluster], running[cluster])
            await asyncio.sleep(0)
            running[cluster] -= 1
            return []

        return types.SimpleNamespace(run=run)

    datastore = Datastore("d", 4, 2, ("a", "b"))
    parked = MySQLParkedStore(types.SimpleNamespace(master=master), datastore, "trigger:p", row_reads_max=3)
    await asyncio.gather(*(parked.of_row(n % 4, bytes(16), ["BASE"], 0, n) for n in range(100)))
    assert (most, running) == ({"a": 3, "b": 3}, {"a": 0, "b": 0})
