"""Single cells over HTTP: each status of the contract, with its headers and members. Real servers, a real process."""

import re
import uuid

import msgspec
import pytest

from schemaless.sharding import shard_of
from tests.integration.api.api_harness import assert_problem, row_in

pytestmark = pytest.mark.storage

CELL_MEMBERS = ["row_key", "column_name", "ref_key", "body", "shard", "generation", "added_id", "created_at"]
CREATED_AT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}


@pytest.fixture
def row():
    return uuid.uuid4()


def test_a_new_cell_is_stored_on_two_masters(call, shared_datastore, row):
    """201 with every member of the contract, two copies, a location, and a digest with which the log is read on."""
    answer = call.put(row, 1, {"fare": 12.5})
    assert answer.status_code == 201
    put = answer.json()
    shard = shard_of(row.bytes, shared_datastore.shards)
    assert put.keys() == set(CELL_MEMBERS) - {"body"} | {"status", "copies", "location", "digest"}
    assert (put["status"], put["copies"], put["shard"], put["generation"]) == ("stored", 2, shard, 1)
    assert put["location"] == f"{shard}:1:{put['added_id']}"
    assert CREATED_AT.fullmatch(put["created_at"])
    after = "{generation}:{added_id}:{digest}".format(**put)
    assert call.get(f"/shards/{shard}/cells", params={"after": after}).status_code == 200


def test_the_same_body_again_is_already_stored(call, row):
    """200 with the first place; members in another order are the same body."""
    first = call.put(row, 1, {"a": 1, "b": [1, 2]}).json()
    again = call.put(row, 1, {"b": [1, 2], "a": 1})
    assert again.status_code == 200
    assert again.json() == first | {"status": "already_stored"}


@pytest.mark.parametrize("other", [{"a": 2}, {"a": 1.0}, {"a": True}, {"a": 1, "b": 1}])
def test_another_body_is_a_conflict_that_changes_nothing(call, row, other):
    """409 with the place of the cell that stands; numbers of another kind are another body; the first one is read."""
    first = call.put(row, 1, {"a": 1}).json()
    problem = assert_problem(call.put(row, 1, other), 409)
    assert not problem["retryable"]
    assert problem["location"] == first["location"]
    assert call.get(f"/cells/{row}/BASE/1").json()["body"] == {"a": 1}


def test_a_cell_is_read_as_it_was_written_and_may_be_kept_for_minutes(call, row):
    """The exact cell has the contract's members in order, the body's as first stored. Caches ask again in minutes."""
    call.put(row, 7, {"z": 1, "a": {"y": None, "b": "ü"}})
    answer = call.get(f"/cells/{str(row).upper()}/BASE/7")
    assert answer.status_code == 200
    cell = answer.json()
    assert list(cell) == CELL_MEMBERS
    assert (cell["row_key"], cell["column_name"], cell["ref_key"]) == (str(row), "BASE", 7)
    assert list(cell["body"]) == ["z", "a"]
    assert list(cell["body"]["a"]) == ["y", "b"]
    assert answer.headers["cache-control"] == "public, max-age=300"
    assert answer.headers["schemaless-served-by"] == "master"
    assert answer.headers["schemaless-cluster"] in ("a", "b")
    assert answer.headers["schemaless-lag"] == "0"


def test_the_newest_version_has_the_highest_ref_key(call, row):
    """Not the last one written; its ETag is the ref_key, and If-None-Match gives 304 without a body."""
    for ref_key in (1, 9, 5):
        call.put(row, ref_key, {"v": ref_key})
    answer = call.get(f"/cells/{row}/BASE")
    assert answer.json()["ref_key"] == 9
    assert answer.headers["etag"] == '"9"'
    unchanged = call.get(f"/cells/{row}/BASE", headers={"if-none-match": '"1", W/"9"'})
    assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", '"9"')
    assert call.get(f"/cells/{row}/BASE", headers={"if-none-match": '"5"'}).status_code == 200


def test_what_isnt_there_is_a_404(call, row):
    """Cell, column and row, each."""
    for path in (f"/cells/{row}/BASE/1", f"/cells/{row}/BASE", f"/cells/{row}"):
        assert_problem(call.get(path), 404)
    assert call.get(f"/cells/{row}/BASE/versions").json() == {"cells": [], "next": None}


