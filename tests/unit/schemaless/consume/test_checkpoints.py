"""Checkpoints of trigger programs (I10): moves that come together share a statement, and each gets its outcome."""

import asyncio

import pytest

from schemaless.consume.checkpoints import Checkpoints, Stand
from schemaless.consume.ports import Advance
from schemaless.errors import Unavailable
from schemaless.location import BEGINNING, Location
from schemaless.storage.checkpoint_table import Checkpoint, State
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
    checkpoints = Checkpoints(Storage(master), Datastore("d", 2, 1, ("a",)), "c", Stand.HOME)
    await checkpoints.read([0, 1])
    master.failing = True
    moving = asyncio.create_task(checkpoints.move({0: Advance(Location(1, 5))}, {}))
    await asyncio.sleep(0)  # the move is handed over
    (lane,) = [lane for gathered in checkpoints._gathered.values() for lane in gathered._batcher._lanes]
    with pytest.raises(Unavailable):
        await asyncio.wait_for(moving, 5)
    with pytest.raises(ZeroDivisionError):
        await lane
