"""Bad input over HTTP: each kind gets its problem document, and nothing is written. Real servers, a real process."""

import socket
import struct
import uuid

import msgspec
import pytest

from tests.integration.api.api_harness import assert_problem, cells_in, row_in

ROW = "6c9e5b1e-7f5a-4a8f-9c58-0d7b52d1f001"
NAN = struct.pack(">d", float("nan"))


def nested(levels: int) -> bytes:
    return b'{"d":' * (levels - 1) + b"{}" + b"}" * (levels - 1)


@pytest.fixture(scope="module")
def datastore(make_datastore):
    """Nothing is ever written to it."""
    return make_datastore()


@pytest.fixture
def call(api, datastore):
    return api.at(datastore)


@pytest.fixture(autouse=True)
def nothing_is_written(storage, datastore):
    """The proof: after each test the heads are where they were, at nothing."""
    yield
    assert cells_in(storage, datastore) == 0


BODIES = {
    "no JSON": (b'{"a": 1', 400),
    "nothing": (b"", 400),
    "two documents": (b"{} {}", 400),
    "a trailing comma": (b'{"a": 1,}', 400),
    "single quotes": (b"{'a': 1}", 400),
    "a leading zero": (b'{"a": 01}', 400),
    "a control character": (b'{"a": "\x01"}', 400),
    "a byte order mark": (b"\xef\xbb\xbf{}", 400),
    "NaN": (b'{"a": NaN}', 400),
    "Infinity": (b'{"a": Infinity}', 400),
    "minus Infinity": (b'{"a": -Infinity}', 400),
    "a number beyond any double": (b'{"a": 1e999}', 400),
    "invalid UTF-8": (b'{"a": "\xff"}', 400),
    "invalid UTF-8 in a name": (b'{"\xc3": 1}', 400),
    "overlong UTF-8": (b'{"a": "\xc0\xaf"}', 400),
    "a lone surrogate": (b'{"a": "\\ud800"}', 400),
    "a list": (b"[1]", 422),
    "a string": (b'"a"', 422),
    "a number": (b"1", 422),
    "null": (b"null", 422),
    "more than 64 bits": (b'{"a": 18446744073709551616}', 422),
    "less than 64 bits": (b'{"a": -9223372036854775809}', 422),
    "65 levels": (nested(65), 422),
    "levels beyond any stack": (nested(100_000), 422),
    "65 levels of lists": (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", 422),
    "a byte too many": (b'{"x":"' + b"a" * ((1 << 20) - 7) + b'"}', 413),
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_a_bad_body_is_refused(call, method, kind):
    """400 what can't be parsed, 422 what is wrong in it, 413 what is too large; by PUT and by POST."""
    body, status = BODIES[kind]
    path = f"/cells/{ROW}/BASE" + ("/1" if method == "PUT" else "")
    assert_problem(call(method, path, content=body), status)


MSGPACK_BODIES = {
    "no MessagePack": (b"\xc1", 400),
    "cut off": (b"\x82\xa1a\x01", 400),
    "trailing bytes": (b"\x80\x80", 400),
    "bin": (b"\x81\xa1a\xc4\x01x", 400),
    "ext": (b"\x81\xa1a\xd4\x05x", 400),
    "a timestamp": (b"\x81\xa1a\xd6\xff\x00\x00\x00\x00", 400),
    "a key that is a number": (b"\x81\x01\x01", 400),
    "a key that is null, deep inside": (b"\x81\xa1a\x91\x81\xc0\x01", 400),
    "NaN": (b"\x81\xa1a\xcb" + NAN, 400),
    "invalid UTF-8": (b"\x81\xa1a\xa1\xff", 400),
    "a list": (b"\x90", 422),
    "65 levels": (b"\x81\xa1a" * 64 + b"\x80", 422),
    "levels beyond any stack": (b"\x81\xa1a" * 100_000 + b"\x80", 422),
}


@pytest.mark.parametrize("kind", MSGPACK_BODIES)
def test_a_bad_messagepack_body_is_refused(call, kind):
    """What has no JSON, bin, ext and keys that are no strings, is refused as what can't be parsed."""
    body, status = MSGPACK_BODIES[kind]
    headers = {"content-type": "application/msgpack"}
    assert_problem(call("PUT", f"/cells/{ROW}/BASE/1", content=body, headers=headers), status)


KEYS = {
    "no UUID": ("/cells/6c9e5b1e/BASE/1", "row_key"),
    "a UUID without hyphens": ("/cells/6c9e5b1e7f5a4a8f9c580d7b52d1f001/BASE/1", "row_key"),
    "a UUID in braces": (f"/cells/%7B{ROW}%7D/BASE/1", "row_key"),
    "a column that begins with a digit": (f"/cells/{ROW}/1BASE/1", "column_name"),
    "a column with a space": (f"/cells/{ROW}/B%20E/1", "column_name"),
    "a column that is no ASCII": (f"/cells/{ROW}/B%C3%84/1", "column_name"),
    "a column of 65 characters": (f"/cells/{ROW}/{'c' * 65}/1", "column_name"),
    "a negative ref_key": (f"/cells/{ROW}/BASE/-1", "ref_key"),
    "a ref_key of 2^63": (f"/cells/{ROW}/BASE/{2**63}", "ref_key"),
    "a ref_key with a point": (f"/cells/{ROW}/BASE/1.0", "ref_key"),
    "a ref_key in other digits": (f"/cells/{ROW}/BASE/%D9%A1", "ref_key"),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_a_bad_key_is_refused_by_name(call, method, kind):
    """422 that names the part of the key that is wrong."""
    path, field = KEYS[kind]
    options = {"json": {"a": 1}} if method == "PUT" else {}
    assert_problem(call(method, path, **options), 422, field)


@pytest.mark.parametrize("name", ["nope", "Nope", "no-pe", "x" * 33, "..", "%00"])
def test_an_unknown_datastore_is_a_404(api, name):
    """Also one whose name could never be one."""
    assert_problem(api.client.put(f"/v1/{name}/cells/{ROW}/BASE/1", json={"a": 1}), 404)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/x-ndjson"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_other_media_types_are_refused(call, headers):
    """415 for a single cell; NDJSON belongs to batches."""
    assert_problem(call("PUT", f"/cells/{ROW}/BASE/1", content=b"{}", headers=headers), 415)


def test_a_body_that_is_too_large_is_not_read(api, call):
    """413 from the headers alone; of a chunked one, whose length nobody announced, as soon as it is known."""

    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as announcing:
        path = f"{call.prefix}/cells/{ROW}/BASE/1"
        announcing.sendall(f"PUT {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {200 << 20}\r\n\r\n".encode())
        assert announcing.recv(1 << 16).startswith(b"HTTP/1.1 413 ")

    def endless():
        for _ in range(64):
            yield b" " * (1 << 16)

    assert_problem(call("PUT", f"/cells/{ROW}/BASE/1", content=endless()), 413)


QUERIES = {
    f"/cells/{ROW}/BASE?read_from=slave": "read_from",
    f"/cells/{ROW}/BASE?readfrom=minion": "readfrom",
    f"/cells/{ROW}/BASE?read_from=minion&read_from=minion": "read_from",
    f"/cells/{ROW}/BASE?read_from": "query",
    f"/cells/{ROW}/BASE/versions?limit=0": "limit",
    f"/cells/{ROW}/BASE/versions?limit=1001": "limit",
    f"/cells/{ROW}/BASE/versions?order=down": "order",
    f"/cells/{ROW}/BASE/versions?from=-1": "from",
    "/shards/0/cells?limit=ten": "limit",
    "/shards/0/cells?after=1:2:3": "after",
    "/shards/0/cells?after=-1": "after",
    f"/shards/0/cells?after={2**63}": "after",
    "/shards/0/cells?since=yesterday": "since",
    "/shards/0/cells?since=2026-01-01T00:00:00": "since",
    "/shards/0/cells?since=2026-01-01T00:00:00Z&after=1": "since",
    "/shards/0/cells?columns=BASE,": "columns",
    "/shards/0/cells?%FF=1": "query",
    "/shards?limit=1": "limit",
}


@pytest.mark.parametrize("path", QUERIES)
def test_a_bad_query_is_refused_by_name(call, path):
    """Unknown, repeated and malformed parameters are 422, never passed over."""
    assert_problem(call.get(path), 422, QUERIES[path])


def test_a_put_takes_no_parameters(call):
    """A typing error must not turn into a put that means something else."""
    assert_problem(call("PUT", f"/cells/{ROW}/BASE/1?min_copies=2", json={}), 422, "min_copies")
    assert_problem(call.post(f"/cells/{ROW}/BASE?ref_key=1", json={}), 422, "ref_key")


WHOLE_BATCHES = {
    "no JSON": (b'{"cells": [', 400),
    "NaN within an item": (b'{"cells": [{"row_key": "x", "body": {"a": NaN}}]}', 400),
    "invalid UTF-8 within a body": (b'{"cells": [{"row_key": "x", "body": {"a": "\xff"}}]}', 400),
    "a number beyond any double within a body": (b'{"cells": [{"body": {"a": 1e999}}]}', 400),
    "a list": (b"[]", 422),
    "no cells": (b"{}", 422),
    "cells that are no list": (b'{"cells": {}}', 422),
    "another member": (b'{"cells": [{}], "sells": []}', 422),
    "no items": (b'{"cells": []}', 422),
    "1001 items": (b'{"cells": [' + b",".join([b"{}"] * 1001) + b"]}", 413),
    "more than 16 MiB": (b'{"cells": [' + b" " * (16 << 20) + b"]}", 413),
}


@pytest.mark.parametrize("kind", WHOLE_BATCHES)
def test_a_batch_that_cant_be_parsed_is_refused_whole(call, kind):
    """Its items can't be told apart, so none of them has a result."""
    content, status = WHOLE_BATCHES[kind]
    assert_problem(call.post("/batch/put", content=content), status)


ITEMS = {
    "no object": (5, 422, "cell"),
    "no row key": ({"column_name": "BASE", "ref_key": 1, "body": {}}, 422, "row_key"),
    "a bad row key": ({"row_key": "x", "column_name": "BASE", "ref_key": 1, "body": {}}, 422, "row_key"),
    "a bad column": ({"row_key": ROW, "column_name": "", "ref_key": 1, "body": {}}, 422, "column_name"),
    "a ref_key as text": ({"row_key": ROW, "column_name": "BASE", "ref_key": "1", "body": {}}, 422, "ref_key"),
    "a ref_key that is true": ({"row_key": ROW, "column_name": "BASE", "ref_key": True, "body": {}}, 422, "ref_key"),
    "a ref_key that is 1.0": ({"row_key": ROW, "column_name": "BASE", "ref_key": 1.0, "body": {}}, 422, "ref_key"),
    "no body": ({"row_key": ROW, "column_name": "BASE", "ref_key": 1}, 422, "body"),
    "a body that is a list": ({"row_key": ROW, "column_name": "BASE", "ref_key": 1, "body": []}, 422, "body"),
    "an integer too large": ({"row_key": ROW, "column_name": "BASE", "ref_key": 1, "body": {"a": 2**64}}, 422, "body"),
    "another member": ({"row_key": ROW, "column_name": "BASE", "ref_key": 1, "body": {}, "shard": 1}, 422, "cell"),
    "too large a body": ({"row_key": ROW, "column_name": "BASE", "ref_key": 1, "body": {"a": "x" * 2**20}}, 413, None),
}


def test_items_of_a_batch_fail_singly(call):
    """200 with an error and its problem for each item, in order, whenever the batch could be parsed."""
    answer = call.post("/batch/put", json={"cells": [item for item, _, _ in ITEMS.values()]})
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [result["status"] for result in results] == ["error"] * len(ITEMS)
    found = [(result["problem"]["status"], result["problem"].get("field")) for result in results]
    assert found == [(status, field) for _, status, field in ITEMS.values()]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"row_key": "x"}\n{"row_key"', 400),
        (b"\n\n", 422),
        (msgspec.json.encode({"cells": []}), 200),
    ],
)
def test_lines_that_are_no_items(call, content, status):
    """A line that isn't JSON refuses the whole; one that is no item, itself."""
    answer = call.post("/batch/put", content=content, headers={"content-type": "application/x-ndjson"})
    if status == 200:
        assert [result["status"] for result in answer.json()["results"]] == ["error"]
    else:
        assert_problem(answer, status)


def test_bin_in_an_item_refuses_a_messagepack_batch(call):
    """It can't be parsed into JSON values, wherever in the item it stands."""
    headers = {"content-type": "application/msgpack"}
    for item in ({"row_key": b"x"}, {"row_key": ROW, "column_name": "BASE", "ref_key": 1, "body": {"a": b"x"}}):
        content = msgspec.msgpack.encode({"cells": [item]})
        assert_problem(call.post("/batch/put", content=content, headers=headers), 400)


def test_a_wrong_key_refuses_a_batch_of_reads_by_name(call):
    """Its answer has cells and nulls only, so the error names the item."""
    keys = [{"row_key": ROW, "column_name": "BASE"}, {"row_key": ROW, "column_name": "BASE", "ref_key": -1}]
    assert_problem(call.post("/batch/get", json={"keys": keys}), 422, "keys[1].ref_key")


def test_the_same_datastore_takes_what_is_right(api, make_datastore, storage):
    """The proof of this file is worth something: a good put moves the heads that the bad ones left alone."""
    other = make_datastore()
    assert api.at(other).put(row_in(other, 0), 1, {"a": 1}).status_code == 201
    assert api.at(other).put(uuid.uuid4(), 1, {"a": 1}).status_code == 201
    assert cells_in(storage, other) == 2