def test_a_row_is_the_newest_version_of_every_column(call, row):
    """By column name; other rows don't come in."""
    call.put(row, 1, {"v": 1})
    call.put(row, 2, {"v": 2})
    call.put(row, 5, {"s": 1}, column="STATUS")
    found = call.get(f"/cells/{row}").json()
    assert found["row_key"] == str(row)
    assert {name: cell["ref_key"] for name, cell in found["cells"].items()} == {"BASE": 2, "STATUS": 5}


@pytest.mark.parametrize(("order", "expected"), [("asc", [2, 3, 4, 5]), ("desc", [5, 4, 3, 2])])
def test_versions_come_in_pages_without_gap_or_repeat(call, row, order, expected):
    """`next` is where the next page begins, in either order, within `from` and `to`."""
    for ref_key in range(1, 7):
        call.put(row, ref_key, {"v": ref_key})
    bounds = {"from": "2", "to": "5"}
    seen = []
    while True:
        query = {**bounds, "order": order, "limit": "3"}
        page = call.get(f"/cells/{row}/BASE/versions", params=query).json()
        seen += [cell["ref_key"] for cell in page["cells"]]
        if page["next"] is None:
            break
        bounds["to" if order == "desc" else "from"] = str(page["next"])
    assert seen == expected


def test_a_post_gives_the_next_ref_key(call, row):
    """1 for a new column, then the highest at home plus one; without an Idempotency-Key each is a new version."""
    path = f"/cells/{row}/BASE"
    first = call.post(path, json={"v": "same"})
    assert (first.status_code, first.json()["ref_key"], first.json()["status"]) == (201, 1, "stored")
    call.put(row, 41, {"v": "put"})
    assert call.post(path, json={"v": "same"}).json()["ref_key"] == 42


def test_a_repeated_idempotency_key_gets_the_first_answer(call, row):
    """The same status and answer with a header that says so; with another body 422; another column has its own keys."""
    path, headers = f"/cells/{row}/BASE", {"idempotency-key": "order-1"}
    first = call.post(path, json={"v": 1}, headers=headers)
    again = call.post(path, json={"v": 1}, headers=headers)
    assert "idempotency-replayed" not in first.headers
    assert (again.status_code, again.json()) == (201, first.json())
    assert again.headers["idempotency-replayed"] == "true"
    assert_problem(call.post(path, json={"v": 2}, headers=headers), 422, "Idempotency-Key")
    other = call.post(f"/cells/{row}/STATUS", json={"v": 2}, headers=headers)
    assert (other.status_code, "idempotency-replayed" in other.headers) == (201, False)
    assert_problem(call.post(path, json={}, headers={"idempotency-key": "x" * 201}), 422, "Idempotency-Key")


def test_messagepack_goes_in_and_comes_out(call, row):
    """A body sent as MessagePack is the same cell as its JSON; an answer comes in the type that Accept asks for."""
    body = {"n": -1, "f": 1.5, "t": "ü", "l": [True, None, {"x": 2**64 - 1}]}
    answer = call("PUT", f"/cells/{row}/BASE/1", content=msgspec.msgpack.encode(body), headers=MSGPACK)
    assert answer.status_code == 201
    assert answer.headers["content-type"] == "application/msgpack"
    assert msgspec.msgpack.decode(answer.content)["status"] == "stored"
    assert call.put(row, 1, body).json()["status"] == "already_stored"
    read = call.get(f"/cells/{row}/BASE/1", headers={"accept": "text/html, application/msgpack;q=0.9, */*;q=0.1"})
    assert msgspec.msgpack.decode(read.content)["body"] == body


def test_a_minion_answers_when_it_is_asked_for(call, shared_datastore, eventually):
    """read_from=minion is served by a minion of the home, whose lag is told in seconds."""
    row = row_in(shared_datastore, 1)
    call.put(row, 1, {"v": 1})
    answer = eventually(lambda: call.get(f"/cells/{row}/BASE/1", params={"read_from": "minion"}), 200)
    assert answer.headers["schemaless-served-by"] == "minion"
    assert answer.headers["schemaless-cluster"] == shared_datastore.home(1)
    assert 0 <= float(answer.headers["schemaless-lag"]) < 60


