"""One suite over the API in memory and the real one, as a client sees them: cells, versions, batches and logs."""

import uuid
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from schemaless import (
    AsyncClient,
    CellErased,
    Client,
    Conflict,
    Invalid,
    KeyErased,
    LocationGone,
    NotBuilt,
    NotFound,
)
from schemaless.cell import PutStatus
from schemaless.sharding import shard_of
from schemaless.testing.memory_api import MemoryApi
from schemaless.testing.memory_program import MemoryEntityTable, MemoryProgram
from schemaless.topology import Datastore
from tests.integration.api.api_harness import api_process

pytestmark = pytest.mark.storage

SHARDS = 2


@pytest.fixture(scope="module")
def api(running, make_datastore):
    make_datastore()  # with the first one come the tables
    with api_process(running.path) as started:
        yield f"http://127.0.0.1:{started.port}"


@pytest.fixture(params=["memory", "api"])
def made(request):
    """Makes clients of a fresh datastore: made(Client)."""
    if request.param == "api":
        datastore, options = request.getfixturevalue("make_datastore")(shards=SHARDS), {}
        hosts = [request.getfixturevalue("api")]
    else:
        datastore, hosts = Datastore("memory", SHARDS, 1, ("a",)), ["http://memory"]
        program = MemoryProgram("trigger:test", datastore, MemoryEntityTable(datastore))
        options = {"transport": MemoryApi(program)}
    return lambda kind: kind(hosts, datastore=datastore.name, **options)


@pytest.fixture
def client(made):
    with made(Client) as opened:
        yield opened


@pytest.fixture
def row():
    return uuid.uuid4()


def row_in(shard):
    return next(row for row in iter(uuid.uuid4, None) if shard_of(row.bytes, SHARDS) == shard)


def test_a_cell_never_changes(client, row):
    """What is read is what was written, with its place and time."""
    body = {"fare": {"amount": 12.5}, "stops": [1, None, "ü"]}
    put = client.put_cell(row, "BASE", 1, body)
    assert (put.status, put.shard, put.added_id) == (PutStatus.STORED, shard_of(row.bytes, SHARDS), 1)
    again = client.put_cell(row, "BASE", 1, body)
    assert (again.status, again.location, again.digest) == (PutStatus.ALREADY_STORED, put.location, put.digest)
    with pytest.raises(Conflict):
        client.put_cell(row, "BASE", 1, {"fare": {"amount": 12}})
    cell = client.get_cell(row, "BASE", 1)
    assert (cell.body, cell.created_at, cell.generation) == (body, put.created_at, 1)


def test_the_next_version_is_given_and_a_repeat_gets_the_same(client, row):
    """By Idempotency-Key. The key with another body is refused."""
    assert [client.put(row, "STATUS", {"n": n}).ref_key for n in range(3)] == [1, 2, 3]
    first = client.put(row, "STATUS", {"n": 3}, idempotency_key="once")
    client.put(row, "STATUS", {"n": 4})
    repeat = client.put(row, "STATUS", {"n": 3}, idempotency_key="once")
    assert (first.replayed, repeat.replayed) == (False, True)
    assert (repeat.ref_key, repeat.status, repeat.location) == (first.ref_key, first.status, first.location)
    with pytest.raises(Invalid):
        client.put(row, "STATUS", {"n": 5}, idempotency_key="once")
    assert client.get_cell_latest(row, "STATUS").ref_key == 5


def test_a_missing_cell_is_false_and_names_its_column(client, row):
    """A datastore that doesn't exist is an error."""
    status = client.get_cell_latest(row, "STATUS")
    assert (bool(status), status.is_completed, client.get_row(row)) == (False, None, {})
    assert not client.get_cell(row, "STATUS", 1)
    assert client.put(row, status, {}).column_name == "STATUS"


def test_rows_versions_and_many_cells_are_read(client, row):
    for n in (1, 2, 4):
        client.put_cell(row, "A", n, {"n": n})
    client.put_cell(row, "B", 1, {"n": 9})
    assert {column: cell.n for column, cell in client.get_row(row).items()} == {"A": 4, "B": 9}
    found = client.get_cells([(row, "A"), (row, "A", 1), (row, "C")])
    assert [bool(cell) and cell.n for cell in found] == [4, 1, False]
    assert [cell.n for cell in client.get_versions(row, "A", from_=2, order="desc")] == [4, 2]
    page = client.get_versions(row, "A", limit=2)
    assert ([cell.n for cell in page], page.next) == ([1, 2], 4)


def test_items_of_a_batch_stand_or_fail_by_themselves(client, row):
    cells = [(row, "A", 1, {"n": 1}), (row, "A", 1, {"n": 1}), (row, "A", 1, {"n": 1.0}), (row, "no name", 1, {})]
    results = client.put_cells(cells)
    assert [result.status for result in results] == ["stored", "already_stored", "conflict", "error"]
    assert [type(result.error) for result in results[2:]] == [Conflict, Invalid]


