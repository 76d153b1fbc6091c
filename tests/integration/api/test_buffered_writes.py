"""Puts while masters hang or are dead, and what becomes of them afterwards (I5, I6). Real servers, really stopped."""

import asyncio
import os
import signal
import sys
import time
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from api.write.put import CellWriter, PutOutcome
from cleaner import pair, service
from cleaner.service import RESCUE_GRACE_S, Cleaner
from schemaless.cell import Cell, CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.config import ApiSettings
from schemaless.errors import Overloaded, StorageUnavailable, Unavailable
from schemaless.sharding import by_rendezvous, shard_of
from schemaless.storage import buffer_table, entity_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.buffer_table import BufferOutcome, BufferRow
from schemaless.storage.operation import query
from schemaless.storage.sql import sql
from schemaless.topology import StorageCluster, Topology
from tests.log_harness import run_sql
from tests.waiting import async_until

pytestmark = [pytest.mark.storage, pytest.mark.faults]

BASE = ColumnName("BASE")
SETTINGS = ApiSettings(topology=Path("unused"), kafka="unused")
ANSWER_MAX_S = 3.0
FAST_S = 0.9  # less than the shortest time-out: nothing was waited for
TRIES = 10


@pytest.fixture
def servers(running):
    """Handles by node name; whatever a test did to a server, it runs again afterwards."""
    yield running.servers
    for server in running.servers.values():
        if server.alive():
            server.cont()
        else:
            server.start()


@pytest.fixture
def datastore(make_datastore):
    """Home a, so secondary b."""
    return make_datastore(placement=("a",))


@pytest.fixture
async def writer(async_storage):
    opened = CellWriter(async_storage, SETTINGS)
    yield opened
    await opened.close()


@pytest.fixture
async def cleaning(async_storage):
    """A cleaner with its real settings, working until the test ends."""
    stop = asyncio.Event()
    task = asyncio.create_task(Cleaner(async_storage).run(stop))
    yield
    stop.set()
    await task


def cell(row: bytes | None = None, **body: object) -> Cell:
    return Cell(CellKey(RowKey(row or uuid.uuid4().bytes), BASE, RefKey(1)), encode_body(body))


def row_of(datastore, put: Cell, claim: int) -> BufferRow:
    return BufferRow(put.key, put.body, shard_of(put.key.row_key, datastore.shards), "a", claim)


async def timed(awaitable):
    started = time.monotonic()
    value = await awaitable
    return value, time.monotonic() - started


async def answered(writer, datastore, put: Cell):
    """The outcome of a put, again while this process is too late to see one, as it may be on a bad machine."""
    while True:
        (outcome,) = await writer.put(datastore, [put])
        if not isinstance(outcome, Overloaded):
            return outcome


async def at_once(writer, datastore, put: Cell):
    """The outcome, when of several puts of the cell at least one waited for nothing."""
    for _ in range(TRIES):
        outcome, seconds = await timed(answered(writer, datastore, put))
        if seconds < FAST_S:
            return outcome
    return pytest.fail(f"{TRIES} puts took {FAST_S} s each")


async def buffered(async_storage, datastore) -> set[bytes]:
    select = sql("SELECT row_key FROM schemaless.buffer WHERE datastore = %s", datastore.name.encode())
    return {found[0] for found in await async_storage.master("b").run(query, select)}


async def at_home(node, datastore) -> int:
    return (await node.run(shard_head.movement, datastore.name)).heads_sum


async def reaches(question, wanted) -> None:
    """Returns when the answer to `question()` is `wanted`."""

    async def is_wanted() -> bool:
        return await question() == wanted

    await async_until(is_wanted)


async def test_a_hung_home_means_buffered_and_written_when_it_goes_on(
    servers, writer, cleaning, async_storage, datastore
):
    """I5, I6: SIGSTOP the home: the first put waits its share, the next ones don't; SIGCONT: the cleaner catches up."""
    servers["a1"].stop()
    first = await answered(writer, datastore, cell(n=1))
    second = await at_once(writer, datastore, cell(n=2))
    assert (first.status, first.placed, first.copies) == (PutStatus.BUFFERED, None, 1)
    assert second.status is PutStatus.BUFFERED
    await asyncio.sleep(RESCUE_GRACE_S)
    assert await buffered(async_storage, datastore) == {first.key.row_key, second.key.row_key}
    servers["a1"].cont()
    await reaches(lambda: at_home(async_storage.master("a"), datastore), 2)
    await reaches(lambda: buffered(async_storage, datastore), set())
    (again,) = await writer.put(datastore, [cell(first.key.row_key, n=1)])
    assert again.status is PutStatus.ALREADY_STORED


