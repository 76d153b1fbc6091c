"""Checkpoints on real servers: compare-and-set, alone and with an effect (I10)."""

import asyncio
import threading

import pytest

from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints
from schemaless.consume.ports import Advance, ShardCheckpoint
from schemaless.errors import Fenced, SchemalessError
from schemaless.location import BEGINNING, Location
from schemaless.storage import checkpoint_table
from schemaless.storage.checkpoint_table import Move, State

pytestmark = pytest.mark.storage

CONSUMER = "trigger:test"


@pytest.fixture
def node(storage):
    return storage.master("a")


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=1, partitions=1).name


def stands(node, datastore):
    return {c.shard: c for c in node.run(checkpoint_table.of_consumer, datastore, CONSUMER)}


def make(node, datastore, *shards):
    node.run(checkpoint_table.make, datastore, CONSUMER, dict.fromkeys(shards, BEGINNING))


def move(node, datastore, *moves):
    return node.run(checkpoint_table.move, datastore, CONSUMER, moves)


def test_checkpoints_move_together_and_each_for_itself(node, datastore):
    """One statement moves many; one that another process moved is named, the others moved."""
    make(node, datastore, 1, 2, 3)
    assert move(node, datastore, *(Move(n, BEGINNING, Location(1, n * 10)) for n in (1, 2, 3))) == []
    late = Move(2, BEGINNING, Location(1, 21))
    assert move(node, datastore, Move(1, Location(1, 10), Location(2, 11)), late) == [late]
    found = stands(node, datastore)
    assert [found[n].location for n in (1, 2, 3)] == [Location(2, 11), Location(1, 20), Location(1, 30)]


def test_a_move_whose_answer_was_lost_counts_as_done(node, datastore):
    """Run again with the outcome unknown, a move that has happened is no refusal."""
    make(node, datastore, 1)
    moved = Move(1, BEGINNING, Location(1, 5))
    assert move(node, datastore, moved) == []
    assert move(node, datastore, moved) == []
    assert node.run(checkpoint_table.move, datastore, CONSUMER, [moved], "DO 1") == []


def test_making_a_checkpoint_leaves_one_that_is_there(node, datastore):
    """Two processes may make it at once."""
    make(node, datastore, 1)
    move(node, datastore, Move(1, BEGINNING, Location(1, 5)))
    make(node, datastore, 1, 2)
    assert {n: c.location.added_id for n, c in stands(node, datastore).items()} == {1: 5, 2: 0}


def test_an_effect_and_its_checkpoints_are_one_transaction(node, datastore):
    """Checkpoints move with the effect; one that another process moved is named, and stays where that put it."""
    make(node, datastore, 1, 2, 7)
    effect = f"UPDATE schemaless.checkpoint SET added_id = 99 WHERE datastore = '{datastore}' AND shard = 7"
    late = Move(2, Location(1, 3), Location(1, 4))
    moves = [Move(1, BEGINNING, Location(1, 4)), late]
    assert node.run(checkpoint_table.move, datastore, CONSUMER, moves, effect) == [late]
    assert {n: c.location.added_id for n, c in stands(node, datastore).items()} == {1: 4, 2: 0, 7: 99}
    with pytest.raises(SchemalessError):
        node.run(
            checkpoint_table.move,
            datastore,
            CONSUMER,
            [Move(1, Location(1, 4), Location(1, 5))],
            effect + ";SELECT no_such_column",
        )
    assert stands(node, datastore)[1].location.added_id == 4


def test_a_stopped_shard_keeps_its_reason_and_does_not_move_until_resumed(node, datastore):
    """Stopping is part of the move; resuming clears the reason."""
    make(node, datastore, 1, 2)
    both = [Move(1, BEGINNING, Location(1, 4), "it's broken \\ ünïcode"), Move(2, BEGINNING, Location(1, 9))]
    assert move(node, datastore, *both) == []
    found = stands(node, datastore)
    assert (found[1].state, found[1].reason, found[1].location.added_id) == (State.STOPPED, "it's broken \\ ünïcode", 4)
    assert (found[2].state, found[2].reason) == (State.RUNNING, None)
    late = Move(1, Location(1, 4), Location(1, 5))
    assert move(node, datastore, late) == [late]
    assert node.run(checkpoint_table.resume, datastore, CONSUMER, [1, 2]) == 1
    assert move(node, datastore, late) == []
    assert stands(node, datastore)[1].reason is None


def test_of_two_that_read_the_same_checkpoint_one_moves_it(node, datastore):
    """However they interleave, exactly one compare-and-set of each round wins."""
    make(node, datastore, 1)
    rounds = 20
    wins: list[tuple[int, int]] = []
    barrier = threading.Barrier(2)

    def compete(who):
        for n in range(rounds):
            barrier.wait()
            target = Location(1, n * 2 + 1 + who)
            if not move(node, datastore, Move(1, Location(1, at(n)), target)):
                wins.append((n, target.added_id))
            barrier.wait()

    def at(n):
        return 0 if n == 0 else dict(wins)[n - 1]

    threads = [threading.Thread(target=compete, args=(who,)) for who in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [n for n, _ in sorted(wins)] == list(range(rounds))


async def test_what_all_clusters_have_reached_counts_and_each_catches_up_by_itself(async_storage, make_datastore):
    """A process that ended between two clusters left one ahead: only the other one moves, both get their effects."""
    datastore = make_datastore(shards=2, partitions=1)

    def opened():
        return Checkpoints(async_storage, datastore, CONSUMER, CheckpointPlacement.EVERYWHERE)

    first = opened()
    assert (await first.read([0, 1]))[1] == ShardCheckpoint(BEGINNING)
    ahead = [Move(0, BEGINNING, Location(1, 5))]
    await async_storage.master("a").run(checkpoint_table.move, datastore.name, CONSUMER, ahead)
    second = opened()
    assert (await second.read([0]))[0].location == BEGINNING
    await second.move({0: Advance(Location(1, 4))}, {"a": "DO 1", "b": "DO 1"})
    assert (await second.read([0]))[0].location == Location(1, 4)
    await second.move({0: Advance(Location(1, 9))}, {})
    assert (await opened().read([0]))[0].location == Location(1, 9)
    with pytest.raises(Fenced):
        await first.move({0: Advance(Location(1, 3))}, {"b": "DO 1"})


async def test_moves_of_many_shards_at_once_are_all_answered(async_storage, make_datastore):
    """Moves that wait for one another share statements; a refused one doesn't refuse the others."""
    datastore = make_datastore(shards=40, partitions=1, placement=("a",))
    zombie, owner = (Checkpoints(async_storage, datastore, CONSUMER, CheckpointPlacement.HOME) for _ in range(2))
    await zombie.read(range(40))
    await owner.read(range(40))
    await owner.move({7: Advance(Location(1, 3))}, {})
    answers = await asyncio.gather(
        *(zombie.move({shard: Advance(Location(1, 2))}, {}) for shard in range(40)), return_exceptions=True
    )
    assert [shard for shard, answer in enumerate(answers) if answer is not None] == [7]
    assert isinstance(answers[7], Fenced)
    found = await owner.read(range(40))
    assert {shard: standing.location.added_id for shard, standing in found.items()} == {
        **dict.fromkeys(range(40), 2),
        7: 3,
    }
