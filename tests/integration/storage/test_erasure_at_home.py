"""An erasure at home: bodies go, keys and places stay, an entry in the log says so, nothing is put again (I1, I19)."""

import secrets
import time
import uuid

import pytest

from schemaless.cell import CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import decode_body, encode_body, erasing
from schemaless.errors import KeyErased
from schemaless.sharding import shard_of
from schemaless.storage import entity_table, erasure_table, post_version, shard_head, shard_log
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.erasure_table import Erasure
from schemaless.storage.post_version import NewVersion
from schemaless.storage.shard_log import LogRange

pytestmark = pytest.mark.storage

BASE, STATUS = ColumnName("BASE"), ColumnName("STATUS")


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=4, partitions=1, placement=("a",))


@pytest.fixture
def row_key():
    return RowKey(uuid.uuid4().bytes)


@pytest.fixture
def shard(datastore, row_key):
    return shard_of(row_key, datastore.shards)


@pytest.fixture
def run(storage):
    return storage.master("a").run


def ordered(run, datastore, row_key, column=None, ref_key=None):
    shard = shard_of(row_key, datastore.shards)
    now = int(time.time() * 1e6)
    made = Erasure(secrets.randbits(63), datastore.name, shard, row_key, column, ref_key, "asked to", "ada", now)
    run(erasure_table.order, made)
    run(erasure_table.order, made)  # again, as another process may
    return run(erasure_table.of, datastore.name, made.erasure)


def cell(shard, row_key, column, ref_key):
    return ShardCell(CellKey(row_key, column, RefKey(ref_key)), encode_body({"n": ref_key, "of": column}), shard)


def put(run, datastore, shard, row_key, *keys):
    return run(entity_table.put_cells, datastore, [cell(shard, row_key, *key) for key in keys])


def test_bodies_go_and_places_stay(run, datastore, shard, row_key):
    before = put(run, datastore, shard, row_key, (BASE, 1), (BASE, 2), (STATUS, 1))
    erasure = ordered(run, datastore, row_key, BASE)
    assert run(erasure_table.erase_page, datastore, erasure) == 2
    assert run(erasure_table.erase_page, datastore, erasure) == 0
    (log,) = run(shard_log.read, datastore, [LogRange(shard, 0, 100)], 1 << 20)
    assert [each.added_id for each in log] == [1, 2, 3, 4]
    assert [(each.generation, each.added_id, each.created_at) for each in log[:3]] == [
        (place.generation, place.added_id, place.created_at) for place in before
    ]
    assert [each.body for each in log[:2]] == [b"", b""]
    assert {each.erased.erasure for each in log[:2]} == {erasure.erasure}
    assert log[2].erased is None
    entry = log[3]
    assert (entry.row_key, entry.column_name, entry.ref_key) == (row_key, "$erase", 1)
    assert decode_body(entry.body) == {"erasure": erasure.id, "cells": {"BASE": [1, 2]}}
    assert erasing(entry.body).cells == {"BASE": [1, 2]}
    noted = run(erasure_table.of, datastore.name, erasure.erasure)
    assert (noted.until, noted.entry) == (3, 4)
    (head,) = run(shard_head.heads_of, datastore.name, [shard])
    assert head.added_id == 4


def test_what_came_later_is_not_meant(run, datastore, shard, row_key):
    put(run, datastore, shard, row_key, (BASE, 1))
    erasure = ordered(run, datastore, row_key)
    run(erasure_table.erase_page, datastore, erasure)
    put(run, datastore, shard, row_key, (BASE, 2))
    assert run(erasure_table.erase_page, datastore, run(erasure_table.of, datastore.name, erasure.erasure)) == 0
    (newest,) = run(entity_table.newest, datastore, [(shard, row_key, BASE)])
    assert newest.ref_key == 2


