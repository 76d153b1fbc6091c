"""Lagging: how soon a shard is read again whose last read brought nothing, although its head is known to be further on.

The node that was read lags, or can't be read. It is tried after a growing pause, not in every turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from schemaless.location import Location

PAUSE_S = 0.02
PAUSE_MAX_S = 1.0


class _Try(msgspec.Struct, frozen=True):
    position: Location | None
    again_at: float
    pause_s: float


class Lagging:
    """Of one follower."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tries: dict[int, _Try] = {}

    def due(self, ahead: Mapping[int, Location | None]) -> list[int]:
        """Those of the shards that are to be read now; they count as tried at these positions."""
        now = self._clock()
        due = [shard for shard, position in ahead.items() if self._again_at(shard, position) <= now]
        for shard in due:
            self._tried(shard, ahead[shard], now)
        return due

    def next_due(self, ahead: Mapping[int, Location | None], otherwise: float) -> float:
        """When the first of the shards is due."""
        return min((self._again_at(shard, position) for shard, position in ahead.items()), default=otherwise)

    def _again_at(self, shard: int, position: Location | None) -> float:
        last = self._tries.get(shard)
        return last.again_at if last is not None and last.position == position else 0.0

    def _tried(self, shard: int, position: Location | None, now: float) -> None:
        last = self._tries.get(shard)
        repeated = last is not None and last.position == position
        pause_s = min(last.pause_s * 2, PAUSE_MAX_S) if last is not None and repeated else PAUSE_S
        self._tries[shard] = _Try(position, now + pause_s, pause_s)
