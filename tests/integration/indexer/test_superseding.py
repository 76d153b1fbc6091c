"""What a new generation supersedes leaves the index tables of real servers too (I11, I13)."""

import random
import uuid

import pytest

from indexer.maintainer import Maintainer
from schemaless.codec import encode_body
from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints, CommitLanes
from schemaless.consume.delivery import Delivery
from schemaless.consume.host import HomeLog
from schemaless.consume.ports import Run
from schemaless.errors import StorageUnavailable
from schemaless.index.catalogue import build_progress, create_index
from schemaless.location import Location
from schemaless.names import index_consumer
from schemaless.position import Position
from schemaless.sharding import shard_of
from schemaless.storage import checkpoint_table, entity_table, index_definition_table, index_table
from schemaless.storage.entity_table import CellKey, ShardCell
from schemaless.storage.index_definition_table import BuildProgress, IndexStage, defined
from tests.integration.indexer.test_indexer import SHARDS, Rows, definition, elements, owners
from tests.waiting import async_until

pytestmark = pytest.mark.storage


class IndexedRows(Rows):
    """Rows of a datastore, and its index as one maintainer without a topic writes it."""

    def __init__(self, storage, datastore, async_storage, index=None):
        super().__init__(storage, datastore)
        self.async_storage = async_storage
        self.index = index = index or definition()
        self.maintainer = Maintainer(async_storage, datastore, index, effect_bytes_max=3000, examined_rows_max=3)
        for shard in range(SHARDS):
            self.master(shard).run(index_table.create, datastore, shard, index)

    def master(self, shard):
        return self.storage.master(self.datastore.home(shard))

    async def apply(self, effect):
        for cluster, script in effect.scripts.items():
            await self.async_storage.master(cluster).run(index_table.write, script)

    async def follow(self, shard, after=0):
        """Takes the log of a shard from a position to its end."""
        while cells := self.master(shard).run(entity_table.read_after, self.datastore, shard, after, 1000):
            effect = await self.maintainer.handle([Run(shard, Location(1, after), cells)])
            await self.apply(effect)
            after += effect.outcomes[0].finished
            self.reached(shard, cells[effect.outcomes[0].finished - 1].location)

    def reached(self, shard, location):
        """Notes a checkpoint on every cluster, as the transactions of the entries would."""
        name, consumer = self.datastore.name, self.index.consumer
        for cluster in self.datastore.clusters:
            master = self.storage.master(cluster)
            master.run(checkpoint_table.make, name, consumer, [Position(shard, location.generation, location.added_id)])
            master.run(
                index_table.write,
                f"UPDATE schemaless.checkpoint SET generation = {location.generation}, added_id = {location.added_id}"
                f" WHERE datastore = '{name}' AND consumer = '{consumer}' AND shard = {shard}",
            )

    def promote(self, shard, starts_at):
        """Does what a promotion does to the shard: cells from `starts_at` on are lost."""
        name, database = self.datastore.name, self.datastore.database(shard)
        for statement in (
            f"DELETE FROM `{database}`.entity WHERE added_id >= {starts_at}",
            f"INSERT INTO schemaless.shard_generation SELECT '{name}', {shard}, MAX(generation) + 1, {starts_at},"
            f" UTC_TIMESTAMP(6) FROM schemaless.shard_generation WHERE datastore = '{name}' AND shard = {shard}",
            f"UPDATE schemaless.shard_head SET generation = generation + 1, head = {starts_at - 1}"
            f" WHERE datastore = '{name}' AND shard = {shard}",
        ):
            self.master(shard).run(index_table.write, statement)


@pytest.fixture
def rows(storage, async_storage, make_datastore):
    return IndexedRows(storage, make_datastore(shards=SHARDS, partitions=2), async_storage)


def row_keys_of(shard, count):
    found = []
    while len(found) < count:
        row_key = uuid.uuid4().bytes
        if shard_of(row_key, SHARDS) == shard:
            found.append(row_key)
    return found


def moves(rows, shard, row_keys, ref_key, seed):
    """One cell for each row, which gives it an owner on any shard, or none."""
    rng = random.Random(seed)
    names = [*owners().values(), None]
    return [
        ShardCell(CellKey(row, "BASE", ref_key), encode_body({"owner": rng.choice(names), "number": seed}), shard)
        for row in row_keys
    ]


async def test_superseded_entries_are_evaluated_again_in_pieces_and_again(rows):
    """Entries and tombstones in all index shards, over several pages and transactions. Once more changes nothing."""
    for shard in (0, 1):
        row_keys = row_keys_of(shard, 40)
        rows.put(*moves(rows, shard, row_keys, 1, seed=1))
        rows.put(*moves(rows, shard, row_keys, 2, seed=2))
        await rows.follow(shard)
    assert rows.found(definition()) == rows.wanted(definition())
    rows.promote(0, 60)
    assert rows.found(definition()) != rows.wanted(definition())
    with pytest.raises(StorageUnavailable):
        await rows.maintainer.supersede(0, 60, 3)
    effect = await rows.maintainer.supersede(0, 60, 2)
    refusal = index_table.refusal(rows.maintainer.version, 0, 59)  # stands before what is bounded
    assert 0 < max(map(len, effect.scripts.values())) - len(f"{refusal};") <= 3000
    again = await rows.maintainer.supersede(0, 60, 2)  # as after a crash in between: it finds what is left
    assert again.scripts == effect.scripts
    await rows.apply(again)
    assert rows.found(definition()) == rows.wanted(definition())
    left = await rows.maintainer.supersede(0, 60, 2)
    assert not [script for script in left.scripts.values() if "index_by_owner" in script]
    rows.reached(0, Location(1, 59))
    rows.put(*moves(rows, 0, row_keys_of(0, 20), 1, seed=3))
    await rows.follow(0, after=59)
    rows.promote(0, 30)
    await rows.apply(await rows.maintainer.supersede(0, 30, 3))
    rows.put(*moves(rows, 0, row_keys_of(0, 20), 1, seed=4))
    await rows.follow(0, after=29)
    assert rows.found(definition()) == rows.wanted(definition())