@pytest.fixture
async def patient(async_storage):
    """Its masters have twenty seconds for a put."""
    opened = CellWriter(async_storage, SETTINGS.model_copy(update={"write_timeout_s": 20.0}))
    yield opened
    await opened.close()


async def test_a_silent_home_is_given_up_and_a_slow_one_is_not(servers, patient, async_storage, datastore, admin):
    """A quarter of a second each, so no put waits for a time-out. What only a lock holds up has all the time."""
    await patient.put(datastore, [cell(n=0)])  # so it has a connection
    servers["a1"].stop()
    (hung,), hung_s = await timed(patient.put(datastore, [cell(n=1)]))
    servers["a1"].cont()
    assert hung.status is PutStatus.BUFFERED
    assert hung_s < 10
    await asyncio.sleep(1.1)  # the breaker lets the next one try
    slow = cell(n=2)
    shard = shard_of(slow.key.row_key, datastore.shards)
    database = datastore.database(shard)
    slowly = f"BEFORE INSERT ON {database}.entity FOR EACH ROW SET @slow = SLEEP(1)"
    run_sql(admin.master("a"), f"CREATE TRIGGER {database}.slow {slowly}")
    (outcome,) = await patient.put(datastore, [slow])
    assert (outcome.status, outcome.copies) == (PutStatus.STORED, 2)


async def test_every_one_of_many_puts_is_answered_within_3_s(servers, writer, datastore):
    """I5: also those that arrive while others wait for the hung home. On a bad machine in one of some tries."""

    async def later(n: int):
        await asyncio.sleep(n * 0.01)
        return await timed(answered(writer, datastore, cell(n=n)))

    async def is_stored():
        outcome = await answered(writer, datastore, cell())
        return isinstance(outcome, PutOutcome) and outcome.status is PutStatus.STORED

    for _ in range(TRIES):
        await async_until(is_stored)
        servers["a1"].stop()
        answers = await asyncio.gather(*(later(n) for n in range(250)))
        unanswered = [outcome for outcome, _ in answers if isinstance(outcome, Unavailable)]
        assert {outcome.status for outcome, _ in answers if outcome not in unanswered} == {PutStatus.BUFFERED}
        slowest_s = max(seconds for _, seconds in answers)
        if not unanswered and slowest_s < ANSWER_MAX_S:
            return
        servers["a1"].cont()
    pytest.fail(f"the slowest after {slowest_s:.1f} s, without an answer: {unanswered}")


async def test_a_killed_home_means_buffered_and_written_when_it_is_back(
    servers, writer, cleaning, async_storage, datastore
):
    """I5, I6: a home that was killed and started again gets what was buffered for it."""
    (before,) = await writer.put(datastore, [cell(n=0)])
    servers["a1"].kill()
    outcome = await at_once(writer, datastore, cell(n=1))
    assert (before.status, outcome.status) == (PutStatus.STORED, PutStatus.BUFFERED)
    servers["a1"].start()
    await reaches(lambda: at_home(async_storage.master("a"), datastore), 2)
    await reaches(lambda: buffered(async_storage, datastore), set())


async def test_without_a_secondary_the_home_takes_the_cell_alone(servers, writer, async_storage, datastore):
    """I5: stored, copies 1, counted; and min_copies=2 turns that into an error with nothing written."""
    servers["b1"].stop()
    alone = await answered(writer, datastore, cell(n=1))
    assert (alone.status, alone.copies) == (PutStatus.STORED, 1)
    next_one = await at_once(writer, datastore, cell(n=2))
    assert next_one.status in (PutStatus.STORED, PutStatus.ALREADY_STORED)
    assert writer.counts[PutStatus.STORED, 1] == 2
    strict = CellWriter(async_storage, SETTINGS.model_copy(update={"min_copies": 2}))
    (refused,) = await strict.put(datastore, [cell(n=3)])
    assert isinstance(refused, Unavailable)
    with pytest.raises(Unavailable):
        await strict.put_next(datastore, RowKey(uuid.uuid4().bytes), BASE, encode_body({}))
    assert await at_home(async_storage.master("a"), datastore) == 2


async def test_home_and_secondary_away_is_an_error(servers, writer, datastore):
    """I5: nothing durable anywhere is never called buffered."""
    servers["a1"].stop()
    servers["b1"].stop()
    refused = await answered(writer, datastore, cell(n=1))
    assert isinstance(refused, StorageUnavailable)
    assert refused.retryable


