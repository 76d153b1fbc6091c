"""PutOutcome: what came of one put, as the writer says it; the route makes a status code of it."""

from __future__ import annotations

import msgspec

from schemaless.cell import CellKey, Placed, PutStatus
from schemaless.errors import SchemalessError


class PutOutcome(msgspec.Struct, frozen=True, gc=False):
    """`placed` is None for BUFFERED, and for a CONFLICT with a cell that is only buffered.

    `copies`: on how many masters the cell is known to be durable; 0 for a CONFLICT. `replayed`: the first answer to
    an Idempotency-Key, again.
    """

    status: PutStatus
    key: CellKey
    shard: int
    placed: Placed | None
    copies: int
    replayed: bool = False


PutResult = PutOutcome | SchemalessError
"""An error is a value here, because each cell of a batch has an ending of its own."""
