"""The indexer as a process, behind a real tailer: indexes follow their cells (I11)."""

import random
import uuid
from collections import defaultdict

import pytest

from api.index.search import find_entries, parse_query
from schemaless.bus.topics import ensure_topics
from schemaless.codec import decode_body, encode_body
from schemaless.errors import Conflict, NotFound
from schemaless.index.catalogue import create_index, find_index
from schemaless.index.definition import ELEMENTS_MAX, parse_definition
from schemaless.index.entry import entries_for, entry_shard
from schemaless.sharding import shard_of
from schemaless.storage import entity_table, index_table
from schemaless.storage.entity_table import CellKey, ShardCell
from schemaless.storage.index_definition_table import IndexState
from tests.consumer_harness import running_consumer, wait_until_finished
from tests.log_harness import put, running_tailers
from tests.waiting import async_until, until

pytestmark = pytest.mark.storage

SHARDS = 4


def definition(name="by_owner"):
    return parse_definition(
        {
            "name": name,
            "shard_field": "owner",
            "fields": [
                {"name": "owner", "column": "BASE", "path": "owner", "type": "string", "length": 40},
                {"name": "number", "column": "BASE", "path": "number", "type": "int"},
            ],
            "stored": [{"name": "state", "column": "STATUS", "path": "state", "type": "string", "length": 20}],
        }
    )


@pytest.fixture(scope="module")
def datastore(make_datastore, kafka):
    made = make_datastore(shards=SHARDS, partitions=2)
    ensure_topics(kafka, made)
    return made


@pytest.fixture(scope="module")
def processes(running, kafka, datastore):
    """A tailer and an indexer of this datastore, running through all tests of this file."""
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    with running_tailers(1, running.path, kafka, datastore), running_consumer(["indexer"], settings) as indexer:
        yield indexer


@pytest.fixture
def rows(storage, datastore):
    return Rows(storage, datastore)


class Rows:
    """Writes cells, and says what an index of them must hold."""

    def __init__(self, storage, datastore):
        self.storage, self.datastore = storage, datastore

    def cell(self, row, column, ref_key, body):
        return ShardCell(CellKey(row, column, ref_key), encode_body(body), shard_of(row, SHARDS))

    def put(self, *cells):
        put(self.storage, self.datastore, cells)

    def wanted(self, index):
        """By (shard, row key, element): the function of the newest cells, computed from MySQL alone."""
        newest = defaultdict(dict)
        for shard in range(SHARDS):
            master = self.storage.master(self.datastore.home(shard))
            for cell in master.run(entity_table.read_after, self.datastore, shard, 0, 100_000):
                known = newest[cell.row_key].get(cell.column_name)
                if not cell.is_erased and (known is None or cell.ref_key > known.ref_key):
                    newest[cell.row_key][cell.column_name] = cell
        entries = {}
        for row, columns in newest.items():
            made = entries_for(index, {column: decode_body(cell.body) for column, cell in columns.items()})
            for element, entry in enumerate(made):
                if entry is not None:
                    entries[entry_shard(index, entry, SHARDS), row, element] = entry
        return entries

    def found(self, index):
        return {
            (shard, found.row_key, found.element): found.entry
            for shard in range(SHARDS)
            for found in self.storage.master(self.datastore.home(shard)).run(
                index_table.live_entries, self.datastore, shard, index, index_table.BEFORE_ALL, 100_000
            )
        }


def owners():
    """Two owners whose entries live on different clusters, and one more in the second's."""
    by_shard = {}
    while len(by_shard) < SHARDS:
        owner = uuid.uuid4().hex
        (entry,) = entries_for(definition(), {"BASE": {"owner": owner}})
        by_shard[entry_shard(definition(), entry, SHARDS)] = owner
    return by_shard


async def wait_active(storage, datastore, name):
    async def is_active():
        return (await find_index(storage, datastore, name)).state is IndexState.ACTIVE

    await async_until(is_active)


async def test_an_index_is_built_from_cells_that_are_there_and_then_follows(
    processes, rows, async_storage, storage, datastore
):
    """Cells from before the definition are in it when it is active; later ones follow, moves between clusters too."""
    by_shard = owners()
    row_keys = [uuid.uuid4().bytes for _ in range(150)]
    rng = random.Random(1)
    rows.put(
        *[rows.cell(row, "BASE", 1, {"owner": rng.choice(list(by_shard.values())), "number": 1}) for row in row_keys]
    )
    assert await create_index(async_storage, datastore, definition())
    await wait_active(async_storage, datastore, "by_owner")
    assert rows.found(definition()) == rows.wanted(definition())
    for version in (2, 3, 4):
        for row in row_keys:
            owner = rng.choice([*by_shard.values(), None, 7])
            status = rows.cell(row, "STATUS", version, {"state": f"s{version}"})
            rows.put(rows.cell(row, "BASE", version, {"owner": owner, "number": version}), status)
    wait_until_finished(storage, datastore, "index:by_owner")
    assert rows.found(definition()) == rows.wanted(definition())


