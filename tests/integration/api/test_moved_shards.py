"""The API while a shard moves to another cluster: who waits, where its cells go, and what reads show (I5)."""

import asyncio
import signal
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from api.write.queue import MOVED_S
from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.ops.moves import Mover, ShardMover
from schemaless.sharding import shard_of
from schemaless.storage import buffer_table, entity_table
from schemaless.storage.asyncmy_driver import LEASE_S, AsyncStorage
from schemaless.storage.buffer_table import BufferRow
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.sql import sql
from tests.failover_harness import cleaning, drill
from tests.failover_harness import make_datastore as make_drilled_datastore
from tests.integration.api.api_harness import assert_problem, production_api, row_in
from tests.move_harness import ShardMove
from tests.waiting import async_until, until

pytestmark = pytest.mark.faults

SHARD = 0
TRIES = 5
PATIENCE_S = 2.5
"""What puts wait in a test that compares times."""
SWITCHES = 5
"""An odd number: the shard ends at b."""


@pytest.fixture(scope="module")
def api(running, make_datastore):
    make_datastore()
    with production_api(running.path) as started:
        yield started


@pytest.fixture
def datastore(make_datastore):
    """All shards live on a."""
    return make_datastore(shards=64, placement=("a",))


@pytest.fixture
def call(api, datastore, eventually):
    caller = api.at(datastore)
    eventually(lambda: caller.put(row_in(datastore, SHARD), 1, {"v": 0}), 201)
    return caller


@pytest.fixture
def move(storage, datastore):
    """Nothing stays closed, and nothing waits for it: the servers are those of other tests, too."""
    yield ShardMove(storage, datastore, SHARD, "b")
    left = ShardMove(storage, datastore, SHARD, "b")
    if left.home == "a":
        left.reopen()
    for master in storage.masters:
        master.run(query, sql("DELETE FROM schemaless.buffer WHERE datastore = %s", datastore.name.encode()))


def shown(storage, cluster, datastore, shard=SHARD):
    cells = storage.master(cluster).run(entity_table.read_after, datastore, shard, 0, 10**6)
    return [(uuid.UUID(bytes=cell.row_key), cell.ref_key) for cell in cells]


def homes_of(storage, cluster, row):
    """The homes that a server's buffer names for a row's cells."""
    select = sql("SELECT home FROM schemaless.buffer WHERE row_key = %s", row.bytes)
    return [home for (home,) in storage.master(cluster).run(query, select)]


def batch(datastore, shards):
    return [
        {"row_key": str(row_in(datastore, shard)), "column_name": "BASE", "ref_key": 1, "body": {}} for shard in shards
    ]


def timed(call, *args, **options):
    began = time.monotonic()
    answer = call(*args, **options)
    return answer, time.monotonic() - began


def test_a_moved_shard_of_a_batch_costs_that_shard_only(running, datastore, move, eventually):
    """S27: 63 of 64 are stored at once with two copies, and no breaker opens. The closed one is buffered in time."""
    with production_api(running.path, {"api.write.queue.MOVED_S": PATIENCE_S}) as api, ThreadPoolExecutor(2) as pool:
        call = api.at(datastore)
        eventually(lambda: call.put(row_in(datastore, SHARD), 1, {"v": 0}), 201)
        move.announce()
        move.close()
        first = pool.submit(timed, call.post, "/batch/put", json={"cells": batch(datastore, range(64))})
        time.sleep(0.1)
        answer = call.post("/batch/put", json={"cells": batch(datastore, range(1, 64))})
        assert {(one["status"], one["copies"]) for one in answer.json()["results"]} == {("stored", 2)}
        assert not first.done(), "it waited for the shard that moves"
        answer, seconds = first.result()
        results = answer.json()["results"]
        assert {(one["status"], one["copies"]) for one in results[1:]} == {("stored", 2)}
        assert (results[0]["status"], results[0]["copies"]) == ("buffered", 1)
        assert seconds >= PATIENCE_S
        for _ in range(TRIES):
            answer, seconds = timed(call.put, row_in(datastore, SHARD), 1, {})
            assert answer.status_code == 202
            if seconds < PATIENCE_S:
                break
        assert seconds < PATIENCE_S, "each waited again"


