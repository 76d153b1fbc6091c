"""Batches over HTTP: order, repeated keys, and the three media types. Real servers, a real process."""

import uuid

import msgspec
import pytest

from tests.integration.api.api_harness import row_in

pytestmark = pytest.mark.storage


def item(row_key, ref_key=1, body=None, column="BASE"):
    body = {"v": 1} if body is None else body
    return {"row_key": str(row_key), "column_name": column, "ref_key": ref_key, "body": body}


def statuses(results):
    return [result["status"] for result in results]


def test_results_come_in_order_from_all_clusters(call, shared_datastore):
    """Cells of every shard in one call: each result names its cell and its place."""
    rows = [row_in(shared_datastore, shard) for shard in (0, 1, 2, 3, 3, 0)]
    answer = call.post("/batch/put", json={"cells": [item(row) for row in rows]})
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [result["row_key"] for result in results] == [str(row) for row in rows]
    assert [result["shard"] for result in results] == [0, 1, 2, 3, 3, 0]
    assert all(result["copies"] == 2 and result["location"] for result in results)
    assert results[4]["added_id"] == results[3]["added_id"] + 1


def test_a_repeated_key_counts_in_order(call):
    """The first one is stored, the same body is already stored, another one is a conflict, whatever stands between."""
    row, wrong = uuid.uuid4(), {"row_key": "x"}
    cells = [item(row), wrong, item(row), item(row, body={"v": 2}), item(row, ref_key=2), item(row)]
    results = call.post("/batch/put", json={"cells": cells}).json()["results"]
    expected = ["stored", "error", "already_stored", "conflict", "stored", "already_stored"]
    assert statuses(results) == expected
    assert results[3]["problem"]["status"] == 409
    assert results[3]["problem"]["location"] == results[0]["location"]
    assert (results[3]["row_key"], results[3]["ref_key"]) == (str(row), 1)
    assert call.get(f"/cells/{row}/BASE/1").json()["body"] == {"v": 1}


def test_reads_come_in_order_with_null_for_what_isnt_there(call):
    """With a ref_key that version, without one the newest; unknown rows and versions are null."""
    row = uuid.uuid4()
    call.post("/batch/put", json={"cells": [item(row, n, {"v": n}) for n in (1, 3, 2)]})
    key = {"row_key": str(row), "column_name": "BASE"}
    keys = [key, key | {"ref_key": 2}, key | {"ref_key": 9}, key | {"row_key": str(uuid.uuid4())}, key]
    answer = call.post("/batch/get", json={"keys": keys})
    assert [cell and cell["body"]["v"] for cell in answer.json()["cells"]] == [3, 2, None, None, 3]
    assert answer.headers["schemaless-served-by"] == "master"


def test_a_thousand_cells_go_in_and_come_out(call):
    """The largest batch that is taken."""
    rows = [str(uuid.uuid4()) for _ in range(1000)]
    cells = [item(row, body={"n": n}) for n, row in enumerate(rows)]
    assert statuses(call.post("/batch/put", json={"cells": cells}).json()["results"]) == ["stored"] * 1000
    keys = [{"row_key": row, "column_name": "BASE"} for row in rows]
    found = call.post("/batch/get", json={"keys": keys}).json()["cells"]
    assert [cell["body"]["n"] for cell in found] == list(range(1000))


def test_messagepack_batches(call):
    """In and out, puts and gets."""
    row = uuid.uuid4()
    headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    content = msgspec.msgpack.encode({"cells": [item(row, body={"v": "ü"})]})
    put = call.post("/batch/put", content=content, headers=headers)
    assert put.headers["content-type"] == "application/msgpack"
    assert statuses(msgspec.msgpack.decode(put.content)["results"]) == ["stored"]
    keys = {"keys": [{"row_key": str(row), "column_name": "BASE"}] * 2}
    got = call.post("/batch/get", content=msgspec.msgpack.encode(keys), headers=headers)
    assert [cell["body"]["v"] for cell in msgspec.msgpack.decode(got.content)["cells"]] == ["ü", "ü"]


def test_newline_delimited_batches(call):
    """An item a line in, a result a line out; null is a line too."""
    row = uuid.uuid4()
    headers = {"content-type": "application/x-ndjson", "accept": "application/x-ndjson"}
    content = b"\n".join(map(msgspec.json.encode, [item(row), item(row, body={"v": 2}), item(row, 2)])) + b"\n"
    put = call.post("/batch/put", content=content, headers=headers)
    assert put.headers["content-type"] == "application/x-ndjson"
    assert statuses(map(msgspec.json.decode, put.content.splitlines())) == ["stored", "conflict", "stored"]
    keys = [{"row_key": str(row), "column_name": "BASE"}, {"row_key": str(row), "column_name": "NONE"}]
    got = call.post("/batch/get", content=b"\r\n".join(map(msgspec.json.encode, keys)), headers=headers)
    lines = [msgspec.json.decode(line) for line in got.content.splitlines()]
    assert [line and line["ref_key"] for line in lines] == [2, None]


def test_what_a_batch_wrote_single_calls_read(call):
    """The same cells, whichever way they came."""
    row = uuid.uuid4()
    (put,) = call.post("/batch/put", json={"cells": [item(row, 5)]}).json()["results"]
    assert call.put(row, 5, {"v": 1}).json() == put | {"status": "already_stored"}
    assert call.get(f"/cells/{row}/BASE/5").json()["added_id"] == put["added_id"]


def test_large_cells_are_read_in_one_batch_up_to_a_bound(call):
    """Answers of more than 16 MiB are refused with 413 instead of being gathered in memory."""
    row = uuid.uuid4()
    for n in range(1, 4):
        assert call.put(row, n, {"x": "a" * 1_000_000}).status_code == 201
    key = {"row_key": str(row), "column_name": "BASE"}
    assert call.post("/batch/get", json={"keys": [key] * 16}).status_code == 200
    assert call.post("/batch/get", json={"keys": [key] * 17}).status_code == 413
