"""A cell whose stored body can't be decoded costs itself, wherever cells are listed. No list hides it."""

import pytest

from schemaless import Client
from schemaless.errors import UnreadableCell
from tests.integration.api.api_harness import assert_problem, row_in
from tests.integration.api.follow_harness import following
from tests.log_harness import run_sql

pytestmark = pytest.mark.storage

REASON = "can't be read: a stored body can't be decoded"


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=2, partitions=1)


@pytest.fixture
def call(api, datastore):
    return api.at(datastore)


@pytest.fixture
def row(call, datastore, storage):
    """A row of shard 0 with three versions of BASE, the second of which is damaged, and STATUS 1."""
    row = row_in(datastore, 0)
    for ref_key in (1, 2, 3):
        call.put(row, ref_key, {"n": ref_key})
    call.put(row, 1, {"n": 1}, "STATUS")
    entity = f"{datastore.database(0)}.entity"
    run_sql(storage.master(datastore.home(0)), f"UPDATE {entity} SET body = 'no body' WHERE added_id = 2")
    return row


def key(row, column, ref_key):
    return {"row_key": str(row), "column_name": column, "ref_key": ref_key}


def assert_unreadable(problem, row):
    assert problem["type"].endswith("unreadable-cell")
    assert problem["detail"].startswith(f"the cell {row} BASE 2 at 0:1:2 {REASON}")


def test_a_single_cell_is_a_problem_that_names_it(call, row):
    assert_unreadable(assert_problem(call.get(f"/cells/{row}/BASE/2"), 500), row)


def test_a_batch_or_a_row_names_it(call, row):
    """Their responses have no place for errors, and null would say that the cell is missing."""
    keys = [key(row, "BASE", 1), key(row, "BASE", 2), key(row, "BASE", 9), key(row, "STATUS", 1)]
    assert_unreadable(assert_problem(call.post("/batch/get", json={"keys": keys}), 500), row)
    cells = call.post("/batch/get", json={"keys": [*keys[:1], *keys[2:]]}).json()["cells"]
    assert [cell and cell["body"] for cell in cells] == [{"n": 1}, None, {"n": 1}]


def test_a_page_of_versions_or_of_the_log_ends_before_it(call, row):
    """What comes after it can be asked for. Only a page that would begin with it is a problem."""
    versions = call.get(f"/cells/{row}/BASE/versions?order=asc").json()
    assert ([cell["ref_key"] for cell in versions["cells"]], versions["next"]) == ([1], 2)
    assert_unreadable(assert_problem(call.get(f"/cells/{row}/BASE/versions?order=asc&from=2"), 500), row)
    page = call.get("/shards/0/cells").json()
    assert ([cell["added_id"] for cell in page["cells"]], page["next"]["added_id"], page["pending"]) == ([1], 1, 3)
    assert_unreadable(assert_problem(call.get("/shards/0/cells?after=1"), 500), row)
    assert [cell["added_id"] for cell in call.get("/shards/0/cells?after=2").json()["cells"]] == [3, 4]
    several = call.post("/shards/cells", json={"locations": {"0": 1, "1": 0}}).json()["shards"]
    assert_unreadable(several["0"]["problem"], row)
    assert several["1"]["cells"] == []


def test_an_event_stream_has_the_cells_before_it(call, row):
    """Its last event is the problem, as a page would be."""
    with following(call, timeout_s=60) as stream:
        assert stream.added_ids(1) == [1]
        assert_unreadable(stream.next("problem").data, row)


def test_the_client_raises_what_names_the_cell(api, datastore, row):
    """It never returns the cell as a missing one."""
    with Client([f"http://127.0.0.1:{api.port}"], datastore=datastore.name) as client:
        with pytest.raises(UnreadableCell, match=f"{row} BASE 2 at 0:1:2"):
            client.get_cells([(row, "BASE", 1), (row, "BASE", 2)])
        with pytest.raises(UnreadableCell, match=f"{row} BASE 2 at 0:1:2"):
            client.get_cell(row, "BASE", 2)