def test_a_put_waits_for_the_new_home(call, datastore, move, storage):
    """It is stored there, and its second copy lies on another cluster, once the placement is shown."""
    move.announce()
    move.close()
    move.copy_all()
    row = row_in(datastore, SHARD)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(call.put, row, 1, {"v": 1})
        move.open_at()
        move.publish()
        answer = put.result()
    assert (answer.status_code, answer.json()["copies"]) == (201, 2)
    assert (row, 1) in shown(storage, "b", datastore)
    assert (row, 1) not in shown(storage, "a", datastore)
    assert "b" in homes_of(storage, "a", row), "its second copy is elsewhere"


def test_a_put_that_met_another_body_in_the_buffer_is_decided_at_the_new_home(call, datastore, move, storage):
    """The old home can't know what the new one has. Where that has nothing, the buffered body came first."""
    first, second = row_in(datastore, SHARD), row_in(datastore, SHARD)
    for row in (first, second):
        key = CellKey(RowKey(row.bytes), ColumnName("BASE"), RefKey(1))
        buffered = BufferRow(key, encode_body({"v": 7}), SHARD, "a", 7)
        storage.master("b").run(buffer_table.insert, datastore, [buffered])
    move.announce()
    move.close()
    move.copy_all()
    with ThreadPoolExecutor(2) as pool:
        puts = [pool.submit(call.put, row, 1, {"v": 1}) for row in (first, second)]
        move.open_at()
        put_at(storage, "b", datastore, second, 1)
        move.publish()
        assert [put.result().status_code for put in puts] == [409, 200]


def test_a_process_that_is_late_puts_at_the_new_home(call, datastore, move, storage):
    """It learns it from the refusal, also when the shard goes back."""
    for one, home in ((move, "b"), (None, "a")):
        (one or ShardMove(storage, datastore, SHARD, "a")).all()
        row = row_in(datastore, SHARD)
        assert call.put(row, 1, {"v": 1}).status_code == 201
        assert (row, 1) in shown(storage, home, datastore)


def test_a_home_that_is_opened_again_takes_puts(call, datastore, move, eventually):
    """An undone switch leaves nobody out: the process looks at the head itself."""
    move.announce()
    move.close()
    assert call.put(row_in(datastore, SHARD), 1, {}).status_code == 202
    move.reopen()
    eventually(lambda: call.put(row_in(datastore, SHARD), 1, {}), 201)


def test_a_post_waits_and_makes_one_version(call, datastore, move, storage):
    """Its key comes along: the same POST at the new home is the first answer. A buffered cell's ref_key is taken."""
    row = row_in(datastore, SHARD)
    keyed = {"json": {"v": 1}, "headers": {"Idempotency-Key": "one"}}
    first = call.post(f"/cells/{row}/BASE", **keyed).json()
    move.announce()
    move.close()
    assert call.put(row, 2, {"v": 2}).status_code == 202
    move.copy_all()
    with ThreadPoolExecutor(2) as pool:
        again = pool.submit(call.post, f"/cells/{row}/BASE", **keyed)
        other = pool.submit(call.post, f"/cells/{row}/BASE", json={"v": 3})
        time.sleep(2 * MOVED_S)
        move.open_at()
        move.publish()
        assert again.result().json()["ref_key"] == first["ref_key"] == 1
        assert (other.result().status_code, other.result().json()["ref_key"]) == (201, 3)
    assert sorted(ref_key for key, ref_key in shown(storage, "b", datastore) if key == row) == [1, 3]


def test_a_post_to_a_shard_that_stays_closed_is_503(call, datastore, move):
    """It doesn't wait for ever, and writes nothing."""
    move.announce()
    move.close()
    assert_problem(call.post(f"/cells/{row_in(datastore, SHARD)}/BASE", json={}), 503)


def cell(datastore, row, ref_key):
    key = CellKey(RowKey(row.bytes), ColumnName("BASE"), RefKey(ref_key))
    return ShardCell(key, encode_body({"v": ref_key}), shard_of(row.bytes, datastore.shards))


def put_at(storage, cluster, datastore, row, ref_key):
    storage.master(cluster).run(entity_table.put_cells, datastore, [cell(datastore, row, ref_key)])


