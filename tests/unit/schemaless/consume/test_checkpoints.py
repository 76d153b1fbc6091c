"""Checkpoints of trigger programs (I10): moves that come together share a statement, and each gets its outcome."""

import asyncio

import pytest

from schemaless.consume.checkpoints import CheckpointBatcher, CheckpointPlacement, Checkpoints
from schemaless.consume.ports import Advance
from schemaless.errors import Fenced, Unavailable
from schemaless.location import BEGINNING, Location
from schemaless.storage.checkpoint_table import Checkpoint, Move, State
from schemaless.storage.operation import Result
from schemaless.topology import Datastore


class BrokenMaster:
    """Shows checkpoints at the beginning; moves them not, but fails as nobody foresaw."""

    def __init__(self):
        self.failing = False

    async def run(self, operation, *args, **_):
        await asyncio.sleep(0)
        if self.failing:
            raise ZeroDivisionError
        return [Checkpoint("c", shard, BEGINNING, State.RUNNING, None, 0) for shard in (0, 1)]


class Storage:
    def __init__(self, master):
        self._master = master

    def master(self, cluster):
        return self._master


async def test_an_unforeseen_failure_leaves_no_move_waiting():
    """A shard whose move never ended would stand still for ever."""
    master = BrokenMaster()
    checkpoints = Checkpoints(Storage(master), Datastore("d", 2, 1, ("a",)), "c", CheckpointPlacement.HOME)
    await checkpoints.read([0, 1])
    master.failing = True
    moving = asyncio.create_task(checkpoints.move({0: Advance(Location(1, 5))}, {}))
    await asyncio.sleep(0)  # the move is handed over
    (lane,) = [lane for batcher in checkpoints._batchers.values() for lane in batcher._batcher._lanes]
    with pytest.raises(Unavailable):
        await asyncio.wait_for(moving, 5)
    with pytest.raises(ZeroDivisionError):
        await lane


AT_5 = Location(1, 5)


class Master:
    """Runs scripts of moves; all checkpoints move but those of `lost` shards, where another process stands at 1:9."""

    def __init__(self, lost=()):
        self.scripts = []
        self._lost = lost

    async def run(self, operation, *args, **_):
        operation = operation(*args)
        script = next(operation)
        while True:
            await asyncio.sleep(0)
            try:
                script = operation.send(self._answer(script))
            except StopIteration as done:
                return done.value

    def _answer(self, script):
        if script.startswith("SELECT"):
            return [Result([("c", n, 1, 9 if n in self._lost else 5, "running", None, 0) for n in range(4)])]
        self.scripts.append(script)
        shards = [int(part) for part in script.split("AND shard IN (")[1].split(")")[0].split(",")]
        moved = Result((), len([shard for shard in shards if shard not in self._lost]))
        return [Result(()), Result(()), moved, Result(())] if script.startswith("BEGIN") else [moved]


def move(shard):
    return [Move(shard, BEGINNING, AT_5)]


async def test_moves_share_a_transaction_with_their_effects():
    """The first goes at once; what comes meanwhile goes together, effects and checkpoints in one transaction."""
    master = Master()
    batcher = CheckpointBatcher(master, "d", "c")
    under_way = asyncio.create_task(batcher.move(move(0), "EFFECT 0"))
    await asyncio.sleep(0)  # it is in flight
    await asyncio.gather(under_way, *(batcher.move(move(shard), f"EFFECT {shard}") for shard in (1, 2, 3)))
    first, second = master.scripts
    assert "EFFECT 0" in first
    assert [f"EFFECT {shard}" in second for shard in range(4)] == [False, True, True, True]
    assert (second.count("BEGIN"), second.count("UPDATE"), second.count("COMMIT")) == (1, 1, 1)


async def test_only_the_move_that_was_overtaken_is_fenced():
    """I10: what another process moved is told to its own caller, not to those whose moves shared the transaction."""
    batcher = CheckpointBatcher(Master(lost=(2,)), "d", "c")
    outcomes = await asyncio.gather(*(batcher.move(move(shard)) for shard in range(4)), return_exceptions=True)
    assert [isinstance(outcome, Fenced) for outcome in outcomes] == [False, False, True, False]


async def test_a_lost_move_alone_is_fenced():
    """The compare-and-set is asked for even when nothing else moves."""
    with pytest.raises(Fenced):
        await CheckpointBatcher(Master(lost=(0,)), "d", "c").move(move(0), "EFFECT")
