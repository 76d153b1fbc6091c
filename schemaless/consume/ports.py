"""The ports of delivery: what a consumer does with consecutive cells, and where checkpoints and cells are kept.

These are values and protocols, without I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from schemaless.cell import StoredCell
from schemaless.errors import LocationGone
from schemaless.location import Location
from schemaless.position import Position
from schemaless.shard_cursor import ProvenPage

Script = str
"""SQL that only storage writes and runs."""


class Run(msgspec.Struct, frozen=True, gc=False):
    """Consecutive cells of one shard, at least one. The first of them is right after the location `after`."""

    shard: int
    after: Location
    cells: Sequence[StoredCell]


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How many cells of a run are finished. The rest comes again after `retry_in_s`. With a reason the shard stops.

    `idle`: they had no effect, so it costs nothing if they come again after a crash.
    """

    finished: int
    retry_in_s: float = 0.0
    stop_reason: str | None = None
    idle: bool = False


class Effect(msgspec.Struct, frozen=True, gc=False):
    """Outcomes in the order of the runs. `scripts`, by cluster, join the transactions that move the checkpoints."""

    outcomes: Sequence[Outcome]
    scripts: Mapping[str, Script] = {}


class Handler(Protocol):
    """May be given a cell more than once (at least once, I9)."""

    @property
    def together(self) -> bool:
        """Whether runs of several shards share one call. Otherwise each shard has a call of its own."""

    @property
    def record_within_s(self) -> float:
        """How long a finished cell may wait until its checkpoint is stored. 0: it is stored at once, with its effect.

        What was not stored comes again after a crash.
        """

    async def handle(self, runs: Sequence[Run]) -> Effect: ...

    async def supersede(self, shard: int, starts_at: int, generation: int) -> Effect:
        """A new generation superseded the shard's cells from `starts_at` on (I13). Returns scripts and no outcomes."""


class ShardCheckpoint(msgspec.Struct, frozen=True, gc=False):
    """How far a shard is finished. With a reason the shard stopped there.

    `ahead`: the positions of clusters that are further, because a process ended between two clusters. The log may have
    lost the cells at them since.
    """

    position: Position
    stop_reason: str | None = None
    ahead: tuple[Position, ...] = ()


class Advance(msgspec.Struct, frozen=True, gc=False):
    """Where a shard's checkpoint moves to, by how many cells. With a reason the shard stops there.

    `restart`: it moves back, because a generation superseded what was finished.
    """

    to: Position
    finished: int = 0
    stop_reason: str | None = None
    restart: bool = False


class CheckpointStore(Protocol):
    @property
    def consumer(self) -> str: ...

    async def read(self, shards: Iterable[int]) -> dict[int, ShardCheckpoint]:
        """Returns the checkpoints of these shards, and makes those that are missing. Raises StorageUnavailable."""

    async def move(self, advances: Mapping[int, Advance], effects: Mapping[str, Script]) -> frozenset[int]:
        """Moves checkpoints. Returns the shards of which another process moved the checkpoint.

        If there are any, nothing of the effects stays. Without effects the other shards have moved. Raises
        StorageUnavailable.
        """


class Log(Protocol):
    async def read(self, wanted: Mapping[int, Position], limit: int) -> Mapping[int, ProvenPage | LocationGone]:
        """Returns the pages after these positions, of at most `limit` cells each, bounded in bytes together.

        A shard for which no bytes were left isn't in the answer. Raises StorageUnavailable.
        """
