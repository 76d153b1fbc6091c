"""Erasures on real servers: every place of every cluster, in whichever order they are reached (I19)."""

import asyncio
import secrets
import time
import uuid
from collections import Counter
from contextlib import contextmanager
from hashlib import sha256

import msgspec
import pytest

from cleaner import service
from cleaner.pair import ClusterPair, Swept
from cleaner.service import RESCUE_GRACE_S, Cleaner, Confirmation
from schemaless.bus.reader import PartitionReader
from schemaless.bus.topics import ensure_topics
from schemaless.cell import CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.errors import KeyErased, StorageUnavailable
from schemaless.ops import erasures
from schemaless.ops.datastores import Catalogue
from schemaless.runtime.batching import chunks
from schemaless.sharding import shard_of
from schemaless.storage import buffer_table, diverged_table, entity_table, erasure_table, post_version
from schemaless.storage.buffer_table import BufferRow
from schemaless.storage.diverged_table import DivergedCell, DivergedKind
from schemaless.storage.erasure_table import ErasedPlace, Erasure
from schemaless.storage.operation import query
from schemaless.storage.post_version import NewVersion
from schemaless.storage.sql import where
from tests.log_harness import replication_stopped
from tests.waiting import async_until

pytestmark = pytest.mark.storage

BASE, STATUS = ColumnName("BASE"), ColumnName("STATUS")


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    """Buffer rows are old enough at once."""
    monkeypatch.setattr(service, "GRACE_S", 0.0)
    monkeypatch.setattr(service, "RESCUE_GRACE_S", 0.0)


@pytest.fixture
def datastore(make_datastore):
    """All shards live on a, so that every buffer row lies on b."""
    return make_datastore(placement=("a",))


@pytest.fixture
def row_key():
    return RowKey(uuid.uuid4().bytes)


@pytest.fixture
def world(async_storage, datastore, row_key):
    return World(async_storage, datastore, row_key)


class World:
    """One row of cells, on clusters a and b."""

    def __init__(self, storage, datastore, row_key):
        self.storage = storage
        self.datastore = datastore
        self.row_key = row_key
        self.shard = shard_of(row_key, datastore.shards)
        self.a, self.b = storage.master("a"), storage.master("b")
        self.catalogue = Catalogue(storage)

    def row(self, ref_key, column=BASE, **body):
        key = CellKey(self.row_key, column, RefKey(ref_key))
        encoded = encode_body(body or {"n": ref_key})
        return BufferRow(key, encoded, self.shard, "a", secrets.randbits(63))

    async def put(self, *rows):
        return await self.a.run(entity_table.put_cells, self.datastore, rows)

    async def buffer(self, *rows):
        await self.b.run(buffer_table.insert, self.datastore, rows)

    async def state(self, ref_key, column=BASE):
        key = CellKey(self.row_key, column, RefKey(ref_key))
        (cell,) = await self.a.run(entity_table.get, self.datastore, [(self.shard, key)])
        return None if cell is None else ("erased" if cell.erased else "there")

    def erasure(self, column=None, ref_key=None, at=None):
        now = time.time_ns() // 1000 if at is None else at
        return Erasure(
            secrets.randbits(63), self.datastore.name, self.shard, self.row_key, column, ref_key, "asked", "ada", now
        )

    @property
    def where(self):
        return where(datastore=self.datastore.name)

    async def matched(self, column=None):
        return await erasures.matched(self.storage, self.datastore, self.row_key, column, None)

    async def sweep(self):
        """Lets the cleaner confirm and rescue what is old enough."""
        cleaner, until = Cleaner(self.storage), time.monotonic() + RESCUE_GRACE_S + 1
        while time.monotonic() < until:
            await cleaner.step()
            await asyncio.sleep(0.2)

    async def count(self, node, table, condition="TRUE"):
        which = where(datastore=self.datastore.name)
        ((count,),) = await node.run(query, f"SELECT COUNT(*) FROM schemaless.{table} {which} AND {condition}")
        return count

    async def of(self, node, erasure):
        return await node.run(erasure_table.of, self.datastore.name, erasure.erasure)

    async def order(self, erasure):
        await erasures.order(self.storage, self.datastore, erasure)
        return erasure


