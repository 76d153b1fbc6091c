"""Indexes stay where a version was made, and read the cells where they are: complete before, while and after a shard
moves (I11).
"""

import uuid
from collections import Counter
from dataclasses import replace

import pytest

from schemaless.bus.topics import ensure_topics
from schemaless.codec import encode_body
from schemaless.index.catalogue import find_index
from schemaless.index.check import check_index
from schemaless.index.inspection import IndexInspector, everything
from schemaless.sharding import shard_of
from schemaless.storage import entity_table, index_table
from schemaless.storage.entity_table import CellKey, ShardCell
from tests.consumer_harness import running_consumer
from tests.integration.api.api_harness import api_process
from tests.log_harness import run_sql, running_tailers
from tests.move_harness_f import Move, move_shard
from tests.waiting import async_until, until

SHARDS = 4
FIELDS = [{"name": "owner", "column": "BASE", "path": "owner", "type": "string", "length": 40}]
MORE = [*FIELDS, {"name": "n", "column": "BASE", "path": "n", "type": "int"}]


def definition(fields):
    return {"name": "by_owner", "shard_field": "owner", "fields": fields}


@pytest.fixture
def datastore(make_datastore, kafka, running):
    made = make_datastore(shards=SHARDS, partitions=2)
    ensure_topics(kafka, made)
    settings = {"topology": running.path, "kafka": kafka, "datastores": made.name, "cleaner_rows_per_s": 0}
    with running_tailers(1, running.path, kafka, made), running_consumer(["indexer"], settings):
        yield made


@pytest.fixture
def call(running, datastore):
    with api_process(running.path) as api:
        yield api.at(datastore)


class Owners:
    """Rows that go from one owner to another, so that each put writes an entry and a tombstone. Each is written by its
    shard's home, as it is known here.
    """

    def __init__(self, storage, datastore):
        self.storage, self.datastore = storage, datastore
        self.rows = [uuid.uuid4().bytes for _ in range(40)]
        self.owner = {}
        self.ref_key = 0

    def put(self):
        self.ref_key += 1
        for number, row in enumerate(self.rows):
            owner = f"owner {(number + self.ref_key) % 7}"
            shard = shard_of(row, SHARDS)
            cell = ShardCell(CellKey(row, "BASE", self.ref_key), encode_body({"owner": owner, "n": number}), shard)
            self.storage.master(self.datastore.home(shard)).run(entity_table.put_cells, self.datastore, [cell])
            self.owner[row] = owner

    def wanted(self):
        return Counter(self.owner.values())


def found(call):
    counted = {}
    for n in range(7):
        answer = call.get("/indexes/by_owner/entries", params={"owner": f"owner {n}", "limit": 100})
        if answer.status_code != 200:
            return answer.text
        counted[f"owner {n}"] = len(answer.json()["entries"])
    return Counter({owner: count for owner, count in counted.items() if count})


def until_found(call, owners):
    until(lambda: found(call) == owners.wanted(), lambda: (found(call), owners.wanted()))


def until_state(call, number, state="active"):
    def shown():
        document = call.get("/indexes/by_owner").json()
        return document.get("number"), document.get("state")

    until(lambda: shown() == (number, state), shown)


async def faults(storage, datastore):
    index = await find_index(storage, datastore, "by_owner")
    await storage.look()  # as a storage does that is just opened
    inspector = IndexInspector(storage, replace(datastore, moves={}), index.definition)  # read before any move
    checked = await check_index(storage, inspector, [everything(datastore)])
    return checked.faults, index.number


def tables(storage, datastore, cluster):
    return Counter(name for _, name in storage.master(cluster).run(index_table.places, datastore))


async def test_an_index_is_whole_while_shards_move_and_a_later_version_lies_at_the_new_home(
    running, storage, async_storage, datastore, call
):
    """Queries find all rows, the inspector no fault. The tables of the first version stay, and go with it."""
    owners = Owners(storage, datastore)
    owners.put()
    assert call("PUT", "/indexes/by_owner", json=definition(FIELDS)).status_code == 201
    until_state(call, 1)
    until_found(call, owners)
    for shard, target in ((0, "b"), (1, "a")):
        move = Move(running, datastore, shard, target)
        owners.put()
        move.announce()
        move.close()
        until_found(call, owners)
        move.open()
        move.publish()
        owners.put()
        until_found(call, owners)
    assert await faults(async_storage, datastore) == ([], 1)
    assert tables(storage, datastore, "a") == tables(storage, datastore, "b") == {"index_by_owner": 2}
    for shard, cluster in ((0, "a"), (1, "b"), (2, "a"), (3, "b")):
        run_sql(storage.master(cluster), f"DELETE FROM {datastore.database(shard)}.index_by_owner")
    assert len((await faults(async_storage, datastore))[0]) > 10
    assert call.post("/indexes/by_owner/repair", json={}).status_code == 202
    until_found(call, owners)
    assert call("PUT", "/indexes/by_owner", params={"change": "true"}, json=definition(MORE)).status_code == 201
    until_state(call, 2)
    owners.put()
    until_found(call, owners)
    assert await faults(async_storage, datastore) == ([], 2)
    move_shard(running, datastore, 0, "a")
    owners.put()
    until_found(call, owners)
    assert await faults(async_storage, datastore) == ([], 2)
    later = {shard for shard, name in storage.master("b").run(index_table.places, datastore) if name.endswith("$2")}
    assert later == {0, 3}
    assert call("DELETE", "/indexes/by_owner").status_code in (200, 202)
    await async_until(lambda: not tables(storage, datastore, "a") and not tables(storage, datastore, "b"))
