"""Field values: each type's conversions, and the text that places an entry."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless.errors import Invalid
from schemaless.index.values import FieldType, from_json, from_text, shard_text, to_json

UUID_TEXT = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
LENGTH = 8

FITTING = [
    (FieldType.UUID, UUID_TEXT.upper(), UUID_TEXT),
    (FieldType.STRING, "ü" * LENGTH, "ü" * LENGTH),
    (FieldType.STRING, "", ""),
    (FieldType.INT, -(2**63), -(2**63)),
    (FieldType.FLOAT, 3, 3.0),
    (FieldType.DECIMAL, "12.50", "12.5"),
    (FieldType.DECIMAL, 0.1, "0.1"),
    (FieldType.DECIMAL, "-0.0", "0"),
    (FieldType.DECIMAL, "9" * 29 + "." + "9" * 9, "9" * 29 + "." + "9" * 9),
    (FieldType.BOOL, False, False),
    (FieldType.DATETIME, "2026-01-31T23:00:00.5-02:00", "2026-02-01T01:00:00.500000Z"),
    (FieldType.BYTES, "AP8=", "AP8="),
]
NOT_FITTING = [
    (FieldType.UUID, UUID_TEXT.replace("-", "")),
    (FieldType.UUID, 7),
    (FieldType.STRING, "x" * (LENGTH + 1)),
    (FieldType.STRING, 1),
    (FieldType.INT, 2**63),
    (FieldType.INT, 1.0),
    (FieldType.INT, True),
    (FieldType.FLOAT, "1.0"),
    (FieldType.FLOAT, False),
    (FieldType.DECIMAL, "0.0000000001"),
    (FieldType.DECIMAL, "1e29"),
    (FieldType.DECIMAL, "1e999999999"),
    (FieldType.DECIMAL, "Infinity"),
    (FieldType.DECIMAL, "NaN"),
    (FieldType.DECIMAL, "1_000"),
    (FieldType.DECIMAL, " 1"),
    (FieldType.DECIMAL, "1\n"),
    (FieldType.DECIMAL, "١٢"),
    (FieldType.DATETIME, "2026-W05-6T23:00:00Z"),
    (FieldType.DECIMAL, True),
    (FieldType.BOOL, 1),
    (FieldType.BOOL, "true"),
    (FieldType.DATETIME, "2026-01-31T23:00:00"),
    (FieldType.DATETIME, "0999-12-31T23:59:59Z"),
    (FieldType.DATETIME, 1738364400),
    (FieldType.BYTES, "AP8"),
    (FieldType.BYTES, "AAAAAAAAAAAAAAAA"),
]


@pytest.mark.parametrize(("kind", "found", "shown"), FITTING)
def test_a_value_of_its_type_is_kept(kind, found, shown):
    """What fits is converted, shown canonically, and read from that form again."""
    value = from_json(kind, LENGTH if kind in {"string", "bytes"} else 0, found)
    assert value is not None
    assert to_json(kind, value) == shown
    assert from_json(kind, LENGTH, shown) == value


@pytest.mark.parametrize(("kind", "found"), NOT_FITTING)
def test_a_value_of_another_type_is_null(kind, found):
    """A cell never fails an index: what doesn't fit is null."""
    assert from_json(kind, LENGTH, found) is None


@given(
    st.sampled_from(FieldType),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | inner
    ),
)
def test_no_value_raises(kind, found):
    """Whatever a body holds, conversion gives a value of the type or null."""
    value = from_json(kind, LENGTH, found)
    assert value is None or from_json(kind, LENGTH, to_json(kind, value)) == value


@pytest.mark.parametrize(
    ("kind", "found", "text"),
    [
        (FieldType.UUID, UUID_TEXT.upper(), UUID_TEXT),
        (FieldType.STRING, "ünïcode", "ünïcode"),
        (FieldType.INT, -12, "-12"),
        (FieldType.BOOL, True, "true"),
        (FieldType.BOOL, False, "false"),
        (FieldType.DATETIME, "2026-01-31T00:00:00Z", "2026-01-31T00:00:00.000000Z"),
    ],
)
def test_shard_texts_are_those_of_the_contract(kind, found, text):
    """uuid canonical, string as it is, int decimal, bool true or false, datetime with six digits and Z."""
    assert shard_text(kind, from_json(kind, 100, found)) == text


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (FieldType.INT, "-7", -7),
        (FieldType.FLOAT, "1e3", 1000.0),
        (FieldType.BOOL, "true", True),
        (FieldType.STRING, "7", "7"),
        (FieldType.DECIMAL, "1.50", Decimal("1.5")),
    ],
)
def test_query_values_are_read_from_text(kind, text, value):
    """A parameter's text becomes the field's type."""
    assert from_text(kind, LENGTH, text, "f") == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (FieldType.INT, "1.0"),
        (FieldType.INT, "٣"),
        (FieldType.INT, "9" * 30),
        (FieldType.FLOAT, "nan"),
        (FieldType.BOOL, "1"),
        (FieldType.UUID, "x"),
        (FieldType.DATETIME, "yesterday"),
        (FieldType.STRING, "x" * (LENGTH + 1)),
    ],
)
def test_query_values_of_another_type_are_invalid(kind, text):
    """What no entry can hold is a mistake of the one who asks."""
    with pytest.raises(Invalid) as raised:
        from_text(kind, LENGTH, text, "f.gte")
    assert raised.value.field == "f.gte"
