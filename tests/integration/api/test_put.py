"""CellWriter on two real masters, all servers well: what each put's outcome is and what it leaves behind."""

import asyncio
import os
import uuid
from functools import partial
from pathlib import Path

import pytest

from api.write.put import CellWriter
from cleaner import service
from cleaner.service import Cleaner
from schemaless.cell import REF_KEY_MAX, Cell, CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.config import ApiSettings
from schemaless.errors import Invalid
from schemaless.storage import buffer_table, entity_table, post_version, shard_head
from schemaless.storage.operation import query
from schemaless.storage.sql import sql

pytestmark = pytest.mark.storage

BASE = ColumnName("BASE")
SETTINGS = ApiSettings(topology=Path("unused"), kafka="unused")


def row_key() -> RowKey:
    return RowKey(uuid.uuid4().bytes)


def cell(row: RowKey, ref_key: int = 1, **body: object) -> Cell:
    return Cell(CellKey(row, BASE, RefKey(ref_key)), encode_body(body))


@pytest.fixture
async def writer(async_storage):
    opened = CellWriter(async_storage, SETTINGS)
    yield opened
    await opened.close()


@pytest.fixture
def datastore(make_datastore):
    return make_datastore()


async def buffered_keys(async_storage, datastore) -> list[tuple[str, bytes]]:
    """(server's cluster, row key) of all buffer rows of a datastore."""
    select = sql("SELECT row_key FROM schemaless.buffer WHERE datastore = %s", datastore.name.encode())
    return [
        (cluster, row[0]) for cluster in ("a", "b") for row in await async_storage.master(cluster).run(query, select)
    ]


async def test_a_put_is_stored_in_two_places(writer, async_storage, datastore):
    """I5: stored means an entity row at home and a buffer row on another master."""
    row = row_key()
    (outcome,) = await writer.put(datastore, [cell(row, n=1)])
    assert (outcome.status, outcome.copies) == (PutStatus.STORED, 2)
    assert outcome.placed.added_id == 1
    home = datastore.home(outcome.shard)
    assert await buffered_keys(async_storage, datastore) == [({"a": "b", "b": "a"}[home], row)]


async def test_the_same_put_again_writes_nothing(writer, async_storage, datastore):
    """I1: the same body under the same key is a success and no new cell, whatever the order of its members."""
    row = row_key()
    (first,) = await writer.put(datastore, [cell(row, a=1, b=2)])
    (again,) = await writer.put(datastore, [cell(row, b=2, a=1)])
    assert again.status is PutStatus.ALREADY_STORED
    assert (again.placed.added_id, again.placed.created_at, again.copies) == (1, first.placed.created_at, 2)
    assert len(await buffered_keys(async_storage, datastore)) == 1


async def test_another_body_is_a_conflict_and_leaves_no_buffer_row(writer, async_storage, datastore):
    """I1, I5: the stored cell stands, and the put takes its own buffer row back."""
    row = row_key()
    (first,) = await writer.put(datastore, [cell(row, n=1)])
    for cluster in ("a", "b"):
        await async_storage.master(cluster).run(query, "DELETE FROM schemaless.buffer")
    (refused,) = await writer.put(datastore, [cell(row, n=2)])
    assert (refused.status, refused.copies) == (PutStatus.CONFLICT, 0)
    assert refused.placed.added_id == first.placed.added_id
    assert await buffered_keys(async_storage, datastore) == []


async def test_a_conflict_in_the_buffer_is_judged_by_the_home(writer, async_storage, datastore):
    """A transient buffer row of a refused put must not turn the repeat of a stored cell into a conflict."""
    row = row_key()
    stored, other = cell(row, n=1), cell(row, n=2)
    (first,) = await writer.put(datastore, [stored])
    home = datastore.home(first.shard)
    secondary = async_storage.master({"a": "b", "b": "a"}[home])
    await secondary.run(query, "DELETE FROM schemaless.buffer")
    under_way = buffer_table.BufferRow(other.key, other.body, first.shard, home, 7)
    await secondary.run(buffer_table.insert, datastore, [under_way])
    (repeat,) = await writer.put(datastore, [stored])
    assert (repeat.status, repeat.placed.added_id) == (PutStatus.ALREADY_STORED, 1)
    (third,) = await writer.put(datastore, [cell(row, n=3)])
    assert (third.status, third.placed.added_id) == (PutStatus.CONFLICT, 1)


