"""The recorder stores the checkpoints of cells that are finished already, a little later and many at once (I10).

It is for effects that no transaction of ours contains, as the calls of trigger functions. What was not recorded is
called again after a crash.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from schemaless.consume.ports import Advance, CheckpointStore
from schemaless.consume.shard_work import ShardWork
from schemaless.errors import SchemalessError

log = structlog.get_logger()


class Recorder:
    """Records the checkpoints of one consumer at most `within_s` after their cells were finished."""

    def __init__(self, checkpoints: CheckpointStore, within_s: float) -> None:
        self._checkpoints = checkpoints
        self._within_s = within_s

    def note(self, work: ShardWork, finished: int, now: float) -> None:
        """Takes note of finished cells."""
        if finished and not work.unrecorded:
            work.unrecorded_at = now
        work.unrecorded += finished

    def due_at(self, work: ShardWork) -> float:
        return work.unrecorded_at + self._within_s

    def is_due(self, work: ShardWork, now: float) -> bool:
        """Whether a checkpoint must be stored now. One is stored before a call that follows a failure."""
        return bool(work.unrecorded) and (now >= self.due_at(work) or now < work.wait_until)

    async def record(self, works: Sequence[ShardWork], now: float) -> list[ShardWork]:
        """Stores what is finished. Returns the shards of which another process has moved the checkpoint.

        What can't be stored now is stored later.
        """
        pending = {work.shard: work for work in works if work.unrecorded and not work.busy}
        if not pending:
            return []
        advances = {shard: Advance(work.cursor.done, work.unrecorded) for shard, work in pending.items()}
        for work in pending.values():
            work.unrecorded = 0
        try:
            lost = await self._checkpoints.move(advances, {})
        except SchemalessError as error:
            for shard, work in pending.items():
                work.unrecorded += advances[shard].finished
                work.unrecorded_at = now
            log.warning("checkpoints wait", consumer=self._checkpoints.consumer, why=str(error))
            return []
        return [pending[shard] for shard in lost]
