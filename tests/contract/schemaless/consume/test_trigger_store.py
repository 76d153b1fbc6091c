"""One suite over what a trigger program keeps, in memory and on real servers: checkpoints, records, rows and logs."""

import uuid

import pytest

from schemaless.cell import CellKey
from schemaless.codec import Erasing, encode_body
from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints, CommitLanes
from schemaless.consume.host import HomeLog
from schemaless.consume.parked_store import MySQLParkedStore
from schemaless.consume.ports import Advance, Mark, Predecessor
from schemaless.consume.worker import Worker
from schemaless.errors import LocationGone
from schemaless.position import BEGINNING_DIGEST, Position, position_of
from schemaless.storage import checkpoint_table, entity_table, parked_table
from schemaless.storage.checkpoint_table import NO_COUNTS, CellCounts
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.operation import query
from schemaless.storage.parked_table import ATTEMPTS_KEPT, ERROR_CHARACTERS_MAX, Cause, Ending, Order, ParkedCell
from schemaless.testing.memory_program import (
    MemoryCheckpoints,
    MemoryEntityTable,
    MemoryHomeLog,
    MemoryParkedStore,
    MemoryProgram,
)
from schemaless.topology import Datastore

pytestmark = pytest.mark.storage

CONSUMER = "trigger:test"
ROW, OTHER = uuid.UUID(int=1).bytes, uuid.UUID(int=2).bytes


class InMemory:
    def __init__(self):
        self.datastore = Datastore("memory", 2, 1, ("a",))
        self.program = MemoryProgram(CONSUMER, self.datastore, MemoryEntityTable(self.datastore))
        self.parked, self.log = MemoryParkedStore(self.program), MemoryHomeLog(self.program)
        self.workers = 0

    async def process(self):
        self.workers += 1
        self.program.present.add(self.workers)
        return MemoryCheckpoints(self.program, self.workers)

    async def leave(self, checkpoints):
        self.program.present.discard(checkpoints._worker)

    async def write(self, *cells):
        self.program.table.put_cells(cells)

    async def order(self, added_id, order):
        self.program.order(self.program.parked[0, added_id], order)

    async def records(self):
        return self.program.records()

    async def history(self):
        return list(self.program.history)

    async def errors(self):
        return [""]  # it keeps none

    async def counts(self, shard):
        row = self.program.checkpoints[shard]
        return row.counts, row.finished


class OnServers:
    def __init__(self, storage, datastore):
        self.storage, self.datastore = storage, datastore
        self.parked = MySQLParkedStore(storage, datastore, CONSUMER, row_reads_max=4)
        self.log = HomeLog(storage, datastore, "a")

    async def process(self):
        lanes = CommitLanes(self.storage, self.datastore, Worker(self.storage, self.datastore, CONSUMER))
        return Checkpoints(lanes, CONSUMER, CheckpointPlacement.HOME)

    async def leave(self, checkpoints):
        await checkpoints._lanes.worker.leave()

    async def write(self, *cells):
        await self.storage.master("a").run(entity_table.put_cells, self.datastore, list(cells))

    async def order(self, added_id, order):
        statement = f"UPDATE schemaless.parked SET ordered = '{order}', due_at = UTC_TIMESTAMP(6)"
        where = f" WHERE datastore = '{self.datastore.name}' AND added_id = {added_id}"
        await self.storage.master("a").run(lambda: query(statement + where))

    async def records(self):
        keys = [(shard, n) for shard in (0, 1) for n in range(1, 10)]
        return await self.storage.master("a").run(parked_table.of_keys, self.datastore.name, CONSUMER, keys)

    async def history(self):
        found = await self.storage.master("a").run(parked_table.ended_of_row, self.datastore.name, [CONSUMER], ROW, 100)
        return [(one.record.added_id, one.ending) for one in found[CONSUMER]]

    async def errors(self):
        found = await self.storage.master("a").run(parked_table.ended_of_row, self.datastore.name, [CONSUMER], ROW, 100)
        return [one.record.error for one in found[CONSUMER]]

    async def counts(self, shard):
        (row,) = await self.storage.master("a").run(
            checkpoint_table.of_consumer, self.datastore.name, CONSUMER, [shard]
        )
        return row.counts, row.finished