READS = {
    "exact": lambda call, row, **asked: call.get(f"/cells/{row}/BASE/2", **asked),
    "newest": lambda call, row, **asked: call.get(f"/cells/{row}/BASE", **asked),
    "row": lambda call, row, **asked: call.get(f"/cells/{row}", **asked),
    "versions": lambda call, row, **asked: call.get(f"/cells/{row}/BASE/versions", **asked),
    "many": lambda call, row, **asked: call.post(
        "/batch/get", json={"keys": [{"row_key": str(row), "column_name": "BASE"}]}, **asked
    ),
    "log": lambda call, row, **asked: call.get(f"/shards/{SHARD}/cells", **asked),
    "logs": lambda call, row, **asked: call.post("/shards/cells", json={"locations": {"0": 2, "1": 0}}, **asked),
    "shards": lambda call, row, **asked: call.get("/shards", **asked),
}
SECOND = {
    "exact": lambda body: body["ref_key"],
    "newest": lambda body: body["ref_key"],
    "row": lambda body: body["cells"]["BASE"]["ref_key"],
    "versions": lambda body: max(cell["ref_key"] for cell in body["cells"]),
    "many": lambda body: body["cells"][0]["ref_key"],
    "log": lambda body: body["cells"][-1]["ref_key"],
    "logs": lambda body: body["shards"]["0"]["head"] - 1,
    "shards": lambda body: body["shards"][SHARD]["head"] - 1,
}
"""What each answer has of the second version: 2, and less where it is missing. The fixture's cell is the first one."""
FROM_MASTER = {"params": {"read_from": "master"}}


def test_reads_wait_until_the_new_home_is_known(call, datastore, move, storage, eventually):
    """No answer that claims the master lacks what is stored at the new home, which isn't published yet."""
    row = row_in(datastore, SHARD)
    assert call.put(row, 1, {}).status_code == 201
    move.announce()
    time.sleep(1.0)  # as a mover waits: each process has looked
    assert {call.get(f"/cells/{row}/BASE").headers["schemaless-cluster"]} == {"a"}
    move.close()
    move.copy_all()
    move.open_at()
    put_at(storage, "b", datastore, row, 2)
    with ThreadPoolExecutor(2 * len(READS)) as pool:
        answers = {
            (name, bool(asked)): pool.submit(read, call, row, **asked)
            for name, read in READS.items()
            for asked in ({}, FROM_MASTER)
        }
        time.sleep(0.3)
        assert not any(answer.done() for answer in answers.values()), "an answer didn't wait"
        move.publish()
        for (name, _), answer in answers.items():
            found = answer.result()
            assert (found.status_code, SECOND[name](found.json())) == (200, 2), name
            assert "b" in found.headers["schemaless-cluster"].split(","), name


def test_reads_of_a_shard_that_stays_closed_end(call, datastore, move):
    """They say that they can't know, and those of other shards go on. Opened again it is read as before."""
    row, other = row_in(datastore, SHARD), row_in(datastore, 1)
    assert [call.put(each, 1, {}).status_code for each in (row, other)] == [201, 201]
    move.announce()
    time.sleep(1.0)
    move.close()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call.get, f"/cells/{row}/BASE", **FROM_MASTER)
        assert call.get(f"/cells/{other}/BASE", **FROM_MASTER).status_code == 200
        assert_problem(waiting.result(), 503)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call.get, f"/cells/{row}/BASE", **FROM_MASTER)
        time.sleep(0.2)
        move.reopen()
        assert waiting.result().status_code == 200


def test_what_was_buffered_while_no_home_was_open_can_be_read(call, datastore, move):
    """It was acknowledged, so it is read from the buffers, from the one of the new home too, until it is there."""
    row = row_in(datastore, SHARD)
    move.announce()
    move.close()
    assert call.put(row, 1, {"v": 1}).status_code == 202
    move.copy_all()
    move.open_at()
    move.publish()
    for read in ("newest", "row", "versions", "many"):
        answer = READS[read](call, row)
        assert (answer.status_code, str(row) in answer.text) == (200, True), read


