"""No table of an index keeps values of erased cells, whatever the indexer had read of them before (I11, I19)."""

import random
import secrets

import pytest

from schemaless.cell import row_key_text
from schemaless.codec import decode_body
from schemaless.consume.ports import Run
from schemaless.index.comparison import NOTHING_CHECKED, CheckRequest
from schemaless.index.inspection import IndexInspector
from schemaless.location import Location
from schemaless.sharding import shard_of
from schemaless.storage import entity_table, index_check_table
from schemaless.storage.job_table import Job, JobKind
from schemaless.storage.operation import query
from tests.integration.indexer.test_indexer import SHARDS, definition, owners
from tests.integration.indexer.test_superseding import IndexedRows, row_keys_of
from tests.log_harness import erased_at_home

pytestmark = pytest.mark.storage

COLUMNS = ("BASE", "STATUS")


class ErasedRows(IndexedRows):
    """`seen` has the log of each shard as a topic keeps it: with the bodies that cells had when they were published."""

    def __init__(self, storage, datastore, async_storage, index=None):
        super().__init__(storage, datastore, async_storage, index)
        self.seen = {shard: [] for shard in range(SHARDS)}
        self.at = dict.fromkeys(range(SHARDS), 0)

    def publish(self, shard):
        after = len(self.seen[shard])
        self.seen[shard] += self.master(shard).run(entity_table.read_after, self.datastore, shard, after, 1000)

    async def take(self, shard, count):
        """Takes the next cells of a shard, as they were published."""
        cells = self.seen[shard][self.at[shard] :][:count]
        while cells:
            effect = await self.maintainer.handle([Run(shard, Location(1, self.at[shard]), cells)])
            await self.apply(effect)
            finished = effect.outcomes[0].finished
            self.at[shard] += finished
            cells = cells[finished:]

    def erase(self, row_key, column=None, ref_key=None):
        erased_at_home(self.storage, self.datastore, row_key, column, ref_key)

    def dump(self):
        """All that the tables of the index and the lists about it hold, as text."""
        of = f"WHERE datastore = '{self.datastore.name}'"
        statements = [
            f"SELECT * FROM `{self.datastore.database(shard)}`.`{self.index.table}`" for shard in range(SHARDS)
        ]
        found = []
        for cluster in self.datastore.clusters:
            here = [statements[n] for n in range(SHARDS) if self.datastore.home(n) == cluster]
            lists = [f"SELECT details FROM schemaless.index_problem {of}"]
            lists.append(f"SELECT faults FROM schemaless.index_check {of} AND faults IS NOT NULL")
            found += [repr(self.storage.master(cluster).run(query, statement)) for statement in here + lists]
        return "".join(found)


@pytest.fixture
def rows(storage, async_storage, make_datastore):
    return ErasedRows(storage, make_datastore(shards=SHARDS, partitions=2), async_storage)


def secret():
    return secrets.token_hex(8)


def base(rows, row_key, ref_key, owner, text):
    """Its number doesn't fit, so a list of problems has it."""
    return rows.cell(row_key, "BASE", ref_key, {"owner": owner, "number": text})


async def test_a_row_is_indexed_as_it_is_left(rows):
    """The newest version goes: the entry of the one before comes back, in its own shard. All go: nothing is left."""
    first, second, *_ = owners().values()
    (row_key,) = row_keys_of(0, 1)
    texts = [secret() for _ in range(3)]
    rows.put(base(rows, row_key, 1, first, texts[0]), base(rows, row_key, 2, second, texts[1]))
    rows.put(rows.cell(row_key, "STATUS", 1, {"state": texts[2]}))
    await rows.follow(0)
    assert [text for text in texts if text in rows.dump()] == texts[1:]
    rows.erase(row_key, "BASE", 2)
    await rows.follow(0, after=3)
    assert rows.found(definition()) == rows.wanted(definition()) != {}
    assert [text for text in texts if text in rows.dump()] == [texts[0], texts[2]]
    rows.erase(row_key)
    await rows.follow(0, after=4)
    assert rows.found(definition()) == rows.wanted(definition()) == {}
    assert not [text for text in (*texts, first, second) if text in rows.dump()]
    await rows.follow(0)  # as after a crash: on the log as it is now
    assert rows.found(definition()) == {}


