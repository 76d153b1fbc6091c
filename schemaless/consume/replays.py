"""Replays: calls parked cells again, and then the cells of their rows that wait behind them, in order (I12).

It carries out what people ordered, and what records of a former owner of the shard ask for. Where rows are called
beside each other, a pass doesn't wait for a call that takes long, so it holds its own row only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence

import msgspec
import structlog

from schemaless.cell import StoredCell
from schemaless.consume.breaker import Breaker
from schemaless.consume.cell_calls import CellCalls, FailedCall, Place
from schemaless.consume.lanes import Lanes
from schemaless.consume.parked_rows import ParkedRows, Pass, Replay, counted
from schemaless.consume.parked_store import ParkedStore
from schemaless.consume.ports import Death, Run
from schemaless.consume.trigger_calls import Call, Plan, TriggerCalls
from schemaless.errors import SchemalessError
from schemaless.quantity import quantity
from schemaless.runtime.events import Event, emit
from schemaless.storage.parked_history_table import Ending
from schemaless.storage.parked_table import Cause, Order, ParkedCell
from schemaless.triggers.decorator import ParkMode

log = structlog.get_logger()

_STORAGE_PAUSE_S = 1.0
_LANE_MIN_S = 0.02  # a call that begins at the end of a pass has so long until it outlasts the pass


class ReplayLane:
    """The replay of one row in one pass. `call` runs now. `left`: the record that it is of, once the pass has ended."""

    __slots__ = ("call", "left", "replay", "task")

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.call: Call | None = None
        self.left: Replay | None = None
        self.task: asyncio.Task[None]

    @property
    def is_in_pass(self) -> bool:
        return self.left is None and not self.task.done()


class Replays:
    """The replays of one program. `clock` counts seconds."""

    def __init__(
        self,
        cell_calls: CellCalls,
        calls: TriggerCalls,
        breaker: Breaker,
        parked: ParkedStore,
        lanes: Lanes,
        *,
        kills_max: int,
        clock: Callable[[], float],
    ) -> None:
        self._cell_calls = cell_calls
        self._calls = calls
        self._breaker = breaker
        self._parked = parked
        self._lanes = lanes
        self._kills_max = kills_max
        self._clock = clock

    def take_record(self, rows: ParkedRows, record: ParkedCell, *, died: bool, since: int | None) -> None:
        """Takes a record of a shard that begins. If a process died while it called the cell, the cell may be why.

        `since`: this process has had the shard from then on, in microseconds, None if it takes it only now.
        """
        marked, was = self._cell_calls.function_of(record), counted(record)
        if record.begun:
            kills = record.kills + died
            record = msgspec.structs.replace(record, begun=False, kills=kills)
            if kills < self._kills_max:
                rows.to_unmark.append(record)
            else:
                error = f"{Death.KILLED.value}: its call ended {quantity(kills, 'process')}"
                record = msgspec.structs.replace(record, cause=Cause.KILLED, error=error, ordered=None)
                rows.to_put.append((record, was))
        elif record.cause is Cause.WAITING and marked is None:
            record = msgspec.structs.replace(record, cause=Cause.ERROR, error=self._cell_calls.no_function(record))
            rows.to_put.append((record, was))
        if record.cause is Cause.WAITING:
            inherited = bool(record.attempted_at) and (since is None or record.attempted_at[-1] < since)
            rows.wait(record, self._clock()).inherited = inherited
        elif not record.holds_row:
            rows.apart.add(record.added_id)
        else:
            rows.park(record, holds_row=marked is None or marked.park is ParkMode.ROW, now=self._clock())

    def carry_out(self, rows: ParkedRows, made: Pass) -> None:
        """Stores what taking over changed, and begins what people ordered."""
        for record, was in rows.to_put:
            made.put(record)
            made.count(counted(record), was, of=record.added_id)
        rows.to_put.clear()
        for record in rows.to_unmark:
            made.unmark(record)
        rows.to_unmark.clear()
        for record in rows.orders.values():
            replay = rows.replays.get(record.added_id)
            if not rows.knows(record) or (replay is not None and replay.task is not None):
                continue
            if record.ordered is Order.RETRY and self._cell_calls.function_of(record) is None:
                made.put(msgspec.structs.replace(record, error=self._cell_calls.no_function(record)))
                continue
            if replay is None:
                replay = rows.replays[record.added_id] = Replay(record, self._clock())
            elif replay.after >= record.added_id:
                continue  # what waits behind it is being called. The order comes again
            elif replay.order_due_at == record.due_at:
                continue  # it is being carried out
            replay.due_at, replay.ordered, replay.order_due_at = self._clock(), record.ordered, record.due_at
            replay.record = msgspec.structs.replace(replay.record, job=record.job)
        rows.orders.clear()

    async def call_due(self, run: Run, rows: ParkedRows, made: Pass) -> None:
        """Calls what is due again, rows beside each other up to the limit."""
        due = rows.due(self._clock())
        if run.careful and due:
            replay = due[0]
            if not replay.record.begun and replay.ordered is not Order.DISCARD:
                replay.record = msgspec.structs.replace(replay.record, begun=True)
                return made.begin(replay.record)
            return await self.replay(rows, replay, made, run)
        waiting = deque(sorted(due, key=lambda replay: replay.result is None))  # what has ended needs no lane
        lanes: list[ReplayLane] = []
        try:
            while waiting and not (
                self._clock() >= made.deadline or made.stop_reason or made.is_full or self._breaker.is_tripped
            ):
                replay = waiting[0]
                if self._lanes.parallel == 1:
                    await self.replay(rows, replay, made, run)
                elif replay.result or await self._lanes.has_free([lane.task for lane in lanes], rows, made):
                    lanes.append(lane := ReplayLane(replay))
                    lane.task = asyncio.create_task(self.replay(rows, replay, made, run, lane))
                else:
                    break
                waiting.popleft()
            await self._end(lanes, rows, made)
        finally:
            for lane in lanes:
                if lane.is_in_pass:
                    lane.task.cancel()

    async def _end(self, lanes: Collection[ReplayLane], rows: ParkedRows, made: Pass) -> None:
        """Waits a little for the calls in flight. Those that take longer go on without the pass.

        What reads cells of its row is waited for: the store has time limits of its own.
        """
        while running := [lane for lane in lanes if lane.is_in_pass]:
            left_s = max(_LANE_MIN_S, made.deadline - self._clock())
            await asyncio.wait([lane.task for lane in running], timeout=left_s)
            for lane in running:
                if lane.call is not None and lane.is_in_pass:
                    self._detach(lane, lane.call, rows, made)
        for lane in lanes:
            if lane.left is None:
                lane.task.result()

    def _detach(self, lane: ReplayLane, call: Call, rows: ParkedRows, made: Pass) -> None:
        """Lets a call go on beyond its pass. Its record names the cell and the function that it is of."""
        replay, cell, name = lane.replay, call.cell, call.marked.name
        if cell.added_id != replay.record.added_id:
            replay = self._move_head(rows, replay, made, cell, name, "its call takes long")
        elif name != replay.record.function_name:
            replay.record = msgspec.structs.replace(replay.record, function_name=name, attempts=0)
        lane.left = replay
        self._lanes.leave(replay, lane.task, rows)

    async def replay(
        self, rows: ParkedRows, replay: Replay, made: Pass, run: Run, lane: ReplayLane | None = None
    ) -> None:
        """Calls a record's cell again, and then the cells of its row that wait behind it, in order.

        Without a lane the pass waits for each call to its end.
        """
        emit(Event.REPLAY_BEGINS)
        record = replay.record
        has_counted = replay.ordered is Order.DISCARD and replay.after < record.added_id
        if has_counted:
            made.count("skipped", counted(record), of=record.added_id)
            replay.after = record.added_id
        while True:
            until = rows.seen if rows.held.get(record.row_key) == record.added_id else record.added_id
            cells = await self._read_on(rows, replay, until, may_wait=not has_counted)
            if cells is None:
                return
            for cell in cells:
                is_behind = cell.added_id != record.added_id
                if is_behind and (
                    self._clock() > made.deadline or run.careful or made.stop_reason or self._breaker.is_tripped
                ):
                    self._move_head(rows, replay, made, cell)
                    return
                if not await self._call(rows, replay, made, Place(made, run, 0, record), cell, lane):
                    return
                replay.after, has_counted = cell.added_id, True
            if not cells and (until == rows.seen or rows.held.get(record.row_key) != record.added_id):
                return self._leave(rows, replay, made)

    async def _call(
        self, rows: ParkedRows, replay: Replay, made: Pass, place: Place, cell: StoredCell, lane: ReplayLane | None
    ) -> bool:
        """Calls the functions for one cell of a row. Returns whether the row goes on in this pass."""
        head = replay.record if cell.added_id == replay.record.added_id else None
        plan = self._cell_calls.plan(cell, made, place, replay if head else None)
        if lane is None:
            failed = await self._calls.drive(plan)
        else:
            failed = await self._drive(plan, lane, rows)
            if lane.left is not None:
                return False
        if failed is None:
            return True
        is_set_aside = self._cell_calls.set_aside(rows, made, cell, failed, head)
        if head is None:
            if is_set_aside:
                self._leave(rows, replay, made)
            else:  # the shard stops at this cell, and the checkpoint has passed it
                self._move_head(rows, replay, made, cell)
        return False

    async def _drive(self, plan: Plan[FailedCall | None], lane: ReplayLane, rows: ParkedRows) -> FailedCall | None:
        """Makes the calls of a plan. If the pass ends before one of them, that is the last one."""
        try:
            lane.call = next(plan)
            while True:
                error = await self._calls.make(lane.call)
                if lane.left is not None:
                    self._lanes.ended(lane.left, error, rows)
                    return None
                lane.call = plan.send(error)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            lane.call = None

    async def _read_on(
        self, rows: ParkedRows, replay: Replay, until: int, *, may_wait: bool
    ) -> Sequence[StoredCell] | None:
        """Returns the next cells of a row, or None if they can't be read now.

        Raises SchemalessError if something is counted that its record doesn't say: a kill would count it again.
        """
        row_key, columns = replay.record.row_key, self._cell_calls.program.triggers
        try:
            return await self._parked.of_row(rows.shard, row_key, columns, replay.after, until)
        except SchemalessError as error:
            if not may_wait:
                raise
            log.warning("a row waits for its cells", shard=rows.shard, why=str(error))
            replay.due_at = self._clock() + _STORAGE_PAUSE_S
            return None

    def _move_head(
        self, rows: ParkedRows, replay: Replay, made: Pass, cell: StoredCell, function: str | None = None, why: str = ""
    ) -> Replay:
        """Notes that the row goes on with another cell, so that a kill repeats no more than a pass."""
        self._leave(rows, replay, made)
        name = function or self._cell_calls.first_function(cell).name
        record = self._cell_calls.waiting_head(cell, name, why)
        made.put(record)
        return rows.wait(record, self._clock())

    def _leave(self, rows: ParkedRows, replay: Replay, made: Pass) -> None:
        """Removes a record that its row has passed. If its cell is parked alone, it stays for people."""
        record, marked = replay.record, self._cell_calls.function_of(replay.record)
        rows.remove(record)
        if record.cause is not Cause.WAITING and replay.ordered is None and marked and marked.park is ParkMode.CELL:
            made.release_row(record)
            rows.apart.add(record.added_id)
        else:
            made.delete(record, Ending.DISCARDED if replay.ordered is Order.DISCARD else Ending.FINISHED)
