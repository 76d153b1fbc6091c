"""The buffer cleaner on real servers: what it deletes, what it must not, what it writes again (I6)."""

import asyncio
import hashlib
import uuid

import msgspec
import pytest

from cleaner import service
from cleaner.service import Cleaner
from schemaless.cell import CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import decode_body, encode_body
from schemaless.sharding import shard_of
from schemaless.storage import buffer_table, conflict_table, entity_table, refusal_table, shard_head
from schemaless.storage.buffer_table import BufferRow, Sizes
from schemaless.storage.operation import query
from schemaless.storage.sql import sql

pytestmark = pytest.mark.storage

BASE = ColumnName("BASE")


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    """Rows are old enough at once."""
    monkeypatch.setattr(service, "GRACE_S", 0.0)
    monkeypatch.setattr(service, "RESCUE_GRACE_S", 0.0)


@pytest.fixture
def datastore(make_datastore):
    """Home a for all, so that every buffer row lies on b."""
    return make_datastore(placement=("a",))


@pytest.fixture
def cleaner(async_storage):
    return Cleaner(async_storage)


def row_of(datastore, ref_key: int = 1, row: bytes | None = None, **body: object) -> BufferRow:
    row = RowKey(row or uuid.uuid4().bytes)
    key = CellKey(row, BASE, RefKey(ref_key))
    return BufferRow(key, encode_body(body), shard_of(row, datastore.shards), "a", uuid.uuid4().int >> 65)


async def buffer(async_storage, datastore, rows) -> None:
    await async_storage.master("b").run(buffer_table.insert, datastore, rows)


async def put_home(async_storage, datastore, rows) -> None:
    await async_storage.master("a").run(entity_table.put_cells, datastore, rows)


async def buffered(async_storage, datastore) -> set[bytes]:
    select = sql("SELECT row_key FROM schemaless.buffer WHERE datastore = %s", datastore.name.encode())
    return {found[0] for found in await async_storage.master("b").run(query, select)}


async def head_sum(node, datastore) -> int:
    return (await node.run(shard_head.movement, datastore.name)).heads_sum


async def minion_shows(async_storage, datastore, cells: int) -> None:
    (minion,) = async_storage.minions("a")
    for _ in range(1000):
        if await head_sum(minion, datastore) >= cells:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the minion does not follow")


async def test_a_confirmed_row_goes(cleaner, async_storage, datastore):
    """I6: the same body on a minion of the home."""
    rows = [row_of(datastore, n=n) for n in range(30)]
    await put_home(async_storage, datastore, rows)
    await buffer(async_storage, datastore, rows)
    await minion_shows(async_storage, datastore, 30)
    await cleaner.step()
    assert await buffered(async_storage, datastore) == set()
    (minion,) = async_storage.minions("a")
    assert await head_sum(minion, datastore) == 30


async def test_a_row_stays_until_a_minion_shows_its_cell(stopped_replication, cleaner, async_storage, datastore):
    """I6: that the master has it isn't enough, however often the cleaner passes."""
    rows = [row_of(datastore, n=n) for n in range(5)]
    await buffer(async_storage, datastore, rows)
    await put_home(async_storage, datastore, rows[:2])
    for _ in range(3):
        await cleaner.step()
    assert await head_sum(async_storage.master("a"), datastore) == 5  # and the missing ones were written
    assert await buffered(async_storage, datastore) == {row.key.row_key for row in rows}


async def test_a_missing_cell_is_written_and_then_confirmed(cleaner, async_storage, datastore):
    """A put that died between buffer and home ends at home, once."""
    rows = [row_of(datastore, n=n) for n in range(30)]
    await buffer(async_storage, datastore, rows)
    await cleaner.step()
    await minion_shows(async_storage, datastore, 30)
    await cleaner.step()
    await cleaner.step()
    assert await buffered(async_storage, datastore) == set()
    assert await head_sum(async_storage.master("a"), datastore) == 30


async def test_a_cell_keeps_its_cause_on_the_way_through_a_buffer(cleaner, async_storage, datastore):
    """A15: a rescue writes it at home. A put of the same body with another cause changes nothing."""
    row = msgspec.structs.replace(row_of(datastore, n=1), cause="billing/bill_rider@7:1:1000")
    await buffer(async_storage, datastore, [row])
    await buffer(async_storage, datastore, [msgspec.structs.replace(row, cause="other@1:1:1", claim=5)])
    await cleaner.step()
    master = async_storage.master("a")
    (cell,) = await master.run(entity_table.get, datastore, [(row.shard, row.key)])
    assert cell.cause == "billing/bill_rider@7:1:1000"
    again = msgspec.structs.replace(row, cause=None)
    (placed,) = await master.run(entity_table.put_cells, datastore, [again])
    assert placed.status is PutStatus.ALREADY_STORED


