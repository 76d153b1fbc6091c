"""Many keys of several clusters never hold more bytes than were reserved for them together (I14)."""

import asyncio
import uuid
from types import SimpleNamespace

import pytest

from api.read.reader import Served, WantedCell, read_many
from schemaless.cell import RowKey
from schemaless.errors import TooLarge
from schemaless.sharding import shard_of
from schemaless.topology import Datastore, Role

DATASTORE = Datastore("trips", 4, 2, ("a", "b", "c", "d"))


class Reader:
    """Its clusters have bodies of given sizes. It remembers how many bytes could be held at once."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.under_way = self.held = self.held_most = 0

    async def following(self, datastore, read):
        return await read()

    async def read(self, cluster, operation, datastore, keys, bytes_max, *, read_from, of):
        self.under_way += bytes_max
        self.held_most = max(self.held_most, self.held + self.under_way)
        await asyncio.sleep(0)
        self.under_way -= bytes_max
        cells = [SimpleNamespace(body=bytes(self.sizes[cluster])) for _ in keys]
        total = sum(len(cell.body) for cell in cells)
        if total > bytes_max:
            raise TooLarge("more than that")
        self.held += total
        return cells, Served(Role.MASTER, cluster, 0.0)


def one_of_each():
    wanted = {}
    while len(wanted) < 4:
        row_key = RowKey(uuid.uuid4().bytes)
        wanted[DATASTORE.home(shard_of(row_key, 4))] = WantedCell(row_key, "BASE", 1)
    return [wanted[cluster] for cluster in "abcd"]


async def read(reader, bytes_max):
    cells, served = await read_many(reader, DATASTORE, one_of_each(), None, bytes_max)
    return [len(cell.body) for cell in cells], served.cluster


@pytest.mark.parametrize("sizes", [(10, 10, 10, 10), (70, 10, 10, 10), (1, 48, 51, 0)])
async def test_all_clusters_together_stay_within_the_bound(sizes):
    """Also where one of them has nearly all of it."""
    reader = Reader(dict(zip("abcd", sizes, strict=True)))
    assert await read(reader, 100) == (list(sizes), "a,b,c,d")
    assert reader.held_most <= 100


async def test_all_clusters_are_read_in_parallel(monkeypatch):
    """None is asked after another one has answered. The cells of `include` are read so, too."""
    asked, all_asked, read_one = set(), asyncio.Event(), Reader.read

    async def read_when_all_are_asked(self, cluster, *args, **options):
        asked.add(cluster)
        if asked == set(DATASTORE.clusters):
            all_asked.set()
        await all_asked.wait()
        return await read_one(self, cluster, *args, **options)

    monkeypatch.setattr(Reader, "read", read_when_all_are_asked)
    await read(Reader(dict.fromkeys("abcd", 1)), 100)


async def test_more_than_the_bound_is_refused():
    """Whichever cluster it comes from."""
    reader = Reader({"a": 10, "b": 10, "c": 10, "d": 71})
    with pytest.raises(TooLarge):
        await read(reader, 100)
    assert reader.held_most <= 100
