"""Bodies and records: what is accepted, what is refused, what counts as the same."""

import json
import re
import zlib

import msgpack
import pytest

from schemaless import codec
from schemaless.cell import ColumnName, RefKey, RowKey, StoredCell
from schemaless.codec import (
    CONTAINERS_MAX,
    DEPTH_MAX,
    BodyComparison,
    body_json,
    decode_body,
    decode_cell,
    encode_body,
    encode_record,
    parse_json_body,
    same_body,
)
from schemaless.errors import Corrupt, Invalid, Malformed


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"{]}", b"nul", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b'{"a":"\xff"}', b'{"a":1e999}'],
)
def test_what_is_no_json_is_malformed(raw):
    """400: the payload can't be parsed."""
    with pytest.raises(Malformed):
        parse_json_body(raw)


@pytest.mark.parametrize(
    "raw", [b"[]", b"1", b'"a"', b"null", nested(DEPTH_MAX + 1), nested(100_000), b'{"a":18446744073709551616}']
)
def test_what_is_no_body_is_invalid(raw):
    """422: parsed, but not an object, too deep, or beyond 64 bits."""
    with pytest.raises((Invalid, Malformed)):
        parse_json_body(raw)


def test_the_deepest_body_is_stored():
    """64 levels are allowed."""
    assert decode_body(parse_json_body(nested(DEPTH_MAX))) == json.loads(nested(DEPTH_MAX))


def test_a_body_has_so_many_containers():
    """50,000 arrays and objects are allowed, with any brackets in its strings (I14)."""
    most = b'{"[{":["' + b'[\\"{' * 10_000 + b'\\\\"' + b",[]" * (CONTAINERS_MAX - 2) + b"]}"
    assert len(decode_body(parse_json_body(most))["[{"]) == CONTAINERS_MAX - 1
    with pytest.raises(Invalid, match="50000"):
        parse_json_body(most.replace(b"[]", b"[[]]", 1))
    with pytest.raises(Invalid, match="50000"):
        encode_body({"a": [[]] * (CONTAINERS_MAX - 1)})


@pytest.mark.parametrize("body", [{}, {"a": "x" * 2**20}, {"b": [[]] * 40_000}])
def test_a_comparison_costs_what_the_given_body_is_worth(monkeypatch, body):
    """A stored body that can't be the same is not decoded, and of several bodies the first pays for it once."""
    decoded = []
    monkeypatch.setattr(codec, "decode_body", lambda stored: decoded.append(stored) or decode_body(stored))
    large = encode_body({"a": [[]] * 40_000})
    comparison = BodyComparison(large)
    for value in (body, body, {"a": [[]] * 39_999 + [0]}, {"a": [[]] * 39_999 + [1]}):
        assert not comparison.same(encode_body(value))
    assert decoded.count(large) == 1


@pytest.mark.parametrize(
    ("raw", "half"),
    [
        (rb'{"a":"\ud800"}', r"\ud800"),
        (rb'{"a":"\uDBFFx"}', r"\uDBFF"),
        (rb'{"a":"\udc00\ud83d"}', r"\udc00"),
        (rb'{"\uD83D\uDE00":"\uD83D"}', r"\uD83D"),
    ],
)
def test_half_a_surrogate_pair_is_named(raw, half):
    """The decoder says that the input was truncated."""
    with pytest.raises(Malformed, match=re.escape(f"{half} is a surrogate without its other half")):
        parse_json_body(raw)


def test_text_that_only_looks_like_a_surrogate_is_not_named():
    """A backslash may be escaped, and a whole pair is a character."""
    assert decode_body(parse_json_body(rb'{"a":"\\ud800 \uD83D\uDE00"}'))["a"] == "\\ud800 \U0001f600"
    with pytest.raises(Malformed, match="truncated"):
        parse_json_body(rb'{"a":"\\ud800')


def test_members_keep_their_order_and_the_last_duplicate_counts():
    """Reading gives members in the order first stored."""
    assert body_json(parse_json_body(b'{"b":1,"a":2,"b":3}')) == b'{"b":3,"a":2}'


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": [1, 2]}, {"a": [2, 1]}, False),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": 0}, {"a": False}, False),
        ({"a": [{"x": 1}]}, {"a": [{"x": 1.0}]}, False),
        ({"a": 0.0}, {"a": -0.0}, True),
        ({"a": "\u00e9"}, {"a": "e\u0301"}, False),
        ({"a": None}, {}, False),
        ({}, {}, True),
    ],
)
def test_same_body(left, right, same):
    """I1: members in any order, numbers only of the same kind, strings by code point."""
    assert same_body(encode_body(left), encode_body(right)) is same
    assert same_body(encode_body(right), encode_body(left)) is same


@pytest.mark.parametrize("stored", [b"", b"x", b"\x78\x9c", encode_body({"a": "b" * 500})[:-9]])
def test_stored_bytes_that_are_no_body_are_corrupt(stored):
    """Never guessed at."""
    with pytest.raises(Corrupt):
        decode_body(stored)


def test_a_record_is_the_map_of_the_contract():
    """What a record promises: any MessagePack reader gets these members, the body as it is stored."""
    cell = StoredCell(
        RowKey(b"r" * 16),
        ColumnName("BASE"),
        RefKey(2),
        shard=3,
        generation=1,
        added_id=4,
        created_at=5,
        body=b"stored",
    )
    assert msgpack.unpackb(encode_record(cell)) == {
        "row_key": b"r" * 16,
        "column_name": "BASE",
        "ref_key": 2,
        "shard": 3,
        "generation": 1,
        "added_id": 4,
        "created_at": 5,
        "body": b"stored",
    }
    assert decode_cell(encode_record(cell)) == cell


@pytest.mark.parametrize("value", [b"", b"\xc0", msgpack.packb({"row_key": b""}), msgpack.packb([1])])
def test_other_records_are_corrupt(value):
    """A reader stops instead of guessing."""
    with pytest.raises(Corrupt):
        decode_cell(value)


@pytest.mark.parametrize("letters", [0, 1, 200, 240, 244, 245, 246, 250, 300, 5000])
def test_a_body_of_any_length_is_a_zlib_stream_with_its_checksum(letters):
    """Short ones are not deflated, yet any zlib reads them, and a flipped bit is noticed."""
    body = {"text": "x" * letters, "n": 1}
    stored = encode_body(body)
    assert msgpack.unpackb(zlib.decompress(stored)) == body
    assert decode_body(stored) == body
    damaged = stored[:-5] + bytes([stored[-5] ^ 1]) + stored[-4:]
    with pytest.raises(Corrupt):
        decode_body(damaged)