async def test_an_order_is_carried_out_at_once(world):
    """Home and buffer are empty when the call returns, and both clusters say that they are done."""
    rows = [world.row(n) for n in (1, 2)]
    await world.put(*rows)
    await world.buffer(rows[1], world.row(3))
    assert (await world.matched(BASE))[0] == 3
    erasure = await world.order(world.erasure(BASE))
    assert [await world.state(n) for n in (1, 2, 3)] == ["erased"] * 3
    assert await world.count(world.b, "buffer") == 0
    for node in (world.a, world.b):
        own = await world.of(node, erasure)
        assert own.done_at
        assert own.until == 2
    assert own.places == {"buffer": ErasedPlace(2, 2)}
    (again,) = await world.put(world.row(3))
    assert (again.status, again.erased.erasure) == (PutStatus.CONFLICT, erasure.erasure)
    assert (await world.matched(BASE))[0] == 0


async def test_what_is_put_later_stays(world):
    """At home and in a buffer: the erasure means what was there when it was ordered."""
    await world.put(world.row(1))
    erasure = await world.order(world.erasure())
    await world.put(world.row(2))
    await world.buffer(world.row(2), world.row(4))
    await world.b.run(query, f"UPDATE schemaless.erasure SET done_at = NULL {where(erasure=erasure.erasure)}")
    await erasures.step(world.storage, world.catalogue)
    assert [await world.state(n) for n in (1, 2, 4)] == ["erased", "there", None]
    assert await world.count(world.b, "buffer") == 2


@pytest.mark.parametrize("apart_s", [-5, 5])
async def test_the_clocks_of_two_masters_may_differ(world, apart_s):
    """What b buffered before the order came there is meant, and what it buffered later isn't, by b's own clock."""
    await world.put(world.row(1))
    await world.buffer(world.row(2))
    erasure = world.erasure(at=(await world.matched())[1])
    for node in (world.a, world.b):
        await node.run(erasure_table.order, erasure)
    await asyncio.sleep(0.002)
    await world.buffer(world.row(3))
    shifted = f"{{0}} = {{0}} + INTERVAL {apart_s} SECOND"
    await world.b.run(query, f"UPDATE schemaless.buffer SET {shifted.format('buffered_at')} {world.where}")
    await world.b.run(query, f"UPDATE schemaless.erasure SET {shifted.format('here_at')} {world.where}")
    await erasures.step(world.storage, world.catalogue)
    assert [await world.state(n) for n in (1, 2)] == ["erased"] * 2
    await world.sweep()
    assert await world.state(3) == "there"


async def test_what_a_promoted_master_took_after_the_order_stays(world):
    """The history that was lost had more cells, so the new ones have places that were meant."""
    await world.put(world.row(1))
    erasure = await world.order(world.erasure(at=(await world.matched())[1]))
    for node in (world.a, world.b):
        await node.run(query, f"UPDATE schemaless.erasure SET until = 1000, done_at = NULL {world.where}")
    await world.put(world.row(2))
    await erasures.step(world.storage, world.catalogue)
    assert (await world.of(world.a, erasure)).done_at
    assert [await world.state(n) for n in (1, 2)] == ["erased", "there"]


async def test_a_cell_that_was_buffered_before_and_comes_after_the_search_is_erased(world):
    """Its transaction was slow. The cleaner doesn't bring it home, and has its cluster searched again."""
    await world.put(world.row(1))
    await world.order(world.erasure(at=(await world.matched())[1]))
    await world.buffer(world.row(2))
    await world.b.run(
        query, f"UPDATE schemaless.buffer SET buffered_at = buffered_at - INTERVAL 9 SECOND {world.where}"
    )
    await world.sweep()
    assert await world.state(2) is None
    await erasures.step(world.storage, world.catalogue)
    assert await world.state(2) == "erased"
    assert await world.count(world.b, "buffer") == 0


