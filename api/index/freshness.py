"""ReachedWatch: queries that wait until an index has reached a put's location share their looking.

One small question to a node for each index and turn, however many queries wait. It only says when to ask again: the
query itself proves, on the node that answers it, that it includes the put.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from api.read.reader import Reader
from schemaless.errors import SchemalessError
from schemaless.location import Location, ShardLocation
from schemaless.storage import checkpoint_table
from schemaless.topology import Role

_PAUSE_S = 0.005
_PAUSE_MAX_S = 0.05
_PAUSE_OF_AGE = 0.1  # who has waited for long can wait a tenth of it more


class Place(msgspec.Struct, frozen=True):
    """Where the checkpoints of one consumer are looked at: `wish` as of Reader.read."""

    cluster: str
    read_from: Role | None
    datastore: str
    consumer: str


class ReachedWatch:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lanes: dict[Place, _CheckpointPoll] = {}

    async def reached(self, place: Place, wanted: ShardLocation) -> None:
        """Returns when a node there has shown a checkpoint at or behind `wanted`. Raises StorageUnavailable."""
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes[place] = _CheckpointPoll(self._reader, place)
        try:
            await lane.reached(wanted)
        finally:
            if lane.idle and self._lanes.get(place) is lane:
                del self._lanes[place]


class _Waiting(msgspec.Struct, frozen=True, eq=False):
    wanted: ShardLocation
    done: asyncio.Future[None]
    since: float


class _CheckpointPoll:
    def __init__(self, reader: Reader, place: Place) -> None:
        self._reader = reader
        self._place = place
        self._waiting: set[_Waiting] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return not self._waiting

    async def reached(self, wanted: ShardLocation) -> None:
        me = _Waiting(wanted, asyncio.get_running_loop().create_future(), time.monotonic())
        self._waiting.add(me)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_until_idle())
        try:
            await me.done
        finally:
            self._waiting.discard(me)

    async def _look_until_idle(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._pause_s())
            try:
                self._wake(await self._look())
            except SchemalessError as error:
                for waiting in self._waiting:
                    if not waiting.done.done():
                        waiting.done.set_exception(error)
                return

    async def _look(self) -> dict[int, Location]:
        shards = {waiting.wanted.shard for waiting in self._waiting}
        place = self._place
        found, _ = await self._reader.read(
            place.cluster,
            checkpoint_table.of_consumer,
            place.datastore,
            place.consumer,
            sorted(shards),
            read_from=place.read_from,
        )
        return {checkpoint.shard: checkpoint.location for checkpoint in found}

    def _wake(self, found: dict[int, Location]) -> None:
        for waiting in self._waiting:
            location = found.get(waiting.wanted.shard)
            if location is not None and location >= waiting.wanted.location and not waiting.done.done():
                waiting.done.set_result(None)

    def _pause_s(self) -> float:
        """By the age of the youngest."""
        youngest = max((waiting.since for waiting in self._waiting), default=0.0)
        return min(_PAUSE_MAX_S, max(_PAUSE_S, (time.monotonic() - youngest) * _PAUSE_OF_AGE))
