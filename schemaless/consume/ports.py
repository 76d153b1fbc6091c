"""The ports of delivery: what a consumer does with consecutive cells, and where checkpoints and cells are kept.

These are values and protocols, without I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from schemaless.cell import StoredCell
from schemaless.location import GenerationStart, Location

Script = str
"""SQL that only storage writes and runs."""


class Run(msgspec.Struct, frozen=True, gc=False):
    """Consecutive cells of one shard, at least one. The first of them is right after the location `after`."""

    shard: int
    after: Location
    cells: Sequence[StoredCell]


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How many cells of a run are finished. The rest comes again after `retry_in_s`. With a reason the shard stops."""

    finished: int
    retry_in_s: float = 0.0
    stop_reason: str | None = None


class Effect(msgspec.Struct, frozen=True, gc=False):
    """Outcomes in the order of the runs. `scripts`, by cluster, join the transactions that move the checkpoints."""

    outcomes: Sequence[Outcome]
    scripts: Mapping[str, Script] = {}


class Handler(Protocol):
    """May be given a cell more than once (at least once, I9)."""

    @property
    def together(self) -> bool:
        """Whether runs of several shards share one call. Otherwise each shard has a call of its own."""

    async def handle(self, runs: Sequence[Run]) -> Effect: ...


@dataclass(frozen=True, slots=True)
class ShardCheckpoint:
    """How far a shard is finished. `running` is False for a shard that stopped."""

    location: Location
    running: bool = True


@dataclass(frozen=True, slots=True)
class Advance:
    """Where a shard's checkpoint moves to. With a reason the shard stops there."""

    to: Location
    stop_reason: str | None = None


class CheckpointStore(Protocol):
    @property
    def consumer(self) -> str: ...

    async def read(self, shards: Iterable[int]) -> dict[int, ShardCheckpoint]: ...

    async def move(self, advances: Mapping[int, Advance], effects: Mapping[str, Script]) -> None: ...


class Log(Protocol):
    async def read_after(self, positions: Mapping[int, int], limit: int) -> dict[int, list[StoredCell]]: ...

    async def generations(self, shard: int) -> list[GenerationStart]: ...
