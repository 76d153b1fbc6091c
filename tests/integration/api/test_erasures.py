"""Erasing over HTTP: the order and its bounds, and what reads and puts say of an erased cell. Real servers (I19)."""

import uuid

import pytest

from schemaless import CellErased, Client, KeyErased
from schemaless.client.requests import NewCell
from tests.integration.api.api_harness import assert_problem

pytestmark = pytest.mark.storage

SECRET = {"name": "Ada Lovelace"}


@pytest.fixture
def row():
    return str(uuid.uuid4())


@pytest.fixture
def erase(call):
    def order(row, status=202, **more):
        answer = call.post("/erase", json={"row_key": row, "reason": "request 4711", **more})
        assert answer.status_code == status, answer.text
        return answer.json()

    return order


@pytest.fixture
def client(api, shared_datastore):
    with Client([f"http://127.0.0.1:{api.port}"], datastore=shared_datastore.name) as opened:
        yield opened


def test_an_erased_cell_is_gone_and_its_key_stays_taken(call, erase, row):
    """410 to exact reads, with the erasure and the time, 409 with the same to puts of any body."""
    put = call.put(row, 1, SECRET).json()
    ordered = erase(row)
    assert ordered == {"erasure": ordered["erasure"], "matched": 1, "job": ordered["erasure"]}
    gone = call.get(f"/cells/{row}/BASE/1")
    problem = assert_problem(gone, 410)
    assert problem["erasure"] == ordered["erasure"]
    assert gone.headers["cache-control"] == "no-store"
    assert gone.headers["schemaless-served-by"] == "master"
    assert call.get(f"/cells/{row}/BASE/1", headers={"if-none-match": '"1"'}).status_code == 410
    assert assert_problem(call.get(f"/cells/{row}/BASE"), 410)["erased_at"] == problem["erased_at"]
    by = {"erasure": ordered["erasure"], "erased_at": problem["erased_at"]}
    for body in (SECRET, {"other": 1}):
        conflict = assert_problem(call.put(row, 1, body), 409)
        assert (conflict["erased"], conflict["location"]) == (by, put["location"])
        assert not conflict["retryable"]
        (item,) = call.post("/batch/put", json={"cells": [cell(row, 1, body)]}).json()["results"]
        assert (item["status"], item["problem"]["erased"]) == ("conflict", by)


def test_a_post_is_not_repeated_once_its_cell_was_erased(call, erase, row):
    """409 with `erased` for its Idempotency-Key. A new POST gets a ref_key above the erased one."""
    headers = {"idempotency-key": "order-1"}
    assert call.post(f"/cells/{row}/BASE", json=SECRET, headers=headers).status_code == 201
    erasure = erase(row)["erasure"]
    again = call.post(f"/cells/{row}/BASE", json=SECRET, headers=headers)
    assert assert_problem(again, 409)["erased"]["erasure"] == erasure
    assert call.post(f"/cells/{row}/BASE", json={"n": 2}).json()["ref_key"] == 2


def test_lists_show_an_erased_cell_without_its_body(call, erase, row):
    """Row, versions, batch get and log: the place stays. The newest version is the newest that is left."""
    put = [call.put(row, ref_key, {**SECRET, "n": ref_key}).json() for ref_key in (1, 2)]
    call.put(row, 1, SECRET, column="STATUS")
    erasure = erase(row, column_name="BASE", ref_key=2)["erasure"]
    assert call.get(f"/cells/{row}/BASE").json()["ref_key"] == 1
    assert call.get(f"/cells/{row}").json()["cells"]["BASE"]["ref_key"] == 1
    keys = [{"row_key": row, "column_name": "BASE", "ref_key": 2}]
    shard = put[1]["shard"]
    after = {"after": str(put[1]["added_id"] - 1), "limit": "3"}
    log = call.get(f"/shards/{shard}/cells", params=after).json()["cells"]
    lists = [
        call.get(f"/cells/{row}/BASE/versions").json()["cells"],
        call.post("/batch/get", json={"keys": keys}).json()["cells"],
        log,
    ]
    for cells in lists:
        (shown,) = [one for one in cells if one["column_name"] == "BASE" and one["ref_key"] == 2]
        assert (shown["erased"]["erasure"], "body" in shown, shown["added_id"]) == (erasure, False, put[1]["added_id"])
    entry = log[-1]
    assert (entry["column_name"], entry["body"]) == ("$erase", {"erasure": erasure, "cells": {"BASE": [2]}})
    erase(row)
    row_now = call.get(f"/cells/{row}").json()["cells"]
    assert {name: "body" in one for name, one in row_now.items()} == {"BASE": False, "STATUS": False}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"reason": ""}, "reason"),
        ({"reason": " \n"}, "reason"),
        ({"reason": "x" * 1001}, "reason"),
        ({"reason": "x" * 10_240}, "reason"),
        ({"ref_key": 1}, "ref_key"),
        ({"column_name": "$erase"}, "column_name"),
        ({"row_key": "7"}, "row_key"),
        ({"ref_key": -1, "column_name": "BASE"}, "ref_key"),
    ],
)
def test_a_wrong_order_erases_nothing(call, row, wrong, field):
    """422 names the member, and the cell is still read."""
    call.put(row, 1, SECRET)
    assert_problem(call.post("/erase", json={"row_key": row, "reason": "asked to", **wrong}), 422, field)
    assert_problem(call.post("/erase", json={"row_key": row}), 422)
    assert call.get(f"/cells/{row}/BASE/1").json()["body"] == SECRET


