"""Fair turns, and the proof that the next cells of a shard are the next ones: pure parts of the tailer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless.cell import ColumnName, RefKey, RowKey, StoredCell
from schemaless.errors import Corrupt
from schemaless.location import GenerationStart, Location
from tailer.fair_shares import shares
from tailer.shard_progress import ShardTail

WAITING = st.dictionaries(st.integers(0, 4095), st.integers(1, 10**9), min_size=1, max_size=64)


def cells(*added_ids, generation=1):
    return [
        StoredCell(RowKey(bytes(16)), ColumnName("BASE"), RefKey(1), 5, generation, added_id, 0, b"")
        for added_id in added_ids
    ]


def tail(published, head, following=None):
    return ShardTail(5, published, head, following)


def test_a_huge_shard_leaves_small_ones_all_they_have():
    """Small shards are served whole, the huge one gets the rest."""
    assert shares({1: 10**6, 2: 1, 3: 2}, 2000) == {1: 1997, 2: 1, 3: 2}


def test_huge_shards_share_evenly():
    """Among shards with more than their part nobody gets more."""
    assert shares({1: 10**6, 2: 10**6, 3: 10}, 2010) == {1: 1000, 2: 1000, 3: 10}


@given(WAITING, st.integers(1, 5000))
def test_a_turn_keeps_its_bounds(waiting, cells_max):
    """Everybody gets something, nobody more than waits, and all together no more than the bound (or one each)."""
    given_out = shares(waiting, cells_max)
    assert list(given_out) == list(waiting)
    assert all(1 <= given_out[shard] <= waiting[shard] for shard in waiting)
    assert sum(given_out.values()) <= max(cells_max, len(waiting))


@given(WAITING, st.integers(64, 5000))
def test_a_turn_wastes_nothing(waiting, cells_max):
    """Unless every shard is served whole, at most a rounding remainder for each shard is left over."""
    given_out = shares(waiting, cells_max)
    assert given_out == waiting or sum(given_out.values()) >= cells_max - len(waiting)


def test_the_next_cells_are_proven():
    """Dense from the published one on: taken as they are."""
    assert tail(Location(1, 2), Location(1, 4)).proven(cells(3, 4)) == cells(3, 4)


@pytest.mark.parametrize(("found", "missing"), [((4, 5), 3), ((3, 5), 4), ((5,), 3)])
def test_a_hole_is_never_passed(found, missing):
    """The error names the first cell that is missing."""
    with pytest.raises(Corrupt, match=f"cell {missing} is missing"):
        tail(Location(1, 2), Location(1, 5)).proven(cells(*found))


def test_cells_of_an_ended_generation_are_refused():
    """Generation 2 was announced: a cell of generation 1 behind it contradicts I13."""
    with pytest.raises(Corrupt, match="generation 1"):
        tail(Location(2, 2), Location(2, 3)).proven(cells(3))


def test_cells_of_a_generation_not_yet_announced_wait():
    """Read before the head told of the new generation: only what belongs to the old one is published."""
    found = [*cells(3), *cells(4, generation=2)]
    assert tail(Location(1, 2), Location(1, 4)).proven(found) == cells(3)


@pytest.mark.parametrize(
    ("published", "head", "following", "waiting", "behind"),
    [
        (Location(1, 3), Location(1, 3), None, 0, False),
        (Location(1, 3), Location(1, 7), None, 4, True),
        (Location(1, 3), Location(1, 1), None, 0, False),  # a minion that lags
        (Location(1, 3), Location(2, 7), GenerationStart(2, 6), 2, True),  # two cells belong to generation 1 yet
        (Location(1, 5), Location(2, 5), GenerationStart(2, 6), 0, True),  # announced without any cell
        (Location(1, 9), Location(2, 5), GenerationStart(2, 4), 0, True),  # what was published is superseded
        (Location(2, 3), Location(1, 9), None, 6, False),  # an old master: nothing of it is wanted
    ],
)
def test_what_waits_ends_where_a_generation_begins(published, head, following, waiting, behind):
    """Cells up to the start of the next generation come before its announcement."""
    shard_tail = tail(published, head, following)
    assert (shard_tail.waiting, shard_tail.behind) == (waiting, behind)


def test_published_cells_prove_a_head():
    """Cells newer than the head that was seen were published: the shard is neither behind nor ahead of its master."""
    shard_tail = tail(Location(1, 3), Location(1, 4))
    shard_tail.published_up_to(Location(1, 7))
    assert (shard_tail.behind, shard_tail.doubtful) == (False, False)