async def test_a_report_that_finds_a_body_has_it_removed(world):
    """A conflict that was recorded after its cluster had been searched."""
    await world.put(world.row(1))
    erasure = await world.order(world.erasure(at=(await world.matched())[1]))
    values = f"'{world.datastore.name}', x'{world.row_key.hex()}', 'BASE', 1, 'stored', 'buffered', UTC_TIMESTAMP(6)"
    columns = "datastore, row_key, column_name, ref_key, stored_body, buffered_body, detected_at"
    await world.b.run(query, f"INSERT INTO schemaless.conflict ({columns}) VALUES ({values})")
    assert (await erasures.report(world.storage, world.datastore, erasure.erasure, None)).state == "running"
    await erasures.step(world.storage, world.catalogue)
    assert (await erasures.report(world.storage, world.datastore, erasure.erasure, None)).state == "complete"
    assert await world.count(world.b, "conflict") == 0


async def test_who_knows_less_of_the_home_takes_nothing_back(world):
    """A master that heard of the order only has no entry: consumers would seem to have passed it."""
    await world.put(world.row(1))
    erasure = await world.order(world.erasure())
    await world.a.run(erasure_table.learn, erasure)
    own = await world.of(world.a, erasure)
    assert (own.until, own.entry) == (1, 2)


async def test_nothing_found_covers_nothing_later(world):
    """An erasure that found no cell is settled: it doesn't wait for the first one that comes."""
    erasure = await world.order(world.erasure())
    assert (await world.of(world.a, erasure)).until == 0
    await world.put(world.row(1))
    for node in (world.a, world.b):
        await node.run(query, f"UPDATE schemaless.erasure SET done_at = NULL {where(erasure=erasure.erasure)}")
    await erasures.step(world.storage, world.catalogue)
    assert await world.state(1) == "there"


async def test_a_master_that_lacks_an_erasure_gets_it(world):
    """Its cluster was away when the erasure was ordered. What it buffers is erased before it comes home."""
    await world.put(world.row(1))
    erasure = world.erasure()
    await world.buffer(world.row(1), world.row(2))
    await asyncio.sleep(0.002)
    ordered = Erasure(**{name: getattr(erasure, name) for name in erasure.__struct_fields__} | {"ordered_at": now()})
    await world.a.run(erasure_table.order, ordered)
    while await world.a.run(erasure_table.erase_page, world.datastore, await world.of(world.a, ordered)):
        pass
    for _ in range(3):
        await Cleaner(world.storage).step()  # rescue and confirmation: nothing is put, and nothing is a conflict
    assert await world.state(2) is None
    await erasures.step(world.storage, world.catalogue)
    await erasures.step(world.storage, world.catalogue)
    assert await world.state(2) == "erased"
    assert await world.count(world.b, "buffer") == await world.count(world.b, "conflict") == 0
    assert (await world.of(world.b, ordered)).done_at


async def test_a_buffered_cell_that_came_home_after_the_erasure_goes_again(world):
    """A cell that the home had lost, and got again from a buffer, whatever its added_id is."""
    await world.put(world.row(1))
    await world.buffer(world.row(2))
    erasure = world.erasure()
    await world.a.run(erasure_table.order, erasure)
    assert await world.a.run(erasure_table.erase_page, world.datastore, await world.of(world.a, erasure)) == 1
    await world.put(world.row(2))
    await erasures.carry_out(world.storage, world.datastore, erasure)
    assert await world.state(2) == "erased"


async def test_a_cell_under_the_key_of_a_lost_one_stays(world):
    """The buffer has an old body of a key that was lost, and a client put another one after the erasure."""
    await world.put(world.row(1))
    await world.buffer(world.row(2, old=True))
    erasure = world.erasure()
    await world.a.run(erasure_table.order, erasure)
    await world.a.run(erasure_table.erase_page, world.datastore, await world.of(world.a, erasure))
    await world.put(world.row(2, new=True))
    await erasures.carry_out(world.storage, world.datastore, erasure)
    assert await world.state(2) == "there"
    assert await world.count(world.b, "buffer") == 0


