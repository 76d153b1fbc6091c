"""Delivery: every cell of some shards reaches one consumer, in order, at least once (I9, I10).

A ShardCursor says for each shard what comes next (schemaless/shard_cursor.py). Delivery does what it asks for. It reads
checkpoints and pages of the log, lets the handler work on what was handed over, and moves the checkpoints. It knows
nothing of Kafka: losslessness rests neither on offsets nor on acknowledgements, and no shard waits for another.

All shards of a delivery have one home cluster, so a cluster that is unreachable holds up its own shards only. What is
ready at the same time goes to the handler in one call. No exception leaves this module: a failure puts its shards
behind, and they are tried again later, in smaller pages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from math import inf

import structlog

from schemaless.cell import StoredCell
from schemaless.consume.ports import (
    Advance,
    CheckpointStore,
    Death,
    Effect,
    Handler,
    HungCall,
    Log,
    Mark,
    Outcome,
    Run,
    Script,
)
from schemaless.consume.shard_work import (
    HANDING_OVER,
    READING,
    Assignment,
    Care,
    DeliveryCounts,
    History,
    MarkedCalls,
    ShardWork,
    SharedWork,
)
from schemaless.errors import Fenced, LocationGone, SchemalessError, ShardsMoved
from schemaless.location import Location
from schemaless.position import Position, position_of
from schemaless.runtime import tracing
from schemaless.runtime.events import Event, emit
from schemaless.runtime.lifecycle import pause
from schemaless.shard_cursor import CursorState, ShardCursor
from schemaless.storage.shard_head import Head

log = structlog.get_logger()

IDLE_S = 1.0  # how long a delivery waits at most until it looks again whether something is due
_SHARDS_PER_READ = 32
_READ_AHEAD_BYTES_MAX = 64 << 20  # of bodies that wait in a process. One read more may come on top
_CALLS_MAX, _GATHER_S = 4, 0.003  # of a handler that takes shards together. One fetch brings several partitions
_FAILED_PAUSE_S, _FAILED_PAUSE_MAX_S = 0.1, 5.0


class Delivery:
    """Delivers shards of one home cluster to one consumer. Belongs to one event loop.

    `may_call` says whether this process is surely still a member of its group. `clock` counts seconds, as
    time.monotonic does.
    """

    def __init__(
        self,
        handler: Handler,
        checkpoints: CheckpointStore,
        home_log: Log,
        *,
        batch_cells_max: int = 1000,
        may_call: Callable[[], bool] = lambda: True,
        shared: SharedWork | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = DeliveryCounts()
        self._handler = handler
        self._checkpoints = checkpoints
        self._batch_cells_max = batch_cells_max
        self._recorder = Recorder(checkpoints, handler.record_within_s)
        self._reading = ShardReading(
            handler, checkpoints, home_log, self._record, self._lose, batch_cells_max=batch_cells_max, clock=clock
        )
        self._may_call = may_call
        self._shared = shared = shared or SharedWork()
        self._careful = CarefulCalls(handler, checkpoints, self._recorder, shared.marked_calls, may_call)
        self._clock = clock
        self._shards: dict[int, ShardWork] = {}
        self._active: set[ShardWork] = set()  # not at rest. So a pass costs nothing for the others
        self._halted: set[ShardWork] = set()  # stopped, refused or unconfirmed
        self._moved: set[int] = set()  # shards whose head moved at the last look
        self._heads: Mapping[int, Head] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._closing = False
        self._is_paused: Callable[[int], bool] = lambda _: False
        handler.listen(self.attend)

    # What the group and the topic say

    def gain(self, shards: Iterable[int], *, kept: bool = False) -> None:
        """Delivers these shards from now on. Their topic is heard from now on.

        `kept`: nobody else had those that were suspended, so they continue where they are.
        """
        for shard in shards:
            work = self._shards.get(shard)
            if work is None:
                work = self._shards[shard] = ShardWork(shard, self.counts, self._shared.queued)
            elif work.assignment is not Assignment.OURS and not (work.assignment is Assignment.SUSPENDED and kept):
                if work.busy:
                    work.assignment = Assignment.RETURNING
                    continue
                work.begin_anew()
            work.assignment = Assignment.OURS
            work.is_paused = self._is_paused(shard)
            self._active.add(work)
        self._wake.set()

    async def suspend(self, shards: Iterable[int], timeout_s: float) -> None:
        """Begins nothing more for these shards. Waits for calls in flight, and stores the checkpoints."""
        suspended = [work for shard in shards if (work := self._shards.get(shard)) is not None]
        for work in suspended:
            ours = work.assignment in (Assignment.OURS, Assignment.SUSPENDED)
            work.assignment = Assignment.SUSPENDED if ours else Assignment.RELEASED
        deadline = self._clock() + timeout_s
        while any(work.busy for work in suspended) and self._calls and (left_s := deadline - self._clock()) > 0:
            await asyncio.wait(self._calls, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        await self._record(suspended)
        await self._careful.let_go(suspended)

    def release(self, shards: Iterable[int]) -> None:
        """Forgets these shards. One whose call still runs is forgotten after that, so that it has one call at a time.

        If it is gained again before, it begins when that call has ended.
        """
        for shard in shards:
            work = self._shards.get(shard)
            if work is not None:
                work.assignment = Assignment.RELEASED
                work.drop()
                if not work.busy:
                    self._remove(work)

    def _remove(self, work: ShardWork) -> None:
        work.drop()
        self._handler.forget(work.shard)
        self._active.discard(work)
        self._halted.discard(work)
        self._shards.pop(work.shard, None)

    def take(self, shard: int, cells: Sequence[StoredCell]) -> None:
        """Takes a shard's next cells of the topic, in its order."""
        work = self._shards.get(shard)
        if work is None or work.assignment is not Assignment.OURS or self._closing:
            return
        work.queue(work.cursor.take(cells))
        self._active.add(work)
        if work.is_full:
            work.leave_to_the_log()
        self._wake.set()

    def announce(self, shard: int, generation: int, starts_at: int) -> None:
        """Takes the topic's announcement of a generation."""
        if (work := self._shards.get(shard)) is not None:
            work.cursor.announce(generation, starts_at)
            self._active.add(work)
            self._wake.set()

    def look(self, heads: Mapping[int, Head], moved: Iterable[int] | None = None) -> None:
        """Compares shards with their heads. Call it now and then: it finds what the topic never brought.

        `moved` names the shards whose head moved since the last call, by default all. A shard that stopped is read
        again, because an operator may have resumed it.
        """
        self._heads = heads
        here = set(self._shards if moved is None else self._shards.keys() & set(moved))
        for shard in here | (self._moved & self._shards.keys()):
            work, head = self._shards[shard], heads.get(shard)
            if head is not None and work not in self._halted:
                work.cursor.look(head.location)
                self._active.add(work)
        self._moved = here
        for work in tuple(self._halted):
            if work.cursor.state is CursorState.STOPPED and not work.busy:
                work.begin_anew()
            elif work.cursor.state is CursorState.REFUSED and (head := heads.get(work.shard)) is not None:
                work.cursor.look(head.location)
            if work.cursor.state in READING:
                self._halted.discard(work)
                self._active.add(work)
        self._wake.set()

    def attend(self, shards: Iterable[int]) -> None:
        """Calls the handler for those of these shards that are here, although nothing new came for them."""
        now = self._clock()
        for work in [self._shards[shard] for shard in shards if shard in self._shards]:
            work.due_at = work.wait_until = now
            self._active.add(work)
        self._wake.set()

    def pause(self, is_paused: Callable[[int], bool]) -> None:
        """Begins no calls of the shards for which this is true, also of those that it gains later."""
        self._is_paused = is_paused
        for work in self._shards.values():
            if work.is_paused is not is_paused(work.shard):
                work.is_paused = not work.is_paused
                self._active.add(work)
                self._wake.set()

    async def seek(self, to: Position, script: Script) -> None:
        """Moves the checkpoint of a shard as a person ordered, with a script that ends the order. It begins anew there.

        Where a call of the shard is in flight, or something isn't recorded yet, nothing happens: ask again later.
        """
        work = self._shards.get(to.shard)
        if work is None or work.busy or work.assignment is not Assignment.OURS:
            return
        if work.cursor.state not in HANDING_OVER or not self._may_call():
            return
        work.busy = True
        await self._guarded([work], self._seek(work, to, script))
        self._free(work)

    async def _seek(self, work: ShardWork, to: Position, script: Script) -> None:
        await self._record([work])
        if not work.unrecorded and work.cursor.state is not CursorState.UNCONFIRMED:
            log.warning("a shard is moved", consumer=self._checkpoints.consumer, shard=to.shard, to=str(to.location))
            await self._checkpoints.move({to.shard: Advance(to, restart=True, effect=script)}, {})
            work.begin_anew()

    def confirmed(self, shards: Iterable[int]) -> None:
        """Takes the group's word that these shards are ours. Those whose checkpoint was lost begin anew (I10)."""
        for shard in shards:
            work = self._shards.get(shard)
            if work is not None and work.cursor.state is CursorState.UNCONFIRMED and not work.busy:
                work.begin_anew()
                self._halted.discard(work)
                self._active.add(work)
        self._wake.set()

    # What others may ask, and tell

    @property
    def calls(self) -> Collection[asyncio.Task[None]]:
        """The calls in flight."""
        return self._calls

    def cursors(self) -> dict[int, ShardCursor]:
        """Returns how far each shard is, and what it waits for."""
        return {shard: work.cursor for shard, work in self._shards.items()}

    def late(self) -> list[ShardWork]:
        """Returns the shards in which something waits or that are halted. The others have finished all they know."""
        return [*self._active, *(self._halted - self._active)]

    def halted(self, state: CursorState) -> list[ShardCursor]:
        """Returns the shards that are stopped, refused or unconfirmed, as `state` says."""
        return [work.cursor for work in self._halted if work.cursor.state is state]

    def failing(self) -> list[tuple[int, str]]:
        """Returns the shards that fail again and again, each with the last error."""
        return [(work.shard, work.error) for work in self._active if work.is_failing]

    def unconfirmed(self) -> list[int]:
        """Returns the shards whose checkpoint another process moved, until the group has confirmed them."""
        return [cursor.at.shard for cursor in self.halted(CursorState.UNCONFIRMED)]

    async def blame(self, hung: HungCall) -> None:
        """Stores that a call doesn't return, for whoever has the shard next. The process has to end then."""
        if (work := self._shards.get(hung.cell.shard)) is not None:
            await self._careful.blame(work, hung)

    # The loop

    async def run(self) -> None:
        """Delivers until it is cancelled, after `close`."""
        while True:
            self._wake.clear()
            if pause_s := await self.step():
                await pause(self._wake, min(pause_s, IDLE_S))
                await asyncio.sleep(_GATHER_S if self._handler.together else 0.0)

    async def step(self) -> float:
        """Makes one pass. Returns for how many seconds nothing will be due unless something happens."""
        if self._closing:
            return IDLE_S
        self._settle()
        now = self._clock()
        if any([self._recorder.is_due(work, now) for work in self._active]):
            await self._record(list(self._active))
        self._start_calls(now)
        unlocated = [
            work
            for work in self._active
            if work.cursor.state is CursorState.LOCATING and work.may_be_located(now) and not work.busy
        ]
        if unlocated:
            self._halted.difference_update(unlocated)  # or no look would reach one that is live at once
            await self._guarded(unlocated, self._reading.locate(unlocated, self._heads))
            return 0.0
        may_read = self._shared.queued.total < _READ_AHEAD_BYTES_MAX and self._may_call()
        behind = [work for work in self._active if work.wants_page(now)] if may_read else []
        if behind:
            behind.sort(key=lambda work: work.served_at)
            if behind[0].failures:  # it goes alone: it may be what fails the others
                behind = behind[:1]
            else:
                behind = [work for work in behind if not work.failures][:_SHARDS_PER_READ]
            await self._guarded(behind, self._reading.read(behind))
            self._start_calls(self._clock())
            return 0.0
        return max(0.001, min([IDLE_S, *(work.next_due_at(now) - now for work in self._active)]))

    def _settle(self) -> None:
        """Takes the shards at rest out of the passes."""
        for work in [work for work in self._active if work.at_rest]:
            self._active.discard(work)
            work.failures = 0
            if work.cursor.state is not CursorState.LIVE:
                self._halted.add(work)

    async def close(self, timeout_s: float) -> None:
        """Takes nothing new and finishes what is in flight. What takes longer is cancelled, and comes again."""
        self._closing = True
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_s)
        for call in self._calls:
            call.cancel()
        await self._record(list(self._active))
        if cells := sum([work.unrecorded.finished for work in self._active]):
            log.warning("finished cells may come again", consumer=self._checkpoints.consumer, cells=cells)

    # Calls

    def _start_calls(self, now: float) -> None:
        if self._closing or not self._may_call():
            return
        ready = [work for work in self._active if work.is_ready(now)]
        if not self._handler.together:
            for work in ready:
                self._start_call([work])
        elif ready and len(self._calls) < _CALLS_MAX:
            failed = [work for work in ready if work.failures]
            self._start_call(failed[:1] or ready)

    def _start_call(self, works: Sequence[ShardWork]) -> None:
        left = self._batch_cells_max
        chosen, runs = [], []
        foreign = self._handler.foreign_code
        for work in works:
            if left <= 0:
                break
            is_careful = work.caution.care in (Care.MARK, Care.SUSPECT)
            is_due, work.due_at = self._clock() >= work.due_at, inf
            # What is due must not run beside a marked cell, or that would be blamed for it.
            cells = [] if is_due and is_careful else work.next_cells(min(left, work.page_cells), foreign)
            left -= len(cells)
            after = Location(cells[0].generation, cells[0].added_id - 1) if cells else work.cursor.done.location
            runs.append(Run(work.shard, after, cells, is_careful))
            work.busy, work.called_us = True, cells[0].created_at if cells else None
            chosen.append(work)
        call = asyncio.create_task(self._call(chosen, runs))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self, works: Sequence[ShardWork], runs: Sequence[Run]) -> None:
        try:
            async with self._careful.turn(works):
                await self._guarded(works, uncancelled(self._advance(works, runs), lambda: self._closing), of_call=True)
        finally:
            await self._record([work for work in works if work.assignment.is_leaving])
            for work in works:
                self._free(work)

    def _free(self, work: ShardWork) -> None:
        """Notes that nothing works on a shard any longer, and what the group said of it meanwhile."""
        work.busy, work.called_us = False, None
        self._active.add(work)
        if work.assignment is Assignment.RELEASED:
            self._remove(work)
        elif work.assignment is Assignment.RETURNING:
            work.come_back()
        self._wake.set()

    async def _advance(self, works: Sequence[ShardWork], runs: Sequence[Run]) -> None:
        """Makes the effect first. Then the checkpoints move, at once or a little later (I10)."""
        began, began_at = self._clock(), time.time()
        effect = await self._careful.handle(works, runs)
        called_at = self._shared.observe_call(self._checkpoints.consumer, works, began, self._clock())
        if effect is None:
            return self._lose(works)
        outcomes = list(zip(works, runs, effect.outcomes, strict=True))
        if self._handler.record_within_s:
            is_suspect = works[0].caution.care is Care.SUSPECT  # it is recorded before anybody else is called
            for work, run, outcome in outcomes:
                self._recorder.note(work, outcome, self._clock())
                self._note(work, run, outcome)
            if is_suspect or any([work.must_record or work.unrecorded.stop_reason for work in works]):
                await self._record(works)
            return
        moves = {
            run.shard: Advance(work.position_after(run.cells, outcome.finished), outcome.finished, outcome.stop_reason)
            for work, run, outcome in outcomes
            if outcome.finished or outcome.stop_reason is not None
        }
        lost = await self._checkpoints.move(moves, effect.scripts) if moves else frozenset()
        self._shared.observe(self._checkpoints.consumer, "commit", self._clock() - called_at)
        if lost:
            self._lose(work for work in works if work.shard in lost)
            if effect.scripts:
                raise Fenced("nothing of a transaction stays whose compare-and-set is lost")
        if effect.scripts:
            tracing.processed((cell for run in runs for cell in run.cells), self._checkpoints.consumer, began_at)
        for work, run, outcome in outcomes:
            self._note(work, run, outcome)

    def _note(self, work: ShardWork, run: Run, outcome: Outcome) -> None:
        if work.cursor.state is CursorState.UNCONFIRMED:  # another process has the shard, and calls its cells
            return
        now, work.called_us = self._clock(), None  # its cells are finished or handed back: the cursor says what is done
        if outcome.finished:
            work.cursor.finish(work.position_after(run.cells, outcome.finished))
            work.caution.finished()
            work.failures = 0
            work.careful -= 1
            if work.careful <= 0:
                work.page_cells = min(self._batch_cells_max, work.page_cells * 2)
        self.counts.delivered += outcome.finished
        work.wait_until = now + outcome.retry_in_s
        work.due_at = min(work.due_at, now + outcome.due_in_s)
        rest = run.cells[outcome.finished :]
        if outcome.stop_reason is not None:
            work.drop()
            work.cursor.stop(outcome.stop_reason)
        elif rest:
            work.put_back(rest)

    async def _record(self, works: Sequence[ShardWork]) -> None:
        self._lose(await self._recorder.record(works, self._clock()))

    def _lose(self, lost: Iterable[ShardWork]) -> None:
        for work in lost:
            work.lose()
            log.warning("another process moved a checkpoint", consumer=self._checkpoints.consumer, shard=work.shard)

    async def _guarded(self, works: Sequence[ShardWork], action: Awaitable[None], *, of_call: bool = False) -> None:
        """Awaits an action on some shards. If it fails, they are read again, after a pause that grows.

        After a call of foreign code, which may be half done, their checkpoints are read again, too. A shard that went
        to another cluster was refused before its call began, and keeps what it has finished.
        """
        try:
            await action
        except Exception as error:
            self.counts.failures += 1
            failures = max(work.failures for work in works) + 1
            pause_s = min(_FAILED_PAUSE_MAX_S, _FAILED_PAUSE_S * 2 ** min(failures, 10))
            anew = of_call and self._handler.foreign_code is not None and not isinstance(error, ShardsMoved)
            for work in works:
                work.fail(failures, self._clock() + pause_s, error, of_call=of_call)
                if anew and work.cursor.state is not CursorState.UNCONFIRMED:
                    work.begin_anew()
            if isinstance(error, SchemalessError):
                log.warning("delivery waits", consumer=self._checkpoints.consumer, why=str(error), again_in_s=pause_s)
            else:
                log.error("delivery failed", consumer=self._checkpoints.consumer, again_in_s=pause_s, exc_info=error)