def test_head_answers_as_get_without_a_body(call, row):
    """RFC 9110 asks for it: same status and headers, nothing behind them."""
    call.put(row, 1, {"v": 1})
    answer = call("HEAD", f"/cells/{row}/BASE/1")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["etag"] == '"1"'


def test_the_largest_keys_and_bodies_are_taken(call, row):
    """A ref_key of 2^63-1, a column name of 64 characters, a body of exactly 1 MiB, 64 levels."""
    deep = {"d": 1}
    for _ in range(63):
        deep = {"d": deep}
    assert call.put(row, 2**63 - 1, deep, column="c" * 64).status_code == 201
    body = b'{"x":"' + b"a" * ((1 << 20) - 8) + b'"}'
    assert len(body) == 1 << 20
    assert call("PUT", f"/cells/{row}/BIG/0", content=body).status_code == 201
    assert len(call.get(f"/cells/{row}/BIG/0").json()["body"]["x"]) == (1 << 20) - 8


def test_of_duplicate_members_the_last_counts(call, row):
    """As the contract says, so that any parser reads the same body."""
    call("PUT", f"/cells/{row}/BASE/1", content=b'{"a": 1, "a": 2}')
    assert call.get(f"/cells/{row}/BASE/1").json()["body"] == {"a": 2}


CAUSE = "billing/bill_rider@7:1:1000"


def test_a_cell_shows_its_cause_wherever_it_is_read(call, shared_datastore, row):
    """A15: from each kind of put, in each kind of read. A cell without one has no such member."""
    caused = {"schemaless-cause": CAUSE}
    path = f"/cells/{row}/BASE"
    call("PUT", f"{path}/1", json={"n": 1}, headers=caused)
    call("POST", path, json={"n": 2}, headers=caused)
    item = {"row_key": str(row), "column_name": "BASE", "ref_key": 3, "body": {"n": 3}}
    call.post("/batch/put", json={"cells": [item]}, headers=caused)
    last = call.put(row, 4, {"n": 4}).json()
    shard = last["shard"]
    causes = [CAUSE, CAUSE, CAUSE, None]
    shown = call.get(f"{path}/versions", params={"order": "asc"}).json()["cells"]
    assert [cell.get("cause") for cell in shown] == causes
    log = call.get(f"/shards/{shard}/cells", params={"limit": 1000}).json()["cells"]
    assert [cell.get("cause") for cell in log if cell["row_key"] == str(row)] == causes
    assert call.get(f"{path}/1").json()["cause"] == CAUSE
    assert "cause" not in call.get(path).json()
    found = call.post("/batch/get", json={"keys": [{"row_key": str(row), "column_name": "BASE", "ref_key": 3}]})
    assert found.json()["cells"][0]["cause"] == CAUSE


def test_a_cause_is_no_part_of_the_body_nor_of_the_digest(call, row):
    """A15: the same body with another cause, or none, is already stored, and the first cause stays."""
    path = f"/cells/{row}/BASE/1"
    first = call("PUT", path, json={"n": 1}, headers={"schemaless-cause": CAUSE}).json()
    for headers in ({}, {"schemaless-cause": "other@1:1:1"}):
        assert call("PUT", path, json={"n": 1}, headers=headers).json() == first | {"status": "already_stored"}
    assert call.get(path).json()["cause"] == CAUSE


@pytest.mark.parametrize("cause", ["billing", "a b@1:1:1", "x" * 251 + "@1:1:1", "a@1:1:1:1", "\xe4@1:1:1"])
def test_a_wrong_cause_is_refused(call, row, cause):
    """422 which names the header, and nothing is stored."""
    for method, path in (("PUT", f"/cells/{row}/BASE/1"), ("POST", f"/cells/{row}/BASE"), ("POST", "/batch/put")):
        answer = call(method, path, json={"n": 1}, headers={"schemaless-cause": cause.encode("latin-1")})
        assert_problem(answer, 422, "Schemaless-Cause")
    assert call.get(f"/cells/{row}/BASE").status_code == 404
