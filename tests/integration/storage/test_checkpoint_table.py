"""Checkpoints on real servers: compare-and-set, alone and with an effect (I10)."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints, CommitLanes
from schemaless.consume.ports import Advance
from schemaless.errors import SchemalessError
from schemaless.location import Location
from schemaless.position import Position
from schemaless.storage import checkpoint_table
from schemaless.storage.checkpoint_table import NO_COUNTS, CellCounts, Move, State
from schemaless.storage.operation import query
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.storage

CONSUMER = "trigger:test"


@pytest.fixture
def node(storage):
    return storage.master("a")


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=1, partitions=1).name


def at(shard, added_id, generation=1):
    return Position(shard, generation, added_id, digest=added_id * 7)


def to(shard, added_id, *, version=0, consumer=CONSUMER, **options):
    return Move(consumer, version, at(shard, added_id), **options)


def rows(node, datastore, consumer=CONSUMER):
    return {c.shard: c for c in node.run(checkpoint_table.of_consumer, datastore, consumer)}


def make(node, datastore, *shards, consumer=CONSUMER):
    node.run(checkpoint_table.make, datastore, consumer, [Position(shard, 1, 0) for shard in shards])


def move(node, datastore, *moves, effect=""):
    """Returns the moves that were overtaken."""
    return list(node.run(checkpoint_table.move, datastore, moves, effect).overtaken)


def test_checkpoints_of_several_consumers_move_together_and_each_for_itself(node, datastore):
    """One statement moves many. One that another process moved is named, and the others moved."""
    make(node, datastore, 1, 2, 3)
    make(node, datastore, 1, consumer="index:x")
    assert move(node, datastore, *(to(n, n * 10) for n in (1, 2, 3)), to(1, 99, consumer="index:x")) == []
    late = to(2, 21)
    assert move(node, datastore, Move(CONSUMER, 1, at(1, 11, 2)), late) == [late]
    found = rows(node, datastore)
    assert [found[n].position for n in (1, 2, 3)] == [at(1, 11, 2), at(2, 20), at(3, 30)]
    assert rows(node, datastore, "index:x")[1].position == at(1, 99)


def test_finished_cells_are_counted_from_where_counting_began(node, datastore):
    make(node, datastore, 1)
    assert move(node, datastore, to(1, 5, finished=5)) == []
    assert move(node, datastore, to(1, 9, version=1, finished=4)) == []
    assert (rows(node, datastore)[1].counted_from, rows(node, datastore)[1].finished) == (0, 9)
    assert move(node, datastore, to(1, 3, version=2, restart=True)) == []
    assert (rows(node, datastore)[1].counted_from, rows(node, datastore)[1].finished) == (3, 0)


def test_a_move_whose_answer_was_lost_counts_as_done(node, datastore):
    """Run again with the outcome unknown, a move that has happened is no refusal."""
    make(node, datastore, 1)
    for effect in ("", "DO 1"):
        assert move(node, datastore, to(1, 5), effect=effect) == []


def test_a_mark_after_a_move_whose_answer_was_lost_is_not_taken_for_stored(node, datastore):
    """It has the version and the place of that move. A call would begin unmarked."""
    make(node, datastore, 1)
    assert move(node, datastore, to(1, 5)) == []
    mark = to(1, 5, begun=True, kills=1)
    assert move(node, datastore, mark) == [mark]
    assert move(node, datastore, to(1, 5, version=1, begun=True, kills=1)) == []


def test_what_was_added_to_a_move_whose_answer_was_lost_is_not_taken_for_stored(node, datastore):
    """It has the version and the place of that move. A record that it parks would be lost."""
    make(node, datastore, 1)
    first = to(1, 5, finished=5, counts=CellCounts(called=4, waiting=1), counts_before=NO_COUNTS)
    assert move(node, datastore, first, effect="DO 1") == []
    assert move(node, datastore, first, effect="DO 1") == []
    more = msgspec.structs.replace(first, counts=CellCounts(called=4, parked=1))
    assert move(node, datastore, more, effect="DO 1") == [more]


def test_making_a_checkpoint_leaves_one_that_is_there(node, datastore):
    """Two processes may make it at once."""
    make(node, datastore, 1)
    move(node, datastore, to(1, 5))
    make(node, datastore, 1, 2)
    assert {n: c.location.added_id for n, c in rows(node, datastore).items()} == {1: 5, 2: 0}


def test_a_late_process_changes_nothing_in_a_checkpoint_that_was_made_anew(node, datastore):
    """The row has the version that the process read, and another location: the walk of an index began anew (I10)."""
    node.run(checkpoint_table.make, datastore, CONSUMER, [at(1, 9)])
    assert move(node, datastore, to(1, 10)) == []
    read = rows(node, datastore)[1]
    node.run(checkpoint_table.delete_all, datastore, CONSUMER)
    node.run(checkpoint_table.make, datastore, CONSUMER, [at(1, 4)])
    assert move(node, datastore, to(1, 5)) == []
    assert rows(node, datastore)[1].version == read.version
    late = to(1, 12, version=read.version, at=read.location)
    for effect in ("", "DO 1"):
        assert move(node, datastore, late, effect=effect) == [late]
    assert not node.run(checkpoint_table.write_at, datastore, read, "DO 1")
    assert rows(node, datastore)[1].position == at(1, 5)
    assert move(node, datastore, to(1, 12, version=read.version, at=at(1, 5).location)) == []


def test_an_effect_and_its_checkpoints_are_one_transaction(node, datastore):
    make(node, datastore, 1, 7)
    effect = f"UPDATE schemaless.checkpoint SET added_id = 99 WHERE datastore = '{datastore}' AND shard = 7"
    assert move(node, datastore, to(1, 4), effect=effect) == []
    assert {n: c.location.added_id for n, c in rows(node, datastore).items()} == {1: 4, 7: 99}
    with pytest.raises(SchemalessError):
        move(node, datastore, to(1, 5, version=1), effect=effect + ";SELECT no_such_column")
    assert rows(node, datastore)[1].location.added_id == 4


def test_nothing_of_a_transaction_stays_when_one_compare_and_set_is_lost(node, datastore):
    """I10: also not the moves that came with it."""
    make(node, datastore, 1, 2, 7)
    effect = f"UPDATE schemaless.checkpoint SET added_id = 99 WHERE datastore = '{datastore}' AND shard = 7"
    late = to(2, 4, version=3)
    moved = node.run(checkpoint_table.move, datastore, [to(1, 4), late], effect)
    assert (moved.overtaken, moved.undone) == ([late], [to(1, 4)])
    assert {n: c.location.added_id for n, c in rows(node, datastore).items()} == {1: 0, 2: 0, 7: 0}


def test_rows_are_found_by_their_keys(node, datastore):
    """A move locks no row of other consumers and shards: those move at the same time."""
    make(node, datastore, *range(200))
    moved = checkpoint_table._compare_and_set(datastore, [to(3, 5), to(9, 5)], worker=1)

    def plan():
        return (yield from query(f"EXPLAIN FORMAT=TRADITIONAL {moved}"))

    (row,) = [found for found in node.run(plan) if "rows_" in found]
    assert "eq_ref" in row


def test_a_stopped_shard_keeps_its_reason_and_does_not_move_until_resumed(node, datastore):
    """Stopping is part of the move. Resuming clears the reason."""
    make(node, datastore, 1, 2)
    assert move(node, datastore, to(1, 4, stop_reason="it's broken \\ ünïcode"), to(2, 9)) == []
    found = rows(node, datastore)
    assert (found[1].state, found[1].reason, found[1].location.added_id) == (State.STOPPED, "it's broken \\ ünïcode", 4)
    assert (found[2].state, found[2].reason) == (State.RUNNING, None)
    late = to(1, 5, version=1)
    assert move(node, datastore, late) == [late]
    assert node.run(checkpoint_table.resume, datastore, CONSUMER, [1, 2]) == 1
    assert move(node, datastore, to(1, 5, version=2)) == []
    assert rows(node, datastore)[1].reason is None


def test_of_two_that_read_the_same_checkpoint_one_moves_it(node, datastore):
    """However they interleave, exactly one compare-and-set of each round wins."""
    make(node, datastore, 1)
    rounds = 20
    wins: list[int] = []
    barrier = threading.Barrier(2)

    def compete(who):
        for n in range(rounds):
            barrier.wait(LIMIT_S)
            if not move(node, datastore, to(1, n * 2 + 1 + who, version=n)):
                wins.append(n)
            barrier.wait(LIMIT_S)

    with ThreadPoolExecutor(2) as pool:
        for competing in [pool.submit(compete, who) for who in (0, 1)]:
            competing.result()
    assert sorted(wins) == list(range(rounds))


async def test_what_all_clusters_have_reached_counts_and_each_catches_up_by_itself(async_storage, make_datastore):
    """A process that ended between two clusters left one ahead: only the other one moves, both get their effects."""
    datastore = make_datastore(shards=2, partitions=1)

    def opened():
        return Checkpoints(CommitLanes(async_storage, datastore), CONSUMER, CheckpointPlacement.EVERYWHERE)

    first = opened()
    assert (await first.read([0, 1]))[1].position.location == Location(1, 0)
    await async_storage.master("a").run(checkpoint_table.move, datastore.name, [to(0, 5)])
    second = opened()
    assert (await second.read([0]))[0].position.location == Location(1, 0)
    assert not await second.move({0: Advance(at(0, 4))}, {"a": "DO 1", "b": "DO 1"})
    assert (await second.read([0]))[0].position == at(0, 4)
    assert not await second.move({0: Advance(at(0, 9))}, {})
    assert (await opened().read([0]))[0].position == at(0, 9)
    assert await first.move({0: Advance(at(0, 3))}, {"b": "DO 1"}) == {0}


async def test_a_cluster_that_is_ahead_is_compared_too(async_storage, make_datastore):
    """Its effects are written again. A late process writes none, though that checkpoint wouldn't move (I10)."""
    datastore = make_datastore(shards=2, partitions=1)
    late, owner = (
        Checkpoints(CommitLanes(async_storage, datastore), CONSUMER, CheckpointPlacement.EVERYWHERE) for _ in range(2)
    )
    await late.read([0, 1])
    await async_storage.master("a").run(checkpoint_table.move, datastore.name, [to(0, 5)])
    await late.read([0])
    await owner.read([0, 1])
    assert not await owner.move({0: Advance(at(0, 4))}, {"a": "DO 1", "b": "DO 1"})
    assert (await owner.read([0]))[0].ahead == (at(0, 5),)
    lost = await late.move({0: Advance(at(0, 3)), 1: Advance(at(1, 2))}, {"a": "DO 1"})
    assert 0 in lost
    (moved,) = await async_storage.master("a").run(checkpoint_table.of_consumer, datastore.name, CONSUMER, [1])
    assert moved.location == Location(1, 0), "nothing of the transaction stays"


async def test_moves_of_many_shards_at_once_are_all_answered(async_storage, make_datastore):
    """Moves that wait for one another share statements. A refused one doesn't refuse the others."""
    datastore = make_datastore(shards=40, partitions=1, placement=("a",))
    zombie, owner = (
        Checkpoints(CommitLanes(async_storage, datastore), CONSUMER, CheckpointPlacement.HOME) for _ in range(2)
    )
    await zombie.read(range(40))
    await owner.read(range(40))
    await owner.move({7: Advance(at(7, 3))}, {})
    lost = await asyncio.gather(*(zombie.move({shard: Advance(at(shard, 2))}, {}) for shard in range(40)))
    assert [shard for shard, found in enumerate(lost) if found] == [7]
    found = await owner.read(range(40))
    assert {shard: row.position.added_id for shard, row in found.items()} == {**dict.fromkeys(range(40), 2), 7: 3}
