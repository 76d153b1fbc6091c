"""Media types: what is asked for, what is sent, and what has no JSON."""

import sys
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.content import (
    JSON,
    MSGPACK,
    NDJSON,
    check_json_only,
    follow_format,
    parse_msgpack,
    request_format,
    response_format,
)
from schemaless.errors import Invalid, Malformed, UnsupportedMedia


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (b"", JSON),
        (b"*/*", JSON),
        (b"text/html", JSON),
        (b"application/msgpack", MSGPACK),
        (b"Application/MsgPack; q=0.5", MSGPACK),
        (b"application/json;q=0.5, application/msgpack", MSGPACK),
        (b"application/json, application/msgpack;q=0.9", JSON),
        (b"application/msgpack;q=0", JSON),
        (b"application/msgpack;q=x", JSON),
        (b"application/msgpack;q=inf", JSON),
        (b"application/msgpack;q=1_0", JSON),
        (b"application/msgpack;q=0.5000", JSON),
        (b"application/json;q=0.5, application/msgpack;q=1.000", MSGPACK),
        (b"application/x-ndjson", JSON),
    ],
)
def test_the_answer_is_in_what_accept_likes_best(accept, expected):
    """JSON when it names nothing that we have; NDJSON only where batches are answered."""
    assert response_format(accept) is expected


def test_batches_are_answered_in_lines_when_asked():
    """NDJSON by its own media type."""
    assert response_format(b"application/x-ndjson", batch=True) is NDJSON


@pytest.mark.parametrize(
    ("content_type", "batch", "expected"),
    [
        (b"", False, JSON),
        (b"application/json", False, JSON),
        (b'Application/JSON; charset="UTF-8"', False, JSON),
        (b"application/msgpack", False, MSGPACK),
        (b"application/x-ndjson; charset=utf-8", True, NDJSON),
    ],
)
def test_a_payload_is_read_as_its_type_says(content_type, batch, expected):
    """Parameters other than the character set don't matter."""
    assert request_format(content_type, batch=batch) is expected


@pytest.mark.parametrize("content_type", [b"text/plain", b"application/x-ndjson", b"application/json; charset=utf-16"])
def test_other_types_are_refused(content_type):
    """Never guessed."""
    with pytest.raises(UnsupportedMedia):
        request_format(content_type)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (b"text/event-stream", None),
        (b"Text/Event-Stream; charset=utf-8", None),
        (b"text/event-stream, */*;q=0.1", None),
        (b"application/json;q=0.5, text/event-stream", None),
        (b"", JSON),
        (b"*/*", JSON),
        (b"application/json, text/event-stream;q=0.5", JSON),
        (b"application/msgpack", MSGPACK),
    ],
)
def test_a_follower_has_events_or_pages_as_it_likes(accept, expected):
    """The event stream is asked for by name only."""
    assert follow_format(accept) is expected


@pytest.mark.parametrize("accept", [b"text/html", b"text/*", b"text/event-stream;q=0", b"application/x-ndjson"])
def test_a_follower_gets_nothing_that_it_did_not_name(accept):
    """A page in place of a stream, or a stream in place of a page, would be another call."""
    with pytest.raises(Invalid):
        follow_format(accept)


@pytest.mark.parametrize(
    "value",
    [b"bin", {"a": [b"bin"]}, {1: 1}, {"a": {None: 1}}, {"a": float("inf")}, [msgspec.msgpack.Ext(5, b"x")]],
)
def test_messagepack_without_json_is_refused(value):
    """Wherever it stands."""
    with pytest.raises(Malformed):
        parse_msgpack(msgspec.msgpack.encode(value))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(JSON_VALUES)
def test_every_json_value_is_taken_as_messagepack(value):
    """And comes out unchanged."""
    assert parse_msgpack(msgspec.msgpack.encode(value)) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(raw):
    """Nothing but our own errors comes out of bytes from outside."""
    with suppress(Malformed):
        parse_msgpack(raw)


@pytest.mark.parametrize("member", [{"a": 1.5, "b": ""}, [0, None, 1.5, True]], ids=["objects", "arrays"])
def test_a_level_of_a_body_is_checked_as_a_whole(member):
    """A Python call for each of 50,000 containers holds the event loop for 50 ms (I14)."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    value = {"a": [member] * 20_000, "b": {"c": [member]}}
    sys.setprofile(count)
    try:
        depth = check_json_only(value)
    finally:
        sys.setprofile(None)
    assert depth == 4
    assert calls < 1_000


@pytest.mark.parametrize("foreign", [b"x", float("nan"), float("-inf"), {1: 2}, {"a": {None: 1}}])
def test_what_json_has_not_is_found_at_any_level(foreign):
    """Beside many values that are well."""
    for depth in range(4):
        with pytest.raises(Malformed):
            check_json_only({"a": [1, "x", {"b": 2.5}, foreign]})
        foreign = [{"deep": depth}, foreign, 1.5]
