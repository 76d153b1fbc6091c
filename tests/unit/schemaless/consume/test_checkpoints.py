"""Checkpoints (I10): moves that come together share a transaction, and each gets its outcome."""

import asyncio
import re
from functools import partial
from types import SimpleNamespace

import pytest

from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints, CommitLane, CommitLanes
from schemaless.consume.ports import Advance
from schemaless.errors import NeedsLockedHeads, ShardsMoved, StorageUnavailable, Unavailable
from schemaless.position import Position
from schemaless.storage import checkpoint_table
from schemaless.storage.checkpoint_table import Checkpoint, Move, MoveResult, State
from schemaless.storage.operation import Result
from schemaless.topology import Datastore, Placement


class BrokenMaster:
    """Shows checkpoints at the beginning. It doesn't move them, but fails as nobody foresaw."""

    def __init__(self):
        self.failing = False

    async def run(self, operation, *args, **_):
        await asyncio.sleep(0)
        if self.failing:
            raise ZeroDivisionError
        return [Checkpoint("c", Position(shard, 1, 0), 0, 0, 0, State.RUNNING, None, 0) for shard in (0, 1)]


class Storage:
    def __init__(self, master):
        self._master = master

    def master(self, cluster):
        return self._master


async def test_an_unforeseen_failure_leaves_no_move_waiting():
    """A shard whose move never ended would stand still for ever."""
    master = BrokenMaster()
    lanes = CommitLanes(Storage(master), Datastore("d", 2, 1, ("a",)))
    checkpoints = Checkpoints(lanes, "c", CheckpointPlacement.HOME)
    await checkpoints.read([0, 1])
    master.failing = True
    moving = asyncio.create_task(checkpoints.move({0: Advance(Position(0, 1, 5))}, {}))
    await asyncio.sleep(0)  # the move is handed over
    (lane,) = lanes["a"]._batcher._lanes
    with pytest.raises(Unavailable):
        await asyncio.wait_for(moving, 5)
    with pytest.raises(ZeroDivisionError):
        await lane


class Homes:
    """Two clusters, each with its checkpoints at the beginning."""

    def __init__(self):
        self.down = set()
        self.moved = []

    def master(self, cluster):
        return SimpleNamespace(run=partial(self._run, cluster))

    async def _run(self, cluster, operation, *args, **_):
        await asyncio.sleep(0)
        if cluster in self.down:
            raise StorageUnavailable(cluster)
        if operation is checkpoint_table.move:
            self.moved += [(cluster, move.to.shard) for move in args[1]]
            return MoveResult()
        return [Checkpoint("c", Position(shard, 1, 0), 0, 0, 0, State.RUNNING, None, 0) for shard in (0, 1)]


async def test_what_is_stored_at_one_home_does_not_wait_for_another():
    """Two shards were together until one moved. Stored again, the first one's cells would count twice."""
    homes, datastore = Homes(), Datastore("d", 2, 1, ("a",))
    checkpoints = Checkpoints(CommitLanes(homes, datastore), "c", CheckpointPlacement.HOME)
    await checkpoints.read([0, 1])
    datastore.moves[1] = Placement("d", 1, 1, "b", None, 0)
    homes.down.add("b")
    with pytest.raises(ShardsMoved) as refused:
        await checkpoints.move({shard: Advance(Position(shard, 1, 5)) for shard in (0, 1)}, {})
    assert (refused.value.shards, homes.moved) == ({1}, [("a", 0)])


class Master:
    """Runs scripts of moves. All checkpoints move but those of `lost` shards, where another process stands at 1:9.

    A transaction that meets one of them is undone.
    """

    def __init__(self, lost=()):
        self.scripts = []
        self._lost = lost
        self.moved = set()

    async def run(self, operation, *args, **_):
        operation = operation(*args)
        script = next(operation)
        while True:
            await asyncio.sleep(0)
            try:
                answer = self._answer(script)
            except NeedsLockedHeads as error:
                script = operation.throw(error)
                continue
            try:
                script = operation.send(answer)
            except StopIteration as done:
                return done.value

    def _answer(self, script):
        if script.startswith("SELECT"):
            # added_id and version
            stands = {n: (9, 7) if n in self._lost else (5, 1) if n in self.moved else (0, 0) for n in range(4)}
            rows = [
                ("c", n, 1, at, None, None, 0, 0, version, "running", None, 0, None, 0, 0, *[0] * 5)
                for n, (at, version) in stands.items()
            ]
            return [Result(rows)]
        self.scripts.append(script)
        shards = [int(found) for found in re.findall(r"ascii_bin(?: AS consumer)?,(\d+)", script)]
        moved = [shard for shard in shards if shard not in self._lost]
        if script.startswith("BEGIN") and len(moved) < len(shards):
            raise NeedsLockedHeads("a NULL")
        self.moved.update(moved)
        return [Result((), len(moved))]


def move(shard):
    return [Move("c", 0, Position(shard, 1, 5))]


async def test_moves_share_a_transaction_with_their_effects():
    """What comes a moment after the first goes with it, checkpoints first and then the effects."""
    master = Master()
    lane = CommitLane(master, "d")
    first = asyncio.create_task(lane.move(move(0), "EFFECT 0"))
    await asyncio.sleep(0)
    await asyncio.gather(first, *(lane.move(move(shard), f"EFFECT {shard}") for shard in (1, 2, 3)))
    (script,) = master.scripts
    assert [f"EFFECT {shard}" in script for shard in range(4)] == [True] * 4
    assert (script.count("BEGIN"), script.count("UPDATE ("), script.count("COMMIT")) == (1, 1, 1)
    assert script.index("UPDATE (") < script.index("EFFECT 0")


async def test_only_the_move_that_was_overtaken_is_lost():
    lane = CommitLane(Master(lost=(2,)), "d")
    outcomes = await asyncio.gather(*(lane.move(move(shard)) for shard in range(4)))
    assert [outcome.overtaken for outcome in outcomes] == [[], [], move(2), []]


async def test_nothing_of_an_effect_stays_whose_move_is_lost_and_the_others_are_committed_again():
    master = Master(lost=(2,))
    lane = CommitLane(master, "d")
    outcomes = await asyncio.gather(*(lane.move(move(shard), f"EFFECT {shard}") for shard in range(4)))
    assert [outcome.overtaken for outcome in outcomes] == [[], [], move(2), []]
    assert [f"EFFECT {shard}" in master.scripts[-1] for shard in range(4)] == [True, True, False, True]
    assert master.moved == {0, 1, 3}


async def test_a_change_without_an_effect_moves_also_when_others_of_its_transaction_are_overtaken():
    master = Master(lost=(2, 3))
    lane = CommitLane(master, "d")
    first = asyncio.create_task(lane.move(move(0), "EFFECT 0"))
    await asyncio.sleep(0)
    outcomes = await asyncio.gather(first, lane.move(move(1) + move(2)), lane.move(move(3), "EFFECT 3"))
    assert [outcome.overtaken for outcome in outcomes] == [[], move(2), move(3)]
    assert master.moved == {0, 1}