async def test_a_body_that_is_only_buffered_is_a_conflict_too(writer, async_storage, datastore):
    """Nothing stands at home, but a buffered cell came first: 409, and the home isn't touched."""
    row = row_key()
    buffered = cell(row, n=1)
    shard = (await writer.put(datastore, [cell(row, 9, n=0)]))[0].shard
    home = datastore.home(shard)
    ours = buffer_table.BufferRow(buffered.key, buffered.body, shard, home, 7)
    await async_storage.master({"a": "b", "b": "a"}[home]).run(buffer_table.insert, datastore, [ours])
    (refused,) = await writer.put(datastore, [cell(row, n=2)])
    assert (refused.status, refused.placed) == (PutStatus.CONFLICT, None)
    (shared,) = await writer.put(datastore, [buffered])
    assert (shared.status, shared.copies) == (PutStatus.STORED, 2)


async def test_a_batch_counts_its_items_in_order(writer, datastore):
    """A repeated key in a batch gives already_stored or conflict, on any shard, beside its neighbours."""
    rows = [row_key() for _ in range(20)]
    cells = [cell(row, n=1) for row in rows]
    outcomes = await writer.put(datastore, [*cells, cells[3], cell(rows[4], n=2), cell(rows[4], 2, n=2)])
    statuses = [outcome.status for outcome in outcomes]
    assert statuses[:20] == [PutStatus.STORED] * 20
    assert statuses[20:] == [PutStatus.ALREADY_STORED, PutStatus.CONFLICT, PutStatus.STORED]
    assert [outcome.key.row_key for outcome in outcomes] == [*rows, rows[3], rows[4], rows[4]]


async def test_concurrent_puts_of_the_same_cells_agree(writer, async_storage, datastore):
    """I1, I3: of many puts of one key one is stored, equal ones are successes, and the heads count each cell once."""
    row = row_key()
    outcomes = await asyncio.gather(*(writer.put(datastore, [cell(row, n=n % 2)]) for n in range(60)))
    statuses = [result[0].status for result in outcomes]
    assert statuses.count(PutStatus.STORED) == 1
    winner = statuses.index(PutStatus.STORED) % 2
    assert all(
        status is not PutStatus.CONFLICT if n % 2 == winner else status is PutStatus.CONFLICT
        for n, status in enumerate(statuses)
    )
    heads = await async_storage.master(datastore.home(outcomes[0][0].shard)).run(shard_head.heads, datastore.name)
    assert sum(head.added_id for head in heads) == 1


async def test_large_bodies_go_in_pieces(async_storage, make_datastore):
    """A batch larger than one operation is cut, and the order of its items holds across the cut."""
    patient = SETTINGS.model_copy(update={"write_timeout_s": 30.0})
    writer = CellWriter(async_storage, patient)
    datastore = make_datastore(placement=("a",))
    cells = [cell(row_key(), text=os.urandom(450_000).hex()) for _ in range(12)]
    assert sum(len(c.body) for c in cells) > 5 << 20
    outcomes = await writer.put(datastore, [*cells, cells[0]])
    assert [outcome.status for outcome in outcomes] == [PutStatus.STORED] * 12 + [PutStatus.ALREADY_STORED]


async def test_next_versions_count_up_from_one(writer, datastore):
    """POST: 1 for a new column, else the highest at home + 1."""
    row = row_key()
    first = await writer.put_next(datastore, row, BASE, encode_body({"n": 1}))
    assert (first.status, first.key.ref_key, first.copies) == (PutStatus.STORED, 1, 2)
    await writer.put(datastore, [cell(row, 41, n=2)])
    second = await writer.put_next(datastore, row, BASE, encode_body({"n": 1}))
    assert (second.key.ref_key, second.replayed) == (42, False)


async def test_concurrent_next_versions_all_differ(writer, datastore):
    """POSTs with the same body are versions of their own, and none is lost."""
    row = row_key()
    outcomes = await asyncio.gather(*(writer.put_next(datastore, row, BASE, encode_body({})) for _ in range(30)))
    assert sorted(outcome.key.ref_key for outcome in outcomes) == list(range(1, 31))


