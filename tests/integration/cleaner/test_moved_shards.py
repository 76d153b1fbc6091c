"""The buffer cleaner and `buffer wait` where a shard moved after its cells were buffered (I6)."""

import asyncio
import uuid

import pytest

from cleaner import service
from cleaner.service import Cleaner
from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.errors import Unavailable
from schemaless.facts.buffers import settle
from schemaless.sharding import shard_of
from schemaless.storage import buffer_table, entity_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.buffer_table import BufferRow, Sizes
from schemaless.storage.operation import query
from schemaless.storage.sql import sql
from tests.move_harness import ShardMove
from tests.waiting import async_until

pytestmark = pytest.mark.storage

SHARD = 1
TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    """Rows are old enough at once."""
    monkeypatch.setattr(service, "GRACE_S", 0.0)
    monkeypatch.setattr(service, "RESCUE_GRACE_S", 0.0)


@pytest.fixture
def datastore(make_datastore):
    """All shards live on a, so that every buffer row lies on b."""
    return make_datastore(placement=("a",))


@pytest.fixture
def move(storage, datastore):
    return ShardMove(storage, datastore, SHARD, "b")


def row_in(datastore, shard, home="a", **body) -> BufferRow:
    while True:
        row = RowKey(uuid.uuid4().bytes)
        if shard_of(row, datastore.shards) == shard:
            key = CellKey(row, ColumnName("BASE"), RefKey(1))
            return BufferRow(key, encode_body(body), shard, home, uuid.uuid4().int >> 65)


async def buffered(storage, datastore) -> dict[str, list[tuple[bytes, str]]]:
    """By cluster, the rows of its buffer, each with the home that it names."""
    select = sql("SELECT row_key, home FROM schemaless.buffer WHERE datastore = %s", datastore.name.encode())
    return {name: [tuple(row) for row in await storage.master(name).run(query, select)] for name in ("a", "b")}


async def until_empty(cleaner, storage, datastore) -> None:
    async def is_empty():
        await cleaner.step()
        return not any((await buffered(storage, datastore)).values())

    await async_until(is_empty)


async def bodies(storage, datastore, rows, home):
    cells = await storage.master(home).run(entity_table.get, datastore, [(row.shard, row.key) for row in rows])
    return [cell and cell.body for cell in cells]


async def test_a_row_that_lies_on_its_own_home_arrives_there(topology, datastore, move, async_storage):
    """It was buffered while its home was away, and the shard moved to where it lies. A cleaner knows that at once, or
    learns it while it runs.
    """
    early = Cleaner(async_storage)
    await early.step()
    rows = [row_in(datastore, SHARD, n=n) for n in range(5)]
    stays = row_in(datastore, 0)
    await async_storage.master("b").run(buffer_table.insert, datastore, [*rows, stays])
    await asyncio.to_thread(move.all)
    await until_empty(early, async_storage, datastore)
    assert await bodies(async_storage, datastore, rows, "b") == [row.body for row in rows]
    assert await bodies(async_storage, datastore, rows, "a") == [None] * 5
    assert await bodies(async_storage, datastore, [stays], "a") == [stays.body]
    late = row_in(datastore, SHARD)  # of a process that doesn't know of the move yet
    await async_storage.master("b").run(buffer_table.insert, datastore, [late])
    async with AsyncStorage(topology) as another:
        await until_empty(Cleaner(another), another, datastore)
    assert await bodies(async_storage, datastore, [late], "b") == [late.body]


async def test_a_row_of_a_shard_that_went_back_arrives_at_its_first_home(datastore, move, async_storage):
    """Rows that name b lie on b and on a. Both are corrected, also behind what the cleaner has walked over."""
    await asyncio.to_thread(move.all)
    cleaner = Cleaner(async_storage)
    rows = {name: row_in(datastore, SHARD, home="b") for name in ("a", "b")}
    for name, row in rows.items():
        await async_storage.master(name).run(buffer_table.insert, datastore, [row])
    await asyncio.to_thread(move.back().all)
    await cleaner.step()
    await until_empty(cleaner, async_storage, datastore)
    assert await bodies(async_storage, datastore, rows.values(), "a") == [row.body for row in rows.values()]