async def test_a_version_written_late_changes_nothing(processes, rows, async_storage, storage, datastore):
    """A lower ref_key that comes after a higher one leaves the entry as it is."""
    await create_index(async_storage, datastore, definition())
    await wait_active(async_storage, datastore, "by_owner")
    row, first, second = uuid.uuid4().bytes, *list(owners().values())[:2]
    rows.put(rows.cell(row, "BASE", 9, {"owner": first, "number": 9}))
    rows.put(rows.cell(row, "BASE", 8, {"owner": second, "number": 8}))
    wait_until_finished(storage, datastore, "index:by_owner")
    assert [entry.values[:2] for (_, key, _), entry in rows.found(definition()).items() if key == row] == [(first, 9)]


async def test_a_query_after_a_put_includes_it_on_master_and_minion(processes, rows, async_storage, storage, datastore):
    """A node that shows a checkpoint at or behind the put has its entry, whichever node it is."""
    await create_index(async_storage, datastore, definition())
    await wait_active(async_storage, datastore, "by_owner")
    for _ in range(20):
        row, owner = uuid.uuid4().bytes, uuid.uuid4().hex
        cell = rows.cell(row, "BASE", 1, {"owner": owner, "number": 5})
        master = storage.master(datastore.home(cell.shard))
        (placed,) = master.run(entity_table.put_cells, datastore, [cell])
        after = f"{placed.shard}:{placed.generation}:{placed.added_id}"
        query = parse_query(definition(), SHARDS, [("owner", owner), ("after", after)])
        ((shard, _),) = query.places
        home = datastore.home(shard)
        for node in (storage.master(home), *storage.minions(home)):
            page = ask_until_reached(node, datastore, query)
            assert [found.row_key for found in page.entries] == [row]


def ask_until_reached(node, datastore, query):
    def answer():
        found = node.run(find_entries, datastore, definition(), query, query.places)
        return found if found.reached is not None and found.reached >= query.after.location else None

    return until(answer).page


def elements(name="by_tag"):
    return parse_definition(
        {
            "name": name,
            "shard_field": "tag",
            "fields": [{"name": "tag", "column": "BASE", "path": "tags[].name", "type": "string", "length": 40}],
            "stored": [
                {"name": "weight", "column": "BASE", "path": "tags[].weight", "type": "int"},
                {"name": "state", "column": "STATUS", "path": "state", "type": "string", "length": 20},
            ],
        }
    )


async def test_each_element_of_an_array_has_an_entry(processes, rows, async_storage, storage, datastore):
    """Arrays grow, shrink, change their order and move elements between clusters, before and after the build."""
    rng = random.Random(2)
    tags = list(owners().values())
    row_keys = [uuid.uuid4().bytes for _ in range(60)]

    def put(version):
        for row in row_keys:
            found = [{"name": rng.choice([*tags, None]), "weight": n} for n in range(rng.randrange(5))]
            rows.put(rows.cell(row, "BASE", version, {"tags": found}))
            rows.put(rows.cell(row, "STATUS", version, {"state": f"s{version}"}))

    put(1)
    await create_index(async_storage, datastore, elements())
    await wait_active(async_storage, datastore, "by_tag")
    assert rows.found(elements()) == rows.wanted(elements())
    put(2)
    long = [{"name": tags[0], "weight": n} for n in range(ELEMENTS_MAX)]
    rows.put(rows.cell(row_keys[0], "BASE", 3, {"tags": long}))
    wait_until_finished(storage, datastore, "index:by_tag")
    assert rows.found(elements()) == rows.wanted(elements())
    assert sum(key == row_keys[0] for _, key, _ in rows.found(elements())) == ELEMENTS_MAX
    rows.put(rows.cell(row_keys[0], "BASE", 4, {"tags": [*long, long[0]]}))
    wait_until_finished(storage, datastore, "index:by_tag")
    assert rows.found(elements()) == rows.wanted(elements())
    assert all(key != row_keys[0] for _, key, _ in rows.found(elements()))


async def test_an_index_on_a_running_indexer_is_built_while_cells_come(
    processes, rows, async_storage, storage, datastore, chance
):
    """Defined in the middle of the load, it misses nothing of before and after."""
    other = definition("by_owner_later")
    by_shard = list(owners().values())
    for part in range(6):
        if part == 2:
            await create_index(async_storage, datastore, other)
        keys = [uuid.uuid4().bytes for _ in range(100)]
        rows.put(*[rows.cell(row, "BASE", 1, {"owner": chance.choice(by_shard), "number": part}) for row in keys])
    await wait_active(async_storage, datastore, "by_owner_later")
    wait_until_finished(storage, datastore, "index:by_owner_later")
    assert rows.found(other) == rows.wanted(other)


async def test_a_name_stands_for_one_definition(async_storage, datastore):
    """The same definition again is no news; another one under the name is a conflict; an unknown name is not found."""
    changed = parse_definition({**definition().document(), "stored": []})
    await create_index(async_storage, datastore, definition())
    assert not await create_index(async_storage, datastore, definition())
    with pytest.raises(Conflict):
        await create_index(async_storage, datastore, changed)
    with pytest.raises(NotFound):
        await find_index(async_storage, datastore, "nothing")
