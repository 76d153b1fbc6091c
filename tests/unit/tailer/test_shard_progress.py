"""One shard of a tailed partition: which state is due."""

import pytest

from schemaless.location import Location
from schemaless.position import Position
from tailer.shard_queue import PREDECESSORS, ShardProgress, TailState


def progress(generation, added_id, head, held=False):
    return ShardProgress(5, Position(5, generation, added_id), head, held)


@pytest.mark.parametrize(
    ("published", "head", "waiting", "due"),
    [
        ((1, 3), Location(1, 3), 0, TailState.CAUGHT_UP),
        ((1, 3), Location(1, 7), 4, TailState.BEHIND),
        ((1, 3), Location(1, 1), 0, TailState.DOUBTFUL),  # a minion that lags, or lost cells
        ((1, 5), Location(2, 5), 0, TailState.BEHIND),  # a generation without any cell is announced, too
        ((1, 9), Location(2, 5), 0, TailState.BEHIND),  # published ones are superseded
        ((2, 3), Location(1, 9), 6, TailState.DOUBTFUL),  # an old master: none of it is published
    ],
)
def test_the_head_decides_what_is_due(published, head, waiting, due):
    """A head above what was published has something to publish, one below it is doubted."""
    shard = progress(*published, head)
    assert (shard.waiting, shard.due()) == (waiting, due)


def test_what_the_master_holds_is_not_doubted_again():
    """Only a minion showed less."""
    assert progress(1, 5, Location(1, 3), held=True).due() is TailState.CAUGHT_UP


def test_published_cells_prove_a_head():
    """Cells newer than the head that was seen were published: the shard is neither behind nor ahead of its master."""
    shard = progress(1, 3, Location(1, 4))
    shard.published_up_to(Position(5, 1, 7))
    assert shard.due() is TailState.CAUGHT_UP


def test_the_masters_answer_counts_for_what_was_published_then():
    """It ends with the next transaction."""
    shard = progress(1, 5, Location(1, 3), held=True)
    shard.published_up_to(Position(5, 1, 7))
    shard.head = Location(1, 6)
    assert shard.due() is TailState.DOUBTFUL


@pytest.mark.parametrize("state", TailState)
@pytest.mark.parametrize("before", TailState)
def test_only_legal_transitions_are_possible(before, state):
    """What isn't in the table is a defect, and raises."""
    shard = progress(1, 1, Location(1, 1))
    shard.state = before
    if before in PREDECESSORS[state]:
        shard.enter(state)
        assert shard.state is state
    else:
        with pytest.raises(AssertionError, match="can't become"):
            shard.enter(state)
