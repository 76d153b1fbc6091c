"""What a consumer does about cells that its log has no more: it takes back what they caused (I13, I16)."""

from __future__ import annotations

import structlog

from schemaless.consume.ports import Advance, CheckpointStore, Handler, Log, ShardCheckpoint
from schemaless.errors import Fenced, LocationGone, StorageUnavailable
from schemaless.position import Position

log = structlog.get_logger()


class History:
    """Compares the checkpoints of one consumer with the history of a home's log."""

    def __init__(self, handler: Handler, checkpoints: CheckpointStore, home_log: Log) -> None:
        self._handler = handler
        self._checkpoints = checkpoints
        self._log = home_log

    async def prove(self, checkpoint: ShardCheckpoint) -> None:
        """Proves the positions of clusters that are further than others, or takes back what they have.

        A promotion takes the checkpoint on its own cluster back with the cells. The lowest position may be right then,
        while another cluster has effects of superseded cells. Raises LocationGone where a position is of another
        history and no generation says so yet, Fenced when another process moved the checkpoint, and StorageUnavailable.
        """
        for position in checkpoint.ahead:
            answer = (await self._log.read({position.shard: position}, 1)).get(position.shard)
            if not isinstance(answer, LocationGone):
                continue
            if answer.generation <= position.generation:
                raise answer
            await self.take_back(answer, checkpoint.position)

    async def identified(self, position: Position) -> Position:
        """Returns a position of the present history with the digest of its cell (I16). Raises StorageUnavailable."""
        answer = (await self._log.read({position.shard: position}, 0)).get(position.shard)
        if answer is None or isinstance(answer, LocationGone) or answer.digest is None:
            raise StorageUnavailable(f"the cell at {position.location} of shard {position.shard} can't be read now")
        return Position(position.shard, position.generation, position.added_id, digest=answer.digest)

    async def take_back(self, gone: LocationGone, to: Position) -> None:
        """Undoes what cells caused that a generation superseded, and moves their shard's checkpoint back.

        Raises Fenced when another process moved the checkpoint, and StorageUnavailable.
        """
        starts_at = gone.resume_at + 1
        log.warning(
            "cells are superseded",
            consumer=self._checkpoints.consumer,
            shard=to.shard,
            generation=gone.generation,
            starts_at=starts_at,
            continues_after=str(to.location),
        )
        effect = await self._handler.supersede(to.shard, starts_at, gone.generation)
        if await self._checkpoints.move({to.shard: Advance(to, restart=True)}, effect.scripts):
            raise Fenced("another process moved the checkpoint")
