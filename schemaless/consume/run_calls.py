"""RunCalls: calls a program's functions for the cells of a run, one after the other or rows beside each other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection

from schemaless.cell import StoredCell
from schemaless.consume.breaker import Breaker
from schemaless.consume.cell_calls import CellCalls, Place
from schemaless.consume.lanes import PASS_S, Lanes
from schemaless.consume.parked_rows import ParkedRows, Pass, Replay
from schemaless.consume.ports import Run
from schemaless.consume.trigger_calls import Plan, TriggerCalls
from schemaless.triggers.decorator import Trigger


class Lane:
    """The cells of one row that one pass calls. `replay` is its record once the pass has ended without it."""

    __slots__ = ("cells", "marked", "replay", "task")

    def __init__(self, cells: deque[StoredCell]) -> None:
        self.cells = cells
        self.replay: Replay | None = None
        self.task: asyncio.Task[None]
        self.marked: Trigger | None = None


class RunCalls:
    """Runs of one program. `clock` counts seconds."""

    def __init__(
        self,
        cell_calls: CellCalls,
        calls: TriggerCalls,
        breaker: Breaker,
        lanes: Lanes,
        clock: Callable[[], float],
    ) -> None:
        self._cell_calls = cell_calls
        self._calls = calls
        self._breaker = breaker
        self._lanes = lanes
        self._clock = clock
        triggers = cell_calls.program.triggers
        self._has_async = any(marked.is_async for found in triggers.values() for marked in found)

    async def call(self, run: Run, rows: ParkedRows, made: Pass) -> int:
        """Calls the functions for the cells of a run. Returns how many are finished or set aside."""
        if self._lanes.parallel > 1 and not (run.careful or made.is_probe):
            return await self._in_lanes(run, rows, made)
        plan = self._plan_run(run, rows, made)
        return await (self._calls.drive(plan) if self._has_async else self._calls.drive_in_thread(plan))

    def pass_over(self, run: Run, rows: ParkedRows, made: Pass) -> int:
        """Finishes the first cells of a run, up to one that a function is called for. Returns how many."""
        for n, cell in enumerate(run.cells):
            if cell.row_key in rows.held and self._cell_calls.wants(cell):
                made.count("waiting", of=cell.added_id)
            elif not self._cell_calls.called_for(cell):
                made.count("filtered", of=cell.added_id)
            else:
                return n
        return len(run.cells)

    def _plan_run(self, run: Run, rows: ParkedRows, made: Pass) -> Plan[int]:
        """Calls one cell after the other."""
        held, deadline = rows.held, made.deadline
        for n, cell in enumerate(run.cells):
            if n and (self._clock() > deadline or made.is_full):
                return n
            if not self._cell_calls.wants(cell):
                made.count("filtered", of=cell.added_id)
            elif cell.row_key in held:
                made.count("waiting", of=cell.added_id)
            else:
                failed = yield from self._cell_calls.plan(cell, made, Place(made, run, n), None)
                if failed:
                    if not self._cell_calls.set_aside(rows, made, cell, failed, None):
                        return n
                    if self._breaker.is_tripped:
                        return n + 1
        return len(run.cells)

    async def _in_lanes(self, run: Run, rows: ParkedRows, made: Pass) -> int:
        """Calls rows beside each other, the cells of each in order. A call that takes long goes on beyond the pass."""
        lanes: dict[bytes, Lane] = {}
        dispatched = 0
        for cell in run.cells:
            if made.stop_reason or self._breaker.is_tripped or made.is_full:
                break
            if dispatched and self._clock() > made.deadline:
                break
            if not self._cell_calls.wants(cell):
                made.count("filtered", of=cell.added_id)
            elif cell.row_key in rows.held:
                made.count("waiting", of=cell.added_id)
            elif (lane := lanes.get(cell.row_key)) is not None and not lane.task.done():
                lane.cells.append(cell)
            elif await self._lanes.has_free([lane.task for lane in lanes.values()], rows, made):
                lane = lanes[cell.row_key] = Lane(deque([cell]))
                lane.task = asyncio.create_task(self._call_lane(lane, run, rows, made))
            else:
                break
            dispatched += 1
        await self._end(lanes.values(), rows, made)
        return dispatched

    async def _end(self, lanes: Collection[Lane], rows: ParkedRows, made: Pass) -> None:
        """Waits a little for the calls in flight. The checkpoint passes those that take longer."""
        if running := [lane.task for lane in lanes if not lane.task.done()]:
            await asyncio.wait(running, timeout=max(0.0, made.deadline - self._clock()) + PASS_S)
        for lane in lanes:
            if lane.task.done():
                lane.task.result()
            if lane.cells:
                self._detach(lane, rows, made)

    async def _call_lane(self, lane: Lane, run: Run, rows: ParkedRows, made: Pass) -> None:
        while lane.cells and made.stop_reason is None:
            cell = lane.cells[0]
            plan = self._cell_calls.plan(cell, made, Place(made, run, 0), None)
            try:
                call = next(plan)
                while True:
                    lane.marked = call.marked
                    error = await self._calls.make(call)
                    if (replay := lane.replay) is not None:  # the pass has ended without it
                        return self._lanes.ended(replay, error, rows)
                    call = plan.send(error)
            except StopIteration as stop:
                failed = stop.value
            if failed and not self._cell_calls.set_aside(rows, made, cell, failed, None):
                return
            lane.cells.popleft()
            if failed:
                for behind in lane.cells:
                    made.count("waiting", of=behind.added_id)
                lane.cells.clear()

    def _detach(self, lane: Lane, rows: ParkedRows, made: Pass) -> None:
        """Lets the checkpoint pass cells that no pass waits for. Their row has a record until they are finished."""
        cell, now = lane.cells[0], self._clock()
        marked = lane.marked or self._cell_calls.first_function(cell)
        record = self._cell_calls.waiting_head(cell, marked.name, "its call takes long")
        made.put(record)
        for waiting in lane.cells:
            made.count("waiting", of=waiting.added_id)
        replay = rows.wait(record, now)
        if not lane.task.done():
            lane.replay = replay
            self._lanes.leave(replay, lane.task, rows)
