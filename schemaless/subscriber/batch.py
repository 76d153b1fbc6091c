"""The values that a subscriber gets: batches of cells, each with the position to store."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from schemaless.cell import StoredCell
from schemaless.location import Location
from schemaless.position import Position


class GenerationChange(msgspec.Struct, frozen=True):
    """A shard lost its continuity: `generation` begins at `starts_at` (I13).

    `superseded` counts the last cells that were given out before, which are not in the log any more. Those that were
    still buffered come again, elsewhere in the log.
    """

    generation: int
    starts_at: int
    superseded: int


class Batch(msgspec.Struct, frozen=True):
    """Consecutive cells of one shard and generation. The first is right after the location `after`.

    Store `position` together with the effect of the cells, in one transaction if you can. It replaces the position at
    `after`. A batch with a `change` has no cells. Store its position too: it may be a lower one.
    """

    shard: int
    after: Location
    cells: Sequence[StoredCell]
    position: Position
    change: GenerationChange | None = None
