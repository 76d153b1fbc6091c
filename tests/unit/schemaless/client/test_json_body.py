"""What a client sends as a body: the types of JSON, and moments. All else is refused by the name of its member."""

import uuid
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum

import msgspec
import pytest

from schemaless.client.exchange import ClientResponse
from schemaless.client.json_body import json_body
from schemaless.client.put_batch import put_cells
from schemaless.client.requests import Requests
from schemaless.errors import Invalid

NOON = datetime(2026, 1, 2, 12, 0, 0, 5000, UTC)
EASTERN = timezone(timedelta(hours=-5))


def test_what_json_has_stays_as_it_is():
    body = {"a": 1, "b": 1.5, "c": "text", "d": None, "e": True, "f": [1, {"g": [False]}], "h": {}}
    assert json_body(body) == body
    assert json_body({"a": (1, 2)}) == {"a": [1, 2]}


def test_a_moment_becomes_rfc_3339():
    """With the zone that it has."""
    assert json_body({"at": NOON, "of": [NOON.astimezone(EASTERN)]}) == {
        "at": "2026-01-02T12:00:00.005000Z",
        "of": ["2026-01-02T07:00:00.005000-05:00"],
    }


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [datetime(2026, 1, 2), Decimal("1.5"), uuid.UUID(int=1), date(2026, 1, 2), {1}, Colour.RED, b"bytes", object()],
    ids=lambda value: type(value).__name__,
)
def test_what_json_has_not_is_refused_by_the_name_of_its_member(value):
    with pytest.raises(Invalid) as refused:
        json_body({"good": 1, "trip": [{"fare": value}]})
    assert refused.value.field == "body.trip[0].fare"


def test_a_key_that_is_no_text_is_refused():
    with pytest.raises(Invalid, match=r"body\.a: has the key 1"):
        json_body({"a": {1: 2}})


def test_a_body_that_contains_itself_is_refused():
    body = {}
    body["again"] = body
    with pytest.raises(Invalid, match="nested"):
        json_body(body)


def test_in_a_batch_only_the_cell_concerned_fails():
    """The others are sent, and every result stands at the place of its cell."""
    key = uuid.UUID(int=7)
    flow = put_cells(Requests("trips"), [(key, "A", 1, {"a": 1}), (key, "A", 2, {"a": {1}}), (key, "A", 3, {"a": 3})])
    request = next(flow)
    assert [cell["ref_key"] for cell in msgspec.msgpack.decode(request.content)["cells"]] == [1, 3]
    stored = {"status": "stored", "shard": 0, "copies": 2, "generation": 1, "added_id": 1, "location": "1:1"}
    answer = msgspec.msgpack.encode({"results": [stored, stored]})
    with pytest.raises(StopIteration) as done:
        flow.send(ClientResponse(200, {"content-type": "application/msgpack"}, answer))
    first, second, third = done.value.value
    assert (first.ref_key, third.ref_key) == (1, 3)
    assert (bool(second), second.error.field) == (False, "body.a")
