"""/conflicts: all of them can be found, newest first, in pages that are bounded (I6, I14)."""

import base64
import os
import uuid

import pytest

from schemaless.codec import encode_body
from schemaless.storage.operation import query
from schemaless.storage.sql import sql

pytestmark = pytest.mark.storage

RECORDED = 25


@pytest.fixture(scope="module")
def recorded(api, make_datastore, storage):
    """A datastore with conflicts that both clusters recorded by turns, one a second, by row key, newest first."""
    datastore = make_datastore()
    rows = [uuid.uuid4() for _ in range(RECORDED)]
    for n, row in enumerate(rows):
        body = encode_body({"n": n})
        record(storage.master("ab"[n % 2]), datastore, row, n, body)
    return datastore, [str(row) for row in reversed(rows)]


def record(node, datastore, row, second, body):
    columns = "(datastore, row_key, column_name, ref_key, stored_body, buffered_body, detected_at)"
    node.run(
        query,
        sql(
            f"INSERT INTO schemaless.conflict {columns} VALUES (%s, %s, 'BASE', 1, %s, %s,"
            " '2026-01-01' + INTERVAL %s SECOND)",
            datastore.name.encode(),
            row.bytes,
            encode_body({"n": -1}),
            body,
            second,
        ),
    )


def pages(call, path):
    """All pages, each as its conflicts."""
    found = []
    cursor = ""
    while cursor is not None:
        answer = call.get(f"{path}{'&cursor=' if cursor else ''}{cursor}")
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["conflicts"])
        cursor = answer.json()["cursor"]
    return found


@pytest.mark.parametrize("limit", [1, 4, 25, 100])
def test_pages_lead_back_to_the_first_conflict(api, recorded, limit):
    """I6: none is dropped silently, however many there are, whichever cluster recorded them."""
    datastore, rows = recorded
    found = pages(api.at(datastore), f"/conflicts?limit={limit}")
    assert [one["row_key"] for page in found for one in page] == rows
    assert max(map(len, found)) <= limit
    assert found[0][0]["buffered_body"] == {"n": RECORDED - 1}


def test_a_body_that_cant_be_decoded_costs_no_page(api, make_datastore, storage):
    """I6: the conflict is shown with its key. The reason is there instead of the body."""
    datastore = make_datastore()
    damaged, row = uuid.uuid4(), uuid.uuid4()
    record(storage.master("a"), datastore, damaged, 1, b"no body")
    record(storage.master("b"), datastore, row, 0, encode_body({"n": 1}))
    ((first, second),) = pages(api.at(datastore), "/conflicts")
    assert (first["row_key"], first["stored_body"], first["buffered_body"]) == (str(damaged), {"n": -1}, None)
    assert list(first["unreadable"]) == ["buffered_body"]
    assert first["unreadable"]["buffered_body"].startswith("a stored body can't be decoded")
    assert (second["row_key"], second["buffered_body"], "unreadable" in second) == (str(row), {"n": 1}, False)


def test_a_page_of_large_bodies_is_short_and_the_next_one_continues(api, make_datastore, storage):
    """I14: a page holds no more bytes than a response may have."""
    datastore = make_datastore()
    noise = encode_body({"noise": base64.b64encode(os.urandom(780_000)).decode()})
    rows = [uuid.uuid4() for _ in range(24)]
    for n, row in enumerate(rows):
        record(storage.master("b"), datastore, row, n, noise)
    found = pages(api.at(datastore), "/conflicts?limit=100")
    assert [one["row_key"] for page in found for one in page] == [str(row) for row in reversed(rows)]
    assert len(found) > 1


@pytest.mark.parametrize("cursor", ["nonsense", "e30x", "eyJhIjotMX0", "eyJhIjoieCJ9", "%C3%A4", "eyJhIjoxZTk5OX0"])
def test_a_cursor_that_is_none_is_refused(api, recorded, cursor):
    """Whatever it holds: a 422 that names it."""
    answer = api.at(recorded[0]).get(f"/conflicts?cursor={cursor}")
    assert (answer.status_code, answer.json()["field"]) == (422, "cursor")
