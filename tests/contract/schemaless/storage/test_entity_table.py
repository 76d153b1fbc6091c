"""One suite over the entity table in memory and on real servers, by both drivers: what every one of them promises."""

import uuid
from functools import partial
from random import Random

import pytest
from structlog.testing import capture_logs

from schemaless.cell import REF_KEY_MAX, CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import decode_body, encode_body
from schemaless.errors import Misconfigured, TableMissing, TooLarge
from schemaless.location import GenerationStart
from schemaless.storage import entity_table, shard_head, shard_log
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.sql import sql
from schemaless.testing.memory_program import MemoryEntityTable
from schemaless.topology import Datastore

pytestmark = pytest.mark.storage

SHARDS = 2
BASE, STATUS = ColumnName("BASE"), ColumnName("STATUS")
ROW, OTHER_ROW = RowKey(b"\x01" * 16), RowKey(b"\x02" * 16)
STORED, ALREADY, CONFLICT = PutStatus.STORED, PutStatus.ALREADY_STORED, PutStatus.CONFLICT


class InMemory:
    """The table under test in memory. `run` calls its method of that name."""

    def __init__(self, datastore: Datastore) -> None:
        self.table = MemoryEntityTable(datastore)

    async def run(self, name: str, *args, **kwargs):
        return getattr(self.table, name)(*args, **kwargs)

    async def open_generation(self, shard: int, starts_at: int) -> None:
        self.table.open_generation(shard, starts_at)


class OnServer:
    """The tables under test on a server. `run` runs the operation of that name; `run_operation` is a driver's."""

    def __init__(self, datastore: Datastore, run_operation) -> None:
        self.datastore = datastore
        self.run_operation = run_operation

    async def run(self, name: str, *args, **kwargs):
        operation = getattr(entity_table, name, None) or getattr(shard_log, name, None)
        if operation is not None:
            return await self.run_operation(partial(operation, self.datastore, *args, **kwargs))
        return await self.run_operation(partial(getattr(shard_head, name), self.datastore.name, *args, **kwargs))

    async def open_generation(self, shard: int, starts_at: int) -> None:
        name, database = self.datastore.name, self.datastore.database(shard)
        for statement in (
            f"DELETE FROM `{database}`.entity WHERE added_id >= {starts_at}",
            f"INSERT INTO schemaless.shard_generation SELECT '{name}', {shard}, MAX(generation) + 1, {starts_at},"
            f" UTC_TIMESTAMP(6) FROM schemaless.shard_generation WHERE datastore = '{name}' AND shard = {shard}",
            f"UPDATE schemaless.shard_head SET generation = generation + 1, head = {starts_at - 1}"
            f" WHERE datastore = '{name}' AND shard = {shard}",
        ):
            await self.run_operation(query, statement)


@pytest.fixture(params=["memory", "pymysql", "asyncmy"])
async def table(request, topology, make_datastore):
    datastore = make_datastore(shards=SHARDS, partitions=1, placement=("a",))
    if request.param == "memory":
        yield InMemory(datastore)
    elif request.param == "pymysql":
        with SyncStorage(topology) as storage:

            async def run(operation, *args):
                return storage.master("a").run(operation, *args)

            yield OnServer(datastore, run)
    else:
        async with AsyncStorage(topology) as storage:
            yield OnServer(datastore, storage.master("a").run)


def cell(row=ROW, column=BASE, ref_key=1, shard=0, **body) -> ShardCell:
    return ShardCell(CellKey(row, column, RefKey(ref_key)), encode_body(body), shard)


