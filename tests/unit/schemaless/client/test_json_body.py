"""What a client sends as a body: the types of JSON, and moments. All else is refused by the name of its member."""

import math
import uuid
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from types import MappingProxyType

import msgspec
import pytest

from schemaless.client.exchange import ClientResponse
from schemaless.client.requests import BYTES_MAX, Requests, encode_json_body, put_cells
from schemaless.errors import Invalid

NOON = datetime(2026, 1, 2, 12, 0, 0, 5000, UTC)
EASTERN = timezone(timedelta(hours=-5))
AMSTERDAM = timezone(timedelta(minutes=19, seconds=32))


class Kind(StrEnum):
    TRIP = "trip"


class Stars(IntEnum):
    FIVE = 5


def sent(body):
    """The body as the server reads it."""
    return msgspec.msgpack.decode(encode_json_body(body))


def test_what_json_has_stays_as_it_is():
    body = {"a": -(2**63), "b": 1.5, "c": "text", "d": None, "e": True, "f": [2**64 - 1, {"g": [False]}], "h": {}}
    assert sent(body) == body
    assert sent({"a": (1, 2), "b": MappingProxyType({"c": 1})}) == {"a": [1, 2], "b": {"c": 1}}
    assert sent({"kind": Kind.TRIP, "stars": [Stars.FIVE]}) == {"kind": "trip", "stars": [5]}


def test_a_moment_becomes_rfc_3339():
    """With the zone that it has. RFC 3339 has no zones with seconds, such as those of local times long ago."""
    assert sent({"at": NOON, "of": [NOON.astimezone(EASTERN), NOON.astimezone(AMSTERDAM)]}) == {
        "at": "2026-01-02T12:00:00.005000Z",
        "of": ["2026-01-02T07:00:00.005000-05:00", "2026-01-02T12:00:00.005000Z"],
    }


class Colour(Enum):
    RED = 1


class Float64(float):
    """As numpy.float64 is: a float by descent."""


class Text(str):
    """As numpy.str_ is."""

    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [datetime(2026, 1, 2), datetime.min.replace(tzinfo=AMSTERDAM), Decimal("1.5"), uuid.UUID(int=1), date(2026, 1, 2),
     {1}, Colour.RED, b"bytes", object(), Float64(1.5), Text("a"), math.nan, math.inf, -math.inf, 2**64,
     -(2**63) - 1, "half \ud800"],
    ids=lambda value: f"{type(value).__name__} {value!r:.20}",
)  # fmt: skip
def test_what_json_has_not_is_refused_by_the_name_of_its_member(value):
    with pytest.raises(Invalid) as refused:
        encode_json_body({"good": 1, "trip": [{"fare": value}]})
    assert refused.value.field == "body.trip[0].fare"
    refused.value.field.encode()


@pytest.mark.parametrize("key", [1, None, Text("a"), b"a", "half \ud800"])
def test_a_key_that_json_has_not_is_refused_by_the_name_of_its_object(key):
    with pytest.raises(Invalid) as refused:
        encode_json_body({"a": [{key: 2}]})
    assert refused.value.field == "body.a[0]"
    str(refused.value).encode()  # the message itself can be shown


@pytest.mark.parametrize("body", [None, [1], "text", b"{}"])
def test_a_body_is_an_object(body):
    with pytest.raises(Invalid, match="body: must be a JSON object"):
        encode_json_body(body)


def test_a_body_that_contains_itself_is_refused():
    body = {}
    body["again"] = body
    with pytest.raises(Invalid, match="nested"):
        encode_json_body(body)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ((uuid.UUID(int=7), "A", 2, {"a": {1}}), "body.a"),
        ((uuid.UUID(int=7), "A", 2, {"a": math.nan}), "body.a"),
        ((uuid.UUID(int=7), "A", 2, {"a": 2**64}), "body.a"),
        ((uuid.UUID(int=7), "A", 2**63, {}), "ref_key"),
        ((uuid.UUID(int=7), {"A"}, 2, {}), "column_name"),
        (("no uuid", "A", 2, {}), "row_key"),
        ((uuid.UUID(int=7), "A", 2, {"a": "x" * BYTES_MAX}), None),
    ],
)
def test_in_a_batch_only_the_cell_concerned_fails(bad, field):
    """The others are sent, and every result stands at the place of its cell."""
    key = uuid.UUID(int=7)
    flow = put_cells(Requests("trips"), [(key, "A", 1, {"a": 1}), bad, (key, "A", 3, {"a": 3})])
    request = next(flow)
    assert [cell["ref_key"] for cell in msgspec.msgpack.decode(request.content)["cells"]] == [1, 3]
    stored = {"status": "stored", "shard": 0, "copies": 2, "generation": 1, "added_id": 1, "location": "1:1"}
    answer = msgspec.msgpack.encode({"results": [stored, stored]})
    with pytest.raises(StopIteration) as done:
        flow.send(ClientResponse(200, {"content-type": "application/msgpack"}, answer))
    first, second, third = done.value.value
    assert (first.ref_key, third.ref_key) == (1, 3)
    assert (bool(second), getattr(second.error, "field", None)) == (False, field)