def test_a_put_of_an_erased_key_is_a_conflict_whatever_its_body(run, datastore, shard, row_key):
    put(run, datastore, shard, row_key, (BASE, 1))
    erasure = ordered(run, datastore, row_key, BASE, RefKey(1))
    run(erasure_table.erase_page, datastore, erasure)
    (again,) = put(run, datastore, shard, row_key, (BASE, 1))
    assert (again.status, again.erased.erasure) == (PutStatus.CONFLICT, erasure.erasure)
    (looked,) = run(entity_table.look_up, datastore, [cell(shard, row_key, BASE, 1)])
    assert looked == again


def test_a_post_again_with_its_key_brings_no_body_back(run, datastore, shard, row_key):
    version = NewVersion(shard, row_key, BASE, encode_body({"n": 1}), "my key")
    run(post_version.put_next, datastore, [version])
    erasure = ordered(run, datastore, row_key)
    run(erasure_table.erase_page, datastore, erasure)
    (again,) = run(post_version.put_next, datastore, [version])
    assert isinstance(again, KeyErased)
    assert again.erasure == erasure.id


def test_the_newest_is_the_newest_that_is_left(run, datastore, shard, row_key):
    put(run, datastore, shard, row_key, (BASE, 1), (BASE, 2), (STATUS, 1))
    for column, ref_key in ((BASE, 2), (STATUS, 1)):
        run(erasure_table.erase_page, datastore, ordered(run, datastore, row_key, column, RefKey(ref_key)))
    base, status = run(entity_table.newest, datastore, [(shard, row_key, BASE), (shard, row_key, STATUS)])
    assert (base.ref_key, base.is_erased) == (1, False)
    assert (status.ref_key, status.is_erased) == (1, True)
    keys = [(shard, row_key, BASE, None), (shard, row_key, BASE, RefKey(2))]
    some, exact = run(entity_table.get_or_newest, datastore, keys, 1 << 20)
    assert (some.ref_key, exact.is_erased) == (1, True)
    row = run(entity_table.row, datastore, shard, row_key, 1 << 20)
    assert [(each.column_name, each.ref_key, each.is_erased) for each in row] == [
        ("BASE", 1, False),
        ("STATUS", 1, True),
    ]
    columns = {BASE, STATUS}
    until = run(entity_table.newest_until, datastore, {shard: (100, [row_key])}, columns)
    walk = run(entity_table.walk, datastore, shard, columns, 100, RowKey(b""))
    span = run(entity_table.span, datastore, {shard: 100}, columns, RowKey(b""), RowKey(b"\xff" * 16), 100)
    for cells in (until.cells, list(walk.rows[0].newest.values()), span.cells):
        assert [(each.column_name, each.ref_key) for each in cells] == [("BASE", 1)]
    assert walk.rows[0].keys == 5  # three cells and two entries: keys stay, so a count still proves that all were met


def test_a_buffered_cell_gets_its_place_without_a_body(run, datastore, shard, row_key):
    put(run, datastore, shard, row_key, (BASE, 1))
    erasure = ordered(run, datastore, row_key)
    late = dict.fromkeys([CellKey(row_key, BASE, RefKey(1)), CellKey(row_key, BASE, RefKey(7))])
    assert run(erasure_table.erase_page, datastore, erasure, late) == 2
    (place,) = put(run, datastore, shard, row_key, (BASE, 7))
    assert (place.status, place.added_id, place.erased.erasure) == (PutStatus.CONFLICT, 2, erasure.erasure)
    assert run(erasure_table.erase_page, datastore, erasure, late) == 0


def test_a_row_with_more_than_an_entry_names_takes_several(run, datastore, shard, row_key):
    keys = [(BASE, n) for n in range(1, erasure_table.TARGETS_MAX + 6)]
    for first in range(0, len(keys), 500):
        put(run, datastore, shard, row_key, *keys[first : first + 500])
    erasure = ordered(run, datastore, row_key)
    erased = []
    while count := run(erasure_table.erase_page, datastore, run(erasure_table.of, datastore.name, erasure.erasure)):
        erased.append(count)
    assert erased == [erasure_table.TARGETS_MAX, 5]
