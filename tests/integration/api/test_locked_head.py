"""HTTP while another session holds the head or the tables of one shard: what it costs, and whom (I5)."""

import asyncio
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import httpx
import pymysql
import pytest

from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.config import ApiSettings
from schemaless.errors import ShardsLocked
from schemaless.storage import entity_table
from schemaless.storage.asyncmy_driver import Traffic
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.node_core import connect_options
from tests.integration.api.api_harness import api_process, assert_problem, production_api, row_in
from tests.waiting import until

pytestmark = [pytest.mark.storage, pytest.mark.faults]

WAITED_S = 0.5
"""Half of the time that a session waits for a lock."""
TRIES = 5


@pytest.fixture(scope="module")
def api(running, make_datastore):
    make_datastore()  # with the first one come the tables
    with api_process(running.path) as started:
        yield started


@contextmanager
def held_head(node, datastore, shard):
    """A client that begins, locks a head, and does nothing more. It has none of our session's time-outs. APIs end it
    after a while if it has our own account.
    """
    connection = pymysql.connect(**connect_options(node.node))
    try:
        with connection.cursor() as cursor:
            cursor.execute("BEGIN")
            select = "SELECT head FROM schemaless.shard_head WHERE datastore = %s AND shard = %s FOR UPDATE"
            assert cursor.execute(select, (datastore.name, shard)) == 1
        yield connection
    finally:
        connection.close()


@contextmanager
def locked_tables(node, kind, *tables):
    """A dump or a backup tool that locks tables, by an administrator's account."""
    connection = pymysql.connect(**connect_options(node.node))
    try:
        with connection.cursor() as cursor:
            cursor.execute("LOCK TABLES " + ", ".join(f"{table} {kind}" for table in tables))
        yield
    finally:
        connection.close()


def put_in(call, datastore, shard):
    began = time.monotonic()
    answer = call.put(row_in(datastore, shard), 1, {"v": 1})
    return answer.status_code, answer.json().get("copies"), time.monotonic() - began


def put_beside_held_one(call, datastore, pool):
    """Puts to shard 0, which somebody holds, and to others. On a bad machine the waits are few in one of some tries."""
    for _ in range(TRIES):
        first = pool.submit(put_in, call, datastore, 0)
        others = list(pool.map(lambda n: put_in(call, datastore, 1 + n % 3), range(60)))
        assert first.result()[:2] == (202, 1)
        assert {(status, copies) for status, copies, _ in others} == {(201, 2)}
        if sum(seconds > WAITED_S for _, _, seconds in others) <= 8:
            return
    pytest.fail("they waited more than once")


def test_a_locked_head_costs_its_own_shard_only(api, make_datastore, admin, eventually):
    """Puts to other shards are stored twice: one of them waited once. The shard's own are buffered at once."""
    datastore = make_datastore(placement=("a",))
    call = api.at(datastore)
    eventually(lambda: call.put(uuid.uuid4(), 1, {"v": 0}), 201)
    with held_head(admin.master("a"), datastore, 0), ThreadPoolExecutor(8) as pool:
        put_beside_held_one(call, datastore, pool)
        own = [put_in(call, datastore, 0) for _ in range(TRIES)]
        assert {(status, copies) for status, copies, _ in own} == {(202, 1)}
        assert min(seconds for _, _, seconds in own) < WAITED_S
        items = [
            {"row_key": str(row_in(datastore, n % 4)), "column_name": "BASE", "ref_key": 1, "body": {}}
            for n in range(8)
        ]
        results = call.post("/batch/put", json={"cells": items}).json()["results"]
        assert [result["status"] for result in results] == ["buffered", "stored", "stored", "stored"] * 2
        assert_problem(call.post(f"/cells/{row_in(datastore, 0)}/BASE", json={}), 503)
        assert call.post(f"/cells/{row_in(datastore, 1)}/BASE", json={}).status_code == 201
    eventually(lambda: call.put(row_in(datastore, 0), 1, {"v": 1}), 201)


@pytest.mark.parametrize("kind", ["READ", "WRITE"])
def test_a_locked_table_costs_its_own_shard_only(api, make_datastore, admin, eventually, kind):
    """B8: a dump locks one shard's table. Puts to other shards keep both copies, and POSTs and reads go on."""
    datastore = make_datastore(placement=("a",))
    call = api.at(datastore)
    eventually(lambda: call.put(uuid.uuid4(), 1, {"v": 0}), 201)
    row = row_in(datastore, 1)
    assert call.put(row, 1, {"v": 1}).status_code == 201
    with locked_tables(admin.master("a"), kind, f"{datastore.database(0)}.entity"), ThreadPoolExecutor(8) as pool:
        put_beside_held_one(call, datastore, pool)
        posts = [pool.submit(call.post, f"/cells/{row_in(datastore, n)}/BASE", json={}) for n in range(4)]
        assert [post.result().status_code for post in posts] == [503, 201, 201, 201]
        reads = pool.map(lambda n: call.get(f"/cells/{row if n % 2 else row_in(datastore, 0)}/BASE/1"), range(60))
        seen = [(answer.status_code, answer.headers.get("schemaless-served-by")) for answer in reads]
        assert set(seen[1::2]) == {(200, "master")}
        assert set(seen[::2]) == {(404, "master" if kind == "READ" else "minion")}
    eventually(lambda: call.put(row_in(datastore, 0), 1, {"v": 1}), 201)