@pytest.fixture(params=["memory", "mysql"])
async def store(request, async_storage, make_datastore):
    if request.param == "memory":
        return InMemory()
    return OnServers(async_storage, make_datastore(shards=2, partitions=1, placement=("a",)))


def cell(row=ROW, column="BASE", ref_key=1, shard=0):
    return ShardCell(CellKey(row, column, ref_key), encode_body({"n": ref_key}), shard)


def record(added_id=1, **fields):
    values = {
        "shard": 0, "generation": 1, "added_id": added_id, "row_key": ROW, "column_name": "BASE", "ref_key": 1,
        "function_name": "f", "cause": Cause.ERROR, "holds_row": True, "error": "ValueError: ü", "attempts": 2,
        "attempted_at": [1_000_000, 2_000_001], "version": "v1", "parked_at": 3_000_003,
    }  # fmt: skip
    return ParkedCell(**values | fields)


async def position(store, added_id):
    page = (await store.log.read({0: Position(0, 1, 0, digest=BEGINNING_DIGEST)}, 10))[0]
    return position_of(page.cells[added_id - 1])


async def move(store, checkpoints, advance, script=""):
    return await checkpoints.move({0: advance}, {"a": script} if script else {})


async def test_a_checkpoint_moves_from_what_was_read_and_from_nothing_else(store):
    """Of two processes one is told that it was overtaken. Nothing of its script stays (I10)."""
    await store.write(cell(ref_key=1), cell(ref_key=2))
    first, second = await store.process(), await store.process()
    begun = await first.read([0, 1])
    assert {(found.position.added_id, found.predecessor) for found in begun.values()} == {(0, Predecessor.LEFT)}
    await second.read([0])
    to = Advance(await position(store, 1), 1, counts=CellCounts(called=1))
    assert await move(store, first, to, store.parked.put(record(1))) == frozenset()
    assert await move(store, second, to, store.parked.put(record(2))) == {0}
    assert [found.added_id for found in await store.records()] == [1]
    assert await store.counts(0) == (CellCounts(called=1), 1)
    assert (await second.read([0]))[0].position == to.to
    assert await move(store, second, Advance(await position(store, 2), 1, counts=CellCounts(parked=1))) == frozenset()
    assert await store.counts(0) == (CellCounts(called=1, parked=1), 2)


async def test_a_shard_that_stopped_moves_no_further(store):
    await store.write(cell(ref_key=1), cell(ref_key=2))
    process = await store.process()
    await process.read([0])
    stop = Advance(await position(store, 1), 1, "the key is wrong", counts=CellCounts(called=1))
    assert await move(store, process, stop) == frozenset()
    assert (await process.read([0]))[0].stop_reason == "the key is wrong"
    assert await move(store, process, Advance(await position(store, 2), 1)) == {0}


async def test_a_restart_begins_counting_anew(store):
    await store.write(cell(ref_key=1), cell(ref_key=2))
    process = await store.process()
    await process.read([0])
    await move(store, process, Advance(await position(store, 2), 2, counts=CellCounts(called=2)))
    await move(store, process, Advance(await position(store, 1), restart=True))
    assert await store.counts(0) == (NO_COUNTS, 0)
    assert (await process.read([0]))[0].counted_from == 1


async def test_the_next_process_learns_how_the_last_one_ended(store):
    """It died while its row is there. A death counts where a call was begun."""
    await store.write(cell())
    first, second = await store.process(), await store.process()
    await first.read([0])
    await move(store, first, Advance(Position(0, 1, 0, digest=BEGINNING_DIGEST), mark=Mark(begun=True, kills=1)))
    assert (await first.read([0]))[0].predecessor is Predecessor.OURSELVES
    found = (await second.read([0]))[0]
    assert (found.predecessor, found.kills) == (Predecessor.DIED, 2)
    await store.leave(first)
    found = (await second.read([0]))[0]
    assert (found.predecessor, found.kills) == (Predecessor.LEFT, 1)