def test_a_log_is_paged_and_proves_its_positions(client):
    row = row_in(1)
    for n in range(5):
        client.put_cell(row, "A" if n % 2 else "B", n, {"n": n})
    seen, position = [], None
    while (page := client.get_cells_for_shard(1, position, 2)).cells:
        seen += [cell.added_id for cell in page]
        position = page.position
    assert (seen, page.head, page.pending) == ([1, 2, 3, 4, 5], 5, 0)
    only = client.get_cells_for_shard(1, 0, columns=["A"])
    assert ([cell.n for cell in only], only.next.added_id) == ([1, 3], 5)
    now = datetime.now(UTC)
    assert len(client.get_cells_for_shard(1, now - timedelta(hours=1)).cells) == 5
    assert client.get_cells_for_shard(1, now + timedelta(hours=1)).cells == []
    for gone in (6, "2:1", "1:5:0123456789abcdef"):
        with pytest.raises(LocationGone):
            client.get_cells_for_shard(1, gone)
    with pytest.raises(NotFound):
        client.get_cells_for_shard(SHARDS)


def test_logs_of_several_shards_come_together(client):
    for shard in (0, 0, 1):
        client.put_cell(row_in(shard), "A", 1, {})
    pages = client.get_cells_for_shards({0: 1, 1: 7})
    assert [cell.added_id for cell in pages[0]] == [2]
    assert isinstance(pages[1], LocationGone)


def test_a_cell_has_the_cause_that_its_put_named(client, row):
    caused = client.caused_by("billing/bill_rider@0:1:7")
    caused.put(row, "A", {})
    caused.put_cells([(row, "B", 1, {})])
    client.put(row, "C", {})
    assert [cell.cause for cell in client.get_row(row).values()] == ["billing/bill_rider@0:1:7"] * 2 + [None]


async def test_the_async_client_has_the_same_answers(made, row):
    async with made(AsyncClient) as client:
        await client.put_cell(row, "A", 1, {"n": 1})
        assert (await client.put(row, "A", {"n": 2})).ref_key == 2
        assert (await client.get_cell_latest(row, "A")).n == 2


def test_what_memory_does_not_answer_says_so():
    datastore = Datastore("memory", 1, 1, ("a",))
    program = MemoryProgram("trigger:test", datastore, MemoryEntityTable(datastore))
    with Client(["http://memory"], datastore="memory", transport=MemoryApi(program)) as client:
        with pytest.raises(NotBuilt, match="in memory"):
            client.document("/status")
        program.is_away = True
        assert MemoryApi(program).handle_request(httpx.Request("GET", "http://memory/v1/memory")).status_code == 503


def test_an_erased_body_is_gone_and_its_key_stays_taken(client, row):
    """Reads and puts of it raise. Lists have its place, and the newest version is the newest that is left."""
    for ref_key in (1, 2):
        client.put_cell(row, "BASE", ref_key, {"n": ref_key})
    posted = client.put(row, "STATUS", {"n": 1}, idempotency_key="once")
    assert client.erase(row, reason="asked to", dry_run=True) == {"erasure": None, "matched": 3, "job": None}
    erasure = client.erase(row, "BASE", 2, reason="asked to")["erasure"]
    assert client.get_cell_latest(row, "BASE").n == 1
    with pytest.raises(CellErased) as gone:
        client.get_cell(row, "BASE", 2)
    assert (gone.value.erasure, gone.value.retryable) == (erasure, False)
    (left, stub) = client.get_versions(row, "BASE")
    assert (left.is_erased, stub.is_erased, stub.body, stub.erased.erasure) == (False, True, {}, erasure)
    for body in ({"n": 2}, {"n": 3}):
        with pytest.raises(KeyErased):
            client.put_cell(row, "BASE", 2, body)
        (failure,) = client.put_cells([(row, "BASE", 2, body)])
        assert (failure.status, failure.error.erasure) == ("conflict", erasure)
    assert client.put(row, "BASE", {"n": 3}).ref_key == 3
    last = client.erase(row, "STATUS", reason="asked to")["erasure"]
    with pytest.raises(KeyErased):
        client.put(row, "STATUS", {"n": 1}, idempotency_key="once")
    with pytest.raises(CellErased):
        client.get_cell_latest(row, "STATUS")
    assert client.get_row(row)["STATUS"].erased.erasure == last
    assert client.get_cells([(row, "STATUS")])[0].is_erased
    log = [cell for cell in client.get_cells_for_shard(posted.shard, limit=1000) if cell.row_key == row]
    assert [(cell.column_name, cell.ref_key, cell.is_erased) for cell in log] == [
        ("BASE", 1, False), ("BASE", 2, True), ("STATUS", 1, True), ("$erase", 1, False), ("BASE", 3, False),
        ("$erase", 2, False),
    ]  # fmt: skip
    assert log[3].body == {"erasure": erasure, "cells": {"BASE": [2]}}
    for wrong in ({"column": "OTHER"}, {"column": "BASE", "ref_key": 2}):
        with pytest.raises(NotFound):
            client.erase(row, **{"reason": "another request", **wrong})
    for wrong in ({"reason": " "}, {"ref_key": 1}):
        with pytest.raises(Invalid):
            client.erase(row, **{"reason": "another request", **wrong})
