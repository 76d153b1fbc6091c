"""RefusedWrites decides when an index has failed: a server refuses what it writes, and would refuse it again.

A cell that can't be decoded fails a build in the same way.

A transaction carries the writes of several indexes, and its error may be another one's fault. So an index fails only
where the same source shard is refused again and again, without a success in between. An outage is no refusal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from schemaless.consume.ports import Advance, CheckpointStore, Script, ShardCheckpoint
from schemaless.errors import RefusedForGood, TableMissing

FAILED_AFTER_S = 3.0
FAILED_AFTER_TIMES = 3


class _Refused(msgspec.Struct):
    since: float
    times: int = 0


class RefusedWrites:
    """The checkpoints of one index, which remember which source shards are refused. `clock` counts seconds."""

    def __init__(self, checkpoints: CheckpointStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._checkpoints = checkpoints
        self._clock = clock
        self._refused: dict[int, _Refused] = {}
        self.reason: str | None = None
        """Why the index has failed."""

    @property
    def consumer(self) -> str:
        return self._checkpoints.consumer

    async def read(self, shards: Iterable[int]) -> dict[int, ShardCheckpoint]:
        return await self._checkpoints.read(shards)

    async def move(self, advances: Mapping[int, Advance], effects: Mapping[str, Script]) -> frozenset[int]:
        try:
            lost = await self._checkpoints.move(advances, effects)
        except (RefusedForGood, TableMissing) as error:
            self.note(advances, error)
            raise
        self.succeeded(advances)
        return lost

    def succeeded(self, shards: Iterable[int]) -> None:
        """Takes note that no server refuses these shards."""
        for shard in shards:
            self._refused.pop(shard, None)

    async def give_away(self, shards: Iterable[int]) -> None:
        await self._checkpoints.give_away(shards)

    def note(self, shards: Iterable[int], error: Exception) -> None:
        """Takes note that these shards can't be written: a server refuses it, or a cell can't be decoded."""
        now = self._clock()
        for shard in shards:
            refused = self._refused.setdefault(shard, _Refused(now))
            refused.times += 1
            if refused.times >= FAILED_AFTER_TIMES and now - refused.since >= FAILED_AFTER_S:
                self.reason = f"the cells of shard {shard} can't be indexed: {error}"