def noise(size: int) -> str:
    """Returns a text that takes so many bytes where it is stored, too: it can't be compressed much."""
    return Random(size).randbytes(size // 2).hex()


def statuses(placed) -> list[PutStatus]:
    return [outcome.status for outcome in placed]


async def test_added_ids_are_dense_in_each_shard(table):
    """I3: duplicates and conflicts between new cells leave no hole, in one shard and over several."""
    await table.run("put_cells", [cell(ref_key=n) for n in range(3)])
    placed = await table.run(
        "put_cells",
        [cell(ref_key=1), cell(ref_key=3), cell(shard=1, row=OTHER_ROW), cell(ref_key=2, n=1), cell(ref_key=4)],
    )
    assert statuses(placed) == [ALREADY, STORED, STORED, CONFLICT, STORED]
    assert [(p.shard, p.added_id) for p in placed] == [(0, 2), (0, 4), (1, 1), (0, 3), (0, 5)]
    for shard, expected in ((0, [1, 2, 3, 4, 5]), (1, [1])):
        assert [c.added_id for c in await table.run("read_after", shard, 0, 100)] == expected
    assert [(head.shard, head.generation, head.added_id) for head in await table.run("heads")] == [(0, 1, 5), (1, 1, 1)]


async def test_a_cell_never_changes(table):
    """I1: the first body stays, the place of the first is given to every later put."""
    (first,) = await table.run("put_cells", [cell(a=1, b=[1, 2])])
    again, other_order, number, other = await table.run(
        "put_cells", [cell(a=1, b=[1, 2]), cell(b=[1, 2], a=1), cell(a=1.0, b=[1, 2]), cell(a=2)]
    )
    assert statuses([first, again, other_order, number, other]) == [STORED, ALREADY, ALREADY, CONFLICT, CONFLICT]
    assert {p.added_id for p in (again, other_order, number, other)} == {1}
    assert {p.created_at for p in (again, other_order, number, other)} == {first.created_at}
    (stored,) = await table.run("get", [(0, first_key := cell().key)])
    assert (stored.key, stored.body) == (first_key, encode_body({"a": 1, "b": [1, 2]}))


@pytest.mark.parametrize("shards", [(0, 0, 0), (0, 1, 0)])
async def test_a_repeated_key_counts_in_order(table, shards):
    """The second in one call is already stored or a conflict with the first."""
    cells = [cell(n=1, shard=shards[0]), cell(row=OTHER_ROW, shard=shards[1]), cell(n=1), cell(n=2)]
    placed = await table.run("put_cells", cells)
    assert statuses(placed) == [STORED, STORED, ALREADY, CONFLICT]
    assert {placed[n].added_id for n in (0, 2, 3)} == {1}


async def test_created_at_never_falls(table):
    """I4: along added_id, also within one call."""
    for n in range(5):
        await table.run("put_cells", [cell(ref_key=10 * n + m) for m in range(3)])
    moments = [c.created_at for c in await table.run("read_after", 0, 0, 100)]
    assert moments == sorted(moments)
    assert (await table.run("heads"))[0].last_created_at == moments[-1]


async def test_a_time_finds_the_first_cell_that_is_not_earlier(table):
    """I4: a timestamp location is exact; past the end it is head + 1."""
    for n in range(7):
        await table.run("put_cells", [cell(ref_key=n)])
    moments = [c.created_at for c in await table.run("read_after", 0, 0, 100)]
    for wanted in (0, moments[0], moments[3], moments[3] + 1, moments[-1], moments[-1] + 1):
        expected = next((n for n, moment in enumerate(moments, 1) if moment >= wanted), 8)
        assert await table.run("first_since", 0, wanted, 7) == expected
    assert await table.run("first_since", 1, 0, 0) == 1


async def test_the_newest_version_has_the_highest_ref_key(table):
    """Whatever the order of writing; None where nothing is."""
    await table.run("put_cells", [cell(ref_key=n, n=n) for n in (5, REF_KEY_MAX, 0)])
    newest, none, other = await table.run("newest", [(0, ROW, BASE), (0, ROW, STATUS), (0, OTHER_ROW, BASE)])
    assert (newest.ref_key, none, other) == (REF_KEY_MAX, None, None)


async def test_a_row_is_the_newest_of_each_of_its_columns(table):
    """By column name, case counting; other rows of the shard don't show."""
    await table.run(
        "put_cells",
        [cell(ref_key=1), cell(ref_key=2), cell(column=STATUS, ref_key=9), cell(column="base"), cell(row=OTHER_ROW)],
    )
    row = await table.run("row", 0, ROW, 1 << 20)
    assert [(c.column_name, c.ref_key) for c in row] == [("BASE", 2), ("STATUS", 9), ("base", 1)]


async def test_the_newest_until_a_location_ignores_what_came_after(table):
    """The log decides which cells count, the ref_key which of them is the newest; columns and rows that are not asked
    for don't show.
    """
    events = [(ROW, BASE, 5), (ROW, BASE, 2), (OTHER_ROW, STATUS, 1), (ROW, STATUS, 7), (ROW, BASE, 9)]
    await table.run("put_cells", [cell(row=row, column=column, ref_key=n) for row, column, n in events])
    await table.run("put_cells", [cell(row=ROW, ref_key=1, shard=1)])

    async def newest(rows, columns):
        found = await table.run("newest_until", rows, columns)
        assert not found.unread
        return sorted((c.shard, c.row_key, c.column_name, c.ref_key) for c in found.cells)

    assert await newest({0: (1, [ROW])}, [BASE, STATUS]) == [(0, ROW, BASE, 5)]
    assert await newest({0: (4, [ROW])}, [BASE, STATUS]) == [(0, ROW, BASE, 5), (0, ROW, STATUS, 7)]
    assert await newest({0: (5, [ROW, OTHER_ROW])}, [BASE]) == [(0, ROW, BASE, 9)]
    assert await newest({0: (5, [OTHER_ROW]), 1: (1, [ROW])}, [BASE, STATUS]) == [
        (0, OTHER_ROW, STATUS, 1),
        (1, ROW, BASE, 1),
    ]


async def test_the_newest_until_a_location_reads_whole_rows_as_far_as_the_bytes_go(table):
    """The first row comes whatever its size, the others in their order, and none after the first that doesn't fit."""
    rows = [RowKey(bytes([n]) * 16) for n in range(5)]
    bodies = {(row, column): encode_body({"n": "x" * 200}) for row in rows for column in (BASE, STATUS)}
    bodies[rows[3], BASE] = encode_body({"n": Random(1).randbytes(60_000).hex()})
    cells = [ShardCell(CellKey(row, column, RefKey(1)), body, 0) for (row, column), body in bodies.items()]
    await table.run("put_cells", cells)

    async def read(row_keys, bytes_max):
        found = await table.run("newest_until", {0: (100, row_keys)}, [BASE, STATUS], bytes_max)
        assert all(cell.body == bodies[cell.row_key, cell.column_name] for cell in found.cells)
        whole = sorted({cell.row_key for cell in found.cells})
        assert len(found.cells) == 2 * len(whole)
        return [rows.index(row) for row in whole], [rows.index(row) for row in found.unread.get(0, ())]

    small = 2 * len(bodies[rows[0], BASE])
    assert await read(rows, 1 << 20) == ([0, 1, 2, 3, 4], [])
    assert await read(rows, small * 2) == ([0, 1], [2, 3, 4])
    assert await read(rows, small * 3 + 1) == ([0, 1, 2], [3, 4])
    assert await read([rows[3], rows[4]], 1) == ([3], [4])
    assert await read([rows[4], rows[3], rows[0]], small * 2) == ([4], [3, 0])


async def test_versions_come_in_the_order_and_range_asked_for(table):
    """Both ends included, cut by the limit."""
    await table.run("put_cells", [cell(ref_key=n) for n in (1, 2, 3, 5, 8)])

    async def versions(low, high, descending, limit):
        page = await table.run("versions", 0, (ROW, BASE), (low, high), descending, limit, 1 << 20)
        return [c.ref_key for c in page.cells]

    assert await versions(0, REF_KEY_MAX, False, 10) == [1, 2, 3, 5, 8]
    assert await versions(2, 5, True, 10) == [5, 3, 2]
    assert await versions(2, 8, True, 2) == [8, 5]
    assert await versions(6, 7, False, 10) == []


async def test_a_page_of_versions_is_bounded_in_bytes(table):
    """I14: as many as fit, at least one; `following` is where the next page starts. Large and small alike."""
    sizes = {1: 2000, 2: 10, 3: 5000, 4: 10, 5: 9000}
    await table.run("put_cells", [cell(ref_key=n, noise=noise(size)) for n, size in sizes.items()])

    async def page(low, limit, bytes_max):
        found = await table.run("versions", 0, (ROW, BASE), (low, REF_KEY_MAX), False, limit, bytes_max)
        assert all(decode_body(c.body)["noise"] == noise(sizes[c.ref_key]) for c in found.cells)
        return [c.ref_key for c in found.cells], found.following

    assert await page(1, 10, 1 << 20) == ([1, 2, 3, 4, 5], None)
    assert await page(1, 5, 1 << 20) == ([1, 2, 3, 4, 5], None)
    assert await page(1, 4, 1 << 20) == ([1, 2, 3, 4], 5)
    assert await page(1, 10, 3000) == ([1, 2], 3)
    assert await page(3, 10, 100) == ([3], 4)
    assert await page(6, 10, 100) == ([], None)


async def test_a_row_is_bounded_in_bytes(table):
    """I14: a row has no pages, so a larger one is refused."""
    await table.run("put_cells", [cell(column=c, ref_key=1, noise=noise(3000)) for c in (BASE, STATUS)])
    assert len(await table.run("row", 0, ROW, 10_000)) == 2
    with pytest.raises(TooLarge):
        await table.run("row", 0, ROW, 2500)


async def test_reading_the_log_goes_on_behind_a_location(table):
    """after and limit page through; columns leave out others without renumbering."""
    await table.run("put_cells", [cell(column=(BASE, STATUS)[n % 2], ref_key=n) for n in range(10)])
    assert [c.added_id for c in await table.run("read_after", 0, 4, 3)] == [5, 6, 7]
    assert [c.added_id for c in await table.run("read_after", 0, 0, 3, ["STATUS"])] == [2, 4, 6]
    assert [c.added_id for c in await table.run("read_after", 0, 8, 9, ["BASE", "STATUS"])] == [9, 10]
    assert await table.run("read_after", 0, 10, 3) == []
    assert [c.added_id for c in await table.run("read_after", 0, 4, 9, ["STATUS"], 7)] == [6]
    assert [c.added_id for c in await table.run("read_after", 0, 4, 9, until=6)] == [5, 6]


async def test_heads_say_how_far_a_shard_is(table):
    """Of all shards, of some, of one with its generations; their sums change with every cell."""
    before = await table.run("movement")
    await table.run("put_cells", [cell(ref_key=1), cell(ref_key=2), cell(row=OTHER_ROW, shard=1)])
    heads = await table.run("heads")
    assert [(head.shard, head.generation, head.added_id) for head in heads] == [(0, 1, 2), (1, 1, 1)]
    assert await table.run("heads_of", [1, 99]) == heads[1:]
    assert await table.run("heads_of", []) == []
    assert await table.run("history", 0) == (heads[0], [GenerationStart(1, 1)])
    after = await table.run("movement")
    assert (after.heads_sum - before.heads_sum, after.generations_sum - before.generations_sum) == (3, 0)
    with pytest.raises(Misconfigured):
        await table.run("history", 99)


async def test_a_new_generation_takes_the_places_of_the_cells_that_were_lost(table):
    """I13: added_ids go on densely from where it starts; a lost cell may be put again."""
    await table.run("put_cells", [cell(ref_key=n) for n in range(1, 6)])
    before = await table.run("movement")
    await table.open_generation(0, 4)
    assert await table.run("generations", 0) == [GenerationStart(1, 1), GenerationStart(2, 4)]
    assert (await table.run("history", 0))[0].added_id == 3
    assert await table.run("get", [(0, cell(ref_key=4).key)]) == [None]
    assert await table.run("movement") != before
    placed = await table.run("put_cells", [cell(ref_key=n) for n in (5, 3, 4)])
    assert [(p.status, p.generation, p.added_id) for p in placed] == [(STORED, 2, 4), (ALREADY, 1, 3), (STORED, 2, 5)]
    found = await table.run("read_after", 0, 0, 10)
    assert [(c.generation, c.added_id, c.ref_key) for c in found] == [
        (1, 1, 1), (1, 2, 2), (1, 3, 3), (2, 4, 5), (2, 5, 4),
    ]  # fmt: skip


async def test_hostile_values_arrive_as_they_are(table):
    """Quotes, zero bytes and the largest numbers can't leave their literals."""
    row = RowKey(b"';\\\x00`%s\"--/*\xff\xfe\x01")
    body = {"';DROP TABLE entity;--": "\x00\\'\"`%s\U0001f600", "n": 2**63 - 1, "m": -(2**63)}
    hostile = ShardCell(CellKey(row[:16].ljust(16, b"'"), BASE, RefKey(REF_KEY_MAX)), encode_body(body), 0)
    await table.run("put_cells", [hostile])
    (stored,) = await table.run("get", [(0, hostile.key)])
    assert (stored.key, stored.body) == (hostile.key, hostile.body)


async def test_a_shard_of_another_cluster_takes_nothing(storage, make_datastore):
    """A cell that was sent to the wrong home is refused loudly, alone and in company."""
    datastore = make_datastore(placement=("a", "b"))
    for cells in ([cell(shard=1)], [cell(shard=0), cell(shard=1, row=OTHER_ROW)]):
        with pytest.raises(TableMissing):
            storage.master("a").run(entity_table.put_cells, datastore, cells)
    assert storage.master("a").run(shard_head.movement, datastore.name).heads_sum == 0


@pytest.mark.parametrize("shards", [2, 60, 80])
def test_many_cells_of_many_shards_keep_their_order(storage, make_datastore, shards):
    """I3: with heads in user variables, and with more shards than go that way."""
    datastore = make_datastore(shards=shards, partitions=1, placement=("a",))
    cells = [cell(row=RowKey(uuid.uuid4().bytes), shard=n % shards, n=n) for n in range(400)]
    for part in (cells[:200], cells):  # the second time half of them exist
        placed = storage.master("a").run(entity_table.put_cells, datastore, part)
    found = storage.master("a").run(entity_table.get, datastore, [(c.shard, c.key) for c in cells])
    assert [(c.key, c.shard, c.added_id) for c in found] == [
        (c.key, p.shard, p.added_id) for c, p in zip(cells, placed, strict=True)
    ]
    assert statuses(placed) == [ALREADY] * 200 + [STORED] * 200
    heads = storage.master("a").run(shard_head.heads, datastore.name)
    assert sum(head.added_id for head in heads) == 400


@pytest.mark.parametrize("company", [False, True], ids=["new cells only", "beside one that exists"])
def test_a_clock_that_went_back_is_told_and_changes_no_order(storage, make_datastore, company):
    """I4: created_at stays where it was; more than 60 s behind is a loud warning."""
    datastore = make_datastore(shards=1, partitions=1, placement=("a",))
    node = storage.master("a")
    old = [cell(row=OTHER_ROW)] if company else []
    if old:
        node.run(entity_table.put_cells, datastore, old)
    ahead = sql(
        "UPDATE schemaless.shard_head SET last_created_at = UTC_TIMESTAMP(6) + INTERVAL 61 SECOND WHERE datastore = %s",
        datastore.name,
    )
    node.run(query, ahead)
    (head,) = node.run(shard_head.heads, datastore.name)
    with capture_logs() as logged:
        placed = node.run(entity_table.put_cells, datastore, [*old, cell()])
    assert placed[-1].created_at == head.last_created_at
    assert [entry["log_level"] for entry in logged] == ["warning"]
    assert logged[0]["shard"] == 0