async def test_a_closed_shard_of_a_page_costs_that_shard_only(datastore, move, async_storage):
    """Its cells wait, and nobody is told that the home refuses them. They arrive as soon as there is a home again."""
    await asyncio.to_thread(move.announce)
    await asyncio.to_thread(move.close)
    waits, others = row_in(datastore, SHARD), [row_in(datastore, shard) for shard in (0, 2, 3)]
    await async_storage.master("b").run(buffer_table.insert, datastore, [waits, *others])
    cleaner = Cleaner(async_storage)

    async def only_one_waits():
        await cleaner.step()
        return (await buffered(async_storage, datastore))["b"] == [(waits.key.row_key, "a")]

    await async_until(only_one_waits)
    assert await bodies(async_storage, datastore, others, "a") == [row.body for row in others]
    refused = "SELECT COUNT(*) FROM schemaless.refusal JOIN schemaless.buffer USING (buffer_id) WHERE datastore = %s"
    assert await async_storage.master("b").run(query, sql(refused, datastore.name.encode())) == ((0,),)
    await asyncio.to_thread(move.reopen)
    await until_empty(cleaner, async_storage, datastore)


async def test_a_buffered_cell_that_met_another_body_at_the_new_home_is_a_conflict(datastore, move, async_storage):
    """The old home never had it, so only the new one can tell."""
    buffer, stored = row_in(datastore, SHARD, n=1), encode_body({"n": 2})
    await async_storage.master("b").run(buffer_table.insert, datastore, [buffer])
    await asyncio.to_thread(move.all)
    other = BufferRow(buffer.key, stored, SHARD, "b", 1)
    await async_storage.master("b").run(entity_table.put_cells, datastore, [other])
    await until_empty(Cleaner(async_storage), async_storage, datastore)
    select = sql("SELECT stored_body FROM schemaless.conflict WHERE datastore = %s", datastore.name.encode())
    assert list(await async_storage.master("b").run(query, select)) == [(stored,)]


async def test_buffer_wait_looks_at_the_present_home(datastore, move, async_storage):
    """A row that still names the old home, and lies on the new one, is waited for until it is readable there."""
    row = row_in(datastore, SHARD)
    await async_storage.master("b").run(buffer_table.insert, datastore, [row])
    await asyncio.to_thread(move.all)
    await async_storage.look()
    live = async_storage.live(datastore)
    for homes in (None, ("b",)):
        with pytest.raises(Unavailable):
            await settle(async_storage, live, 0.3, lambda: False, homes=homes)
    waiting = asyncio.create_task(settle(async_storage, live, TIMEOUT_S, lambda: False))
    await until_empty(Cleaner(async_storage), async_storage, datastore)
    await waiting


async def test_buffer_wait_looks_again_at_a_row_that_got_another_home(datastore, move, async_storage):
    """Corrected between two looks, it isn't among those of its old home, and wasn't yet among those of the new one."""
    row = row_in(datastore, SHARD)
    b1 = async_storage.master("b")
    await b1.run(buffer_table.insert, datastore, [row])
    await asyncio.to_thread(move.all)
    await async_storage.look()
    live = async_storage.live(datastore)
    waiting = asyncio.create_task(settle(async_storage, live, 2.0, lambda: False))
    await asyncio.sleep(0.5)  # it waits for the row, and has seen all that names the new home
    found = await b1.run(lambda: buffer_table.page("a", 0, 1 << 60, Sizes(), rows_max=1000, bytes_max=1 << 20))
    late = [one for one in found if one.datastore == datastore.name]
    await b1.run(buffer_table.correct_home, late, "b")
    with pytest.raises(Unavailable):
        await waiting
