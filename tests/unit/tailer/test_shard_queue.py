"""The queue of a partition's shards: fair shares, order, and no shard that is lost on its way through the states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from schemaless.bus.partition_log import Progress
from schemaless.location import Location
from schemaless.position import Position
from schemaless.topology import Datastore
from tailer.shard_queue import ShardQueue, TailState, fair_shares

WAITING = st.dictionaries(st.integers(0, 4095), st.integers(1, 10**9), min_size=1, max_size=64)
SHARDS = 4


def test_a_huge_shard_leaves_small_ones_all_they_have():
    """Small shards are served whole, the huge one gets the rest."""
    assert fair_shares({1: 10**6, 2: 1, 3: 2}, 2000) == {1: 1997, 2: 1, 3: 2}


def test_huge_shards_share_evenly():
    """Among shards with more than their part nobody gets more."""
    assert fair_shares({1: 10**6, 2: 10**6, 3: 10}, 2010) == {1: 1000, 2: 1000, 3: 10}


@given(WAITING, st.integers(1, 5000))
def test_shares_keep_their_bounds(waiting, cells_max):
    """Each shard gets something, none more than waits, and all together no more than the bound (or one each)."""
    shares = fair_shares(waiting, cells_max)
    assert list(shares) == list(waiting)
    assert all(1 <= shares[shard] <= waiting[shard] for shard in waiting)
    assert sum(shares.values()) <= max(cells_max, len(waiting))


@given(WAITING, st.integers(64, 5000))
def test_shares_waste_nothing(waiting, cells_max):
    """Unless every shard is served whole, at most a rounding remainder for each shard is left over."""
    shares = fair_shares(waiting, cells_max)
    assert shares == waiting or sum(shares.values()) >= cells_max - len(waiting)


def queue(published=range(SHARDS), placement=("a",)):
    """A queue of four shards. Of those that are named two cells are published, of the others nothing is known."""
    known = {shard: Position(shard, 1, 2) for shard in published}
    return ShardQueue(Datastore("trips", SHARDS, 1, placement), Progress(known, {}, set()))


def heads(*shards, head=5):
    return {shard: Location(1, head) for shard in shards}


def taken(shards, state=TailState.BEHIND):
    """Takes what waits, and leaves it where it was."""
    with shards.taken(state) as found:
        return [shard.shard for shard in found]


async def test_shards_wait_in_the_order_in_which_they_fell_behind():
    """A head that moves again costs no shard its place, and who was served waits behind the others."""
    shards = queue()
    shards.heads_moved(heads(2))
    shards.heads_moved(heads(0, 1))
    shards.heads_moved(heads(2, head=9))
    assert taken(shards) == [2, 0, 1]
    shards.heads_moved(heads(3))
    assert taken(shards) == [2, 0, 1, 3]
    with shards.taken(TailState.BEHIND) as found:
        shards[2].published_up_to(Position(2, 1, 9))
        assert [shard.state for shard in found] == [TailState.WORKING] * SHARDS
    assert taken(shards) == [0, 1, 3]


async def test_a_pass_takes_shards_of_one_cluster():
    """They are read with one query."""
    shards = queue(placement=("a", "b"))
    shards.heads_moved(heads(1, 2, 3))
    assert taken(shards) == [1, 3]
    assert taken(shards) == [2]


async def test_a_failed_pass_loses_no_shard():
    """Whatever was raised inside, the shards wait again."""
    shards = queue()
    shards.heads_moved(heads(0) | heads(1, head=1))
    for state in (TailState.BEHIND, TailState.DOUBTFUL):
        with pytest.raises(ZeroDivisionError), shards.taken(state):
            raise ZeroDivisionError
    assert (taken(shards), taken(shards, TailState.DOUBTFUL)) == ([0], [1])


async def test_a_shard_that_backs_off_waits_again_afterwards():
    """Meanwhile a new head changes nothing; then it is due as its head says, and `news` is set."""
    shards = queue()
    shards.heads_moved(heads(0))
    with shards.taken(TailState.BEHIND) as (shard,):
        shards.back_off(shard, 0.0)
    shards.news.clear()
    shards.heads_moved(heads(0, head=7))
    assert (shards.idle, shard.state) == (True, TailState.BACKING_OFF)
    await shards.news.wait()
    assert (taken(shards), shard.head) == ([0], Location(1, 7))


async def test_a_refused_shard_waits_for_a_generation():
    """Cells above the refused head are another history, a new generation is not."""
    shards = queue()
    shards.heads_moved(heads(0, head=1))
    with capture_logs() as logged, shards.taken(TailState.DOUBTFUL) as (shard,):
        shards.refuse(shard, "1:2 is past the head, 1", 60.0)
    assert "run `schemaless tailer new-generation trips --shard 0`" in logged[0]["what_to_do"]
    shards.heads_moved(heads(0, head=9))
    assert (shards.idle, shard.state) == (True, TailState.REFUSED)
    shards.heads_moved({0: Location(2, 9)})
    assert taken(shards) == [0]


async def test_the_master_is_asked_again_about_a_refused_shard():
    """The lost cells may have been brought back."""
    shards = queue()
    shards.heads_moved(heads(0, head=1))
    with shards.taken(TailState.DOUBTFUL) as (shard,):
        shards.refuse(shard, "", 0.0)
    shards.news.clear()
    await shards.news.wait()
    assert taken(shards, TailState.DOUBTFUL) == [0]


async def test_a_shard_whose_head_is_what_was_published_is_read_once():
    """A restored master that has grown again may show the same number."""
    shards = queue()
    shards.heads_moved(heads(0, head=2))
    assert taken(shards) == [0]
    assert shards[0].state is TailState.CAUGHT_UP


async def test_a_shard_without_progress_is_logged_once_and_never_tailed():
    """Neither how much was published is known, nor may it be guessed."""
    shards = queue(published=[1])
    with capture_logs() as logged:
        shards.heads_moved(heads(0, 1))
        shards.heads_moved(heads(0, 1, head=9))
    assert (taken(shards), shards[0].state) == ([1], TailState.PROGRESS_LOST)
    assert [entry["shard"] for entry in logged] == [0]
    assert "run `schemaless tailer seek DATASTORE LOCATION --shard 0`" in logged[0]["error"]
