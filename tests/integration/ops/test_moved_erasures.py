"""A shard moves while cells of it are erased: no copy keeps a body, and digests still agree (S31)."""

import asyncio
import secrets
import time

import msgspec
import pytest

from schemaless.ops import erasures
from schemaless.ops.moves import Mover, ShardMover
from schemaless.sharding import shard_of
from schemaless.storage import entity_table, erasure_table, shard_copy, shard_move_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.erasure_table import ErasedPlace, Erasure
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from tests.mover_harness import fill, new_cell, verify

pytestmark = pytest.mark.storage


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=1, partitions=1, placement=("a",))


@pytest.fixture
def opened(topology):
    with SyncStorage(topology) as storage:
        yield storage


def ordered(datastore, cell):
    shard = shard_of(cell.key.row_key, datastore.shards)
    now = time.time_ns() // 1000
    return Erasure(secrets.randbits(63), datastore.name, shard, cell.key.row_key, None, None, "asked", "ada", now)


def put(storage, datastore, cluster):
    cell = new_cell(0)
    storage.master(cluster).run(entity_table.put_cells, datastore, [cell])
    return cell


def erase_at(storage, datastore, cluster, cell):
    """Erases at home only: no other cluster knows of it yet."""
    master, erasure = storage.master(cluster), ordered(datastore, cell)
    master.run(erasure_table.order, erasure)
    assert master.run(erasure_table.erase_page, datastore, erasure) == 1
    return erasure


def erase_everywhere(topology, datastore, erasure):
    async def run():
        async with AsyncStorage(topology) as storage:
            await storage.look()
            await erasures.carry_out(storage, storage.live(datastore), erasure)

    asyncio.run(run())


def bodies(storage, datastore, cluster, cell):
    return [
        body
        for (body,) in storage.master(cluster).run(
            query,
            f"SELECT body FROM `{datastore.database(0)}`.entity WHERE row_key = x'{cell.key.row_key.hex()}'"
            " AND column_name <> '$erase'",
        )
    ]


def digest_fits(storage, datastore, cluster):
    master = storage.master(cluster)
    move = master.run(shard_move_table.of_shard, datastore.name, 0)
    return move.digest == master.run(query, shard_copy.digest(datastore, 0, 0, move.copied))[0][0]


def test_the_copier_carries_out_what_it_copies(opened, datastore):
    """The cell was copied with its body before it was erased."""
    cell = put(opened, datastore, "a")
    fill(opened, datastore, 0, 1200)
    with Mover(opened, ["a", "b"]) as mover:
        one = ShardMover(mover, datastore, 0, "a", "b")
        one.begin()
        one.copy()
        assert bodies(opened, datastore, "b", cell) == [cell.body]
        erase_at(opened, datastore, "a", cell)
        one.copy()
        assert bodies(opened, datastore, "b", cell) == [b""]
        assert digest_fits(opened, datastore, "b")
        one.switch()
    verify(opened, datastore, 0, "b", "a", [])
    assert digest_fits(opened, datastore, "b")


def test_an_erasure_while_a_page_is_under_way(opened, datastore, monkeypatch):
    """The source is erased between the cells and their digest: the page is read again."""
    cell = put(opened, datastore, "a")
    erased = []
    with Mover(opened, ["a", "b"]) as mover:
        one = ShardMover(mover, datastore, 0, "a", "b")
        one.begin()
        read = one._read

        def read_late(copied, until):
            page = read(copied, until)
            if not erased:
                erased.append(page)
                erase_at(opened, datastore, "a", cell)
                compared = opened.master("a").run(query, shard_copy.digest(datastore, 0, 0, 1))[0][0]
                page = msgspec.structs.replace(page, digest=compared)
            return page

        monkeypatch.setattr(one, "_read", read_late)
        one.copy()
        assert erased
        assert bodies(opened, datastore, "b", cell) == [b""]
        assert digest_fits(opened, datastore, "b")


def test_a_copy_that_nobody_follows_is_emptied(topology, opened, datastore):
    """The former home has cells, and no process copies to it. Later one does, and the digests agree."""
    cell = put(opened, datastore, "a")
    late = put(opened, datastore, "a")
    with Mover(opened, ["a", "b"]) as mover:
        one = ShardMover(mover, datastore, 0, "a", "b")
        one.begin()
        one.switch()
    erasure = ordered(datastore, cell)
    erase_everywhere(topology, datastore, erasure)
    assert bodies(opened, datastore, "a", cell) == bodies(opened, datastore, "b", cell) == [b""]
    assert bodies(opened, datastore, "a", late) == [late.body]
    former = opened.master("a").run(erasure_table.of, datastore.name, erasure.erasure)
    assert former.places == {"copy": ErasedPlace(1, 1)}
    assert digest_fits(opened, datastore, "a")
    erase_at(opened, datastore, "b", late)
    with Mover(opened, ["a", "b"]) as mover:
        back = ShardMover(mover, datastore, 0, "b", "a")
        back.begin()
        back.copy()
        assert bodies(opened, datastore, "a", late) == [b""]
        assert digest_fits(opened, datastore, "a")
        back.switch()
    verify(opened, datastore, 0, "a", "b", [])


def test_an_erasure_empties_a_copy_under_way(topology, opened, datastore):
    """Between two pages, in the process that orders it: the mover's digest is the row's."""
    cell = put(opened, datastore, "a")
    fill(opened, datastore, 0, 100)
    with Mover(opened, ["a", "b"]) as mover:
        one = ShardMover(mover, datastore, 0, "a", "b")
        one.begin()
        one.copy()
        erase_everywhere(topology, datastore, ordered(datastore, cell))
        assert bodies(opened, datastore, "b", cell) == [b""]
        fill(opened, datastore, 0, 10)
        one.switch()
        assert (
            one.move.digest == opened.master("b").run(query, shard_copy.digest(datastore, 0, 0, one.move.copied))[0][0]
        )
    verify(opened, datastore, 0, "b", "a", [])


def test_until_goes_with_the_shard(topology, opened, datastore):
    """The new home doesn't erase what was put since the old one did."""
    cell = put(opened, datastore, "a")
    erasure = erase_at(opened, datastore, "a", cell)
    with Mover(opened, ["a", "b"]) as mover:
        one = ShardMover(mover, datastore, 0, "a", "b")
        one.begin()
        one.switch()
    again = msgspec.structs.replace(cell, key=msgspec.structs.replace(cell.key, ref_key=2))
    opened.master("b").run(entity_table.put_cells, datastore, [again])
    erase_everywhere(topology, datastore, erasure)
    assert sorted(bodies(opened, datastore, "b", cell)) == [b"", cell.body]