async def test_a_next_version_is_never_buffered(servers, writer, async_storage, datastore):
    """POST needs the home for its ref_key: away means an error, and no trace."""
    servers["a1"].stop()
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            await writer.put_next(datastore, RowKey(uuid.uuid4().bytes), BASE, encode_body({}), "key")
    assert await buffered(async_storage, datastore) == set()


async def test_a_post_takes_no_ref_key_that_waits_in_a_buffer(servers, writer, async_storage, datastore):
    """I1, I5: the home is back, and nothing was rescued yet. The acknowledged cell keeps its key. All are stored."""
    servers["a1"].kill()  # one that only hangs would read the put from its socket later
    waiting = cell(n=1)
    (outcome,) = await writer.put(datastore, [waiting])
    assert outcome.status is PutStatus.BUFFERED
    servers["a1"].start()
    another = CellWriter(async_storage, SETTINGS)  # another process, which met no failure
    row_key, column_name = waiting.key.row_key, waiting.key.column_name
    posted = [(await another.put_next(datastore, row_key, column_name, encode_body({"n": n}))).key for n in (2, 3)]
    assert [key.ref_key for key in posted] == [2, 3]
    (outcome,) = await another.put(datastore, [waiting])
    assert outcome.status is PutStatus.STORED
    await another.close()


async def test_another_body_for_a_buffered_key_is_a_conflict_while_the_home_is_away(servers, writer, datastore):
    """I1: the body that was buffered first stands; the same body is buffered again."""
    servers["a1"].stop()
    first = cell(n=1)
    outcomes = [(await writer.put(datastore, [put]))[0] for put in (first, cell(first.key.row_key, n=2), first)]
    assert [outcome.status for outcome in outcomes] == [
        PutStatus.BUFFERED, PutStatus.CONFLICT, PutStatus.BUFFERED
    ]  # fmt: skip


async def test_a_minion_knows_better_than_a_buffered_rival(servers, writer, async_storage, datastore):
    """I1: the home is away, its minion shows the very body that a buffered row contradicts: already stored."""
    stored = cell(n=1)
    (outcome,) = await writer.put(datastore, [stored])
    await reaches(lambda: at_home(async_storage.minions("a")[0], datastore), 1)
    await async_storage.master("b").run(query, "DELETE FROM schemaless.buffer")
    rival = row_of(datastore, cell(stored.key.row_key, n=2), 7)
    await async_storage.master("b").run(buffer_table.insert, datastore, [rival])
    servers["a1"].stop()
    (repeat,) = await writer.put(datastore, [stored])
    assert (repeat.status, repeat.placed.added_id) == (PutStatus.ALREADY_STORED, outcome.placed.added_id)


async def test_two_puts_share_a_row_and_the_refused_one_leaves_it(async_storage, datastore):
    """I6: the first put may not remove a row that another relies on, nor the second one that it didn't insert."""
    node = async_storage.master("b")
    put = cell(n=1)
    first, second = row_of(datastore, put, 1), row_of(datastore, put, 2)
    assert await node.run(buffer_table.insert, datastore, [first]) == [BufferOutcome.INSERTED]
    assert await node.run(buffer_table.insert, datastore, [first]) == [BufferOutcome.INSERTED]
    assert await node.run(buffer_table.insert, datastore, [second]) == [BufferOutcome.SHARED]
    assert await node.run(buffer_table.insert, datastore, [second]) == [BufferOutcome.SHARED]  # its answer was lost
    for claimed in (first, second):
        await node.run(buffer_table.remove, datastore, [claimed])
        assert await buffered(async_storage, datastore) == {put.key.row_key}
    assert await node.run(buffer_table.insert, datastore, [first]) == [BufferOutcome.INSERTED]  # as it was told before


async def test_a_batch_that_repeats_a_refused_key_leaves_no_row(writer, async_storage, datastore):
    """I6: before a conflict is told, the put removes its own row, also one that it met itself."""
    stored = cell(n=1)
    await async_storage.master("a").run(entity_table.put_cells, datastore, [row_of(datastore, stored, 0)])
    rival = cell(stored.key.row_key, n=2)
    results = await writer.put(datastore, [rival, rival, cell(n=3), rival])
    assert [result.status for result in results].count(PutStatus.CONFLICT) == 3
    assert stored.key.row_key not in await buffered(async_storage, datastore)


async def test_a_shared_row_outlives_the_conflict_of_the_put_that_shares_it(writer, async_storage, datastore):
    """I6: whoever inserted it may have said "buffered", so it waits for the cleaner to record the conflict."""
    stored = cell(n=1)
    rival = cell(stored.key.row_key, n=2)
    await async_storage.master("a").run(entity_table.put_cells, datastore, [row_of(datastore, stored, 0)])
    await async_storage.master("b").run(buffer_table.insert, datastore, [row_of(datastore, rival, 1)])
    (refused,) = await writer.put(datastore, [rival])
    assert refused.status is PutStatus.CONFLICT
    assert await buffered(async_storage, datastore) == {stored.key.row_key}


