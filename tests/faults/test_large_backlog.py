"""A master hangs while many large cells are buffered. When it is back, all go home, and small ones don't wait (I6)."""

import asyncio
import base64
import os
import random
import time
import uuid
from functools import partial
from pathlib import Path

import pytest

from api.write.put import CellWriter, PutOutcome
from cleaner.service import Cleaner
from schemaless.cell import Cell, CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.config import ApiSettings
from schemaless.errors import StorageUnavailable
from schemaless.sharding import shard_of
from schemaless.storage import entity_table
from schemaless.storage.operation import query
from schemaless.storage.sql import sql
from tests.waiting import async_until

LARGE_CELLS = 1600 if os.environ.get("SCHEMALESS_FAULTS_LONG") else 100
"""The test proves that everything arrives. It prints how fast, and asserts nothing about that."""
SMALL_CELLS = 100
LARGE_BYTES = 780_000

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SETTINGS = ApiSettings(topology=Path("unused"), kafka="unused")


@pytest.fixture
def home(running):
    """The master of cluster a, which runs again afterwards."""
    yield running.servers["a1"]
    running.servers["a1"].cont()


@pytest.fixture
def datastore(make_datastore):
    """Home a, so secondary b."""
    return make_datastore(shards=8, placement=("a",))


def cell_of(body: dict) -> Cell:
    return Cell(CellKey(RowKey(uuid.uuid4().bytes), ColumnName("BASE"), RefKey(1)), encode_body(body))


async def put_all(writer, datastore, cells) -> list[CellKey]:
    """Puts cells, four at once, each until it is acknowledged, and returns their keys."""
    waiting, acknowledged = iter(cells), []

    async def put(cell):
        (outcome,) = await writer.put(datastore, [cell])
        return outcome if isinstance(outcome, PutOutcome) else None

    async def put_some():
        for cell in waiting:
            assert (await async_until(partial(put, cell))).status is PutStatus.BUFFERED
            acknowledged.append(cell.key)

    await asyncio.gather(*(put_some() for _ in range(4)))
    return acknowledged


async def missing_at_home(storage, datastore, keys) -> int:
    wanted = [(shard_of(key.row_key, datastore.shards), key) for key in keys]
    try:
        found = await storage.master("a").run(entity_table.digests, datastore, wanted)
    except StorageUnavailable:
        return len(keys)
    return found.count(None)


async def buffered(storage, datastore) -> tuple[int, int]:
    """Returns the number of rows and their bytes."""
    select = "SELECT COUNT(*), CAST(COALESCE(SUM(size), 0) AS SIGNED) FROM schemaless.buffer WHERE datastore = %s"
    ((rows, size),) = await storage.master("b").run(query, sql(select, datastore.name.encode()))
    return rows, size


async def test_a_backlog_of_large_cells_goes_home_and_small_ones_dont_wait(home, async_storage, datastore):
    """A: the large ones were buffered first, and the page that they fill once took longer than its time-out."""
    rng = random.Random(7)
    noise = (base64.b64encode(rng.randbytes(LARGE_BYTES)).decode() for _ in range(LARGE_CELLS))
    writer = CellWriter(async_storage, SETTINGS)
    home.stop()
    large = await put_all(writer, datastore, (cell_of({"noise": text}) for text in noise))
    small = await put_all(writer, datastore, (cell_of({"n": n}) for n in range(SMALL_CELLS)))
    _, backlog_bytes = await buffered(async_storage, datastore)
    stop = asyncio.Event()
    cleaning = asyncio.create_task(Cleaner(async_storage).run(stop))
    home.cont()
    back = time.monotonic()
    small_s = await seconds_until_none(lambda: missing_at_home(async_storage, datastore, small), back)
    drained_s = await seconds_until_none(lambda: rows_left(async_storage, datastore), back)
    stop.set()
    await cleaning
    await writer.close()
    print(f"\n{backlog_bytes / 1e6:.0f} MB: small cells {small_s:.1f} s, drained {drained_s:.1f} s,", end=" ")
    print(f"{backlog_bytes / 1e6 / drained_s:.1f} MB/s")
    for part in range(0, len(large), 20):
        assert await missing_at_home(async_storage, datastore, large[part : part + 20]) == 0


async def rows_left(storage, datastore) -> int:
    rows, _ = await buffered(storage, datastore)
    return rows


async def seconds_until_none(question, began: float) -> float:
    """Each wait is for the next ones to go, because all of them may take minutes."""

    async def fewer_than(count):
        return (left,) if (left := await question()) < count else None

    left = await question()
    while left > 0:
        (left,) = await async_until(partial(fewer_than, left))
    return time.monotonic() - began