# CarefulCalls: the calls of one delivery, each with the care that its shard needs (schemaless/consume/shard_work.py).
#
# A call that needs care changes the checkpoint before it begins. A handler that runs no code but ours needs none.


@dataclass(eq=False)
class CarefulCalls:
    """Calls the handler of one consumer. `marked_calls` are those of the process. Belongs to one event loop."""

    handler: Handler
    checkpoints: CheckpointStore
    recorder: Recorder
    marked_calls: MarkedCalls
    may_call: Callable[[], bool]

    def turn(self, works: Sequence[ShardWork]) -> AbstractAsyncContextManager[None]:
        """Holds the place of a call until it is recorded. A handler that is given shards together needs no care."""
        return self.marked_calls.turn(works[0].caution.care)

    async def handle(self, works: Sequence[ShardWork], runs: Sequence[Run]) -> Effect | None:
        """Lets the handler work, or returns None: another process moved the checkpoint. Raises StorageUnavailable."""
        foreign, work, cells = self.handler.foreign_code, works[0], runs[0].cells
        if foreign is None or work.caution.care is Care.NONE or (cells and not any(map(foreign.calls, cells))):
            return await self.handler.handle(runs)
        if not cells and work.caution.is_claimed:  # parked cells have marks of their own, in their records
            return await self.handler.handle(runs)
        if work.assignment is not Assignment.OURS or not self.may_call():  # that changed while it waited for its turn
            return Effect([Outcome(0)])
        kills = work.caution.kills
        if cells and kills and (outcome := foreign.judge_suspect(cells[0], kills, Death.KILLED)) is not None:
            return Effect([outcome])
        mark = work.caution.mark() if cells else Mark(begun=False, kills=kills)
        if not await self.recorder.mark(work, mark):
            return None
        work.caution.marked()
        return await self.handler.handle(runs)

    async def blame(self, work: ShardWork, hung: HungCall) -> None:
        """Stores that the call of a cell hangs, which counts as one death, and parks the cell after the last."""
        work.unrecorded.add(hung.before)
        to, kills = work.cursor.done if hung.last is None else position_of(hung.last), work.caution.kills
        if hung.is_next and (foreign := self.handler.foreign_code) is not None:
            kills = work.caution.kills + 1
            if (outcome := foreign.judge_suspect(hung.cell, kills, Death.HUNG)) is not None:
                work.unrecorded.add(outcome)
                to, kills = position_of(hung.cell), 0
        advance = work.unrecorded.advance(to, Mark(begun=False, kills=kills))
        work.unrecorded.clear()
        async with self.recorder.lock:
            try:
                await self.checkpoints.move({work.shard: advance}, {})
            except SchemalessError as error:
                log.warning("nobody learns of a call that hangs", shard=work.shard, why=str(error))

    async def let_go(self, works: Sequence[ShardWork]) -> None:
        """Stores that no call of this process is to blame for what happens to these shards from now on.

        Where even their checkpoints couldn't be stored, the group isn't kept waiting for this.
        """
        claimed = [work for work in works if work.caution.is_claimed]
        is_away = any([work.unrecorded for work in works])
        try:
            if claimed and not is_away and self.handler.foreign_code is not None:
                await self.checkpoints.give_away([work.shard for work in claimed])
        except SchemalessError as error:
            log.warning("others will call with care", consumer=self.checkpoints.consumer, why=str(error))
        for work in claimed:
            work.caution.let_go()


