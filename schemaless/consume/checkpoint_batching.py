"""GatheredMoves: moves of checkpoints on one master, with their effects, as few transactions as come naturally (I10).

While one transaction is under way the next moves collect, so shards that are busy together share a commit; when
nothing else goes on a move goes at once. Each keeps an outcome of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from schemaless.batching import Batcher, BatchLimits
from schemaless.errors import Fenced
from schemaless.storage import checkpoint_table
from schemaless.storage.asyncmy_driver import AsyncNode
from schemaless.storage.checkpoint_table import Move
from schemaless.storage.sql import Script

_LIMITS = BatchLimits(items_max=256, bytes_max=1 << 20)
_MOVE_BYTES = 100
"""What a move weighs as SQL, about."""


class _Change(msgspec.Struct, frozen=True, gc=False):
    moves: Sequence[Move]
    effect: Script


class GatheredMoves:
    """Of one consumer on one cluster. Belongs to one event loop."""

    def __init__(self, master: AsyncNode, datastore: str, consumer: str) -> None:
        self._master = master
        self._datastore = datastore
        self._consumer = consumer
        self._batcher: Batcher[_Change, Fenced | None] = Batcher(self._flush, _LIMITS)

    async def move(self, moves: Sequence[Move], effect: Script = "") -> None:
        """Raises Fenced when one of them was moved by another process, StorageUnavailable, or Unavailable when too
        much waits. The effect must be one that may be repeated and come late (I11).
        """
        weight = len(effect) + _MOVE_BYTES * len(moves)
        (failure,) = await self._batcher.submit([_Change(moves, effect)], weight)
        if failure is not None:
            raise failure

    async def _flush(self, changes: list[_Change]) -> list[Fenced | None]:
        moves = [move for change in changes for move in change.moves]
        effect = ";".join([change.effect for change in changes if change.effect])
        missed = await self._master.run(checkpoint_table.move, self._datastore, self._consumer, moves, effect)
        return [self._failure(change, missed) for change in changes]

    def _failure(self, change: _Change, missed: Sequence[Move]) -> Fenced | None:
        lost = [move for move in change.moves if move in missed]
        if not lost:
            return None
        return Fenced(f"{self._consumer}: another process moved the checkpoint of shard {lost[0].shard}")
