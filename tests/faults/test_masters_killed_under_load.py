"""Masters and minions die and hang while puts run: nothing acknowledged is lost, no log has a hole (I3, I5, I6)."""

import asyncio
import os
import random
import uuid
from collections import Counter
from pathlib import Path

import pytest

from api.write.put import CellWriter, PutOutcome
from cleaner.service import Cleaner
from schemaless.cell import Cell, CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.config import ApiSettings
from schemaless.storage import entity_table, shard_head
from schemaless.storage.operation import query
from schemaless.storage.sql import sql
from tests.waiting import async_until

pytestmark = [pytest.mark.storage, pytest.mark.faults]

SETTINGS = ApiSettings(topology=Path("unused"), kafka="unused")
CALLERS = 16
ROUNDS = 50 if os.environ.get("SCHEMALESS_FAULTS_LONG") else 1


@pytest.fixture
def servers(running):
    yield running.servers
    for server in running.servers.values():
        if server.alive():
            server.cont()
        else:
            server.start()


def random_cell(rng: random.Random) -> Cell:
    """Mostly new; now and then one that others write too, with a body of its own."""
    row = uuid.UUID(int=rng.randrange(200)) if rng.random() < 0.2 else uuid.uuid4()
    return Cell(CellKey(RowKey(row.bytes), ColumnName("BASE"), RefKey(1)), encode_body({"n": rng.randrange(2)}))


async def put_until(stop: asyncio.Event, writer: CellWriter, datastore, seed: int, told: list) -> None:
    rng = random.Random(seed)
    while not stop.is_set():
        cells = [random_cell(rng) for _ in range(rng.choice([1, 1, 1, 10]))]
        told += zip(cells, await writer.put(datastore, cells), strict=True)


async def strike(servers) -> None:
    """Every kind of harm to each kind of server, one after the other."""
    for name in ("a1", "b2", "b1"):
        await asyncio.sleep(0.7)
        servers[name].kill()
        await asyncio.sleep(0.5)
        servers[name].start()
    for name in ("a1", "b1"):
        await asyncio.sleep(0.7)
        servers[name].stop()
        await asyncio.sleep(1.0)
        servers[name].cont()
    await asyncio.sleep(0.7)


def has_each_kind(told: list) -> bool:
    """Whether enough puts had each of the outcomes that matter."""
    counts = Counter((outcome.status, outcome.copies) for _, outcome in told if isinstance(outcome, PutOutcome))
    return counts[PutStatus.STORED, 2] > 500 and counts[PutStatus.BUFFERED, 1] > 0 and counts[PutStatus.STORED, 1] > 0


async def quiet(async_storage, datastore) -> None:
    """Returns when every buffer is empty: all cells were confirmed on minions."""
    select = sql("SELECT COUNT(*) FROM schemaless.buffer WHERE datastore = %s", datastore.name.encode())

    async def are_empty():
        return not any([(await async_storage.master(name).run(query, select))[0][0] for name in ("a", "b")])

    await async_until(are_empty)


async def logs(async_storage, datastore) -> dict:
    """All stored cells by key, after density and order of each shard's log are checked against its head."""
    found = {}
    for cluster in datastore.placement:
        node = async_storage.master(cluster)
        for head in await node.run(shard_head.heads, datastore.name):
            cells = await node.run(entity_table.read_after, datastore, head.shard, 0, 10**6)
            assert [cell.added_id for cell in cells] == list(range(1, head.added_id + 1))
            assert [cell.created_at for cell in cells] == sorted(cell.created_at for cell in cells)
            found.update({cell.key: cell for cell in cells})
    return found


async def test_nothing_acknowledged_is_lost_while_servers_die_and_hang(servers, async_storage, make_datastore):
    """I1, I3, I5, I6: what was called stored stands where it was said, what was called buffered stands or its conflict
    is recorded; no body was replaced, no log has a hole.
    """
    datastore = make_datastore(shards=8)
    writer = CellWriter(async_storage, SETTINGS)
    told: list = []
    stop = asyncio.Event()
    cleaning = asyncio.create_task(Cleaner(async_storage).run(stop))
    puts = [asyncio.create_task(put_until(stop, writer, datastore, n, told)) for n in range(CALLERS)]
    for _ in range(ROUNDS):
        await strike(servers)
    while not has_each_kind(told):  # on a slow machine
        await strike(servers)
    stop.set()
    await asyncio.gather(*puts, cleaning)
    await writer.close()
    stop.clear()
    cleaning = asyncio.create_task(Cleaner(async_storage).run(stop))
    await quiet(async_storage, datastore)
    stop.set()
    await cleaning

    found = await logs(async_storage, datastore)
    outcomes = [(cell, outcome) for cell, outcome in told if isinstance(outcome, PutOutcome)]
    for cell, outcome in outcomes:
        stands = found[cell.key]
        if outcome.status in (PutStatus.STORED, PutStatus.ALREADY_STORED):
            assert stands.body == cell.body
            assert (stands.shard, stands.added_id) == (outcome.placed.shard, outcome.placed.added_id)
        elif outcome.status is PutStatus.CONFLICT and outcome.placed is not None:
            assert stands.body != cell.body
    recorded = await conflicts(async_storage, datastore)
    lost = [
        cell.key
        for cell, outcome in outcomes
        if outcome.status is PutStatus.BUFFERED
        and found[cell.key].body != cell.body
        and (cell.key.row_key, cell.body) not in recorded
    ]
    assert lost == []


async def conflicts(async_storage, datastore) -> set[tuple[bytes, bytes]]:
    select = sql("SELECT row_key, buffered_body FROM schemaless.conflict WHERE datastore = %s", datastore.name.encode())
    return {row for name in ("a", "b") for row in await async_storage.master(name).run(query, select)}
