"""One shard of a tailed partition: which state is due, and the proof that its next cells are the next ones."""

import pytest

from schemaless.cell import ColumnName, RefKey, RowKey, StoredCell
from schemaless.errors import Corrupt
from schemaless.location import GenerationStart, Location
from tailer.shard_progress import PREDECESSORS, MasterAnswer, ShardProgress, TailState


def cells(*added_ids, generation=1):
    return [
        StoredCell(RowKey(bytes(16)), ColumnName("BASE"), RefKey(1), 5, generation, added_id, 0, b"")
        for added_id in added_ids
    ]


def progress(published, head, following=None, answer=MasterAnswer.NOT_ASKED):
    return ShardProgress(5, published, head, following, answer)


def test_the_next_cells_are_proven():
    """Dense from the published one on: taken as they are."""
    assert progress(Location(1, 2), Location(1, 4)).proven(cells(3, 4)) == cells(3, 4)


@pytest.mark.parametrize(("found", "missing"), [((4, 5), 3), ((3, 5), 4), ((5,), 3)])
def test_a_hole_is_never_passed(found, missing):
    """The error names the first cell that is missing."""
    with pytest.raises(Corrupt, match=f"cell {missing} is missing"):
        progress(Location(1, 2), Location(1, 5)).proven(cells(*found))


def test_cells_of_an_ended_generation_are_refused():
    """Generation 2 was announced: a cell of generation 1 behind it contradicts I13."""
    with pytest.raises(Corrupt, match="generation 1"):
        progress(Location(2, 2), Location(2, 3)).proven(cells(3))


def test_cells_of_a_generation_not_yet_announced_wait():
    """Read before the head showed the new generation: only what belongs to the old one is published."""
    found = [*cells(3), *cells(4, generation=2)]
    assert progress(Location(1, 2), Location(1, 4)).proven(found) == cells(3)


@pytest.mark.parametrize(
    ("published", "head", "following", "waiting", "due"),
    [
        (Location(1, 3), Location(1, 3), None, 0, TailState.CAUGHT_UP),
        (Location(1, 3), Location(1, 7), None, 4, TailState.BEHIND),
        (Location(1, 3), Location(1, 1), None, 0, TailState.DOUBTFUL),  # a minion that lags, or lost cells
        (Location(1, 3), Location(2, 7), GenerationStart(2, 6), 2, TailState.BEHIND),  # two cells are of generation 1
        (Location(1, 5), Location(2, 5), GenerationStart(2, 6), 0, TailState.BEHIND),  # announced without any cell
        (Location(1, 9), Location(2, 5), GenerationStart(2, 4), 0, TailState.BEHIND),  # published ones are superseded
        (Location(2, 3), Location(1, 9), None, 6, TailState.DOUBTFUL),  # an old master: none of it is published
    ],
)
def test_what_waits_ends_where_a_generation_begins(published, head, following, waiting, due):
    """Cells up to the start of the next generation come before its announcement."""
    shard = progress(published, head, following)
    assert (shard.waiting, shard.due()) == (waiting, due)


@pytest.mark.parametrize(
    ("head", "answer", "due"),
    [
        (Location(1, 3), MasterAnswer.HELD, TailState.CAUGHT_UP),  # only a minion showed less
        (Location(1, 3), MasterAnswer.LOST, TailState.REFUSED),
        (Location(1, 9), MasterAnswer.LOST, TailState.REFUSED),  # what was written in the places of lost cells
        (Location(2, 4), MasterAnswer.LOST, TailState.BEHIND),
    ],
)
def test_the_masters_verdict_decides_about_a_topic_that_is_ahead(head, answer, due):
    """Lost cells are refused until a new generation begins."""
    assert progress(Location(1, 5), head, answer=answer).due() is due


def test_published_cells_prove_a_head():
    """Cells newer than the head that was seen were published: the shard is neither behind nor ahead of its master."""
    shard = progress(Location(1, 3), Location(1, 4))
    shard.published_up_to(Location(1, 7))
    assert shard.due() is TailState.CAUGHT_UP


def test_a_verdict_counts_for_what_was_published_then():
    """HELD ends with the next transaction, LOST with the next generation."""
    shard = progress(Location(1, 5), Location(1, 3), answer=MasterAnswer.HELD)
    shard.published_up_to(Location(1, 7))
    shard.head = Location(1, 6)
    assert shard.due() is TailState.DOUBTFUL
    shard = progress(Location(1, 5), Location(2, 9), answer=MasterAnswer.LOST)
    shard.published_up_to(Location(1, 6))
    assert shard.answer is MasterAnswer.LOST
    shard.published_up_to(Location(2, 6))
    assert shard.answer is MasterAnswer.NOT_ASKED


@pytest.mark.parametrize("state", TailState)
@pytest.mark.parametrize("before", TailState)
def test_only_legal_transitions_are_possible(before, state):
    """What isn't in the table is a defect, and raises."""
    shard = progress(Location(1, 1), Location(1, 1))
    shard.state = before
    if before in PREDECESSORS[state]:
        shard.enter(state)
        assert shard.state is state
    else:
        with pytest.raises(AssertionError, match="can't become"):
            shard.enter(state)
