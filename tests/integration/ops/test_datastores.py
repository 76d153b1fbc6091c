"""Making datastores: once, again, after a crash, and with counts that don't fit."""

import asyncio
import functools
import uuid

import pytest

from schemaless.errors import Invalid, Misconfigured, NotFound
from schemaless.ops.datastores import Catalogue, create_shards, list_datastores, parse_name
from schemaless.storage import schema, shard_head
from schemaless.storage.operation import query
from schemaless.topology import Datastore

pytestmark = pytest.mark.storage


def silent(made: int, total: int) -> None:
    pass


def fresh(shards: int, partitions: int = 2, placement: tuple[str, ...] = ("a", "b")) -> Datastore:
    return Datastore(f"d{uuid.uuid4().hex[:8]}", shards, partitions, placement)


@pytest.fixture
def create(running, storage):
    """Makes the shards of a datastore, granted by an administrator."""
    return functools.partial(create_shards, storage, administrators=running.administrators)


def heads_on(storage, cluster, datastore):
    return [head.shard for head in storage.master(cluster).run(shard_head.heads, datastore.name)]


def test_shards_are_placed_in_turn_on_the_clusters(storage, create):
    """Shard n lives on the (n mod clusters)th cluster, and progress reaches the total."""
    seen = []
    datastore = create(fresh(6), lambda made, total: seen.append((made, total)))
    assert heads_on(storage, "a", datastore) == [0, 2, 4]
    assert heads_on(storage, "b", datastore) == [1, 3, 5]
    assert seen == [(made, 6) for made in range(7)]


def test_what_a_crash_left_is_finished(storage, admin, topology, create):
    """A datastore half made isn't listed; made again it is whole, and what was there is left alone."""
    wanted = fresh(4)
    for cluster in ("a", "b"):
        storage.master(cluster).run(schema.create_server_tables)
    storage.master("a").run(schema.insert_datastore, wanted)
    admin.master("a").run(schema.create_shard, wanted, 0)
    assert wanted.name not in list_datastores(topology)
    seen = []
    create(wanted, lambda made, total: seen.append(made))
    assert seen == [1, 2, 3, 4]
    assert list_datastores(topology)[wanted.name] == wanted


@pytest.mark.parametrize(("shards", "partitions"), [(8, 2), (4, 4)])
def test_other_counts_are_refused(shards, partitions, create):
    """A datastore never changes its counts."""
    made = create(fresh(4), silent)
    there = rf"{made.name} exists with 4 shards and {made.partitions} partitions.* changed to {shards} and {partitions}"
    with pytest.raises(Misconfigured, match=there):
        create(Datastore(made.name, shards, partitions, ("a", "b")), silent)


def test_a_later_topology_does_not_move_shards(storage, create):
    """Made again under another placement, a datastore keeps its first one."""
    made = create(fresh(4, placement=("b",)), silent)
    again = create(Datastore(made.name, 4, 2, ("a", "b")), silent)
    assert again.placement == ("b",)
    assert heads_on(storage, "a", made) == []


@pytest.mark.parametrize("name", ["", "A", "1a", "a-b", "a" * 33, "a.b", "a`"])
def test_names_that_are_none_are_refused(name):
    """A datastore's name is part of database and topic names."""
    with pytest.raises(Invalid):
        parse_name(name)


async def test_the_catalogue_finds_what_was_made_after_it_last_looked(async_storage, make_datastore):
    """A name that was missing a moment ago is found as soon as its datastore is ready."""
    catalogue = Catalogue(async_storage)
    first = make_datastore()
    assert await catalogue.datastore(first.name) == first
    with pytest.raises(NotFound):
        await catalogue.datastore("missing")
    second = make_datastore()
    assert await catalogue.datastore(second.name) == second


async def test_those_who_ask_for_missing_names_at_once_share_a_look(async_storage, make_datastore):
    """A hundred callers with wrong names cost each server a query or two, not a hundred."""
    make_datastore()
    clock = iter(range(1000))
    catalogue = Catalogue(async_storage, clock=lambda: next(clock))
    await asyncio.gather(*(catalogue.datastore(f"missing{n}") for n in range(100)), return_exceptions=True)
    ticks = next(clock)
    assert ticks - 100 <= 2, "a tick for each caller, and one for each look"


def test_a_format_that_is_not_known_is_refused(storage, topology, create):
    """A later program's databases are left alone, by everything that asks for its datastores."""
    create(fresh(2), silent)
    master = storage.master("a")
    master.run(query, "UPDATE schemaless.format SET version = 99")
    try:
        with pytest.raises(Misconfigured, match=rf"have format \[99\], this program knows {schema.FORMAT_VERSION}"):
            list_datastores(topology)
    finally:
        master.run(query, f"UPDATE schemaless.format SET version = {schema.FORMAT_VERSION}")
    assert list_datastores(topology)
