"""The client against a real API process over real servers, beside a host where nobody listens."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from schemaless import AsyncClient, Client, Location, NewCell
from schemaless.__main__ import app
from schemaless.cell import PutStatus
from schemaless.client.answers import LogPage, PutFailure
from schemaless.errors import Conflict, Invalid, LocationGone, NotFound
from schemaless.sharding import shard_of
from schemaless.stack.plan import free_ports
from tests.integration.api.api_harness import row_in


@pytest.fixture(scope="module")
def hosts(api):
    (nobody,) = free_ports(1)
    return [f"http://127.0.0.1:{nobody}", f"http://127.0.0.1:{api.port}"]


@pytest.fixture
def client(hosts, shared_datastore):
    with Client(hosts, datastore=shared_datastore.name) as opened:
        yield opened


@pytest.fixture
def row():
    return uuid.uuid4()


def test_a_cell_is_put_read_and_never_changed(client, shared_datastore, row):
    """Stored, already stored, conflict; what is read is what was written."""
    body = {"fare": {"amount": 12.5}, "stops": [1, None, "ü"], "is_completed": False}
    put = client.put_cell(row, "BASE", 1, body)
    assert (put.status, put.copies) == (PutStatus.STORED, 2)
    assert put.shard == shard_of(row.bytes, shared_datastore.shards)
    again = client.put_cell(row, "BASE", 1, body)
    assert (again.status, again.location) == (PutStatus.ALREADY_STORED, put.location)
    with pytest.raises(Conflict):
        client.put_cell(row, "BASE", 1, {"fare": {"amount": 12}})
    cell = client.get_cell(row, "BASE", 1)
    assert cell.body == body
    assert (cell.fare["amount"], cell.row_key, cell.created_at) == (12.5, row, put.created_at)


def test_a_missing_cell_is_told_from_a_missing_datastore(client, hosts, row):
    """An empty place is false; a datastore that isn't there is an error."""
    assert not client.get_cell_latest(row, "STATUS")
    assert client.get_cell(row, "STATUS", 1).is_completed is None
    assert client.get_row(row) == {}
    assert client.get_versions(row, "STATUS").cells == []
    with Client(hosts, datastore="no_such_store") as other, pytest.raises(NotFound, match="no_such_store"):
        other.get_cell_latest(row, "STATUS")


def test_the_server_gives_the_next_version_and_a_repeat_gets_the_same(client, row):
    """1, 2, 3; the same Idempotency-Key is answered from memory and writes nothing."""
    assert [client.put(row, "STATUS", {"n": n}).ref_key for n in range(3)] == [1, 2, 3]
    first = client.put(row, "STATUS", {"n": 3}, idempotency_key="once")
    repeat = client.put(row, "STATUS", {"n": 3}, idempotency_key="once")
    assert (first.replayed, repeat.replayed, repeat.ref_key) == (False, True, first.ref_key)
    assert client.get_cell_latest(row, "STATUS").ref_key == 4
    assert [cell.n for cell in client.get_versions(row, "STATUS", from_=2, order="desc")] == [3, 2, 1]


def test_a_row_has_the_newest_cell_of_each_column(client, row):
    """By column name."""
    client.put_cells([(row, "A", 1, {"n": 1}), (row, "A", 2, {"n": 2}), (row, "B", 1, {"n": 3})])
    assert {column: cell.n for column, cell in client.get_row(row).items()} == {"A": 2, "B": 3}
    found = client.get_cells([(row, "A"), (row, "A", 1), (row, "C"), (row, "C", 1)])
    assert [bool(cell) and cell.n for cell in found] == [2, 1, False, False]


def test_items_of_a_batch_stand_or_fail_by_themselves(client, row):
    """In order; a repeated key meets what went before it."""
    results = client.put_cells(
        [
            NewCell(row, "A", 1, {"n": 1}),
            NewCell(row, "A", 1, {"n": 1}),
            NewCell(row, "A", 1, {"n": 1.0}),
            NewCell(row, "no name", 1, {}),
        ]
    )
    assert [result.status for result in results] == ["stored", "already_stored", "conflict", "error"]
    assert isinstance(results[2], PutFailure)
    assert isinstance(results[2].error, Conflict)
    assert isinstance(results[3].error, Invalid)


def test_a_number_that_is_none_is_refused_and_not_made_into_null(client, row):
    """NaN has no JSON: its member is named, nothing is written."""
    with pytest.raises(Invalid, match=r"body\.n"):
        client.put_cell(row, "A", 1, {"n": float("nan")})
    assert not client.get_cell(row, "A", 1)


