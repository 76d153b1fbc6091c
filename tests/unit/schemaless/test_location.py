"""Locations and their text forms."""

import pytest

from schemaless.errors import Invalid
from schemaless.location import (
    BEGINNING,
    Location,
    ShardLocation,
    parse_location,
    parse_shard_location,
)


@pytest.mark.parametrize(
    ("text", "parsed"), [("0", (None, 0)), ("1000", (None, 1000)), ("2:1000", (2, 1000)), ("1:0", (1, 0))]
)
def test_a_location_with_or_without_its_generation(text, parsed):
    """ADDED_ID or GENERATION:ADDED_ID."""
    assert parse_location(text) == parsed


@pytest.mark.parametrize("text", ["", ":", "1:", ":1", "-1", "1:2:3", "a", "1 ", str(2**63), "12345678901:1", None, 3])
def test_other_locations_are_refused(text):
    """The answer names the field."""
    with pytest.raises(Invalid) as caught:
        parse_location(text, "after")
    assert caught.value.field == "after"


@pytest.mark.parametrize("text", ["", "1:2", "1:2:3:4", "a:1:1", f"0:1:{2**63}", "-1:1:1"])
def test_a_puts_location_has_three_parts(text):
    """SHARD:GENERATION:ADDED_ID and nothing else."""
    with pytest.raises(Invalid):
        parse_shard_location(text)


def test_locations_are_ordered_by_generation_first():
    """A later generation goes on behind an earlier one."""
    assert BEGINNING < Location(1, 5) < Location(1, 6) < Location(2, 6)


def test_a_puts_location_reads_back():
    """What an answer says is what `after=` takes."""
    location = ShardLocation(7, Location(1, 42))
    assert str(location) == "7:1:42"
    assert parse_shard_location(str(location)) == location
