"""Positions and checkpoints as the audit judges them: by generation, by the cell at them, by the count of cells."""

import pytest

from schemaless.audit.consumer_audit import Standing, behind, finished, finished_until
from schemaless.location import GenerationStart, Location
from schemaless.position import Position

STARTS = [GenerationStart(1, 1), GenerationStart(2, 90)]


@pytest.mark.parametrize(
    ("location", "starts", "until"),
    [
        (Location(1, 100), STARTS, 89),
        (Location(1, 89), STARTS, 89),
        (Location(2, 95), STARTS, 95),
        (Location(1, 100), [*STARTS, GenerationStart(3, 80)], 79),
        (Location(2, 95), [*STARTS, GenerationStart(3, 80)], 79),
        (Location(1, 85), [*STARTS, GenerationStart(3, 80)], 79),
    ],
)
def test_a_position_counts_up_to_what_later_generations_kept(location, starts, until):
    """The lowest of all later starts decides: a later generation may start lower than an earlier one (I13)."""
    assert finished_until(location, starts) == until


def standing(location, counted_from=0, finished=None):
    """A checkpoint of a shard with STARTS."""
    position = Position(0, location.generation, location.added_id)
    return Standing(position, finished_until(location, STARTS), None, counted_from, finished, finished or 0)


def test_a_superseded_checkpoint_is_behind_a_lower_head():
    """A consumer at 1:100 has not handled 2:90 to 2:95, although 95 is below 100."""
    found = {("a", 0): standing(Location(1, 100))}
    assert [(cluster, shard) for cluster, shard, _ in behind(found, {0: 95})] == [("a", 0)]
    assert finished(found, {0: 95}) == 89


def test_a_checkpoint_of_the_present_generation_is_not_behind():
    """What it has finished is all there is. A shard without cells needs no checkpoint."""
    found = {("a", 0): standing(Location(2, 95)), ("a", 1): None}
    assert list(behind(found, {0: 95, 1: 0})) == []


@pytest.mark.parametrize(
    ("counted_from", "added_id", "count", "skipped"),
    [(0, 7, 7, 0), (5, 7, 2, 0), (7, 7, 0, 0), (0, 7, 6, 1), (5, 7, 3, -1), (0, 7, None, 0)],
)
def test_a_trigger_has_finished_as_many_cells_as_its_checkpoint_went(counted_from, added_id, count, skipped):
    """added_ids are dense, so a skipped cell breaks the equation. An index doesn't count."""
    assert standing(Location(1, added_id), counted_from, count).skipped == skipped