async def test_a_shard_that_was_given_away_blames_nobody(store):
    await store.write(cell())
    first, second = await store.process(), await store.process()
    await first.read([0])
    await move(store, first, Advance(Position(0, 1, 0, digest=BEGINNING_DIGEST), mark=Mark(begun=True)))
    await first.give_away([0])
    found = (await second.read([0]))[0]
    assert (found.predecessor, found.kills) == (Predecessor.LEFT, 0)


async def test_records_are_stored_changed_and_deleted_by_their_scripts(store):
    """Several in one move, in their order. What is read has no errors, and what is listed has them."""
    process, parked = await store.process(), store.parked
    await process.read([0])
    here = Position(0, 1, 0, digest=BEGINNING_DIGEST)
    scripts = [parked.put(record(n)) for n in (1, 2, 3, 4)]
    scripts += [parked.begin(record(1)), parked.release_row(record(2))]
    scripts += [parked.delete(record(3), Ending.FINISHED)]
    scripts += [parked.begin(record(4)), parked.unmark(record(4, kills=2))]
    await move(store, process, Advance(here, effect=";".join(scripts)))
    found = (await parked.of_shards([0, 1]))[0]
    assert [(one.added_id, one.begun, one.holds_row, one.kills) for one in found] == [
        (1, True, True, 0), (2, False, False, 0), (4, False, True, 2),
    ]  # fmt: skip
    assert {one.error for one in found} == {""}
    assert (await store.records())[2] == record(4, kills=2)
    await move(store, process, Advance(here, effect=parked.delete_from(0, 2, Ending.SOUGHT)))
    assert [one.added_id for one in await store.records()] == [1]


async def test_what_became_of_a_parked_cell_is_kept(store):
    """Of one that only waited for its next attempt nothing is kept, unless a person ordered something for it."""
    process, parked = await store.process(), store.parked
    await process.read([0])
    here = Position(0, 1, 0, digest=BEGINNING_DIGEST)
    records = [record(1), record(2), record(3, cause=Cause.WAITING), record(4), record(5, cause=Cause.WAITING)]
    await move(store, process, Advance(here, effect=";".join(map(parked.put, records))))
    scripts = [parked.delete(records[0], Ending.FINISHED), parked.delete(records[1], Ending.DISCARDED)]
    scripts += [parked.delete(records[2], Ending.FINISHED), parked.delete_from(0, 4, Ending.SUPERSEDED)]
    await move(store, process, Advance(here, effect=";".join(scripts)))
    assert await store.records() == []
    assert await store.history() == [(1, "finished"), (2, "discarded"), (4, "superseded")]


async def test_a_record_is_replaced_within_its_bounds_and_keeps_a_discard(store):
    """A retry is done with that."""
    process = await store.process()
    await process.read([0])
    here = Position(0, 1, 0, digest=BEGINNING_DIGEST)
    await move(store, process, Advance(here, effect=";".join(store.parked.put(record(n)) for n in (1, 2))))
    await store.order(1, Order.RETRY)
    await store.order(2, Order.DISCARD)
    long = {"error": "e" * (ERROR_CHARACTERS_MAX + 9), "attempted_at": list(range(10**6, 10**6 + 30)), "begun": True}
    again = [store.parked.put(record(n, attempts=3, cause=Cause.WAITING, **long)) for n in (1, 2)]
    await move(store, process, Advance(here, effect=";".join(again)))
    first, second = await store.records()
    assert (first.ordered, first.due_at, second.ordered) == (None, None, Order.DISCARD)
    assert (second.cause, second.attempts, second.begun) == (Cause.WAITING, 3, True)
    assert (len(first.error), len(first.attempted_at)) == (ERROR_CHARACTERS_MAX, ATTEMPTS_KEPT)