async def test_a_home_that_lost_what_it_showed_gets_it_again(stopped_replication, cleaner, async_storage, datastore):
    """S3, I13: the head of a restored home fell. The buffer rows of the lost cells are the only copies."""
    rows = [row_of(datastore, n=n) for n in range(20)]
    await put_home(async_storage, datastore, rows)
    await buffer(async_storage, datastore, rows)
    await cleaner.step()
    master = async_storage.master("a")
    lost = await lose_newest(master, datastore, rows[0].shard)
    assert await head_sum(master, datastore) == 19
    await cleaner.step()
    assert await head_sum(master, datastore) == 20
    assert None not in await master.run(entity_table.get, datastore, [(rows[0].shard, lost)])


async def lose_newest(node, datastore, shard) -> CellKey:
    """Takes a shard's last cell from its master, as a restore of an older state does. Returns its key."""
    table = f"`{datastore.database(shard)}`.entity"
    select = f"SELECT row_key, column_name, ref_key FROM {table} ORDER BY added_id DESC LIMIT 1"
    ((row_key, column_name, ref_key),) = await node.run(query, select)
    here = sql("datastore = %s AND shard = %s", datastore.name, shard)
    await node.run(query, f"DELETE FROM {table} ORDER BY added_id DESC LIMIT 1")
    await node.run(query, f"UPDATE schemaless.shard_head SET head = head - 1 WHERE {here}")
    return CellKey(RowKey(row_key), ColumnName(column_name), RefKey(ref_key))


async def test_members_in_another_order_are_the_same_body(cleaner, async_storage, datastore):
    """Bytes that differ are compared as values before anything is called a conflict."""
    stored = row_of(datastore, a=1, b=2)
    await put_home(async_storage, datastore, [stored])
    await buffer(async_storage, datastore, [row_of(datastore, row=stored.key.row_key, b=2, a=1)])
    await minion_shows(async_storage, datastore, 1)
    await cleaner.step()
    assert await buffered(async_storage, datastore) == set()
    assert await async_storage.master("b").run(conflict_table.count, datastore.name) == 0


async def test_another_body_at_home_is_recorded(cleaner, async_storage, datastore):
    """I6: a buffered cell that can't be stored goes to the conflict table with both bodies, never just away."""
    stored = row_of(datastore, n=1)
    refused = row_of(datastore, row=stored.key.row_key, n=2)
    await put_home(async_storage, datastore, [stored])
    await buffer(async_storage, datastore, [refused])
    await cleaner.step()
    await cleaner.step()
    assert await buffered(async_storage, datastore) == set()
    (entry,) = await async_storage.master("b").run(conflict_table.newest, datastore.name, 2**63 - 1, 10)
    conflict = (await async_storage.master("b").run(conflict_table.get, [entry.conflict_id]))[entry.conflict_id]
    assert entry.size_bytes == len(stored.body) + len(refused.body)
    assert conflict.key == stored.key
    assert (decode_body(conflict.stored_body), decode_body(conflict.buffered_body)) == ({"n": 1}, {"n": 2})


async def test_several_cleaners_at_once_are_harmless(async_storage, datastore):
    """Every row is confirmed, rewritten or recorded exactly once, whoever does it."""
    stored = [row_of(datastore, n=n) for n in range(20)]
    missing = [row_of(datastore, n=n) for n in range(20)]
    refused = [row_of(datastore, row=row.key.row_key, n=-1) for row in stored[:5]]
    await put_home(async_storage, datastore, stored)
    await buffer(async_storage, datastore, [*stored[5:], *missing, *refused])
    cleaners = [Cleaner(async_storage) for _ in range(4)]
    for _ in range(4):
        await asyncio.gather(*(cleaner.step() for cleaner in cleaners))
        await minion_shows(async_storage, datastore, 40)
    assert await buffered(async_storage, datastore) == set()
    assert await head_sum(async_storage.master("a"), datastore) == 40
    assert await async_storage.master("b").run(conflict_table.count, datastore.name) == 5


async def test_a_taken_over_row_is_not_deleted_behind_its_put(async_storage, datastore):
    """A claim that changed since the row was read keeps the row for the next pass."""
    row = row_of(datastore, n=1)
    await buffer(async_storage, datastore, [row])
    (seen,) = await async_storage.master("b").run(rows_of, datastore.name)
    again = BufferRow(row.key, row.body, row.shard, row.home, row.claim + 1)
    await buffer(async_storage, datastore, [again])
    assert await async_storage.master("b").run(buffer_table.delete_confirmed, [seen], "a", 0) == 0