async def test_an_idempotency_key_gives_the_first_answer_again(writer, datastore):
    """A repeat writes nothing; with another body it is refused; another column is another scope."""
    row, body = row_key(), encode_body({"n": 1})
    first = await writer.put_next(datastore, row, BASE, body, "key")
    again = await writer.put_next(datastore, row, BASE, body, "key")
    assert again.replayed
    assert (again.status, again.key, again.placed, again.copies) == (first.status, first.key, first.placed, 2)
    with pytest.raises(Invalid):
        await writer.put_next(datastore, row, BASE, encode_body({"n": 2}), "key")
    other = await writer.put_next(datastore, row, ColumnName("STATUS"), encode_body({"n": 2}), "key")
    assert not other.replayed


async def lose(async_storage, datastore, shard: int, row: RowKey) -> None:
    """The home forgets the cell and the Idempotency-Key, as a minion does that is promoted and never received them."""
    home = async_storage.master(datastore.home(shard))
    for table in (f"{datastore.database(shard)}.entity", "schemaless.idempotency"):
        await home.run(query, sql(f"DELETE FROM {table} WHERE row_key = %s", row))


@pytest.mark.parametrize("rescued", [False, True])
async def test_an_idempotency_key_outlives_the_home(monkeypatch, writer, async_storage, datastore, rescued):
    """The second copy of a POST has its key: a repeat finds it there, and the cleaner brings both home together."""
    monkeypatch.setattr(service, "RESCUE_GRACE_S", 0.0)
    row, body = row_key(), encode_body({"n": 1})
    first = await writer.put_next(datastore, row, BASE, body, "key", "billing@0:1:7")
    await lose(async_storage, datastore, first.shard, row)
    if rescued:
        await Cleaner(async_storage).step()
    with pytest.raises(Invalid, match="another body"):
        await writer.put_next(datastore, row, BASE, encode_body({"n": 2}), "key")
    again = await writer.put_next(datastore, row, BASE, encode_body({"n": 1}), "key")
    assert (again.status, again.key, again.copies, again.replayed) == (PutStatus.STORED, first.key, 2, True)
    home = async_storage.master(datastore.home(first.shard))
    find = partial(post_version.find_answer, datastore.name, [(row, BASE, "key")])
    assert await home.run(find) == [first.key.ref_key]
    (stored,) = await home.run(entity_table.get, datastore, [(first.shard, first.key)])
    assert stored.cause == "billing@0:1:7"  # the first one's, whatever a repeat says
    assert (await writer.put_next(datastore, row, BASE, body, "another")).key.ref_key == first.key.ref_key + 1


async def test_a_full_column_takes_no_next_version(writer, datastore):
    """The highest ref_key has no successor, and the shard's lock is given back."""
    row = row_key()
    await writer.put(datastore, [cell(row, REF_KEY_MAX, n=1)])
    with pytest.raises(Invalid):
        await writer.put_next(datastore, row, BASE, encode_body({}))
    assert (await writer.put(datastore, [cell(row, n=1)]))[0].status is PutStatus.STORED


async def test_old_idempotency_keys_are_deleted(writer, async_storage, datastore):
    """Kept for 25 hours, then deleted in bounded steps."""
    row = row_key()
    outcome = await writer.put_next(datastore, row, BASE, encode_body({}), "key")
    home = async_storage.master(datastore.home(outcome.shard))
    await home.run(post_version.delete_old_answers, 100)
    find = partial(post_version.find_answer, datastore.name, [(row, BASE, "key")])
    assert await home.run(find) == [1]
    await home.run(query, "UPDATE schemaless.idempotency SET created_at = created_at - INTERVAL 26 HOUR")
    assert await home.run(post_version.delete_old_answers, 100) >= 1
    assert await home.run(find) == [None]


async def test_digests_tell_equal_bytes(writer, async_storage, datastore):
    """What the cleaner compares: SHA-256 of the stored body, None for no cell."""
    row = row_key()
    (outcome,) = await writer.put(datastore, [cell(row, n=1)])
    keys = [(outcome.shard, CellKey(row, BASE, RefKey(ref))) for ref in (1, 2)]
    node = async_storage.master(datastore.home(outcome.shard))
    digest, missing = await node.run(entity_table.digests, datastore, keys)
    assert len(digest) == 32
    assert missing is None
