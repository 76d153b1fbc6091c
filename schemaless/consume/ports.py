"""The ports of delivery: what a consumer does with consecutive cells, and where checkpoints and cells are kept.

These are values and protocols, without I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from math import inf
from typing import Protocol

import msgspec

from schemaless.cell import StoredCell
from schemaless.codec import Erasing, erasing
from schemaless.errors import LocationGone
from schemaless.location import Location
from schemaless.names import ERASE_COLUMN
from schemaless.position import Position
from schemaless.shard_cursor import ProvenPage
from schemaless.storage.checkpoint_table import NO_COUNTS, CellCounts

Script = str
"""SQL that only storage writes and runs."""


class Run(msgspec.Struct, frozen=True, gc=False):
    """Consecutive cells of one shard. The first of them is right after the location `after`.

    It has none where a handler asked for a call though nothing new came. `careful`: a process died that had the shard.
    """

    shard: int
    after: Location
    cells: Sequence[StoredCell]
    careful: bool = False

    @property
    def before_erasure(self) -> Run:
        """The run up to the first entry of an erasure (I19), or that entry alone."""
        first = next((n for n, cell in enumerate(self.cells) if cell.column_name == ERASE_COLUMN), None)
        return self if first is None else msgspec.structs.replace(self, cells=self.cells[: first or 1])

    @property
    def erasing(self) -> Erasing | None:
        """What the entry says, of a run that is an entry of an erasure alone. Otherwise None."""
        return erasing(self.cells[0].body) if self.cells and self.cells[0].column_name == ERASE_COLUMN else None


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How many cells of a run are finished. The rest comes again after `retry_in_s`. With a reason the shard stops.

    `idle`: they had no effect, so it costs nothing if they come again after a crash. `counts` and `script` join the
    transaction that moves the checkpoint. `durable`: the shard waits for that transaction. `due_in_s`: when the handler
    wants a call although nothing new came.
    """

    finished: int
    retry_in_s: float = 0.0
    stop_reason: str | None = None
    idle: bool = False
    counts: CellCounts = NO_COUNTS
    script: Script = ""
    durable: bool = False
    due_in_s: float = inf


class Effect(msgspec.Struct, frozen=True, gc=False):
    """Outcomes in the order of the runs. `scripts`, by cluster, join the transactions that move the checkpoints."""

    outcomes: Sequence[Outcome]
    scripts: Mapping[str, Script] = {}


class Death(Enum):
    """How a call ended its process."""

    KILLED = "killed"
    HUNG = "hung"


class HungCall(msgspec.Struct, frozen=True, gc=False):
    """A call that doesn't return. `before` is what became of the cells of its run before it, and `last` is the last.

    `is_next`: the cell is the next one of its shard. Otherwise it is of a row that was set aside, and `before` has its
    record.
    """

    cell: StoredCell
    before: Outcome
    last: StoredCell | None
    text: str
    is_next: bool = True


class ForeignCode(Protocol):
    """What a handler knows of the functions of other people that it calls. One of them may end the process."""

    def calls(self, cell: StoredCell) -> bool:
        """Whether a function is called for this cell."""

    def judge_suspect(self, cell: StoredCell, kills: int, death: Death) -> Outcome | None:
        """Returns an outcome instead of a call for a cell that has ended so many processes, or None to call it."""


