"""Gathered moves (I10): checkpoints that move together share a transaction, each with its own effect and outcome."""

import asyncio

import pytest

from schemaless.consume.checkpoint_batching import GatheredMoves
from schemaless.errors import Fenced
from schemaless.location import BEGINNING, Location
from schemaless.storage.checkpoint_table import Move
from schemaless.storage.operation import Result

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
            await asyncio.sleep(0.01)
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
    gathered = GatheredMoves(master, "d", "c")
    under_way = asyncio.create_task(gathered.move(move(0), "EFFECT 0"))
    await asyncio.sleep(0.001)
    await asyncio.gather(under_way, *(gathered.move(move(shard), f"EFFECT {shard}") for shard in (1, 2, 3)))
    first, second = master.scripts
    assert "EFFECT 0" in first
    assert [f"EFFECT {shard}" in second for shard in range(4)] == [False, True, True, True]
    assert (second.count("BEGIN"), second.count("UPDATE"), second.count("COMMIT")) == (1, 1, 1)


async def test_only_the_move_that_was_overtaken_is_fenced():
    """I10: what another process moved is told to its own caller, not to those whose moves shared the transaction."""
    gathered = GatheredMoves(Master(lost=(2,)), "d", "c")
    outcomes = await asyncio.gather(*(gathered.move(move(shard)) for shard in range(4)), return_exceptions=True)
    assert [isinstance(outcome, Fenced) for outcome in outcomes] == [False, False, True, False]


async def test_a_lost_move_alone_is_fenced():
    """The compare-and-set is asked for even when nothing else moves."""
    with pytest.raises(Fenced):
        await GatheredMoves(Master(lost=(0,)), "d", "c").move(move(0), "EFFECT")
