"""Bodies over all JSON objects, with `msgpack`, `zlib` and `json` as the references."""

import json
import zlib
from contextlib import suppress

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from schemaless.codec import body_json, decode_body, encode_body, parse_json_body, same_body
from schemaless.errors import SchemalessError

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXT,
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)
BODIES = st.dictionaries(TEXT, VALUES, max_size=4)


def strictly(value) -> str:
    """A text that is equal for the same JSON value and only then: members sorted, kinds of numbers told apart."""
    return json.dumps(value, sort_keys=True)


def reversed_members(value):
    if isinstance(value, dict):
        return {name: reversed_members(value[name]) for name in reversed(value)}
    return [reversed_members(item) for item in value] if isinstance(value, list) else value


@given(BODIES)
def test_stored_bytes_are_plain_zlib_over_plain_messagepack(body):
    """Whoever reads a topic or a table needs no code of ours."""
    assert strictly(msgpack.unpackb(zlib.decompress(encode_body(body)))) == strictly(body)


@given(BODIES)
def test_what_others_wrote_is_read(body):
    """And nothing in ours depends on who compressed it, or how."""
    stored = zlib.compress(msgpack.packb(body), 9)
    assert strictly(decode_body(stored)) == strictly(body)
    assert same_body(stored, encode_body(body))


@given(BODIES)
def test_json_goes_in_and_comes_out(body):
    """Values, kinds of numbers and the order of members survive."""
    given_text = json.dumps(body).encode()
    answered = body_json(parse_json_body(given_text))
    assert json.dumps(json.loads(answered)) == json.dumps(json.loads(given_text))


@given(BODIES)
def test_a_body_is_the_same_as_itself_in_any_order(body):
    """I1: reflexive, and blind to the order of members."""
    stored = encode_body(body)
    assert same_body(stored, stored)
    assert same_body(stored, encode_body(reversed_members(body)))


@given(BODIES, BODIES)
def test_same_body_is_equality_of_json_values(left, right):
    """I1: symmetric, and neither more nor less than the same value."""
    expected = strictly(_zero_without_sign(left)) == strictly(_zero_without_sign(right))
    assert same_body(encode_body(left), encode_body(right)) is expected
    assert same_body(encode_body(right), encode_body(left)) is expected


@given(BODIES, st.integers(1, 100))
def test_a_changed_kind_of_number_is_another_body(body, number):
    """I1: 1, 1.0 and true are three bodies."""
    with_int, with_float = {**body, "n": number}, {**body, "n": float(number)}
    assert not same_body(encode_body(with_int), encode_body(with_float))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_an_error_of_ours(raw):
    """No foreign exception gets out."""
    for read in (parse_json_body, decode_body):
        with suppress(SchemalessError):
            read(raw)


def _zero_without_sign(value):
    if isinstance(value, dict):
        return {name: _zero_without_sign(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_zero_without_sign(inner) for inner in value]
    return 0.0 if isinstance(value, float) and value == 0 else value