def test_a_locked_buffer_table_costs_copies_only(running, make_datastore, admin, eventually):
    """Cells of the master's own shards are stored, and other clusters' cells have one copy meanwhile."""
    datastore = make_datastore(placement=("a", "b"))
    with api_process(running.path) as api:
        call = api.at(datastore)
        eventually(lambda: call.put(uuid.uuid4(), 1, {"v": 0}), 201)
        with locked_tables(admin.master("a"), "READ", "schemaless.buffer"), ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda n: put_in(call, datastore, n % 2), range(40)))
        assert {status for status, _, _ in answers} == {201}
        assert {copies for n, (_, copies, _) in enumerate(answers) if n % 2 == 0} == {2}
        eventually(lambda: call.put(uuid.uuid4(), 1, {"v": 0}), 201)


def test_a_read_locked_master_is_a_master_that_is_away(running, make_datastore, admin, eventually):
    """FLUSH TABLES WITH READ LOCK: every put is buffered within its time, and stored when the lock goes."""
    datastore = make_datastore(placement=("a", "b"))
    with production_api(running.path) as api:
        call = api.at(datastore)
        eventually(lambda: call.put(uuid.uuid4(), 1, {"v": 0}), 201)
        connection = pymysql.connect(**connect_options(admin.master("a").node))
        with closing(connection), connection.cursor() as cursor, ThreadPoolExecutor(8) as pool:
            cursor.execute("FLUSH TABLES WITH READ LOCK")

            def told():  # on a bad machine the other master is away, too, in some tries
                answers = list(pool.map(lambda n: put_in(call, datastore, n % 4), range(80)))
                return {(n % 2, status) for n, (status, _, _) in enumerate(answers)}

            until(lambda: told() == {(0, 202), (1, 201)})
        eventually(lambda: call.put(row_in(datastore, 0), 1, {"v": 1}), 201)


async def test_a_locked_head_is_given_up_before_the_write_is(async_storage, make_datastore):
    """MySQL looks for lock waits that are over once a second only. A write that is cut off opens the breaker. On a bad
    machine some are cut off.
    """
    datastore = make_datastore(placement=("a",))
    master = async_storage.master("a")
    timeout_s = ApiSettings.model_fields["write_timeout_s"].default

    async def put(number):
        await asyncio.sleep(number * 0.09)
        row = row_in(datastore, 0)
        cell = ShardCell(CellKey(RowKey(row.bytes), ColumnName("BASE"), RefKey(1)), encode_body({}), 0)
        await master.run(entity_table.put_cells, datastore, [cell], timeout_s=timeout_s, traffic=Traffic.WRITE)

    for _ in range(TRIES):
        with held_head(master, datastore, 0):
            told = await asyncio.gather(*(put(number) for number in range(12)), return_exceptions=True)
        if {type(one) for one in told} == {ShardsLocked}:
            return
    pytest.fail(f"in none of {TRIES} tries all were given up in time: {told}")


def test_an_idle_transaction_that_holds_a_head_is_ended(api, make_datastore, storage):
    """A process that stands still inside a transaction stops its shard for seconds, on MySQL as on MariaDB."""
    datastore = make_datastore(placement=("a",))
    call = api.at(datastore)
    with held_head(storage.master("a"), datastore, 0) as connection:
        until(lambda: put_in(call, datastore, 0)[0] == 201)
        with pytest.raises(pymysql.err.MySQLError):
            connection.ping(reconnect=False)


async def test_many_posts_to_one_column_cost_other_rows_nothing(api, make_datastore, eventually):
    """600 at once: each is a version of its own, and no put meanwhile loses a copy or is only buffered."""
    datastore = make_datastore(placement=("a",))
    call = api.at(datastore)
    eventually(lambda: call.put(uuid.uuid4(), 1, {"v": 0}), 201)
    hot = f"{call.prefix}/cells/{row_in(datastore, 0)}/BASE"
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=api.client.base_url, timeout=20, limits=limits) as client:
        posts = [asyncio.create_task(client.post(hot, json={"n": n})) for n in range(600)]
        puts = []
        while not all(post.done() for post in posts):
            # By a client of its own: the pool of 600 connections may need seconds between the head and the payload.
            puts.append(await asyncio.to_thread(call.put, row_in(datastore, 1), 1, {}))
        answers = await asyncio.gather(*posts)
    assert puts
    assert {(put.status_code, put.json().get("copies")) for put in puts} == {(201, 2)}
    stored = [answer for answer in answers if answer.status_code == 201]
    assert sorted(answer.json()["ref_key"] for answer in stored) == list(range(1, len(stored) + 1))
    assert len(stored) > 100  # all on a quiet machine: how many a busy one stores in time is no matter of this test
    for answer in answers:
        if answer.status_code != 201:  # 429 where too many payloads of one caller have not arrived yet
            assert_problem(answer, 429 if answer.status_code == 429 else 503)