async def test_the_cleaner_process_outlives_hanging_masters(servers, running, async_storage, make_datastore, tmp_path):
    """I6: it waits for a master that hangs, as a home and as a secondary, then writes; SIGTERM ends it in order."""
    datastore = make_datastore(placement=("a", "b"))
    rows = {}
    while len(rows) < 2:
        put = cell(n=1)
        shard = shard_of(put.key.row_key, datastore.shards)
        home = datastore.home(shard)
        rows[home] = BufferRow(put.key, put.body, shard, home, 1)
    servers["a1"].stop()
    await async_storage.master("b").run(buffer_table.insert, datastore, [rows["a"]])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cleaner",
        env={**os.environ, "SCHEMALESS_TOPOLOGY": str(running.path), "SCHEMALESS_KAFKA": "unused"},
    )  # fmt: skip
    try:
        await asyncio.sleep(1)
        servers["a1"].cont()
        await async_storage.master("a").run(buffer_table.insert, datastore, [rows["b"]])
        servers["a1"].stop()
        await asyncio.sleep(RESCUE_GRACE_S)
        servers["a1"].cont()
        for home in ("a", "b"):
            await reaches(partial(at_home, async_storage.master(home), datastore), 1)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_hanging_home_holds_up_no_other_ones_rows(servers, topology, datastore, make_datastore, monkeypatch):
    """I6: many pages of rows for a home that hangs; a row for another home is written in time all the same."""
    monkeypatch.setattr(pair, "NODE_TIMEOUT_S", 0.5)
    for name, value in (("GRACE_S", 0.0), ("RESCUE_GRACE_S", 0.0), ("BATCH_ROWS_MAX", 10)):
        monkeypatch.setattr(service, name, value)
    clusters = {**topology.clusters, "c": topology.cluster("b")}  # b's servers once more, as the home of other rows
    others = make_datastore(placement=("b",))
    async with AsyncStorage(Topology(clusters)) as opened:
        master = opened.master("b")
        await master.run(buffer_table.insert, datastore, [row_of(datastore, cell(n=n), claim=n) for n in range(300)])
        servers["a1"].stop()
        stop = asyncio.Event()
        cleaning = asyncio.create_task(Cleaner(opened).run(stop))
        await asyncio.sleep(1)
        await master.run(buffer_table.insert, others, [msgspec.structs.replace(row_of(others, cell(), 1), home="c")])
        await reaches(lambda: at_home(master, others), 1)
        servers["a1"].cont()
        await reaches(lambda: buffered(opened, datastore), set())
        stop.set()
        await cleaning


@pytest.fixture
async def wider(topology):
    """The same servers and a third cluster, whose master was never started."""
    nobody = replace(topology.cluster("b").nodes[0], name="c1", cluster="c", port=1, socket=None)
    clusters = {**topology.clusters, "c": StorageCluster("c", (nobody,))}
    async with AsyncStorage(Topology(clusters)) as opened:
        yield opened


async def test_another_secondary_is_tried_when_one_fails(wider, datastore):
    """I5: rows that prefer the dead cluster go to the next one, together with their batch; copies stay 2."""
    writer = CellWriter(wider, SETTINGS)
    outcomes = await writer.put(datastore, [cell(n=n) for n in range(40)])
    assert {(outcome.status, outcome.copies) for outcome in outcomes} == {(PutStatus.STORED, 2)}
    preferred = {by_rendezvous(outcome.key.row_key, ["b", "c"])[0] for outcome in outcomes}
    assert preferred == {"b", "c"}
    assert await buffered(wider, datastore) == {outcome.key.row_key for outcome in outcomes}
    await writer.close()


async def test_two_secondaries_take_what_a_dead_home_cant(wider, datastore):
    """I6: with three clusters the loss of a secondary, too, loses no acknowledged cell. Each row is there twice."""
    writer = CellWriter(wider, SETTINGS)
    away = replace(datastore, placement=("c",))
    outcomes = await writer.put(away, [cell(n=n) for n in range(20)])
    assert {(outcome.status, outcome.copies) for outcome in outcomes} == {(PutStatus.BUFFERED, 2)}
    for cluster in ("a", "b"):
        waiting = await wider.master(cluster).run(buffer_table.waiting)
        assert waiting[datastore.name, "c"].rows == 20, cluster
    await writer.close()
