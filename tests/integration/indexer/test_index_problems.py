"""Problems on real servers: exact whatever comes again, comes late, or is superseded (I10, I11, I13)."""

import random

import pytest

from indexer.service import remove_from, remove_strays
from schemaless.codec import encode_body
from schemaless.consume.ports import Run
from schemaless.index.catalogue import create_index
from schemaless.index.entry import Misfit
from schemaless.index.transition import ProblemWrite
from schemaless.location import Location
from schemaless.storage import entity_table, index_problem_table
from schemaless.storage.entity_table import CellKey, ShardCell
from schemaless.storage.index_definition_table import IndexStage, defined
from schemaless.storage.index_problem_table import LISTED_MAX, IndexVersion
from schemaless.storage.operation import query
from tests.integration.indexer.test_indexer import SHARDS, definition
from tests.integration.indexer.test_superseding import IndexedRows, row_keys_of

pytestmark = pytest.mark.storage


@pytest.fixture
def rows(storage, async_storage, make_datastore):
    return IndexedRows(storage, make_datastore(shards=SHARDS, partitions=2), async_storage)


def version(rows):
    return IndexVersion(rows.datastore.name, definition().name, 1)


def counted(rows):
    clusters = rows.datastore.clusters
    counts = [rows.storage.master(cluster).run(index_problem_table.counts) for cluster in clusters]
    return sum(found.get(version(rows), 0) for found in counts)


def listed(rows):
    """By row key, the fields that don't fit, read in pages of seven rows of each cluster."""
    found = {}
    for cluster in rows.datastore.clusters:
        shard, row_key, is_first = 0, b"", True
        while True:
            page = rows.storage.master(cluster).run(index_problem_table.page, version(rows), shard, row_key, 7)
            new = page if is_first else page[1:]
            if not new:
                break
            found.update({row.row_key: {misfit.field for misfit in row.misfits} for row in new})
            shard, row_key, is_first = page[-1].shard, page[-1].row_key, False
    return found


def wanted(rows, shards):
    """By row key, the fields of the newest cells that don't fit: computed from the cells alone."""
    newest = {}
    for shard in shards:
        for cell in rows.master(shard).run(entity_table.read_after, rows.datastore, shard, 0, 10_000):
            known = newest.get(cell.row_key)
            if known is None or cell.ref_key > known.ref_key:
                newest[cell.row_key] = cell
    found = {}
    for row_key, cell in newest.items():
        body = index_body(cell.ref_key, row_key)
        wrong = {name for name, kind in (("owner", str), ("number", int)) if not isinstance(body[name], kind)}
        if wrong:
            found[row_key] = wrong
    return found


def index_body(ref_key, row_key):
    """Each version of a row fits or not, as its key and the row's say."""
    rng = random.Random(f"{ref_key} {row_key.hex()}")
    return {"owner": rng.choice(["o", 5]), "number": rng.choice([1, "one", [1]])}


def versions_of(shard, row_keys, ref_key):
    return [ShardCell(CellKey(row, "BASE", ref_key), encode_body(index_body(ref_key, row)), shard) for row in row_keys]


async def test_an_index_whose_every_row_is_a_problem_counts_and_lists_all(rows):
    """Both clusters have their own. Cells that come again, in other batches, change neither count nor list."""
    row_keys = {shard: row_keys_of(shard, 40) for shard in (0, 1)}
    unfit = encode_body({"owner": 1, "number": "one"})
    for shard, keys in row_keys.items():
        rows.put(*[ShardCell(CellKey(row, "BASE", 1), unfit, shard) for row in keys])
        await rows.follow(shard)
    every = {row: {"owner", "number"} for keys in row_keys.values() for row in keys}
    assert (counted(rows), listed(rows)) == (160, every)
    assert rows.found(definition()) == {}
    await rows.follow(0, after=13)
    assert (counted(rows), listed(rows)) == (160, every)


