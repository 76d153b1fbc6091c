"""The recorder stores the checkpoints of cells that are finished already, a little later and many at once (I10).

It is for effects that no transaction of ours contains, as the calls of trigger functions. What was not recorded is
called again after a crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from schemaless.consume.ports import Advance, CheckpointStore, Mark, Outcome
from schemaless.consume.shard_work import ShardWork
from schemaless.errors import SchemalessError

log = structlog.get_logger()

_RETRY_S = 1.0
_IDLE_WITHIN_S = 5.0  # for cells of columns that the program has no function for


class Recorder:
    """Records the checkpoints of one consumer at most `within_s` after their cells were finished.

    Who moves one in another way holds the lock, or both would move it.
    """

    def __init__(self, checkpoints: CheckpointStore, within_s: float) -> None:
        self.lock = asyncio.Lock()
        self._checkpoints = checkpoints
        self._within_s = within_s

    def note(self, work: ShardWork, outcome: Outcome, now: float) -> None:
        """Takes note of finished cells."""
        if outcome.finished:
            due_at = now + (_IDLE_WITHIN_S if outcome.idle else self._within_s)
            work.record_at = min(work.record_at, due_at) if work.unrecorded else due_at
            work.unrecorded += outcome.finished

    def is_due(self, work: ShardWork, now: float) -> bool:
        """Whether a checkpoint must be stored now. One is stored before a call that follows a failure."""
        return bool(work.unrecorded) and (now >= work.record_at or now < work.wait_until)

    async def record(self, works: Sequence[ShardWork], now: float) -> list[ShardWork]:
        """Stores what is finished. Returns the shards of which another process has moved the checkpoint.

        What can't be stored now is stored later.
        """
        if not (any([work.unrecorded for work in works]) or self.lock.locked()):
            return []
        async with self.lock:
            return await self._record(works, now)

    async def mark(self, work: ShardWork, mark: Mark) -> bool:
        """Stores what is finished, with what the checkpoint has to say before the next call begins.

        Returns False if another process has moved the checkpoint. Raises StorageUnavailable.
        """
        async with self.lock:
            pass  # nothing in flight moves this checkpoint any longer, and nothing will: nothing of it is unrecorded
        finished, work.unrecorded = work.unrecorded, 0
        try:
            lost = await self._checkpoints.move({work.shard: Advance(work.cursor.done, finished, mark=mark)}, {})
        except SchemalessError:
            work.unrecorded += finished
            raise
        return not lost

    async def _record(self, works: Sequence[ShardWork], now: float) -> list[ShardWork]:
        pending = {work.shard: work for work in works if work.unrecorded}
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
                work.record_at = now + _RETRY_S
            log.warning("checkpoints wait", consumer=self._checkpoints.consumer, why=str(error))
            return []
        return [pending[shard] for shard in lost]
