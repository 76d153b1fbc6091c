"""When a home's reads look into no buffer any more: once all that waited there is at home."""

import asyncio
import secrets
import time
import uuid

import msgspec
import pytest

from api.read.reader import ReadBreaker, Reader, WantedCell
from api.read.unsettled import CellReader, Unsettled
from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.codec import decode_body, encode_body
from schemaless.ops.datastores import Catalogue
from schemaless.sharding import shard_of
from schemaless.storage import buffer_table, entity_table, erasure_table
from schemaless.storage.buffer_table import BufferRow, BufferSelection
from schemaless.storage.erasure_table import Erasure
from schemaless.storage.operation import query
from schemaless.storage.replica_lag import ReplicaLag
from schemaless.topology import Role
from tests.move_harness import ShardMove
from tests.waiting import async_until

pytestmark = pytest.mark.storage

ROWS = 1200  # more than two pages


async def test_a_home_is_settled_by_one_look_however_many_rows_wait(async_storage, make_datastore):
    """A home under load always has rows of the last second in a buffer, and they fill more than a page."""
    datastore = make_datastore(placement=("a",))
    home, secondary = async_storage.master("a"), async_storage.master("b")
    await secondary.run(query, "DELETE FROM schemaless.buffer")  # of other tests
    keys = [CellKey(RowKey(uuid.uuid4().bytes), ColumnName("BASE"), RefKey(1)) for _ in range(ROWS)]
    rows = [BufferRow(key, encode_body({}), shard_of(key.row_key, datastore.shards), "a", 7) for key in keys]
    await secondary.run(buffer_table.insert, datastore, rows)
    await home.run(entity_table.put_cells, datastore, rows)
    unsettled = Unsettled(async_storage, Catalogue(async_storage), lambda server: True)
    looking = asyncio.create_task(unsettled.run())
    try:
        await async_until(lambda: "a" not in unsettled)
    finally:
        looking.cancel()


async def test_an_answer_in_a_lost_master_s_stead_is_completed_at_once(async_storage, make_datastore):
    """Nothing was noted yet: this process put nothing, and the master answered when it was last asked."""
    datastore = make_datastore(placement=("a",))
    key = row_key_in(datastore, 1)
    unsettled, breaker = Unsettled(async_storage, Catalogue(async_storage), lambda server: True), ReadBreaker()
    lag = ReplicaLag(async_storage, timeout_s=2, on_sample=breaker.sampled)
    reader = CellReader(Reader(async_storage, breaker, lag, timeout_s=2), unsettled)
    looking = asyncio.create_task(unsettled.run())
    try:
        await async_until(lambda: "a" not in unsettled)
    finally:
        looking.cancel()
    row = BufferRow(key, encode_body({}), 1, "a", 7)
    await async_storage.master("b").run(buffer_table.insert, datastore, [row])
    assert (await reader.exact(datastore, key, None))[0] is None
    breaker.sampled(async_storage.master("a").node.name, False)
    wanted = [WantedCell(key.row_key, key.column_name, key.ref_key)]
    exact, served = await reader.exact(datastore, key, None)
    (of_many,), _ = await reader.many(datastore, wanted, None, 1 << 20)
    assert (exact.key, of_many.key, served.role) == (key, key, Role.MINION)
    assert (await reader.exact(datastore, key, Role.MINION))[0] is None
    (of_many,), _ = await reader.many(datastore, wanted, Role.MINION, 1 << 20)
    assert of_many is None


async def test_a_shard_that_moved_is_settled_when_all_that_waited_is_at_its_home(
    async_storage, make_datastore, storage
):
    """Until then reads look into the buffers, also into the one of its home. A shard that may move is never settled."""
    made = make_datastore(placement=("a",))
    for master in async_storage.masters:
        await master.run(query, "DELETE FROM schemaless.buffer")  # of other tests
    datastore = async_storage.live(made)
    row = BufferRow(row_key_in(made, 1), encode_body({}), 1, "a", 7)
    await async_storage.master("b").run(buffer_table.insert, datastore, [row])
    move = ShardMove(storage, made, 1, "b")
    await asyncio.to_thread(move.all)
    going = ShardMove(storage, made, 2, "b")
    await asyncio.to_thread(going.announce)
    await async_storage.look()
    unsettled = Unsettled(async_storage, Catalogue(async_storage), lambda server: True)
    looking = asyncio.create_task(unsettled.run())
    try:
        await async_until(lambda: not unsettled.may_have(datastore, 0))
        assert unsettled.may_have(datastore, 1)
        found, _ = await unsettled.cells(datastore, "b", BufferSelection(row.key.row_key))
        assert [cell.key for cell in found] == [row.key]
        await async_storage.master("b").run(entity_table.put_cells, datastore, [row])
        await async_until(lambda: not unsettled.may_have(datastore, 1))
        assert unsettled.may_have(datastore, 2)
    finally:
        looking.cancel()


async def test_a_buffer_brings_no_erased_body_back(async_storage, make_datastore):
    """It may have one until the erasure was carried out there. A version that waits to come home is the newest left."""
    datastore = make_datastore(placement=("a",))
    home, secondary = async_storage.master("a"), async_storage.master("b")
    stored = row_key_in(datastore, 1)
    rows = [
        BufferRow(msgspec.structs.replace(stored, ref_key=RefKey(number)), encode_body({"n": number}), 1, "a", 7)
        for number in range(1, 4)
    ]
    await secondary.run(buffer_table.insert, datastore, rows[:2])
    await home.run(entity_table.put_cells, datastore, rows[1:])
    now = time.time_ns() // 1000
    erasure = Erasure(secrets.randbits(63), datastore.name, 1, stored.row_key, None, None, "asked to", "ada", now)
    await home.run(erasure_table.order, erasure)
    assert await home.run(erasure_table.erase_page, datastore, erasure) == 2
    unsettled, breaker = Unsettled(async_storage, Catalogue(async_storage), lambda server: True), ReadBreaker()
    lag = ReplicaLag(async_storage, timeout_s=2, on_sample=breaker.sampled)
    reader = CellReader(Reader(async_storage, breaker, lag, timeout_s=2), unsettled)
    column = stored.row_key, stored.column_name
    newest, _ = await reader.newest(datastore, *column, None)
    assert decode_body(newest.body) == {"n": 1}
    (in_row,), _ = await reader.row(datastore, stored.row_key, 1 << 20, None)
    wanted = [WantedCell(*column, ref_key) for ref_key in (None, RefKey(2))]
    (newest_of_many, exact_of_many), _ = await reader.many(datastore, wanted, None, 1 << 20)
    assert newest == in_row == newest_of_many
    page, _ = await reader.versions(datastore, BufferSelection(*column), False, 100, 1 << 20, None)
    exact, _ = await reader.exact(datastore, rows[1].key, None)
    assert [cell.is_erased for cell in (*page.cells, exact, exact_of_many)] == [False, True, True, True, True]
    await home.run(erasure_table.order, msgspec.structs.replace(erasure, erasure=erasure.erasure ^ 1))
    again = await home.run(erasure_table.of, datastore.name, erasure.erasure ^ 1)
    await home.run(erasure_table.erase_page, datastore, again, {rows[0].key: None})
    gone, _ = await reader.newest(datastore, *column, None)
    assert (gone.ref_key, gone.is_erased) == (3, True)


def row_key_in(datastore, shard):
    while shard_of(row := RowKey(uuid.uuid4().bytes), datastore.shards) != shard:
        pass
    return CellKey(row, ColumnName("BASE"), RefKey(1))
