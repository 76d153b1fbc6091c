"""A master dies with an erasure that nobody else has, and comes back with bodies that are erased (I19)."""

import asyncio
import secrets
import time
import uuid

import pytest

from controller.tail import Tail
from schemaless.cell import CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.errors import KeyErased, TableMissing
from schemaless.ops import erasures
from schemaless.ops.datastores import Catalogue
from schemaless.sharding import shard_of
from schemaless.storage import buffer_table, diverged_table, erasure_table, post_version
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.erasure_table import Erasure
from schemaless.storage.operation import query
from schemaless.storage.post_version import NewVersion
from tests.integration.controller.test_tail import DATASTORE, buffered, controlled
from tests.waiting import until

pytestmark = [pytest.mark.storage, pytest.mark.timeout(180)]

BASE = ColumnName("BASE")


def row_at(home):
    row_key = RowKey(uuid.uuid4().bytes)
    while DATASTORE.home(shard_of(row_key, DATASTORE.shards)) != home:
        row_key = RowKey(uuid.uuid4().bytes)
    return row_key


def cell(row_key, ref_key, idempotency_key=None):
    return ShardCell(
        CellKey(row_key, BASE, RefKey(ref_key)),
        encode_body({"secret": secrets.token_hex(16)}),
        shard_of(row_key, DATASTORE.shards),
        idempotency_key=idempotency_key,
    )


def ordered(row_key):
    shard, now = shard_of(row_key, DATASTORE.shards), time.time_ns() // 1000
    return Erasure(secrets.randbits(63), DATASTORE.name, shard, row_key, None, None, "asked", "ada", now)


def erasing(world, work):
    """Runs work with a storage of its own, as a cleaner would that begins now."""

    async def run():
        async with AsyncStorage(world.running.topology) as storage:
            await storage.look()
            return await work(storage)

    return asyncio.run(run())


def order(world, row_key):
    erasure = ordered(row_key)
    erasing(world, lambda storage: erasures.order(storage, DATASTORE, erasure))
    return erasure


def step(world):
    erasing(world, lambda storage: erasures.step(storage, Catalogue(storage)))


def states(world, cluster, row_key):
    master = world.storage.master(cluster)
    rows = master.run(
        query,
        f"SELECT ref_key, erased IS NOT NULL FROM `{DATASTORE.database(shard_of(row_key, DATASTORE.shards))}`.entity"
        f" WHERE row_key = x'{row_key.hex()}' AND column_name = 'BASE'",
    )
    return {ref_key: bool(erased) for ref_key, erased in rows}


def known_everywhere(world, erasure):
    def is_shown():
        try:
            found = world.storage.nodes["a2"].run(erasure_table.of, DATASTORE.name, erasure.erasure)
        except TableMissing:  # the minion is behind
            return False
        return found is not None and found.done_at is not None

    until(is_shown)


def kept(world, *row_keys):
    """What is kept of rows: the sizes of bodies, and what came of them."""
    master = world.storage.master("a")
    rows = {row_key: master.run(diverged_table.of_row, DATASTORE.name, row_key, 10) for row_key in row_keys}
    return {row_key: [(row.size_bytes, row.outcome) for row in found] for row_key, found in rows.items()}


def test_a_master_dies_with_an_erasure(tmp_path):
    """The order is on the other master, so it is carried out again. What the dead one had comes back without bodies."""
    first, late, unheard, away = row_at("a"), row_at("a"), row_at("a"), row_at("b")
    with controlled(tmp_path) as world:
        a1 = world.storage.master("a")
        world.put("a", cell(first, 1), cell(late, 1))
        known = cell(away, 1)
        world.put("b", known)
        known_everywhere(world, order(world, away))
        world.admin("a2", "STOP REPLICA IO_THREAD")
        posted = cell(late, 2, "a key")
        world.put("a", cell(first, 2), posted, cell(unheard, 2))
        a1.run(buffer_table.insert, DATASTORE, [buffered(known)])  # its home is away, for all that the client knows
        erasure = order(world, first)
        assert states(world, "a", first) == {1: True, 2: True}
        world.servers["a1"].kill()
        world.step_until(lambda: world.master_is("a2"))
        assert states(world, "a", first) == {1: False}
        step(world)
        step(world)
        assert states(world, "a", first) == {1: True}
        again = world.storage.master("a").run(erasure_table.of, DATASTORE.name, erasure.erasure)
        assert again.done_at
        order(world, late)
        elsewhere = ordered(unheard)
        world.storage.master("b").run(erasure_table.order, elsewhere)  # a's master hears of it later
        world.servers["a1"].start()
        Tail(world.storage, "a1").keep()
        emptied = (first, late, unheard)
        assert kept(world, *emptied) == {row_key: [(0, PutStatus.CONFLICT)] for row_key in emptied}
        entered = world.storage.master("a").run(erasure_table.of, DATASTORE.name, elsewhere.erasure)
        assert entered.entry
        assert kept(world, away) == {away: [(len(known.body), None)]}
        world.step_until(lambda: "0 wait" in world.steps().get("put again", ""))
        assert kept(world, *emptied, away) == {row_key: [(0, PutStatus.CONFLICT)] for row_key in (*emptied, away)}
        assert states(world, "a", first) == states(world, "a", late) == {1: True, 2: True}  # the keys stay taken
        version = NewVersion(posted.shard, late, BASE, posted.body, "a key")
        (again,) = world.storage.master("a").run(post_version.put_next, DATASTORE, [version])
        assert isinstance(again, KeyErased)
        assert not world.conflicts("a")
        assert not world.conflicts("b")