async def uncancelled(action: Awaitable[None], is_meant: Callable[[], bool]) -> None:
    """Awaits an action. That it is cancelled is an error where nobody means it: foreign code shares the event loop."""
    try:
        await action
    except asyncio.CancelledError as cancelled:
        if is_meant():
            raise
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        raise RuntimeError("a call was cancelled, though this process doesn't stop") from cancelled


# ShardReading: reads the checkpoints and the logs of one delivery's shards, and gives the cells to their cursors.

_WAIT_S = 0.1
_REFUSED_WAIT_S = 5.0
_NO_CHECKPOINT_WAIT_S = 0.5


@dataclass(eq=False)
class ShardReading:
    """Reads for one delivery. `record` stores the checkpoints of shards, and `lose` gives up those that another process
    moved. Belongs to one event loop.
    """

    handler: Handler
    checkpoints: CheckpointStore
    home_log: Log
    record: Callable[[Sequence[ShardWork]], Awaitable[None]]
    lose: Callable[[Sequence[ShardWork]], None]
    batch_cells_max: int
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._history = History(self.handler, self.checkpoints, self.home_log)

    async def locate(self, works: Sequence[ShardWork], heads: Mapping[int, Head]) -> None:
        """Reads checkpoints. A shard that stopped stays so until somebody resumes it."""
        found = await self.checkpoints.read([work.shard for work in works])
        due_in_s = await self.handler.take_over(found)  # later than the checkpoints, or a move in between is missed
        uneven = []
        for work in works:
            checkpoint = found.get(work.shard)
            if checkpoint is None:
                work.wait_until = self.clock() + _NO_CHECKPOINT_WAIT_S
                continue
            if checkpoint.ahead and checkpoint.stop_reason is None:
                uneven.append(work)
                continue
            work.begin(checkpoint, heads.get(work.shard))
            work.due_at = self.clock() + due_in_s.get(work.shard, inf)
            if checkpoint.stop_reason is not None:
                work.cursor.stop(checkpoint.stop_reason)
        for work in uneven:
            try:
                await self._history.prove(found[work.shard])
                work.begin(found[work.shard], heads.get(work.shard))
            except LocationGone as gone:
                work.report(self.checkpoints.consumer, str(gone))
                work.wait_until = self.clock() + _REFUSED_WAIT_S
            except Fenced:
                self.lose([work])

    async def read(self, works: Sequence[ShardWork]) -> None:
        """Reads one page of each shard's log."""
        wanted = {work.shard: work.cursor.at for work in works}
        share = max(1, self.batch_cells_max // len(works))
        now = self.clock()
        for work in works:
            work.served_at = now
        answers = await self.home_log.read(wanted, min(share, *(work.page_cells for work in works)))
        for work in works:
            cursor = work.cursor
            answer = answers.get(work.shard)
            if answer is None or cursor.at is not wanted[work.shard] or work.assignment is not Assignment.OURS:
                continue
            if isinstance(answer, LocationGone):
                if work.busy or work.cells:  # the rest of a call that ended meanwhile is before the position, too
                    work.wait_until = self.clock() + _WAIT_S
                else:
                    await self._step_back(work, answer)
            else:
                work.queue(cursor.page(answer))
                if not work.cells:
                    work.failures = 0
            work.report(self.checkpoints.consumer, cursor.reason if cursor.state is CursorState.REFUSED else None)

    async def _step_back(self, work: ShardWork, gone: LocationGone) -> None:
        """Continues before the generation that superseded the shard's position, if there is one (I13)."""
        cursor = work.cursor
        await self.record([work])
        if work.unrecorded:
            work.wait_until = self.clock() + _WAIT_S
        if work.unrecorded or cursor.state is not CursorState.BEHIND or cursor.gone(gone) is None:
            return
        back = cursor.at
        work.caution.forget()
        cursor.forget()  # where this fails, the shard begins anew with its checkpoint, and comes here again
        back = await self._history.identified(back)
        try:
            await self._history.take_back(gone, back)
        except Fenced:
            self.lose([work])
        else:
            cursor.begin(back)
            work.due_at = self.clock()


# The recorder stores the checkpoints of cells that are finished already, a little later and many at once (I10).
#
# It is for effects that no transaction of ours contains, as the calls of trigger functions. What was not recorded is
# called again after a crash. Parked cells are stored in the transaction that moves the checkpoint past them (I12).

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
        except BaseException:
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
        """Moves checkpoints, one alone if it has an effect. What a failed or cancelled move doesn't store is kept."""
        emit(Event.CHECKPOINTS_MOVING)
        lost: Collection[int] = ()
        waiting: Collection[int] = advances.keys()
        try:
            lost = await self._checkpoints.move(advances, {})
            waiting = ()
            emit(Event.CHECKPOINTS_MOVED)
        except SchemalessError as error:
            waiting = error.shards if isinstance(error, ShardsMoved) else waiting  # the others were stored
            log.warning("checkpoints wait", consumer=self._checkpoints.consumer, why=str(error))
        finally:
            for shard, advance in advances.items():
                work = pending[shard]
                if shard in waiting:
                    work.unrecorded.put_back(advance)
                    work.record_at = now + _RETRY_S
                # A kill would repeat all that is called until it is stored.
                work.must_record = shard in waiting or (work.must_record and bool(work.unrecorded))
        return [pending[shard] for shard in lost]