async def test_a_buffer_row_that_meets_a_stub_is_no_conflict(world):
    """It was buffered after the order, or the cleaner was faster: it goes, and its body is kept nowhere."""
    await world.put(world.row(1))
    await world.order(world.erasure())
    await world.buffer(world.row(1, other="body"))
    cleaner = Cleaner(world.storage)

    async def is_empty():
        await cleaner.step()
        return not await world.count(world.b, "buffer")

    await async_until(is_empty)
    assert await world.count(world.b, "conflict") == 0


async def test_a_minion_that_lags_makes_no_conflict_of_an_erased_key(world, admin):
    """It shows the body still. The home's master is asked, and while it is away the row waits."""
    await world.put(world.row(1))
    key = [(world.shard, world.row(1).key)]
    (minion,) = world.storage.minions("a")

    async def shows():
        return await minion.run(entity_table.get, world.datastore, key) != [None]

    await async_until(shows)
    with replication_stopped(admin.minions("a")[0]):
        await world.order(world.erasure())
        await world.buffer(world.row(1, other="body"))
        (shown,) = await minion.run(entity_table.get, world.datastore, key)
        assert shown.body
        pair = ClusterPair(world.storage, world.catalogue, "b", "a", Counter())
        with away(world.storage, "a"):
            assert await Confirmation(pair).step() == Swept()
        assert await world.count(world.b, "buffer") == 1

        async def confirms():
            """One pass alone does nothing if a server is late for once."""
            return (await Confirmation(pair).step()).confirmed

        assert await async_until(confirms) == 1
    assert await world.count(world.b, "buffer") == await world.count(world.b, "conflict") == 0


@contextmanager
def away(storage, *clusters):
    async def run(*_, **__):
        raise StorageUnavailable(f"{clusters[0]}1 is away")

    with pytest.MonkeyPatch.context() as patched:
        for cluster in clusters:
            patched.setattr(storage.present_master(cluster), "run", run)
        yield


async def test_conflicts_and_tails(world):
    """Conflicts go, and cells of a tail stay without their bodies."""
    await world.put(world.row(1), world.row(9, STATUS))
    cells = []
    for kind, row in ((DivergedKind.CELL, world.row(5)), (DivergedKind.CONFLICT, world.row(1, other=True))):
        digest = bytes(32)
        cells.append(DivergedCell(kind, world.datastore.name, world.shard, row.key, row.body, digest))
    await world.b.run(diverged_table.keep, "b9", 7, cells)
    await world.buffer(world.row(1, third=True), world.row(9, STATUS, third=True))
    cleaner = Cleaner(world.storage)
    while await world.count(world.b, "conflict") < 2:
        await cleaner.step()
    erasure = await world.order(world.erasure(BASE))
    assert await world.count(world.b, "conflict") == 1
    assert await world.count(world.b, "diverged") == await world.count(world.b, "diverged", "body = ''") == 2
    assert await world.b.run(diverged_table.waiting, "b9", 7, 0, 10, 1 << 20) == {}
    assert [await world.state(5), await world.state(9, STATUS)] == ["erased", "there"]
    assert (await world.of(world.b, erasure)).places == {"diverged": ErasedPlace(2, 2), "conflict": ErasedPlace(1, 1)}


async def test_a_post_again_of_a_cell_that_its_home_lost_brings_no_body_back(world):
    """Only a buffer has it, or a tail: its key comes home with its place."""
    await world.put(world.row(1))
    posted = [msgspec.structs.replace(world.row(n), idempotency_key=f"key {n}") for n in (7, 8, 9)]
    await world.buffer(*posted[:2])
    kept = [
        DivergedCell(kind, world.datastore.name, world.shard, posted[2].key, body, sha256(body).digest(), None, key)
        for kind, body, key in (
            (DivergedKind.CELL, posted[2].body, "key 9"),
            (DivergedKind.CONFLICT, encode_body({"n": "other"}), None),
        )
    ]
    await world.b.run(diverged_table.keep, "b9", 7, kept)
    erasure = await world.order(world.erasure())
    for row in posted:
        assert await world.state(row.key.ref_key) == "erased"
        version = NewVersion(world.shard, world.row_key, BASE, row.body, row.idempotency_key)
        (again,) = await world.a.run(post_version.put_next, world.datastore, [version])
        assert isinstance(again, KeyErased)
        assert again.erasure == erasure.id


