"""An index is built by row up to a fixed head: complete, proven, and whoever walks it (I3, I11, I13)."""

import asyncio
import itertools
import random

import pytest

from indexer import walker as walker_module
from indexer.service import build_step
from indexer.walker import BuildLoad, RefusedWrites, WalkedCheckpoints, Walker
from schemaless.cell import row_key_text
from schemaless.codec import encode_body
from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints, CommitLanes
from schemaless.consume.delivery import Delivery
from schemaless.consume.host import HomeLog
from schemaless.index.catalogue import build_progress, create_index, find_index
from schemaless.location import Location
from schemaless.storage import checkpoint_table, entity_table, index_definition_table, index_table
from schemaless.storage.entity_table import CellKey, ShardCell
from schemaless.storage.index_definition_table import BuildProgress, IndexStage, defined
from tests.integration.indexer.test_indexer import SHARDS, definition, owners
from tests.integration.indexer.test_superseding import IndexedRows, moves, row_keys_of
from tests.log_harness import erased_at_home
from tests.waiting import async_until

pytestmark = pytest.mark.storage

PAGE = 7  # columns of rows, so that a walk of some rows has many pages


class WalkedRows(IndexedRows):
    """Rows whose index is built by walkers of this test, and follows the log in deliveries of this test."""

    async def begin(self):
        """Makes the index, and fixes how far its build goes."""
        await create_index(self.async_storage, self.datastore, definition())
        heads = dict.fromkeys(range(SHARDS), 0)
        for shard in range(SHARDS):
            database = self.datastore.database(shard)
            ((head,),) = self.select(shard, f"SELECT MAX(added_id) FROM `{database}`.entity")
            heads[shard] = head or 0
        for master in self.async_storage.masters:
            await master.run(index_definition_table.begin_build, self.datastore.name, definition().name, 1, heads)

    def select(self, shard, statement):
        def selected():
            (result,) = yield statement
            return result.rows

        return self.master(shard).run(selected)

    def walker(self):
        """A process that walks."""
        version = self.maintainer.version
        load = BuildLoad(self.async_storage, self.datastore, version, lag_cells_max=1, commit_max_s=9.0, busy_share=1)
        return Walker(self.async_storage, self.datastore, definition(), self.maintainer, load)

    async def walk(self, shard=0, walker=None):
        walker = walker or self.walker()
        while await walker.step(shard):
            pass
        return walker

    async def progress(self):
        return await build_progress(self.async_storage, self.datastore, defined(definition(), IndexStage.BUILDING))

    def checkpoints(self, shard=0):
        """By cluster, how far the shard is."""
        consumer, name = definition().consumer, self.datastore.name
        return {
            cluster: found[0].location.added_id
            for cluster in self.datastore.clusters
            if (found := self.storage.master(cluster).run(checkpoint_table.of_consumer, name, consumer, [shard]))
        }

    async def deliver(self, shard, location):
        """Follows the log of a shard to a location, from its checkpoint, as an indexer does."""
        lanes = CommitLanes(self.async_storage, self.datastore)
        kept = Checkpoints(lanes, definition().consumer, CheckpointPlacement.EVERYWHERE, start_at=None)
        home = self.datastore.home(shard)
        log = HomeLog(self.async_storage, self.datastore, home)
        delivery = Delivery(self.maintainer, WalkedCheckpoints(kept, self.walker()), log)
        delivery.gain([shard])

        async def is_there():
            await delivery.step()
            return (done := delivery.cursors()[shard].done) is not None and done.location == location

        await async_until(is_there)
        await delivery.close(10)


@pytest.fixture
def rows(storage, async_storage, make_datastore, monkeypatch):
    monkeypatch.setattr(entity_table, "COLUMNS_AT_ONCE", PAGE)
    return WalkedRows(storage, make_datastore(shards=SHARDS, partitions=2), async_storage)