def test_a_dry_run_counts_and_erases_nothing(call, erase, row):
    """200 without an erasure. What doesn't exist is a 404."""
    call.put(row, 1, SECRET)
    call.put(row, 2, SECRET)
    assert erase(row, 200, dry_run=True) == {"erasure": None, "matched": 2, "job": None}
    assert call.get(f"/cells/{row}/BASE/1").status_code == 200
    erase(row, 404, column_name="STATUS")
    erase(row, 404, column_name="STATUS", dry_run=True)


def test_an_order_that_is_sent_again_is_the_same_erasure(call, erase, row):
    """Its answer may have been lost. With another reason it is another order, which finds nothing."""
    call.put(row, 1, SECRET)
    first = erase(row)
    assert erase(row) == first | {"matched": 0}
    erase(row, 404, reason="another request")
    erase(row, 404, dry_run=True)
    call.put(row, 2, SECRET)
    assert erase(row)["erasure"] != first["erasure"]
    assert call.get(f"/cells/{row}/BASE/2").status_code == 410


def test_an_erasure_tells_who_ordered_what(call, erase, row):
    """With its reason, and its places. An id that nobody gave is a 404, and another text a 422."""
    call.put(row, 1, SECRET)
    erasure = erase(row, column_name="BASE")["erasure"]
    for query in ({}, {"verify": "true"}):
        told = call.get(f"/erasures/{erasure}", params=query).json()
        assert told.items() >= {
            "erasure": erasure, "row_key": row, "column_name": "BASE", "ref_key": None, "reason": "request 4711",
        }.items()  # fmt: skip
        assert told["state"] in ("running", "complete")
    job = call.get(f"/jobs/{erasure}").json()
    assert (job["job"], job["kind"], job["who"], job["matched"]) == (
        erasure, "erase", told["who"], job["done"] + job["pending"],
    )  # fmt: skip
    assert_problem(call.get("/erasures/00c0ffee00c0ffee"), 404)
    for wrong in ("7", "f" * 16, "x" * 16):
        assert_problem(call.get(f"/erasures/{wrong}"), 422, "erasure")


def test_a_client_tells_erased_cells_apart(client, row):
    """Reads of one raise CellErased, puts KeyErased. Lists have a cell that says so and has an empty body."""
    client.put_cell(row, "BASE", 1, SECRET)
    client.put_cell(row, "STATUS", 1, SECRET)
    assert client.erase(row, "BASE", 1, reason="asked to", dry_run=True)["matched"] == 1
    erasure = client.erase(row, "BASE", 1, reason="asked to")["erasure"]
    assert client.erasure(erasure)["reason"] == "asked to"
    for read in (lambda: client.get_cell(row, "BASE", 1), lambda: client.get_cell_latest(row, "BASE")):
        with pytest.raises(CellErased) as gone:
            read()
        assert gone.value.erasure == erasure
        assert gone.value.erased_at > 0
    with pytest.raises(KeyErased) as refused:
        client.put_cell(row, "BASE", 1, SECRET)
    assert refused.value.erasure == erasure
    (failure,) = client.put_cells([NewCell(row, "BASE", 1, SECRET)])
    assert isinstance(failure.error, KeyErased)
    stubs = [
        client.get_row(row)["BASE"],
        client.get_versions(row, "BASE").cells[0],
        client.get_cells([(row, "BASE", 1)])[0],
    ]
    for stub in stubs:
        assert (stub.is_erased, stub.body, stub.name, stub.erased.erasure) == (True, {}, None, erasure)
    log = list(client.get_cells_for_shard(stubs[0].shard, stubs[0].added_id - 1, limit=1000))
    assert [one.is_erased for one in log if one.row_key == stubs[0].row_key] == [True, False, False]
    assert log[-1].body == {"erasure": erasure, "cells": {"BASE": [1]}}
    assert not client.get_row(row)["STATUS"].is_erased


def cell(row, ref_key, body):
    return {"row_key": row, "column_name": "BASE", "ref_key": ref_key, "body": body}