def test_a_large_batch_is_stored_whole_and_in_order(client, shared_datastore):
    """More than one request's worth; the log of each shard has the cells in the order in which they were given."""
    rows = [row_in(shared_datastore, 0) for _ in range(10)]
    cells = [(rows[number % 10], "MANY", number, {"n": number}) for number in range(1500)]
    results = client.put_cells(cells)
    assert {result.status for result in results} == {PutStatus.STORED}
    added = [result.added_id for result in results]
    assert added == sorted(added)


def test_a_log_is_paged_to_its_end(make_datastore, hosts):
    """Each page begins where the last one ended; every cell comes once, in added_id order."""
    datastore = make_datastore()
    with Client(hosts, datastore=datastore.name) as client:
        client.put_cells([(row_in(datastore, 1), "A", 1, {"n": n}) for n in range(25)])
        seen, location = [], None
        while (page := client.get_cells_for_shard(1, location, 10)).cells:
            seen += [cell.added_id for cell in page]
            location = page.position
        assert seen == list(range(1, 26))
        assert (location.location, page.location, page.pending) == (Location(1, 25), Location(1, 25), 0)
        now = datetime.now(UTC)
        assert len(client.get_cells_for_shard(1, now - timedelta(hours=1)).cells) == 25
        assert client.get_cells_for_shard(1, now + timedelta(hours=1)).cells == []
        assert client.get_cells_for_shard(1, 0, columns=["B"]).cells == []
        with pytest.raises(LocationGone) as gone:
            client.get_cells_for_shard(1, 26)
        assert (gone.value.head, gone.value.resume_at) == (25, 25)


def test_logs_of_several_shards_come_together(make_datastore, hosts):
    """One request; a shard whose location can't be read from has its error, the others their page."""
    datastore = make_datastore()
    with Client(hosts, datastore=datastore.name) as client:
        client.put_cells([(row_in(datastore, shard), "A", 1, {}) for shard in (0, 0, 1)])
        pages = client.get_cells_for_shards({0: Location(1, 1), 1: None, 2: 5}, 10)
    assert isinstance(pages[0], LogPage)
    assert [cell.added_id for cell in pages[0]] == [2]
    assert len(pages[1].cells) == 1
    assert isinstance(pages[2], LocationGone)


def test_threads_may_share_a_client(client):
    """Many calls at once over one client, none mixed up."""
    rows = [uuid.uuid4() for _ in range(60)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda row: client.put_cell(row, "A", 1, {"row": str(row)}), rows))
        cells = list(pool.map(lambda row: client.get_cell(row, "A", 1), rows))
    assert [cell.body["row"] for cell in cells] == [str(row) for row in rows]


async def test_the_async_client_does_the_same(hosts, shared_datastore, row):
    """Put, next version, batch, reads."""
    async with AsyncClient(hosts, datastore=shared_datastore.name) as client:
        await client.put_cell(row, "A", 1, {"n": 1})
        assert (await client.put(row, "A", {"n": 2})).ref_key == 2
        assert all(await client.put_cells([(row, "B", 1, {"n": 3})]))
        assert {column: cell.n for column, cell in (await client.get_row(row)).items()} == {"A": 2, "B": 3}
        assert (await client.get_cell_latest(row, "A", read_from="master")).n == 2


def test_the_commands_read_what_the_client_wrote(hosts, shared_datastore, row):
    """put, get, row, versions, log and shard-of from the command line, on a real API."""
    where = ["--hosts", ",".join(hosts), "--datastore", shared_datastore.name]

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, *where])
        assert result.exception is None, result.exception
        return result.stdout

    assert run("put", str(row), "BASE", "1", '{"driver": "d-17"}').startswith("stored ")
    assert run("put", str(row), "BASE", "next", '{"driver": "d-18"}').startswith("stored ")
    line = run("get", str(row), "BASE", "1")
    shard, generation, added_id = line.split()[0].split(":")
    assert line.endswith(f'{row} BASE 1 {{"driver":"d-17"}}\n')
    assert run("shard-of", str(row)) == f"{shard}\n"
    assert run("log", shard, "--after", f"{generation}:{int(added_id) - 1}", "--limit", "1") == line
    assert run("versions", str(row), "BASE").count("\n") == 2
    assert run("row", str(row)) == run("latest", str(row), "BASE")
    assert "no conflicts" in run("conflicts", "list")