async def test_when_a_record_is_due_is_told_as_the_time_that_is_left(store):
    """The store's clock measures it. A record that is written without it is due at once, and so is one whose time is
    over."""
    process = await store.process()
    await process.read([0])
    here = Position(0, 1, 0, digest=BEGINNING_DIGEST)
    delays_us = {1: 60_000_000, 2: 0, 3: 366 * 86_400_000_000}
    waiting = [store.parked.put(record(n, cause=Cause.WAITING, again_in_us=us)) for n, us in delays_us.items()]
    await move(store, process, Advance(here, effect=";".join(waiting)))
    minute, none, year = (await store.parked.of_shards([0]))[0]
    assert 0 < minute.again_in_us <= 60_000_000
    assert none.again_in_us == 0
    assert 365 * 86_400_000_000 < year.again_in_us <= 366 * 86_400_000_000
    await move(store, process, Advance(here, effect=store.parked.put(record(1, cause=Cause.WAITING))))
    assert (await store.parked.of_shards([0]))[0][0].again_in_us == 0


async def test_a_row_is_read_in_order_within_its_bounds(store):
    """Only its cells, in these columns, after one added_id and up to another."""
    cells = [(ROW, "BASE"), (OTHER, "BASE"), (ROW, "STATUS"), (ROW, "OTHER"), (ROW, "BASE"), (ROW, "BASE")]
    for n, (row, column) in enumerate(cells):
        await store.write(cell(row, column, n))
    found = await store.parked.of_row(0, ROW, {"BASE", "STATUS"}, 0, 5)
    assert [one.added_id for one in found] == [1, 3, 5]
    assert [one.added_id for one in await store.parked.of_row(0, ROW, {"BASE"}, 1, 6)] == [5, 6]
    assert await store.parked.of_row(0, ROW, {"BASE"}, 6, 6) == []


async def test_a_log_proves_where_it_is_read_on(store):
    await store.write(*[cell(ref_key=n) for n in range(1, 6)], cell(OTHER, ref_key=1, shard=1))
    at = await position(store, 2)
    pages = await store.log.read({0: at, 1: Position(1, 1, 0, digest=BEGINNING_DIGEST)}, 2)
    assert [[one.added_id for one in pages[shard].cells] for shard in (0, 1)] == [[3, 4], [1]]
    assert (pages[0].head.added_id, pages[1].head.added_id) == (5, 1)
    for gone in (Position(0, 1, 2, digest=at.digest + 1), Position(0, 1, 9, digest=7), Position(0, 2, 2, digest=7)):
        assert isinstance((await store.log.read({0: gone}, 2))[0], LocationGone)


async def test_what_failed_for_an_erased_cell_says_nothing_any_longer(store):
    """Neither the record nor what ended before. The record is to be called again, and others are left alone (I19)."""
    await store.write(*[cell(ref_key=n) for n in (1, 2, 3)])
    process = await store.process()
    await process.read([0])
    scripts = [store.parked.put(record(n, ref_key=n)) for n in (1, 2)]
    scripts.append(store.parked.put(record(3, ref_key=1, column_name="STATUS")))
    await move(store, process, Advance(await position(store, 1), 1, counts=CellCounts(parked=1)), ";".join(scripts))
    await store.order(2, Order.DISCARD)
    erased = store.parked.erase(ROW, Erasing(7, {"BASE": [1, 2, 9], "OTHER": [1]}))
    scripts = [store.parked.keep(record(1), Ending.FAILED), erased]
    await move(store, process, Advance(await position(store, 2), 1, counts=CellCounts(called=1)), ";".join(scripts))
    found = await store.records()
    assert [(each.error, each.ordered) for each in found] == [
        ("", Order.RETRY),
        ("", Order.DISCARD),
        ("ValueError: ü", None),
    ]
    assert found[0].due_at is not None
    assert await store.errors() == [""]
    ended = store.parked.delete(found[0], Ending.ERASED)
    await move(store, process, Advance(await position(store, 3), 1, counts=CellCounts(called=1)), ended)
    assert (await store.history())[-1] == (1, Ending.ERASED)