class Handler(Protocol):
    """May be given a cell more than once (at least once, I9)."""

    @property
    def foreign_code(self) -> ForeignCode | None:
        """None for a handler that runs no code but ours. A call of such a handler is never a suspect."""

    @property
    def together(self) -> bool:
        """Whether runs of several shards share one call. Otherwise each shard has a call of its own."""

    @property
    def record_within_s(self) -> float:
        """How long a finished cell may wait until its checkpoint is stored. 0: it is stored at once, with its effect.

        What was not stored comes again after a crash.
        """

    async def handle(self, runs: Sequence[Run]) -> Effect: ...

    async def take_over(self, checkpoints: Mapping[int, ShardCheckpoint]) -> Mapping[int, float]:
        """Begins these shards after what their checkpoints say, whatever it knew of them.

        Returns in how many seconds the handler wants a call of a shard although nothing new came. Raises
        StorageUnavailable.
        """

    def forget(self, shard: int) -> None:
        """Nothing more of this shard is called here, until it is taken over."""

    def listen(self, wanted: Callable[[Iterable[int]], None]) -> None:
        """Makes it tell when it wants calls of some shards at once, although nothing new came."""

    async def supersede(self, shard: int, starts_at: int, generation: int) -> Effect:
        """A new generation superseded the shard's cells from `starts_at` on (I13). Returns scripts and no outcomes."""


class StatelessHandler:
    """A handler that remembers nothing of its shards, and wants no calls but those of new cells."""

    async def take_over(self, checkpoints: Mapping[int, ShardCheckpoint]) -> Mapping[int, float]:
        return {}

    def forget(self, shard: int) -> None:
        pass

    def listen(self, wanted: Callable[[Iterable[int]], None]) -> None:
        pass


class Predecessor(Enum):
    """How the process let go of a shard that moved its checkpoint last."""

    OURSELVES = "ourselves"  # or there was none that called anything
    LEFT = "left"  # it stopped, or gave the shard away
    DIED = "died"  # it did neither


class ShardCheckpoint(msgspec.Struct, frozen=True, gc=False):
    """How far a shard is finished. With a reason the shard stopped there. Counts are of cells after `counted_from`.

    `ahead`: the positions of clusters that are further, because a process ended between two clusters. The log may have
    lost the cells at them since. `kills`: how many processes the call of the next cell has ended.
    """

    position: Position
    stop_reason: str | None = None
    ahead: tuple[Position, ...] = ()
    predecessor: Predecessor = Predecessor.OURSELVES
    kills: int = 0
    counted_from: int = 0


class Mark(msgspec.Struct, frozen=True, gc=False):
    """What a checkpoint says of the next cell: whether its call begins now, and how many processes it has ended."""

    begun: bool
    kills: int = 0


class Advance(msgspec.Struct, frozen=True, gc=False):
    """Where a shard's checkpoint moves to, by how many cells. With a reason the shard stops there.

    `restart`: it moves back, because a generation superseded what was finished. With a mark, counts or an effect it may
    stay where it is. The effect is a script for the cluster of the checkpoint, as those of `move`.
    """

    to: Position
    finished: int = 0
    stop_reason: str | None = None
    restart: bool = False
    mark: Mark | None = None
    counts: CellCounts = NO_COUNTS
    effect: Script = ""


class CheckpointStore(Protocol):
    @property
    def consumer(self) -> str: ...

    async def read(self, shards: Iterable[int]) -> dict[int, ShardCheckpoint]:
        """Returns the checkpoints of these shards. A shard that isn't among them has none yet: ask again later.

        Raises StorageUnavailable.
        """

    async def move(self, advances: Mapping[int, Advance], effects: Mapping[str, Script]) -> frozenset[int]:
        """Moves checkpoints. Returns the shards of which another process moved the checkpoint.

        If there are any, nothing of the effects stays. Without effects the other shards have moved. Raises
        StorageUnavailable where none has moved, and ShardsMoved where all have moved but the shards that it names.
        """

    async def give_away(self, shards: Iterable[int]) -> None:
        """Notes that no call of this process runs for these shards any longer. Raises StorageUnavailable."""


class Log(Protocol):
    async def read(self, wanted: Mapping[int, Position], limit: int) -> Mapping[int, ProvenPage | LocationGone]:
        """Returns the pages after these positions, of at most `limit` cells each, bounded in bytes together.

        A shard for which no bytes were left isn't in the answer. Raises StorageUnavailable.
        """
