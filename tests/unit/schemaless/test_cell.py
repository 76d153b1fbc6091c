"""Parsing at the edge: what is a row key, a column name, a ref_key, a time."""

import pytest

from schemaless.cell import (
    REF_KEY_MAX,
    CellKey,
    ColumnName,
    RefKey,
    RowKey,
    created_at_text,
    parse_cause,
    parse_column_name,
    parse_ref_key,
    parse_row_key,
    parse_time,
    row_key_text,
)
from schemaless.errors import Invalid

UUID = "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"


def test_a_row_key_is_answered_in_lower_case():
    """Any case in, canonical text out."""
    assert row_key_text(parse_row_key(UUID.upper())) == UUID


@pytest.mark.parametrize(
    "text",
    ["", UUID.replace("-", ""), "{" + UUID + "}", "urn:uuid:" + UUID, UUID + "\n", UUID[:-1], UUID[:-1] + "g", None, 5],
)
def test_other_spellings_of_a_uuid_are_refused(text):
    """Hyphenated and nothing else: one text for one row."""
    with pytest.raises(Invalid) as caught:
        parse_row_key(text)
    assert caught.value.field == "row_key"


@pytest.mark.parametrize("text", ["A", "_", "BASE", "a.b-c_1", "x" * 64])
def test_column_names(text):
    """Letters, digits, dot, hyphen, underscore; 1 to 64."""
    assert parse_column_name(text) == text


@pytest.mark.parametrize("text", ["", "1a", "-a", ".a", "a b", "ä", "x" * 65, "a\n", "a/b", None])
def test_other_column_names_are_refused(text):
    """They are part of URLs and of an ascii column."""
    with pytest.raises(Invalid):
        parse_column_name(text)


@pytest.mark.parametrize(
    ("given", "ref_key"), [(0, 0), ("0", 0), ("7", 7), (REF_KEY_MAX, REF_KEY_MAX), ("9" * 18, 10**18 - 1)]
)
def test_ref_keys(given, ref_key):
    """An integer or its decimal text."""
    assert parse_ref_key(given) == ref_key


@pytest.mark.parametrize(
    "given",
    [-1, REF_KEY_MAX + 1, str(REF_KEY_MAX + 1), "", "1.0", 1.0, True, None, "١", "+1", "1_0", " 1", "007"],
)
def test_other_ref_keys_are_refused(given):
    """Not signed, not a float, not a bool, not beyond 63 bits, ASCII digits only."""
    with pytest.raises(Invalid):
        parse_ref_key(given)


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:00.000001Z", 1),
        ("1970-01-01T01:00:00+01:00", 0),
        ("2026-11-21T12:00:00.123456Z", 1795262400123456),
        ("1970-01-01t00:00:00z", 0),
        ("1970-01-01T00:00:00.0000019999Z", 1),
        ("1969-12-31T23:59:60Z", 0),
        ("1970-01-01T00:00:00-00:00", 0),
    ],
)
def test_times(text, microseconds):
    """RFC 3339 with a zone, to the microsecond."""
    assert parse_time(text) == microseconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "2026-11-21", "2026-11-21T12:00:00", "2026-11-21 12:00:00Z", "yesterday", None, 5),
        *("2026-W47-6T12:00:00Z", "2026-325T12:00:00Z", "20261121T120000Z", "2026-11-21T12Z", "2026-11-21T12:00Z"),
        *("2026-11-21T12:00:00,5Z", "2026-11-21T12:00:00.Z", "2026-11-21T12:00:00+01", "2026-11-21T12:00:00+0100"),
        *("2026-11-21T24:00:00Z", "2026-02-30T12:00:00Z", "2026-11-21T12:00:61Z", "2026-11-21T12:00:00+24:00"),
        *("2026-11-21T12:00:00+01:00:30", "٢٠٢٦-11-21T12:00:00Z", " 2026-11-21T12:00:00Z", "2026-11-21T12:00:00Z\n"),
        *("9999-12-31T23:59:60Z", "9999-12-31T23:59:59-00:01", "0001-01-01T00:00:00+00:01"),
    ],
)
def test_other_times_are_refused(text):
    """Without a zone a time names no moment."""
    with pytest.raises(Invalid):
        parse_time(text)


def test_created_at_has_six_digits_always():
    """One form for all clients."""
    assert created_at_text(0) == "1970-01-01T00:00:00.000000Z"
    assert created_at_text(1795262400123456) == "2026-11-21T12:00:00.123456Z"


def test_a_key_reads_as_a_path():
    """In logs and messages."""
    assert str(CellKey(RowKey(bytes(16)), ColumnName("BASE"), RefKey(3))) == f"{row_key_text(bytes(16))}/BASE/3"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "@1:1:1",
        "a b@1:1:1",
        "ä@1:1:1",
        "a@b@1:1:1",
        "a@1:1",
        "a@1:1:1\n",
        "a@-1:1:1",
        "x" * 251 + "@1:1:1",
        None,
    ],
)
def test_a_wrong_cause_is_refused(text):
    """A15: it names who wrote the cell and a location, and is bounded."""
    with pytest.raises(Invalid, match="Schemaless-Cause"):
        parse_cause(text, "Schemaless-Cause")


def test_the_longest_cause_has_room_in_its_column():
    """VARCHAR(300), in schema.sql."""
    longest = "x" * 250 + "@" + "9" * 9 + ":" + "9" * 10 + ":" + "9" * 19
    assert len(parse_cause(longest)) <= 300