@pytest.mark.parametrize("seed", range(3))
async def test_an_indexer_that_lags_keeps_nothing(rows, seed):
    """Cells come to it with the bodies that the topic has, and the rows that it reads have lost theirs."""
    rng = random.Random(seed)
    row_keys = row_keys_of(0, 3) + row_keys_of(1, 2)
    names, texts, versions = [*owners().values(), None], {}, {}
    for step in range(70):
        row_key, column = rng.choice(row_keys), rng.choice(COLUMNS)
        shard, known = shard_of(row_key, SHARDS), versions.setdefault((row_key, column), [])
        if rng.random() < 0.2 and known:
            ref_key = rng.choice([None, *known])
            rows.erase(row_key, column, ref_key)
            for gone in known if ref_key is None else [ref_key]:
                texts.pop((row_key, column, gone), None)
        else:
            ref_key = rng.choice([n for n in range(1, 200) if n not in known])
            text = texts[row_key, column, ref_key] = secret()
            body = {"owner": rng.choice(names), "number": text} if column == "BASE" else {"state": text}
            rows.put(rows.cell(row_key, column, ref_key, body))
            known.append(ref_key)
        if step % 3:
            rows.publish(shard)
        if rng.random() < 0.2:
            await rows.take(shard, rng.randrange(1, 12))
    for shard in (0, 1):
        rows.publish(shard)
        await rows.take(shard, 1000)
    assert rows.found(definition()) == rows.wanted(definition())
    left, dump = set(texts.values()), rows.dump()
    every = {text for cells in rows.seen.values() for cell in cells for text in texts_of(cell)}
    assert every - left, "nothing was erased"
    assert not [text for text in every - left if text in dump]


def texts_of(cell):
    found = decode_body(cell.body) if cell.body and cell.column_name in COLUMNS else {}
    return [text for text in (found.get("number"), found.get("state")) if text]


async def test_a_list_of_faults_forgets_the_row(rows):
    """And one that is made later, by a check that had read the row before, has none of its values."""
    (row_key, other) = row_keys_of(0, 2)
    text, kept = secret(), secret()
    rows.put(base(rows, row_key, 1, "o", text))
    await rows.follow(0)
    master, version = rows.master(0), rows.maintainer.version
    faults = {
        key: {"row_key": row_key_text(key), "found": {"state": value}}
        for key, value in ((row_key, text), (other, kept))
    }
    job = Job(secrets.randbits(60), rows.index.consumer, JobKind.VERIFY, 0, None, "ada")
    requests = dict.fromkeys(range(3), CheckRequest())
    master.run(index_check_table.put, version, job, requests)

    def note(shard, *named):
        part = index_check_table.CheckPart(job.job, shard, version, CheckRequest())
        master.run(index_check_table.done, part, NOTHING_CHECKED, [faults[key] for key in named])

    note(0, row_key)
    note(1, other)
    assert text in rows.dump()
    rows.erase(row_key)
    await rows.follow(0, after=1)
    note(2, row_key)
    assert (text in rows.dump(), kept in rows.dump()) == (False, True)
    assert len(master.run(index_check_table.progress, job).results) == 3


async def test_a_row_that_is_erased_is_no_fault_before_the_index_knows(rows):
    """It is looked at again. Afterwards an erased cell is as one that never was."""
    (row_key,) = row_keys_of(0, 1)
    rows.put(base(rows, row_key, 1, "o", "n"))
    await rows.follow(0)
    for shard in range(1, SHARDS):
        rows.reached(shard, Location(1, 0))
    nodes = [rows.async_storage.master(cluster) for cluster in rows.datastore.clusters]
    inspector = IndexInspector(rows.async_storage, rows.datastore, definition())
    rows.erase(row_key)
    looked = await inspector.of_rows(nodes, [row_key])
    assert (sum(looked.entries.values()), any(looked.faults.values()), looked.unsettled) == (1, False, [row_key])
    await rows.follow(0, after=1)
    looked = await inspector.of_rows(nodes, [row_key])
    assert (sum(looked.entries.values()), any(looked.faults.values()), looked.unsettled) == (0, False, [])