async def test_a_large_row_takes_many_pages(world):
    """At home, in a buffer, and in one call: what isn't done at once is done by the next step."""
    rows = [world.row(n) for n in range(1, 2601)]
    for some in chunks(rows, count_max=500):
        await world.put(*some)
    late = [world.row(n) for n in range(2001, 3201)]
    for some in chunks(late, count_max=500):
        await world.buffer(*some)
    erasure = world.erasure()
    await world.a.run(erasure_table.order, erasure)
    await erasures.step(world.storage, world.catalogue)
    await erasures.step(world.storage, world.catalogue)
    own = await world.of(world.b, erasure)
    assert own.done_at
    assert own.places == {"buffer": ErasedPlace(1200, 1200)}
    assert [await world.state(n) for n in (1, 2600, 3200)] == ["erased"] * 3
    told = await erasures.report(world.storage, world.datastore, erasure.erasure, None)
    assert by_place(told.places)["log of a"] == (3200, 3200)


async def test_a_cluster_that_is_away_is_finished_later(world):
    """The report says who wasn't searched, and the next step after it is back does the rest."""
    await world.put(world.row(1))
    await world.buffer(world.row(2))
    with away(world.storage, "b"):
        erasure = await world.order(world.erasure())
        told = await erasures.report(world.storage, world.datastore, erasure.erasure, None)
        assert told.state == "running"
        assert {place.place: place.not_searched for place in told.places}["cluster b"] == "b1 is away"
        assert [await world.state(n) for n in (1, 2)] == ["erased", None]
    for _ in range(2):  # it gets the order, and carries it out
        await erasures.step(world.storage, world.catalogue)
    assert [await world.state(n) for n in (1, 2)] == ["erased", "erased"]
    await minions_follow((world.storage, world.datastore, erasure.erasure))
    assert (await erasures.report(world.storage, world.datastore, erasure.erasure, None)).state == "complete"


async def test_erasures_that_wait_hide_no_later_one(world, monkeypatch):
    """More than are asked for at once, on both masters. Each has others, so their pages end at different ones."""
    monkeypatch.setattr(erasures, "_DUE_MAX", 2)
    await world.put(world.row(1))
    first, second, meant, third, fourth = (
        msgspec.structs.replace(world.erasure(), ordered_at=now() + n) for n in range(5)
    )
    waiting = [msgspec.structs.replace(each, datastore="unknown") for each in (first, second, third, fourth)]
    for erasure, due_on in zip([*waiting, meant], [world.a, world.a, world.b, world.b, world.a], strict=True):
        for master in (world.a, world.b):
            await master.run(erasure_table.order, erasure)
            if master is not due_on:
                await master.run(erasure_table.finish, erasure)
    await erasures.step(world.storage, world.catalogue)
    assert await world.state(1) == "erased"
    assert (await world.of(world.a, meant)).done_at
    for master in (world.a, world.b):
        for erasure in waiting:
            await master.run(erasure_table.finish, erasure)


async def test_without_any_master_nothing_is_ordered(world):
    with away(world.storage, "a", "b"), pytest.raises(StorageUnavailable):
        await world.order(world.erasure())


def now():
    return time.time_ns() // 1000


def by_place(places):
    return {place.place: (place.found, place.removed) for place in places}


async def minions_follow(which):
    async def are_clean():
        return all(place.found == place.removed for place in await erasures.verify(*which))

    await async_until(are_clean)


