"""CheckpointWaiter: queries that wait until an index has reached a put's location share their polls.

Each poll of an index asks a node one small question, however many queries wait. The answer only says when to run the
query again. The query itself proves, on the node that answers it, that it includes the put.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from api.read.reader import Reader
from schemaless.errors import SchemalessError
from schemaless.location import ShardLocation
from schemaless.storage import checkpoint_table
from schemaless.topology import Role

PAUSE_S = 0.005
PAUSE_MAX_S = 0.05
PAUSE_OF_WAIT = 0.1  # the pause is a tenth of the time that the youngest query has waited


class CheckpointsAt(msgspec.Struct, frozen=True):
    """Where the checkpoints of one consumer are read."""

    cluster: str
    read_from: Role | None
    datastore: str
    consumer: str


class _Waiting(msgspec.Struct, frozen=True, eq=False):
    wanted: ShardLocation
    done: asyncio.Future[None]
    since: float
    has_seen: bool


class CheckpointWaiter:
    """Belongs to one event loop. `pause` waits between polls."""

    def __init__(
        self,
        reader: Reader,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._reader = reader
        self._clock = clock
        self._pause = pause
        self._waiting: dict[CheckpointsAt, set[_Waiting]] = {}
        self._polling: dict[CheckpointsAt, asyncio.Task[None]] = {}

    async def reached(self, place: CheckpointsAt, wanted: ShardLocation, *, has_seen: bool = False) -> None:
        """Returns when a node has shown a checkpoint at or after `wanted`, or none after one was seen.

        `has_seen`: whether the query has seen one, before it waited. Raises StorageUnavailable.
        """
        me = _Waiting(wanted, asyncio.get_running_loop().create_future(), self._clock(), has_seen)
        waiting = self._waiting.setdefault(place, set())
        waiting.add(me)
        if place not in self._polling:
            self._polling[place] = asyncio.create_task(self._poll(place))
        try:
            await me.done
        finally:
            waiting.discard(me)

    async def _poll(self, place: CheckpointsAt) -> None:
        """Polls until nobody waits, or until the error of a poll has gone to everybody who does."""
        waiting = self._waiting[place]
        seen = set[int]()
        try:
            while waiting:
                youngest = max(one.since for one in waiting)
                await self._pause(min(PAUSE_MAX_S, max(PAUSE_S, (self._clock() - youngest) * PAUSE_OF_WAIT)))
                shards = sorted({one.wanted.shard for one in waiting})
                if not shards:
                    break
                checkpoints, _ = await self._reader.read(
                    place.cluster,
                    checkpoint_table.of_consumer,
                    place.datastore,
                    place.consumer,
                    shards,
                    read_from=place.read_from,
                )
                reached = {checkpoint.shard: checkpoint.location for checkpoint in checkpoints}
                for one in waiting:
                    location = reached.get(one.wanted.shard)
                    # One that is there no more went with its index. The query finds that out.
                    was_there = one.has_seen or one.wanted.shard in seen
                    is_due = was_there if location is None else location >= one.wanted.location
                    if is_due and not one.done.done():
                        one.done.set_result(None)
                seen.update(reached)
        except SchemalessError as error:
            for one in waiting:
                if not one.done.done():
                    one.done.set_exception(error)
        finally:
            del self._polling[place], self._waiting[place]