async def test_what_is_erased_before_a_walk_and_during_it_leaves_nothing(rows):
    """Rows that were walked before, others after it, and the walk still proves that it met every cell (I19)."""
    row_keys, by_shard = row_keys_of(0, 20), list(owners().values())
    texts = {row_key: row_key_text(row_key)[-12:] for row_key in row_keys}
    for n, row_key in enumerate(row_keys):
        body = {"owner": by_shard[n % SHARDS], "number": texts[row_key]}
        rows.put(rows.cell(row_key, "BASE", 1, body), rows.cell(row_key, "STATUS", 1, {"state": texts[row_key]}))
    erased = row_keys[::3]
    first, *others = erased
    erased_at_home(rows.storage, rows.datastore, first)
    await rows.begin()
    walker = rows.walker()
    for _ in range(4):
        assert await walker.step(0)
    for row_key in others:
        erased_at_home(rows.storage, rows.datastore, row_key)
    await rows.walk(walker=walker)
    assert walker.reason is None
    ((head,),) = rows.select(0, f"SELECT MAX(added_id) FROM `{rows.datastore.database(0)}`.entity")
    await rows.deliver(0, Location(1, head))
    found = rows.found(definition())
    assert {row_key for _, row_key, _ in found} == set(row_keys) - set(erased)
    assert found == rows.wanted(definition())
    tables = [f"`{rows.datastore.database(shard)}`.`{definition().table}`" for shard in range(SHARDS)]
    dump = "".join(repr(rows.select(shard, f"SELECT * FROM {table}")) for shard, table in enumerate(tables))
    of = f"WHERE datastore = '{rows.datastore.name}'"
    dump += "".join(repr(rows.select(n, f"SELECT details FROM schemaless.index_problem {of}")) for n in range(SHARDS))
    assert [row_key for row_key in row_keys if texts[row_key] in dump] == [key for key in row_keys if key not in erased]


def shuffled(cells, seed):
    return random.Random(seed).sample(cells, len(cells))


async def test_a_walk_then_the_log_make_what_the_cells_say(rows):
    """Versions in any order, cells of other columns, and puts while the walk is under way, which the log brings."""
    row_keys = row_keys_of(0, 30)
    others = [ShardCell(CellKey(row, "OTHER", 1), encode_body({}), 0) for row in row_keys[::2]]
    states = [ShardCell(CellKey(row, "STATUS", 1), encode_body({"state": "s"}), 0) for row in row_keys[::3]]
    rows.put(*shuffled([*moves(rows, 0, row_keys, 1, 1), *moves(rows, 0, row_keys, 3, 2), *others, *states], 1))
    await rows.begin()
    assert await rows.progress() == BuildProgress(0, 85)
    walker = rows.walker()
    for _ in range(4):
        assert await walker.step(0)
    assert 0 < (await rows.progress()).done < 85
    assert rows.checkpoints() == {}
    rows.put(*moves(rows, 0, row_keys[::2], 2, 3), *moves(rows, 0, row_keys[::3], 4, 4))
    await rows.walk(walker=walker)
    assert walker.reason is None
    assert (set(rows.checkpoints().values()), await rows.progress()) == ({85}, BuildProgress(85, 85))
    await rows.deliver(0, Location(1, 110))
    assert rows.found(definition()) == rows.wanted(definition()) != {}


async def test_a_shard_without_cells_has_its_checkpoint_however_busy_the_datastore_is(rows):
    """An index without cells is active at once, and queries with `after` need the checkpoint of the put's shard."""
    await rows.begin()
    walker = rows.walker()
    walker._load.page = None  # it would wait for its share of the time
    await rows.walk(walker=walker)
    assert set(rows.checkpoints().values()) == {0}


async def test_walkers_that_die_or_walk_at_once_continue_one_another(rows):
    """Each step may be another process's, two of them hold what they last read. No cell is counted twice."""
    row_keys = row_keys_of(0, 40)
    rows.put(*moves(rows, 0, row_keys, 1, 1), *moves(rows, 0, row_keys, 2, 2))
    await rows.begin()
    first, second = rows.walker(), rows.walker()
    left = [first, second]
    chance = random.Random(3)
    while left:
        if chance.random() < 0.2:
            left[chance.randrange(len(left))] = rows.walker()
        walker = chance.choice(left)
        if not await walker.step(0):
            assert walker.reason is None
            left.remove(walker)
    assert await rows.progress() == BuildProgress(80, 80)
    assert rows.found(definition()) == rows.wanted(definition())


