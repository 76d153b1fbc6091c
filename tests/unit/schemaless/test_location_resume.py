"""Where a reader of a shard's log goes on: the rule of I13, on its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless.errors import LocationGone
from schemaless.location import GenerationStart, Location, generation_at, is_lag, verify_location, visible_starts

ONE = [GenerationStart(1, 1)]
PROMOTED = [GenerationStart(1, 1), GenerationStart(2, 11)]
TWICE = [*PROMOTED, GenerationStart(3, 8)]  # the second promotion lost more than the first one kept


@pytest.mark.parametrize(
    ("generation", "added_id", "starts", "head"),
    [
        (None, 0, ONE, 0),
        (None, 5, ONE, 5),
        (1, 0, ONE, 0),
        (1, 10, PROMOTED, 30),
        (None, 20, PROMOTED, 30),
        (2, 11, PROMOTED, 30),
        (2, 30, PROMOTED, 30),
        (2, 10, PROMOTED, 30),  # just before its own first cell
        (1, 7, TWICE, 30),
        (2, 7, TWICE, 30),
        (3, 8, TWICE, 30),
    ],
)
def test_a_location_within_the_present_history_goes_on(generation, added_id, starts, head):
    """What the reader has is a prefix of what stands there."""
    assert verify_location(generation, added_id, starts, head) == added_id


@pytest.mark.parametrize(
    ("generation", "added_id", "starts", "head", "resume_at"),
    [
        (None, 6, ONE, 5, 5),
        (1, 6, ONE, 5, 5),
        (1, 11, PROMOTED, 30, 10),
        (1, 99, PROMOTED, 30, 10),  # superseded and past the head: the lower one of both places
        (2, 31, PROMOTED, 30, 30),
        (1, 8, TWICE, 30, 7),
        (2, 8, TWICE, 30, 7),
        (2, 11, TWICE, 30, 7),
        (0, 3, PROMOTED, 30, 3),
        (3, 5, PROMOTED, 30, 5),
        (3, 20, PROMOTED, 30, 10),  # of a history that is not known here: back to where the newest one began
    ],
)
def test_any_other_location_is_told_where_to_go_on(generation, added_id, starts, head, resume_at):
    """Superseded, past the head, or of an unknown generation: head, resume_at, and the newest generation."""
    with pytest.raises(LocationGone) as refused:
        verify_location(generation, added_id, starts, head)
    assert (refused.value.head, refused.value.resume_at) == (head, resume_at)
    assert refused.value.generation == starts[-1].generation


@pytest.mark.parametrize(("added_id", "expected"), [(0, 1), (7, 1), (8, 3), (10, 3), (11, 3)])
def test_a_cell_belongs_to_the_last_generation_that_covers_it(added_id, expected):
    """A later generation that begins lower hides the one between."""
    assert generation_at(added_id, TWICE) == expected


@given(st.lists(st.integers(2, 50), max_size=4), st.integers(0, 6), st.integers(0, 80), st.integers(0, 30))
def test_resume_at_can_always_be_read_from(begins, generation, added_id, beyond):
    """Whoever is sent away finds the place that is named, whatever happened to the shard, and is never sent ahead."""
    starts = [GenerationStart(number, at) for number, at in enumerate([1, *begins], start=1)]
    head = max(start.starts_at for start in starts) - 1 + beyond
    at = resume_or_be_sent(generation, added_id, starts, head)
    assert 0 <= at <= min(added_id, head)
    assert verify_location(generation_at(at, starts), at, starts, head) == at


@given(st.lists(st.integers(2, 50), max_size=4), st.integers(0, 80), st.integers(0, 30))
def test_where_a_follower_stands_can_always_be_read_from(begins, added_id, beyond):
    """It stands in the generation of what comes next, which it was told of: nothing supersedes that but a new one."""
    starts = [GenerationStart(number, at) for number, at in enumerate([1, *begins], start=1)]
    head = max(start.starts_at for start in starts) - 1 + beyond
    position = Location(generation_at(added_id + 1, starts), min(added_id, head))
    assert verify_location(position.generation, position.added_id, starts, head) == position.added_id


@pytest.mark.parametrize(("starts", "met"), [(ONE, [1]), (PROMOTED, [1, 2]), (TWICE, [1, 3])])
def test_a_hidden_generation_is_never_met(starts, met):
    """One that began where a later one had begun already has no cells."""
    assert [start.generation for start in visible_starts(starts)] == met


@pytest.mark.parametrize(
    ("position", "starts", "head", "lags"),
    [
        (Location(1, 11), PROMOTED, 30, False),
        (Location(2, 9), TWICE, 30, False),
        (Location(1, 9), ONE, 8, True),  # a minion that doesn't have the cell yet
        (Location(2, 10), ONE, 10, True),  # nor the generation
    ],
)
def test_a_follower_tells_a_lost_place_from_a_node_that_lags(position, starts, head, lags):
    """Only a newer generation takes a place away."""
    with pytest.raises(LocationGone) as refused:
        verify_location(position.generation, position.added_id, starts, head)
    assert is_lag(position, refused.value) is lags


def test_a_node_that_has_another_cell_does_not_lag():
    """It has the added_id, in the same generation: waiting doesn't help (I16)."""
    other = LocationGone("another cell is there", head=9, resume_at=0, generation=1)
    assert not is_lag(Location(1, 9), other)


def resume_or_be_sent(generation, added_id, starts, head):
    try:
        return verify_location(generation, added_id, starts, head)
    except LocationGone as gone:
        return gone.resume_at
