"""The recorder stores the checkpoints of cells that are finished already, a little later and many at once (I10).

It is for effects that no transaction of ours contains, as the calls of trigger functions. What was not recorded is
called again after a crash. Parked cells are stored in the transaction that moves the checkpoint past them (I12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import structlog

from schemaless.consume.ports import Advance, CheckpointStore, Mark, Outcome
from schemaless.consume.shard_work import ShardWork
from schemaless.errors import SchemalessError
from schemaless.runtime.events import Event, emit

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
        """Takes note of finished cells, and of what is to be stored with them."""
        due_at = now + (_IDLE_WITHIN_S if outcome.idle else self._within_s)
        work.record_at = min(work.record_at, due_at) if work.unrecorded else due_at
        work.unrecorded.add(outcome)
        work.must_record = work.must_record or outcome.durable or work.unrecorded.is_full

    def is_due(self, work: ShardWork, now: float) -> bool:
        """Whether a checkpoint must be stored now. One is stored before a call that follows a failure."""
        return bool(work.unrecorded) and (now >= work.record_at or now < work.wait_until)

    async def record(self, works: Sequence[ShardWork], now: float) -> list[ShardWork]:
        """Stores what is finished. Returns the shards of which another process has moved the checkpoint.

        What can't be stored now is stored later.
        """
        if not (any([bool(work.unrecorded) for work in works]) or self.lock.locked()):
            return []
        async with self.lock:
            return await self._record(works, now)

    async def mark(self, work: ShardWork, mark: Mark) -> bool:
        """Stores what is finished, with what the checkpoint has to say before the next call begins.

        Returns False if another process has moved the checkpoint. Raises StorageUnavailable.
        """
        async with self.lock:
            pass  # nothing in flight moves this checkpoint any longer, and nothing will: nothing of it is unrecorded
        advance = work.unrecorded.advance(work.cursor.done, mark)
        work.unrecorded.clear()
        emit(Event.CHECKPOINTS_MOVING)
        try:
            lost = await self._checkpoints.move({work.shard: advance}, {})
        except SchemalessError:
            work.unrecorded.put_back(advance)
            raise
        emit(Event.CHECKPOINTS_MOVED)
        return not lost

    async def _record(self, works: Sequence[ShardWork], now: float) -> list[ShardWork]:
        pending = {work.shard: work for work in works if work.unrecorded}
        if not pending:
            return []
        advances = {shard: work.unrecorded.advance(work.cursor.done) for shard, work in pending.items()}
        for work in pending.values():
            work.unrecorded.clear()
        together = {shard: advance for shard, advance in advances.items() if not advance.effect}
        alone = [{shard: advance} for shard, advance in advances.items() if advance.effect]
        lost = await asyncio.gather(*(self._move(moves, pending, now) for moves in [together, *alone] if moves))
        return [work for found in lost for work in found]

    async def _move(
        self, advances: Mapping[int, Advance], pending: Mapping[int, ShardWork], now: float
    ) -> list[ShardWork]:
        """Moves checkpoints, one alone if it has an effect. Whose move fails keeps what was to be stored."""
        emit(Event.CHECKPOINTS_MOVING)
        try:
            lost = await self._checkpoints.move(advances, {})
        except SchemalessError as error:
            for shard, advance in advances.items():
                pending[shard].unrecorded.put_back(advance)
                pending[shard].record_at = now + _RETRY_S
                pending[shard].must_record = True  # or a kill repeats all that would be called until it is stored
            log.warning("checkpoints wait", consumer=self._checkpoints.consumer, why=str(error))
            return []
        emit(Event.CHECKPOINTS_MOVED)
        for shard in advances:
            pending[shard].must_record = pending[shard].must_record and bool(pending[shard].unrecorded)
        return [pending[shard] for shard in lost]