async def test_two_processes_each_walk_a_part_of_a_build(rows):
    """Each has shards of its own, and takes those over that the other one gives up in the middle."""
    for shard in range(SHARDS):
        rows.put(*moves(rows, shard, row_keys_of(shard, 20), 1, 1), *moves(rows, shard, row_keys_of(shard, 20), 2, 2))
    await rows.begin()
    owned = [{0, 1}, {2, 3}]
    walkers = [rows.walker(), rows.walker()]
    walked = [set(), set()]

    async def pages(process, count):
        for _ in range(count):
            for shard in sorted(owned[process]):
                await walkers[process].step(shard)
                walked[process].add(shard)

    await asyncio.gather(pages(0, 3), pages(1, 3))
    halfway = await rows.progress()
    assert 0 < halfway.done < halfway.total
    assert walked == [{0, 1}, {2, 3}]
    owned[0], owned[1] = {0, 2}, {1, 3}
    await asyncio.gather(
        *(rows.walk(shard, walkers[process]) for process in (0, 1) for shard in sorted(owned[process]))
    )
    done = await rows.progress()
    assert done.done == done.total
    assert rows.found(definition()) == rows.wanted(definition())
    for _ in range(2):
        await build_step(
            rows.async_storage, rows.datastore, await find_index(rows.async_storage, rows.datastore, "by_owner")
        )
    assert (await find_index(rows.async_storage, rows.datastore, "by_owner")).stage is IndexStage.ACTIVE


async def test_a_cluster_that_lost_the_end_of_the_walk_is_walked_again(rows):
    """A promotion took the walk back on one cluster. The other one's stays as it is."""
    rows.put(*moves(rows, 0, row_keys_of(0, 30), 1, 1))
    await rows.begin()
    walker = rows.walker()
    for _ in range(3):
        await walker.step(0)
    (middle,) = rows.select(
        0,
        "SELECT row_key, walked FROM schemaless.index_walk WHERE shard = 0 AND name = 'by_owner'"
        f" AND datastore = '{rows.datastore.name}'",
    )
    await rows.walk(walker=walker)
    table = f"`{rows.datastore.database(0)}`.index_by_owner"
    for statement in (
        f"DELETE FROM schemaless.checkpoint WHERE datastore = '{rows.datastore.name}'",
        f"UPDATE schemaless.index_walk SET row_key = x'{middle[0].hex()}', walked = {middle[1]}"
        f" WHERE datastore = '{rows.datastore.name}' AND shard = 0",
        f"DELETE FROM {table} WHERE row_key > x'{middle[0].hex()}'",
    ):
        rows.master(0).run(index_table.write, statement)
    assert len(rows.checkpoints()) == 1
    await rows.walk()
    assert len(rows.checkpoints()) == 2
    assert rows.found(definition()) == rows.wanted(definition())


async def test_what_a_promotion_lost_of_a_build_that_had_just_begun_is_made_again(rows):
    """One master has neither tables nor how far the build must come. The build doesn't wait for that for ever."""
    rows.put(*moves(rows, 0, row_keys_of(0, 20), 1, 1))
    await create_index(rows.async_storage, rows.datastore, definition())

    async def step():
        index = await find_index(rows.async_storage, rows.datastore, definition().name)
        await build_step(rows.async_storage, rows.datastore, index)

    await step()
    for cluster in rows.datastore.clusters:
        lost = [shard for shard in range(SHARDS) if rows.datastore.home(shard) == cluster]
        rows.master(lost[0]).run(index_table.drop, rows.datastore, lost, definition().table)
        noted = f"DELETE FROM schemaless.index_build WHERE datastore = '{rows.datastore.name}'"
        rows.master(lost[0]).run(index_table.write, noted)
        assert (await rows.progress()).total is None
        await step()
        assert await rows.progress() == BuildProgress(0, 20)
    for shard in range(SHARDS):
        await rows.walk(shard)
    await step()
    assert (await find_index(rows.async_storage, rows.datastore, definition().name)).stage is IndexStage.ACTIVE
    assert rows.found(definition()) == rows.wanted(definition())


async def test_a_hole_is_named_and_gives_no_checkpoint(rows):
    """One cell is missing in the shard: the index can't be complete, and says so, whoever walks on."""
    rows.put(*moves(rows, 0, row_keys_of(0, 30), 1, 1))
    await rows.begin()
    rows.master(0).run(index_table.write, f"DELETE FROM `{rows.datastore.database(0)}`.entity WHERE added_id = 11")
    walker = await rows.walk()
    assert "shard 0 has 29 of the 30 cells" in walker.reason
    assert rows.checkpoints() == {}
    again = await rows.walk()
    assert again.reason == walker.reason


