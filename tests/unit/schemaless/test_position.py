"""Positions prove which history they stand on (I16)."""

import msgspec
import pytest

from schemaless.cell import StoredCell
from schemaless.errors import Invalid, LocationGone
from schemaless.location import GenerationStart, Location
from schemaless.position import (
    Position,
    cell_digest,
    digest_text,
    parse_digest,
    parse_position,
    verify_position,
)

CELL = StoredCell(b"r" * 16, "BASE", 1, 0, 1, 5, created_at=1_000_000, body=b"x")
STARTS = [GenerationStart(1, 1)]
HEAD = Location(1, 9)


@pytest.mark.parametrize(
    "other",
    [
        {"generation": 2},
        {"added_id": 6},
        {"created_at": 1_000_001},
        {"row_key": b"s" * 16},
        {"column_name": "STATUS"},
        {"ref_key": 2},
    ],
)
def test_the_digest_names_the_insertion(other):
    assert cell_digest(msgspec.structs.replace(CELL, **other)) != cell_digest(CELL)


def test_the_digest_is_63_bits_and_leaves_out_the_body():
    assert 0 < cell_digest(CELL) < 1 << 63
    assert cell_digest(msgspec.structs.replace(CELL, body=b"y")) == cell_digest(CELL)


def test_a_digest_is_sixteen_hexadecimal_digits():
    assert parse_digest(digest_text(255)) == 255
    assert digest_text(255) == "00000000000000ff"


@pytest.mark.parametrize("text", ["", "ff", "0" * 17, "g" * 16, "f" * 16, None])
def test_other_texts_are_refused(text):
    with pytest.raises(Invalid):
        parse_digest(text)


@pytest.mark.parametrize("digest", [cell_digest(CELL), None])
def test_the_same_cell_or_an_unproven_position_may_be_read_on_from(digest):
    verify_position(Position(0, 1, 5, digest=digest), cell_digest(CELL), STARTS, HEAD)


@pytest.mark.parametrize(("found", "why"), [(7, "another cell is at 1:5"), (None, "the cell at 1:5 is missing")])
def test_another_history_is_refused(found, why):
    with pytest.raises(LocationGone, match=why) as refused:
        verify_position(Position(0, 1, 5, digest=cell_digest(CELL)), found, STARTS, HEAD)
    assert refused.value.generation == 1


def test_a_generation_that_superseded_the_position_says_where_to_continue():
    with pytest.raises(LocationGone) as refused:
        verify_position(Position(0, 1, 5, digest=8), 7, [*STARTS, GenerationStart(2, 4)], HEAD)
    assert (refused.value.generation, refused.value.resume_at) == (2, 3)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("0", (None, 0, None)),
        ("1000", (None, 1000, None)),
        ("2:1000", (2, 1000, None)),
        ("1:5:00000000000000ff", (1, 5, 255)),
        ("1:0:0000000000000000", (1, 0, 0)),
    ],
)
def test_a_position_is_parsed_from_what_the_log_api_takes(text, parsed):
    assert parse_position(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "", "1:", ":1", "-1", "1:2:3", "1:2:", "5:00000000000000ff", "1:5:00000000000000f", "1:5:f0000000000000ff",
        "1:5:000000000000000g", "1:9223372036854775808", "1:5:00000000000000ff:0", "१:5", None, 5,
    ],
)  # fmt: skip
def test_what_is_no_position_is_refused(text):
    with pytest.raises(Invalid):
        parse_position(text)


def test_a_position_as_text_can_be_parsed_again():
    assert parse_position(str(Position(7, 2, 9, 100, 255))) == (2, 9, 255)
    assert str(Position(7, 2, 9)) == "2:9"