async def test_a_report_names_every_place(world):
    """Servers with counts, consumers by their checkpoints, and what is out of reach with how long it stays there."""
    datastore = world.datastore
    await world.put(world.row(1), world.row(2))
    await world.buffer(world.row(2))
    await world.a.run(
        query,
        "INSERT INTO schemaless.checkpoint (datastore, consumer, shard, generation, added_id, counted_from, updated_at)"
        f" VALUES ('{datastore.name}', 'trigger:bill', {world.shard}, 1, 2, 0, NOW(6))",
    )
    erasure = await world.order(world.erasure())
    which = (world.storage, datastore, erasure.erasure)
    await minions_follow(which)
    told = await erasures.report(*which, None)
    assert told.state == "running"
    places = by_place(told.places)
    assert places["log of a"] == (2, 2)
    assert places["buffer of b"] == (1, 1)
    assert places["minion a2"] == (2, 2)
    assert places["minion b2"] == (1, 1)
    assert places["trigger:bill"] == (1, 0)
    assert (told.erasure.reason, told.erasure.who, told.erasure.entry) == ("asked", "ada", 3)
    await world.a.run(query, f"UPDATE schemaless.checkpoint SET added_id = 3 {where(datastore=datastore.name)}")
    told = await erasures.report(*which, None)
    assert told.state == "complete"
    assert by_place(told.places)["trigger:bill"] == (1, 1)
    until = {place.place: place.remains_until for place in told.places if place.remains_until}
    assert {name.split(" of ")[0] for name in until} == {"binary logs", "HTTP caches"}
    assert all(moment > now() for moment in until.values())
    assert {place.place for place in told.places if place.not_searched} == {
        f"topic {datastore.topic}",
        "backups",
        "subscribers",
    }
    assert await erasures.report(world.storage, datastore, 7, None) is None


async def test_a_body_that_is_still_there_is_found(world):
    """Written by hand. An error of a parked cell counts, because it may tell of the body."""
    await world.put(world.row(1), world.row(2))
    erasure = await world.order(world.erasure())
    which = (world.storage, world.datastore, erasure.erasure)
    await minions_follow(which)
    table = f"`{world.datastore.database(world.shard)}`.entity"
    await world.a.run(query, f"UPDATE {table} SET erased = NULL, body = 'x' WHERE added_id = 1")
    await world.buffer(world.row(1))
    await world.b.run(query, f"UPDATE schemaless.buffer SET buffered_at = '2020-01-01' {where(row_key=world.row_key)}")
    await world.a.run(
        query,
        "INSERT INTO schemaless.parked (datastore, consumer, shard, added_id, generation, row_key, column_name,"
        " ref_key, function_name, cause, holds_row, error, attempts, attempted_at, version, parked_at) VALUES"
        f" ('{world.datastore.name}', 'trigger:bill', {world.shard}, 2, 1, x'{world.row_key.hex()}', 'BASE', 2, 'bill',"
        " 'error', 1, 'tells it', 1, '[]', 'v', NOW(6))",
    )
    found = {place.place: place.found - place.removed for place in await erasures.verify(*which)}
    assert {name: left for name, left in found.items() if left and not name.startswith("minion")} == {
        "log of a": 1,
        "parked of a": 1,
        "buffer of b": 1,
    }
    assert (await erasures.report(*which, None)).state == "running"


async def test_the_topic_is_named_with_its_offsets(world, kafka, tailing):
    """Records that were published before the erasure, and none for a cell that wasn't."""
    ensure_topics(kafka, world.datastore)
    tailing(world.datastore)
    await world.put(world.row(1), world.row(2))
    partition = world.datastore.partition(world.shard)
    with PartitionReader(kafka) as reader:
        await async_until(lambda: reader.span(world.datastore.topic, partition).high >= 2)
    erasure = await world.order(world.erasure(BASE))
    told = await erasures.report(world.storage, world.datastore, erasure.erasure, kafka)
    (topic,) = [place for place in told.places if place.place.startswith("topic")]
    assert (topic.found, topic.removed, topic.remains_until) == (2, 0, None)
    offsets = topic.place.partition(" at offsets ")[2]
    assert [int(offset) for offset in offsets.split(", ")] == [0, 1]