async def test_the_progress_counts_exactly_the_cells_of_rows_that_are_written(rows):
    """Each entry has the version of the newest source cell that was added last, and is there with the progress."""
    row_keys = row_keys_of(0, 25)
    others = [ShardCell(CellKey(row, "OTHER", 1), encode_body({}), 0) for row in row_keys[::2]]
    states = [ShardCell(CellKey(row, "STATUS", 1), encode_body({"state": "s"}), 0) for row in row_keys[::3]]
    inside = [encode_body({"owner": owner, "number": 1}) for owner in owners().values()]
    moved = [
        ShardCell(CellKey(row, "BASE", version), inside[(n + version) % SHARDS], 0)
        for version in (1, 2)
        for n, row in enumerate(row_keys)
    ]
    rows.put(*shuffled([*moved, *states, *others], 6))
    await rows.begin()
    walker, left = rows.walker(), True
    while left:
        left = await walker.step(0)
        written = {row_key: version for shard in range(SHARDS) for row_key, version in versions_in(rows, shard)}
        in_order = sorted(row_keys)
        assert sorted(written) == in_order[: len(written)]
        done = sum(cells for row_key, (cells, _) in cells_of(rows, 0).items() if row_key in written)
        assert (await rows.progress()).done == done
        assert written == {row_key: cells_of(rows, 0)[row_key][1] for row_key in written}
    assert len(written) == len(row_keys)


def versions_in(rows, shard):
    """Row keys and added_ids of an index shard."""
    return rows.select(shard, f"SELECT row_key, source_added_id FROM `{rows.datastore.database(shard)}`.index_by_owner")


def cells_of(rows, shard):
    """By row, how many cells it has, and the highest added_id among its newest source cells."""
    newest, counts = {}, {}
    for cell in rows.master(shard).run(entity_table.read_after, rows.datastore, shard, 0, 10_000):
        counts[cell.row_key] = counts.get(cell.row_key, 0) + 1
        known = newest.setdefault(cell.row_key, {}).get(cell.column_name)
        if cell.column_name in definition().columns and (known is None or known.ref_key < cell.ref_key):
            newest[cell.row_key][cell.column_name] = cell
    return {row: (counts[row], max(cell.added_id for cell in found.values())) for row, found in newest.items()}


async def test_a_cell_that_cant_be_decoded_fails_the_build_and_is_named(rows, monkeypatch):
    """The build would stand still without a word. Once the cell is right, it goes on where it was."""
    rows.put(*moves(rows, 0, row_keys := row_keys_of(0, 30), 1, 1))
    await rows.begin()
    damaged = sorted(row_keys)[20]
    entity = f"`{rows.datastore.database(0)}`.entity WHERE row_key = x'{damaged.hex()}'"
    ((body,),) = rows.select(0, f"SELECT body FROM {entity}")
    change = f"UPDATE {entity.replace(' WHERE', ' SET body = {} WHERE')}"
    rows.master(0).run(index_table.write, change.format("x'00'"))
    monkeypatch.setattr(walker_module, "_RETRY_S", 0.0)
    seconds = itertools.count()
    writes = RefusedWrites(None, clock=lambda: next(seconds))
    walker = rows.walker()
    walking = asyncio.create_task(walker.run(writes))
    while writes.reason is None:
        walker.want([0])
        await asyncio.sleep(0.01)
    walking.cancel()
    assert f"row {row_key_text(damaged)}, column BASE, ref_key 1" in writes.reason
    assert rows.checkpoints() == {}
    rows.master(0).run(index_table.write, change.format(f"x'{body.hex()}'"))
    await rows.walk()
    assert set(rows.checkpoints().values()) == {30}
    assert rows.found(definition()) == rows.wanted(definition())


