"""Position and Batch: what a subscriber is given, and what it stores beside its effect to go on from there. Values."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from schemaless.cell import StoredCell
from schemaless.location import Location


class Position(msgspec.Struct, frozen=True):
    """How far a shard is finished. Every field is a number, to be stored as it is.

    `offset` says from where on its partition of the topic is worth reading. It is a hint, which saves time: what it
    would miss is found, because added_ids are dense (I3, I9).
    """

    shard: int
    generation: int
    added_id: int
    offset: int | None = None

    @property
    def location(self) -> Location:
        return Location(self.generation, self.added_id)


class GenerationChange(msgspec.Struct, frozen=True):
    """A shard lost its continuity: `generation` begins at `starts_at`, and whatever was given out at or above it is
    `superseded` (that many cells): if those cells were still buffered they come again, elsewhere in the log (I13).
    """

    generation: int
    starts_at: int
    superseded: int


class Batch(msgspec.Struct, frozen=True):
    """Consecutive cells of one shard, the first right after the location `after`.

    Store `position` together with their effect, if you can in one transaction; it replaces the one that stood at
    `after`. A batch with a `change` has no cells, and its position is to be stored too: it may be a lower one.
    """

    shard: int
    after: Location
    cells: Sequence[StoredCell]
    position: Position
    change: GenerationChange | None = None