async def test_a_row_that_is_repaired_is_none_any_more_also_for_a_late_writer(rows):
    """The cell that repairs it wins over the cells before it, which come again."""
    row_keys = row_keys_of(0, 60)
    for ref_key in (1, 2, 3):
        rows.put(*versions_of(0, row_keys, ref_key))
    await rows.follow(0)
    assert listed(rows) == wanted(rows, [0]) != {}
    assert counted(rows) == sum(map(len, wanted(rows, [0]).values()))
    fit = encode_body({"owner": "o", "number": 1})
    rows.put(*[ShardCell(CellKey(row, "BASE", 4), fit, 0) for row in row_keys])
    await rows.follow(0, after=180)
    assert (counted(rows), listed(rows)) == (0, {})
    cells = rows.master(0).run(entity_table.read_after, rows.datastore, 0, 0, 100)
    await rows.apply(await rows.maintainer.handle([Run(0, Location(1, 0), cells)]))
    assert (counted(rows), listed(rows)) == (0, {})


async def test_a_row_that_fits_from_the_beginning_is_never_written(rows):
    fit = encode_body({"owner": "o", "number": 1})
    rows.put(*[ShardCell(CellKey(row, "BASE", 1), fit, 0) for row in row_keys_of(0, 20)])
    await rows.follow(0)
    found = f"SELECT COUNT(*) FROM schemaless.index_problem WHERE datastore = '{rows.datastore.name}'"
    assert [rows.storage.master(cluster).run(query, found)[0][0] for cluster in rows.datastore.clusters] == [0, 0]


def test_of_a_row_some_fields_are_listed_and_all_are_counted(rows):
    """An index has up to 62 fields, and each row may fit none of them."""
    misfits = tuple(Misfit(f"f{n}", "is no int", '"x"', values=2) for n in range(LISTED_MAX + 4))
    unfit = ProblemWrite(0, bytes(16), Location(1, 1), misfits)
    rows.master(0).run(query, index_problem_table.upserts(version(rows), [unfit]))
    assert counted(rows) == 2 * len(misfits)
    assert listed(rows) == {bytes(16): {misfit.field for misfit in misfits[:LISTED_MAX]}}


async def test_problems_of_superseded_cells_are_judged_again(rows):
    """Over several pages. A row whose cells are all lost has none. Once more changes nothing."""
    row_keys = row_keys_of(0, 30)
    rows.put(*versions_of(0, row_keys, 1), *versions_of(0, row_keys, 2), *versions_of(0, row_keys_of(0, 10), 1))
    await rows.follow(0)
    rows.promote(0, 41)
    assert listed(rows) != wanted(rows, [0])
    for _ in range(2):
        await rows.apply(await rows.maintainer.supersede(0, 41, 2))
        assert listed(rows) == wanted(rows, [0]) != {}
    rows.put(*versions_of(0, row_keys, 3))
    await rows.follow(0, after=40)
    assert listed(rows) == wanted(rows, [0])


async def test_problems_go_with_their_version(rows, async_storage):
    """Those of a version that is gone, too, where a process that was killed late left some."""
    await create_index(async_storage, rows.datastore, definition())
    rows.put(*versions_of(0, row_keys_of(0, 30), 1))
    await rows.follow(0)
    assert counted(rows) > 0
    deleted = defined(definition(), IndexStage.DELETING)
    for cluster in rows.datastore.clusters:
        await remove_from(async_storage, rows.datastore, deleted, cluster)
    assert counted(rows) == 0
    stray = IndexVersion(rows.datastore.name, "never_made", 7)
    rows.master(0).run(
        query,
        "INSERT INTO schemaless.index_problem VALUES"
        f" ('{stray.datastore}', '{stray.name}', {stray.number}, 0, x'{bytes(16).hex()}', 1, 1, 2, '[]')",
    )
    await remove_strays(async_storage, rows.datastore)
    assert stray not in rows.master(0).run(index_problem_table.counts)
