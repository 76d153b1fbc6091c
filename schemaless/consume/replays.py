"""Replays: calls parked cells again, and then the cells of their rows that wait behind them, in order (I12).

It carries out what people ordered, and what records of a former owner of the shard ask for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import structlog

from schemaless.batching import all_or_first_error
from schemaless.cell import StoredCell
from schemaless.consume.breaker import Breaker
from schemaless.consume.cell_calls import CellCalls, Place
from schemaless.consume.parked_rows import ParkedRows, Pass, Replay, counted
from schemaless.consume.parked_store import ParkedStore
from schemaless.consume.ports import Death, Run
from schemaless.consume.trigger_calls import TriggerCalls
from schemaless.errors import SchemalessError
from schemaless.storage.parked_table import Cause, Order, ParkedCell
from schemaless.trigger import ParkMode

log = structlog.get_logger()

_STORAGE_PAUSE_S = 1.0


class Replays:
    """The replays of one program. `parallel` rows of a shard are called at once."""

    def __init__(
        self,
        cell_calls: CellCalls,
        calls: TriggerCalls,
        breaker: Breaker,
        parked: ParkedStore,
        *,
        parallel: int,
        kills_max: int,
        clock: Callable[[], float],
    ) -> None:
        self._cell_calls = cell_calls
        self._calls = calls
        self._breaker = breaker
        self._parked = parked
        self._parallel = parallel
        self._kills_max = kills_max
        self._clock = clock

    def take_record(self, rows: ParkedRows, record: ParkedCell, *, died: bool) -> None:
        """Takes a record of a shard that begins. If a process died while it called the cell, the cell may be why."""
        marked, was = self._cell_calls.function_of(record), counted(record)
        if record.begun:
            kills = record.kills + died
            record = msgspec.structs.replace(record, begun=False, kills=kills)
            if kills < self._kills_max:
                rows.to_unmark.append(record)
            else:
                error = f"{Death.KILLED.value}: its call ended {kills} processes"
                record = msgspec.structs.replace(record, cause=Cause.KILLED, error=error, ordered=None)
                rows.to_put.append((record, was))
        elif record.cause is Cause.WAITING and marked is None:
            record = msgspec.structs.replace(record, cause=Cause.ERROR, error=self._cell_calls.no_function(record))
            rows.to_put.append((record, was))
        if record.cause is Cause.WAITING:
            rows.wait(record, self._clock())
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
        waiting = deque(due)
        while (
            waiting
            and self._clock() < made.deadline
            and not (made.stop_reason or made.is_full or self._breaker.is_tripped)
        ):
            free = max(1, self._parallel - len(rows.tasks))
            together = [waiting.popleft() for _ in range(min(free, len(waiting)))]
            await all_or_first_error(self.replay(rows, replay, made, run) for replay in together)

    async def replay(self, rows: ParkedRows, replay: Replay, made: Pass, run: Run) -> None:
        """Calls a record's cell again, and then the cells of its row that wait behind it, in order."""
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
                is_head = cell.added_id == record.added_id
                if not is_head and (self._clock() > made.deadline or run.careful or self._breaker.is_tripped):
                    return self._move_head(rows, replay, made, cell, self._clock())
                place = Place(made, run, 0, record)
                failed = await self._calls.drive(self._cell_calls.plan(cell, made, place, replay if is_head else None))
                if made.stop_reason is not None:
                    return None if is_head else self._move_head(rows, replay, made, cell, self._clock())
                if failed:
                    if not is_head:
                        self._leave(rows, replay, made)
                    return self._cell_calls.set_aside(rows, made, cell, failed, record if is_head else None)
                replay.after, has_counted = cell.added_id, True
            if not cells and (until == rows.seen or rows.held.get(record.row_key) != record.added_id):
                return self._leave(rows, replay, made)

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

    def _move_head(self, rows: ParkedRows, replay: Replay, made: Pass, cell: StoredCell, due_at: float) -> None:
        """Notes that the row goes on with another cell, so that a kill repeats no more than a pass."""
        self._leave(rows, replay, made)
        record = self._cell_calls.waiting_head(cell, self._cell_calls.first_function(cell).name, "")
        made.put(record)
        rows.wait(record, due_at)

    def _leave(self, rows: ParkedRows, replay: Replay, made: Pass) -> None:
        """Removes a record that its row has passed. If its cell is parked alone, it stays for people."""
        record, marked = replay.record, self._cell_calls.function_of(replay.record)
        rows.remove(record)
        if record.cause is not Cause.WAITING and replay.ordered is None and marked and marked.park is ParkMode.CELL:
            made.release_row(record)
            rows.apart.add(record.added_id)
        else:
            made.delete(record)