def test_a_process_that_stood_still_across_the_switch_answers_no_old_data(tmp_path):
    """It wakes with the old placement and asks the old home. It has no lease, so it learns of the move in time."""
    with drill(tmp_path, minions=1) as drilled, SyncStorage(drilled.running.topology) as storage:
        datastore = make_drilled_datastore(drilled.running)
        row = row_in(datastore, SHARD)
        with production_api(drilled.running.path) as api, ThreadPoolExecutor(4 * len(READS)) as pool:
            call = api.at(datastore)
            until(lambda: call.put(row, 1, {}).status_code == 201)
            put_at(storage, "a", datastore, row_in(datastore, SHARD), 1)
            assert call.get(f"/cells/{row}/BASE", **FROM_MASTER).headers["schemaless-cluster"] == "a"
            api.process.send_signal(signal.SIGSTOP)
            try:
                move = ShardMove(storage, datastore, SHARD, "b")
                move.announce()
                time.sleep(LEASE_S)
                for step in (move.close, move.copy_all, move.open_at, move.publish):
                    step()
                put_at(storage, "b", datastore, row, 2)
                answers = [
                    (name, pool.submit(read, call, row, **asked))
                    for name, read in READS.items()
                    for asked in ({}, FROM_MASTER)
                ]
                time.sleep(0.3)
            finally:
                api.process.send_signal(signal.SIGCONT)
            for name, answer in answers:
                found = answer.result()
                assert (found.status_code, SECOND[name](found.json())) == (200, 2), name
                assert "b" in found.headers["schemaless-cluster"].split(","), name


def test_a_shard_that_goes_to_and_fro_loses_nothing(call, datastore, storage, running):
    """Clients see one shard: no put fails, each reads its own writes, and no POST gets a ref_key twice.

    Prints what the longest of each took.
    """
    stop, faults, longest_s = threading.Event(), [], Counter()
    buffered = []
    column = row_in(datastore, SHARD)
    put_rows, ref_keys = [], []

    def puts():
        while not stop.is_set():
            row = row_in(datastore, SHARD)
            put, put_s = timed(call.put, row, 1, {"v": 1})
            read, read_s = timed(call.get, f"/cells/{row}/BASE/1", **FROM_MASTER)
            put_rows.append(row)
            buffered.append(put.status_code == 202)
            longest_s["put"], longest_s["read"] = max(longest_s["put"], put_s), max(longest_s["read"], read_s)
            if (put.status_code, read.status_code) not in ((201, 200), (202, 200)):
                faults.append((put.text, read.status_code, read.text))

    def posts():
        while not stop.is_set():
            post, post_s = timed(call.post, f"/cells/{column}/BASE", json={})
            longest_s["post"] = max(longest_s["post"], post_s)
            read = call.get(f"/cells/{column}/BASE", **FROM_MASTER)
            if (post.status_code, read.status_code) != (201, 200) or read.json()["ref_key"] < post.json()["ref_key"]:
                faults.append((post.text, read.text))
            ref_keys.append(post.json().get("ref_key"))

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(work) for work in (puts, puts, posts, posts)]
        with Mover(storage, ["a", "b"]) as mover:
            for number in range(SWITCHES):
                one = ShardMover(mover, datastore, SHARD, *("ba" if number % 2 else "ab"))
                one.begin()
                one.copy()
                one.switch()
        stop.set()
        for client in clients:
            client.result()
    print(f"{SWITCHES} switches, {len(put_rows)} puts, {sum(buffered)} buffered, longest in s: {dict(longest_s)}")
    assert not faults, (len(faults), len(put_rows), faults[:3])
    assert len(set(ref_keys)) == len(ref_keys)
    asyncio.run(cleaned(running.topology, datastore))
    cells = storage.master("b").run(entity_table.read_after, datastore, SHARD, 0, 10**6)
    assert [cell.added_id for cell in cells] == list(range(1, len(cells) + 1))
    found = {(uuid.UUID(bytes=cell.row_key), cell.ref_key) for cell in cells}
    assert found >= {*((row, 1) for row in put_rows), *((column, number) for number in ref_keys)}


async def cleaned(topology, datastore):
    """Returns when no buffer has a row of the datastore."""
    select = sql("SELECT COUNT(*) FROM schemaless.buffer WHERE datastore = %s", datastore.name.encode())
    async with AsyncStorage(topology) as storage, cleaning(storage):

        async def is_empty():
            return not any([(await master.run(query, select))[0][0] for master in storage.masters])

        await async_until(is_empty)
