"""ShardReading: reads the checkpoints and the logs of one delivery's shards, and gives the cells to their cursors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf

import structlog

from schemaless.consume.history import History
from schemaless.consume.ports import CheckpointStore, Handler, Log
from schemaless.consume.shard_work import Assignment, ShardWork
from schemaless.errors import Fenced, LocationGone
from schemaless.shard_cursor import CursorState
from schemaless.storage.shard_head import Head

log = structlog.get_logger()

_WAIT_S = 0.1
_REFUSED_WAIT_S = 5.0
_NO_CHECKPOINT_WAIT_S = 0.5


class ShardReading:
    """Reads for one delivery. `record` stores the checkpoints of shards, and `lose` gives up those that another process
    moved. Belongs to one event loop.
    """

    def __init__(
        self,
        handler: Handler,
        checkpoints: CheckpointStore,
        home_log: Log,
        record: Callable[[Sequence[ShardWork]], Awaitable[None]],
        lose: Callable[[Sequence[ShardWork]], None],
        *,
        batch_cells_max: int,
        clock: Callable[[], float],
    ) -> None:
        self._handler = handler
        self._checkpoints = checkpoints
        self._log = home_log
        self._record = record
        self._lose = lose
        self._history = History(handler, checkpoints, home_log)
        self._batch_cells_max = batch_cells_max
        self._clock = clock

    async def locate(self, works: Sequence[ShardWork], heads: Mapping[int, Head]) -> None:
        """Reads checkpoints. A shard that stopped stays so until somebody resumes it."""
        found = await self._checkpoints.read([work.shard for work in works])
        due_in_s = await self._handler.take_over(found)  # later than the checkpoints, or a move in between is missed
        uneven = []
        for work in works:
            checkpoint = found.get(work.shard)
            if checkpoint is None:
                work.wait_until = self._clock() + _NO_CHECKPOINT_WAIT_S
                continue
            if checkpoint.ahead and checkpoint.stop_reason is None:
                uneven.append(work)
                continue
            work.begin(checkpoint, heads.get(work.shard))
            work.due_at = self._clock() + due_in_s.get(work.shard, inf)
            if checkpoint.stop_reason is not None:
                work.cursor.stop(checkpoint.stop_reason)
        for work in uneven:
            try:
                await self._history.prove(found[work.shard])
                work.begin(found[work.shard], heads.get(work.shard))
            except LocationGone as gone:
                work.report(self._checkpoints.consumer, str(gone))
                work.wait_until = self._clock() + _REFUSED_WAIT_S
            except Fenced:
                self._lose([work])

    async def read(self, works: Sequence[ShardWork]) -> None:
        """Reads one page of each shard's log."""
        wanted = {work.shard: work.cursor.at for work in works}
        share = max(1, self._batch_cells_max // len(works))
        now = self._clock()
        for work in works:
            work.served_at = now
        answers = await self._log.read(wanted, min(share, *(work.page_cells for work in works)))
        for work in works:
            cursor = work.cursor
            answer = answers.get(work.shard)
            if answer is None or cursor.at is not wanted[work.shard] or work.assignment is not Assignment.OURS:
                continue
            if isinstance(answer, LocationGone):
                if work.busy or work.cells:  # the rest of a call that ended meanwhile is before the position, too
                    work.wait_until = self._clock() + _WAIT_S
                else:
                    await self._step_back(work, answer)
            else:
                work.queue(cursor.page(answer))
                if not work.cells:
                    work.failures = 0
            work.report(self._checkpoints.consumer, cursor.reason if cursor.state is CursorState.REFUSED else None)

    async def _step_back(self, work: ShardWork, gone: LocationGone) -> None:
        """Continues before the generation that superseded the shard's position, if there is one (I13)."""
        cursor = work.cursor
        await self._record([work])
        if work.unrecorded:
            work.wait_until = self._clock() + _WAIT_S
        if work.unrecorded or cursor.state is not CursorState.BEHIND or cursor.gone(gone) is None:
            return
        back = cursor.at
        work.caution.forget()
        cursor.forget()  # where this fails, the shard begins anew with its checkpoint, and comes here again
        back = await self._history.identified(back)
        try:
            await self._history.take_back(gone, back)
        except Fenced:
            self._lose([work])
        else:
            cursor.begin(back)
            work.due_at = self._clock()