async def test_a_cell_of_the_log_that_cant_be_decoded_is_named_and_holds_its_own_shard_only(rows):
    """An active index waits there, and its delivery tells row and column. Once the cell is right, it goes on."""
    await rows.begin()
    home = rows.datastore.home(0)
    beside = next(shard for shard in range(1, SHARDS) if rows.datastore.home(shard) == home)
    for shard in (0, beside):
        await rows.walk(shard)
        rows.put(*moves(rows, shard, row_keys_of(shard, 30), 1, 1))
    entity = f"`{rows.datastore.database(0)}`.entity WHERE added_id = 20"
    ((row_key, body),) = rows.select(0, f"SELECT row_key, body FROM {entity}")
    change = f"UPDATE {entity.replace(' WHERE', ' SET body = {} WHERE')}"
    rows.master(0).run(index_table.write, change.format("x'00'"))
    kept = Checkpoints(
        CommitLanes(rows.async_storage, rows.datastore),
        definition().consumer,
        CheckpointPlacement.EVERYWHERE,
        start_at=None,
    )
    seconds = itertools.count()
    delivery = Delivery(
        rows.maintainer,
        kept,
        HomeLog(rows.async_storage, rows.datastore, home),
        clock=lambda: next(seconds),
    )
    delivery.gain([0, beside])

    async def stands(shard):
        await delivery.step()
        return rows.checkpoints(shard) == dict.fromkeys(rows.datastore.clusters, 30)

    async def fails_alone():
        return await stands(beside) and delivery.failing()

    ((shard, why),) = await async_until(fails_alone)
    assert (shard, f"row {row_key_text(row_key)}, column BASE, ref_key 1" in why) == (0, True)
    rows.master(0).run(index_table.write, change.format(f"x'{body.hex()}'"))
    await async_until(lambda: stands(0))
    await delivery.close(10)
    assert rows.found(definition()) == rows.wanted(definition())


async def test_a_generation_at_or_below_the_head_begins_the_walk_anew(rows):
    """Cells that were walked are lost, and others come in their place. The head is the last one that was kept."""
    row_keys = row_keys_of(0, 20)
    rows.put(*moves(rows, 0, row_keys, 1, 1), *moves(rows, 0, row_keys, 2, 2))
    await rows.begin()
    walker = rows.walker()
    for _ in range(4):
        await walker.step(0)
    rows.promote(0, 26)
    rows.put(*moves(rows, 0, shuffled(row_keys, 4), 3, 5))
    await rows.walk(walker=walker)
    assert walker.reason is None
    assert set(rows.checkpoints().values()) == {25}
    await rows.deliver(0, Location(2, 45))
    assert rows.found(definition()) == rows.wanted(definition())


async def test_a_generation_below_the_head_of_a_walk_that_is_over_finds_what_no_version_tells_of(rows):
    """A lost cell had taken a row out of the index before the walk. So neither entry nor tombstone was there."""
    row_keys = row_keys_of(0, 20)
    inside = [encode_body({"owner": owner, "number": 1}) for owner in owners().values()]
    rows.put(*[ShardCell(CellKey(row, "BASE", 1), inside[n % SHARDS], 0) for n, row in enumerate(row_keys)])
    rows.put(*[ShardCell(CellKey(row, "BASE", 2), encode_body({"owner": None}), 0) for row in row_keys[:10]])
    await rows.begin()
    await rows.walk()
    assert len(rows.found(definition())) == 10
    rows.promote(0, 25)
    assert rows.found(definition()) != rows.wanted(definition())
    rows.put(*moves(rows, 0, row_keys[:3], 5, 5))
    await rows.deliver(0, Location(2, 27))
    assert rows.found(definition()) == rows.wanted(definition())


def test_pages_of_a_walk_end_after_whole_rows(rows):
    """Whatever the bounds, every row comes once, with the newest cells up to the head, and all of its keys."""
    row_keys = sorted(row_keys_of(0, 6))
    wide = [ShardCell(CellKey(row_keys[2], f"C{n}", 1), encode_body({"n": n}), 0) for n in range(20)]
    large = [
        ShardCell(CellKey(row, "BASE", n), encode_body({"x": "y" * 5000 + row.hex() * n}), 0)
        for row in row_keys
        for n in (1, 2)
    ]
    rows.put(*wide, *large)
    rows.put(*[ShardCell(CellKey(row, "BASE", 9), encode_body({}), 0) for row in row_keys])
    for columns_max, bytes_max in ((1, 1), (3, 100), (50, 60), (1000, 1 << 20)):
        found, after, more = [], b"", True
        while more:
            page = rows.master(0).run(
                entity_table.walk, rows.datastore, 0, {"BASE", "C3"}, 32, after, columns_max, bytes_max
            )
            assert page.rows or not page.more
            found += page.rows
            after, more = (page.rows[-1].row_key if page.rows else after), page.more
        assert [row.row_key for row in found] == row_keys
        assert [row.keys for row in found] == [2, 2, 22, 2, 2, 2]
        assert [row.newest["BASE"].ref_key for row in found] == [2] * 6
        assert ["C3" in row.newest for row in found] == [False, False, True, False, False, False]
