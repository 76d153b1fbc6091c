"""The maintainer's bounds: what one batch reads and writes has a limit in bytes, and every batch finishes some cell."""

from random import Random

from indexer.maintainer import EFFECT_BYTES_MAX, Maintainer
from schemaless.cell import CellKey
from schemaless.codec import encode_body
from schemaless.consume.ports import Run
from schemaless.index.definition import parse_definition
from schemaless.location import Location
from schemaless.storage.entity_table import NEWEST_BYTES_MAX, ShardCell, newest_until
from schemaless.storage.shard_head import read_at_home
from schemaless.testing.memory_program import MemoryEntityTable
from schemaless.topology import Datastore

SHARDS = 4
DATASTORE = Datastore("d", SHARDS, 1, ("a", "b"))
STATUS_AND_BASE = parse_definition(
    {
        "name": "by_owner",
        "shard_field": "owner",
        "fields": [{"name": "owner", "column": "BASE", "path": "owner", "type": "int"}],
        "stored": [{"name": "state", "column": "STATUS", "path": "state", "type": "int"}],
    }
)
WIDE = parse_definition(
    {
        "name": "wide",
        "shard_field": "k",
        "fields": [{"name": "k", "column": "BASE", "path": "k", "type": "int"}],
        "stored": [
            {"name": f"s{n}", "column": "BASE", "path": f"s{n}", "type": "string", "length": 768} for n in range(5)
        ],
    }
)


class MemoryStorage:
    """Answers what a maintainer asks of the masters, from one table in memory. `read_bytes` of each answer."""

    def __init__(self):
        self.table = MemoryEntityTable(DATASTORE)
        self.read_bytes = []

    def master(self, cluster):
        return self

    async def run(self, proven, name, untils, operation, datastore, *arguments):
        assert (proven, operation) == (read_at_home, newest_until)
        found = self.table.newest_until(*arguments)
        self.read_bytes.append(sum(len(cell.body) for cell in found.cells))
        return found

    def put(self, shard, column, number, body):
        """Puts cell `number` of a column; the row of a number is the same in every column."""
        row_key = bytes([shard]) + number.to_bytes(15, "big")
        self.table.put_cells([ShardCell(CellKey(row_key, column, 1), encode_body(body), shard)])

    def run_after(self, shard, added_id):
        cells = self.table.read_after(shard, added_id, 1000)
        return Run(shard, Location(1, added_id), cells)


async def test_large_bodies_of_other_columns_finish_fewer_cells():
    """Small cells of STATUS need the rows' BASE, a megabyte each: what is read at once is bounded, and goes on."""
    storage = MemoryStorage()
    random = Random(1)
    for number in range(30):
        storage.put(0, "BASE", number, {"owner": number, "note": random.randbytes(500_000).hex()})
    for number in range(30):
        storage.put(0, "STATUS", number, {"state": number})
    maintainer = Maintainer(storage, DATASTORE, STATUS_AND_BASE)
    at, batches = 30, 0
    while at < 60:
        effect = await maintainer.handle([storage.run_after(0, at)])
        assert effect.outcomes[0].finished >= 1
        at += effect.outcomes[0].finished
        batches += 1
    assert max(storage.read_bytes) <= NEWEST_BYTES_MAX
    assert batches == 30 * 500_000 // NEWEST_BYTES_MAX + 1


async def test_one_row_larger_than_the_bound_is_taken_alone():
    """Each batch finishes a cell, however large its row is. A shard for which nothing is left finishes none."""
    storage = MemoryStorage()
    for shard in (0, 1, 2):
        for column in ("BASE", "STATUS"):
            for number in range(3):
                storage.put(shard, column, number, {"owner": number})
    newest = storage.table.newest_until
    storage.table.newest_until = lambda rows, columns: newest(rows, columns, bytes_max=1)
    maintainer = Maintainer(storage, DATASTORE, STATUS_AND_BASE)
    effect = await maintainer.handle([storage.run_after(shard, 3) for shard in (0, 2, 1)])
    assert [outcome.finished for outcome in effect.outcomes] == [1, 0, 1]  # shard 1 is on a cluster of its own


async def test_wide_entries_of_small_bodies_finish_fewer_cells():
    """Bodies of 200 stored bytes make 30 KB of SQL each: an effect stays below what a server takes."""
    storage = MemoryStorage()
    for number in range(1000):
        storage.put(0, "BASE", number, {"k": number, **{f"s{n}": "\U0001f600" * 768 for n in range(5)}})
    maintainer = Maintainer(storage, DATASTORE, WIDE)
    at, largest = 0, 0
    while at < 1000:
        effect = await maintainer.handle([storage.run_after(0, at)])
        assert effect.outcomes[0].finished >= 1
        at += effect.outcomes[0].finished
        largest = max(largest, *map(len, effect.scripts.values()))
    assert EFFECT_BYTES_MAX / 2 < largest <= EFFECT_BYTES_MAX


async def test_an_entry_larger_than_the_bound_is_written_alone():
    """The rest of the run, and the other runs, come again."""
    storage = MemoryStorage()
    for number in range(3):
        storage.put(0, "BASE", number, {"k": number})
        storage.put(1, "BASE", number, {"k": number})
    maintainer = Maintainer(storage, DATASTORE, WIDE, effect_bytes_max=1)
    effect = await maintainer.handle([storage.run_after(0, 0), storage.run_after(1, 0)])
    assert [outcome.finished for outcome in effect.outcomes] == [1, 0]
    assert len(effect.scripts) == 1