async def test_a_row_that_has_the_number_of_one_that_was_read_is_another(async_storage, datastore):
    """A minion that is promoted gives numbers again which the lost master had given, also to cells of the same put."""
    read = row_of(datastore, n=1)
    other = msgspec.structs.replace(row_of(datastore, n=2), claim=read.claim)
    here = async_storage.master("b")
    await buffer(async_storage, datastore, [read])
    (seen,) = await here.run(rows_of, datastore.name)
    await here.run(query, f"DELETE FROM schemaless.buffer WHERE buffer_id = {seen.buffer_id}")
    await buffer(async_storage, datastore, [other])
    number = sql("WHERE datastore = %s", datastore.name.encode())
    await here.run(query, f"UPDATE schemaless.buffer SET buffer_id = {seen.buffer_id} {number}")
    assert await here.run(buffer_table.cells, [seen]) == [None]
    await here.run(refusal_table.note, {"no table": [seen]})
    assert [row.was_refused for row in await here.run(rows_of, datastore.name)] == [False]
    assert not await here.run(buffer_table.record_conflict, seen, encode_body({"n": 3}), "a", 0)
    assert await here.run(buffer_table.delete_confirmed, [seen], "a", 0) == 0
    assert await buffered(async_storage, datastore) == {other.key.row_key}


def rows_of(name):
    rows = yield from buffer_table.page("a", 0, 2**63, Sizes(), rows_max=1_000_000, bytes_max=1 << 40)
    return [row for row in rows if row.datastore == name]


async def test_a_page_is_bounded_by_rows_and_bytes_and_by_the_sizes_that_are_asked_for(async_storage, datastore):
    """I14: digest and size are columns, so no body is read for it."""
    rows = [row_of(datastore, text=uuid.uuid4().hex * size) for size in (1, 400, 1, 400, 400)]
    await buffer(async_storage, datastore, rows)
    node = async_storage.master("b")
    seen = await node.run(rows_of, datastore.name)
    assert [row.key for row in seen] == [row.key for row in rows]
    assert [(row.size_bytes, row.digest) for row in seen] == [
        (len(row.body), hashlib.sha256(row.body).digest()) for row in rows
    ]
    begin = seen[0].buffer_id - 1

    async def page(sizes, rows_max, bytes_max):
        def operation():
            return buffer_table.page("a", begin, 2**63, sizes, rows_max=rows_max, bytes_max=bytes_max)

        return [row.key for row in await node.run(operation)]

    keys = [row.key for row in rows]
    small_bytes = seen[0].size_bytes
    assert await page(Sizes(), 2, 1 << 30) == keys[:2]
    assert await page(Sizes(), 1000, 1) == keys[:1]
    assert await page(Sizes(), 1000, seen[0].size_bytes + seen[1].size_bytes) == keys[:2]
    assert await page(Sizes(most_bytes=small_bytes), 1000, 1 << 30) == [keys[0], keys[2]]
    assert await page(Sizes(least_bytes=small_bytes + 1), 1000, 1 << 30) == [keys[1], keys[3], keys[4]]


async def test_a_cell_that_its_home_refuses_is_noted_until_it_is_taken(monkeypatch, cleaner, async_storage, datastore):
    """D10: its table is gone. The error stands beside it, other cells of the page go home, and it follows them."""
    rows = [row_of(datastore, n=n) for n in range(20)]
    refused = rows[7]
    table = f"`{datastore.database(refused.shard)}`.entity"
    here, there = async_storage.master("b"), async_storage.master("a")
    await there.run(query, f"RENAME TABLE {table} TO {table}_away")
    await buffer(async_storage, datastore, rows)
    await cleaner.step()
    await there.run(query, f"RENAME TABLE {table}_away TO {table}")
    others = [row for row in rows if row.shard != refused.shard]
    assert None not in await there.run(entity_table.get, datastore, [(row.shard, row.key) for row in others])
    mine = (datastore.name, "a")
    assert mine not in await here.run(refusal_table.refused)  # not for a minute yet
    await here.run(query, "UPDATE schemaless.refusal SET refused_since = refused_since - INTERVAL 61 SECOND")
    found = (await here.run(refusal_table.refused))[mine]
    assert found.cells == len(rows) - len(others)
    assert "entity" in found.reason
    assert found.oldest_s > refusal_table.REFUSED_FOR_S
    with monkeypatch.context() as bounded:  # I14: as many as that, or more
        bounded.setattr(refusal_table, "COUNTED_CELLS_MAX", 1)
        assert (await here.run(refusal_table.refused))[mine].cells == 1
    await Cleaner(async_storage).step()
    assert mine not in await here.run(refusal_table.refused)
    noted = "SELECT * FROM schemaless.refusal JOIN schemaless.buffer USING (buffer_id)"
    assert await here.run(query, noted + sql(" WHERE datastore = %s", datastore.name.encode())) == ()


async def test_the_large_and_the_many_are_bounded(cleaner, async_storage, datastore):
    """More rows than a page, and bodies beyond a piece, are swept in one pass."""
    rows = [row_of(datastore, n=n) for n in range(2500)]
    await buffer(async_storage, datastore, rows)
    swept = await cleaner.step()
    assert swept.rewritten >= 2500
    await minion_shows(async_storage, datastore, 2500)
    await cleaner.step()
    assert await buffered(async_storage, datastore) == set()