async def test_superseded_elements_are_evaluated_again(storage, async_storage, make_datastore):
    """Pages of three entries end within rows: what an element lost, moved or gained is taken back, each by itself."""
    rows = IndexedRows(storage, make_datastore(shards=SHARDS, partitions=2), async_storage, elements())
    names = [*owners().values(), None]
    rng = random.Random(5)
    row_keys = row_keys_of(0, 20)
    for version in (1, 2):
        for row in row_keys:
            tags = [{"name": rng.choice(names), "weight": n} for n in range(rng.randrange(6))]
            rows.put(ShardCell(CellKey(row, "BASE", version), encode_body({"tags": tags}), 0))
    await rows.follow(0)
    assert rows.found(elements()) == rows.wanted(elements())
    rows.promote(0, 27)
    assert rows.found(elements()) != rows.wanted(elements())
    await rows.apply(await rows.maintainer.supersede(0, 27, 2))
    assert rows.found(elements()) == rows.wanted(elements())


async def test_entries_on_the_other_cluster_are_taken_back_when_the_home_lost_its_checkpoint_too(rows, async_storage):
    """A promotion takes the checkpoint on the home back with the cells, and a new process begins there."""
    name, home = rows.datastore.name, rows.datastore.home(0)
    row_keys = row_keys_of(0, 40)
    rows.put(*moves(rows, 0, row_keys, 1, seed=1), *moves(rows, 0, row_keys, 2, seed=2))

    async def deliver(location):
        lanes = CommitLanes(async_storage, rows.datastore)
        checkpoints = Checkpoints(lanes, index_consumer(definition().name), CheckpointPlacement.EVERYWHERE)
        delivery = Delivery(rows.maintainer, checkpoints, HomeLog(async_storage, rows.datastore, home))
        delivery.gain([0])

        async def is_there():
            await delivery.step()
            return delivery.cursors()[0].done.location == location

        await async_until(is_there)
        await delivery.close(10)

    await deliver(Location(1, 80))
    assert rows.found(definition()) == rows.wanted(definition())
    rows.promote(0, 60)
    rows.master(0).run(
        index_table.write,
        f"UPDATE schemaless.checkpoint SET added_id = 50, digest = NULL, version = 3 WHERE datastore = '{name}'",
    )
    assert rows.found(definition()) != rows.wanted(definition())
    rows.put(*moves(rows, 0, row_keys_of(0, 30), 1, seed=3))
    await deliver(Location(2, 89))
    assert rows.found(definition()) == rows.wanted(definition())


async def test_a_build_does_not_wait_for_cells_that_were_superseded(rows, async_storage):
    """The cells that were there at the start and are lost don't hold up the index for ever."""
    rows.put(*moves(rows, 0, row_keys_of(0, 10), 1, seed=1))
    await create_index(async_storage, rows.datastore, definition())
    for master in async_storage.masters:
        until = dict.fromkeys(range(SHARDS), 10)
        await master.run(index_definition_table.begin_build, rows.datastore.name, definition().name, 1, until)
    index = defined(definition(), IndexStage.BUILDING)
    assert (await build_progress(async_storage, rows.datastore, index)).total == 10 * SHARDS
    rows.reached(0, Location(1, 10))
    rows.promote(0, 6)
    await rows.maintainer.supersede(0, 6, 2)
    assert (await build_progress(async_storage, rows.datastore, index)).total == 10 * SHARDS - 5


async def test_a_build_counts_no_cell_that_was_superseded(rows, async_storage):
    """The checkpoints are at 1:10 of 10, and generation 2 has begun at 6. Its cells are still to be indexed."""
    rows.put(*moves(rows, 0, row_keys_of(0, 10), 1, seed=1))
    await create_index(async_storage, rows.datastore, definition())
    name, consumer = rows.datastore.name, index_consumer(definition().name)
    for master in async_storage.masters:
        await master.run(index_definition_table.begin_build, name, definition().name, 1, {0: 10})
        await master.run(checkpoint_table.make, name, consumer, [Position(0, 1, 10)])
    index = defined(definition(), IndexStage.BUILDING)
    assert await build_progress(async_storage, rows.datastore, index) == BuildProgress(10, 10)
    rows.promote(0, 6)
    rows.put(*moves(rows, 0, row_keys_of(0, 5), 1, seed=2))
    assert await build_progress(async_storage, rows.datastore, index) == BuildProgress(5, 10)
