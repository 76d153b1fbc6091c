"""CarefulCalls: the calls of one delivery, each with the care that its shard needs (schemaless/consume/caution.py).

A call that needs care changes the checkpoint before it begins. A handler that runs no code but ours needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import structlog

from schemaless.consume.caution import Care, MarkedCalls
from schemaless.consume.ports import CheckpointStore, Death, Effect, Handler, HungCall, Mark, Outcome, Run
from schemaless.consume.recorder import Recorder
from schemaless.consume.shard_work import Assignment, ShardWork
from schemaless.errors import SchemalessError
from schemaless.position import position_of

log = structlog.get_logger()


class CarefulCalls:
    """Calls the handler of one consumer. `marked_calls` are those of the process. Belongs to one event loop."""

    def __init__(
        self,
        handler: Handler,
        checkpoints: CheckpointStore,
        recorder: Recorder,
        marked_calls: MarkedCalls,
        may_call: Callable[[], bool],
    ) -> None:
        self._handler = handler
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._marked_calls = marked_calls
        self._may_call = may_call

    def turn(self, works: Sequence[ShardWork]) -> AbstractAsyncContextManager[None]:
        """Holds the place of a call until it is recorded. A handler that is given shards together needs no care."""
        return self._marked_calls.turn(works[0].caution.care)

    async def handle(self, works: Sequence[ShardWork], runs: Sequence[Run]) -> Effect | None:
        """Lets the handler work, or returns None: another process moved the checkpoint. Raises StorageUnavailable."""
        foreign, work, cells = self._handler.foreign_code, works[0], runs[0].cells
        if foreign is None or work.caution.care is Care.NONE or (cells and not any(map(foreign.calls, cells))):
            return await self._handler.handle(runs)
        if not cells and work.caution.is_claimed:  # parked cells have marks of their own, in their records
            return await self._handler.handle(runs)
        if work.assignment is not Assignment.OURS or not self._may_call():  # that changed while it waited for its turn
            return Effect([Outcome(0)])
        kills = work.caution.kills
        if cells and kills and (outcome := foreign.judge_suspect(cells[0], kills, Death.KILLED)) is not None:
            return Effect([outcome])
        mark = work.caution.mark() if cells else Mark(begun=False, kills=kills)
        if not await self._recorder.mark(work, mark):
            return None
        work.caution.marked()
        return await self._handler.handle(runs)

    async def blame(self, work: ShardWork, hung: HungCall) -> None:
        """Stores that the call of a cell hangs, which counts as one death, and parks the cell after the last."""
        work.unrecorded.add(hung.before)
        to, kills = work.cursor.done if hung.last is None else position_of(hung.last), work.caution.kills
        if hung.is_next and (foreign := self._handler.foreign_code) is not None:
            kills = work.caution.kills + 1
            if (outcome := foreign.judge_suspect(hung.cell, kills, Death.HUNG)) is not None:
                work.unrecorded.add(outcome)
                to, kills = position_of(hung.cell), 0
        advance = work.unrecorded.advance(to, Mark(begun=False, kills=kills))
        work.unrecorded.clear()
        async with self._recorder.lock:
            try:
                await self._checkpoints.move({work.shard: advance}, {})
            except SchemalessError as error:
                log.warning("nobody learns of a call that hangs", shard=work.shard, why=str(error))

    async def let_go(self, works: Sequence[ShardWork]) -> None:
        """Stores that no call of this process is to blame for what happens to these shards from now on.

        Where even their checkpoints couldn't be stored, the group isn't kept waiting for this.
        """
        claimed = [work for work in works if work.caution.is_claimed]
        is_away = any([work.unrecorded for work in works])
        try:
            if claimed and not is_away and self._handler.foreign_code is not None:
                await self._checkpoints.give_away([work.shard for work in claimed])
        except SchemalessError as error:
            log.warning("others will call with care", consumer=self._checkpoints.consumer, why=str(error))
        for work in claimed:
            work.caution.let_go()
