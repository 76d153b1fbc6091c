"""How one trigger program stands to the cells of one row: what is finished, what isn't, and why not. Does no I/O.

A successful call leaves nothing behind but the checkpoint. So a cell is finished when the checkpoint of its shard has
passed it and no record says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from api.explain.row_facts import HomeFacts
from schemaless.cell import CellKey, ColumnName, RefKey, RowKey, created_at_text
from schemaless.location import kept_until, shard_location_text
from schemaless.quantity import quantity
from schemaless.storage.checkpoint_table import Checkpoint, State
from schemaless.storage.parked_history_table import EndedCell
from schemaless.storage.parked_table import Cause, ParkedCell
from schemaless.storage.shard_log import RowCell
from schemaless.storage.trigger_order_table import ProgramPause, TriggerOrders
from schemaless.storage.trigger_program_table import ProgramFunctions
from schemaless.storage.worker_table import WorkerRow

UNFINISHED_MAX = 20
"""Cells of one row and program whose state is shown one by one."""


class ProgramStanding(msgspec.Struct, frozen=True):
    """One program, and the row of one shard. `pause` is of the whole program, `orders` are those of the shard's home.

    `ended` are cells that are parked no longer. `workers` are its processes that were seen lately.
    """

    program: str
    row_key: RowKey
    shard: int
    home: HomeFacts
    checkpoint: Checkpoint | None
    records: Sequence[ParkedCell]
    ended: Sequence[EndedCell]
    functions: ProgramFunctions | None
    pause: ProgramPause
    orders: TriggerOrders
    workers: Sequence[WorkerRow]

    def view(self) -> dict[str, Any]:
        """Returns what people see: how far the program is, and of each cell that isn't finished why."""
        cells = [cell for cell in self.home.page.cells if self._wants(cell)]
        unfinished = [(cell, *found) for cell in cells if (found := self._unfinished(cell)) is not None]
        state, reason = self._state()
        checkpoint = self.checkpoint
        return {
            "program": self.program,
            "state": state,
            "reason": reason,
            "workers": len(self.workers),
            "checkpoint": None
            if checkpoint is None
            else {
                "location": f"{self.shard}:{checkpoint.location}",
                "at": created_at_text(checkpoint.updated_at),
                "pending": max(0, self.home.head.added_id - self._reached),
            },
            "finished": len(cells) - len(unfinished),
            "unfinished": [self._cell_view(*each) for each in unfinished[:UNFINISHED_MAX]],
            "unfinished_count": len(unfinished),
        }

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields what happened to cells that are parked or wait, and to those that were parked, each with its time.

        Times are in microseconds.
        """
        for record, ended in [*((one, None) for one in self.records), *((one.record, one) for one in self.ended)]:
            about = {
                "program": self.program,
                "trigger": record.function_name,
                "location": shard_location_text(self.shard, record.generation, record.added_id),
            }
            earlier = max(0, record.attempts - len(record.attempted_at))
            for number, at in enumerate(record.attempted_at, start=earlier + 1):
                yield at, {"kind": "failed_call", **about, "attempt": number}
            details = {"attempts": record.attempts, "error": record.error, "version": record.version}
            if record.cause is Cause.WAITING:
                yield record.parked_at, {"kind": "waiting", **about, **details}
            else:
                cause = {"cause": str(record.cause), "holds_row": record.holds_row}
                yield record.parked_at, {"kind": "parked", **about, **cause, **details}
            job = self.home.jobs.get(record.job or 0)
            if job is not None:
                ordered = {"job": f"{job.job:016x}", "who": job.who, "reason": job.reason}
                yield job.made_at, {"kind": f"{job.kind}_ordered", **about, **ordered}
            if ended is not None:
                yield ended.ended_at, {"kind": "unparked", **about, "ending": str(ended.ending)}

    @property
    def _reached(self) -> int:
        """The added_id up to which the shard is finished in its present history."""
        return 0 if self.checkpoint is None else kept_until(self.checkpoint.location, self.home.starts)

    def _wants(self, cell: RowCell) -> bool:
        return self.functions is None or cell.column_name in self.functions.functions

    def _state(self) -> tuple[str, str | None]:
        if self.pause.paused:
            return "paused", self.pause.reason
        if self.checkpoint is not None and self.checkpoint.state is State.STOPPED:
            return "stopped", self.checkpoint.reason
        if self.shard in self.orders.paused:
            return "paused", self.orders.paused[self.shard]
        tripped = [row.report.tripped for row in self.workers if row.report.tripped is not None]
        return ("tripped", tripped[0]) if tripped else ("running", None)

    def _unfinished(self, cell: RowCell) -> tuple[str, str] | None:
        """Returns the state of a cell and why it waits, None for one that is finished."""
        added_id = cell.location.added_id
        for record in self.records:
            if record.added_id == added_id:
                return str(record.cause), self._why_recorded(cell, record)
            if record.holds_row and record.added_id < added_id <= self._reached:
                at = shard_location_text(self.shard, record.generation, record.added_id)
                return "behind", f"it waits behind {at} of its row, so that the row's order holds"
        if added_id <= self._reached:
            return None
        return "not_reached", self._why_not_reached(cell)

    def _why_recorded(self, cell: RowCell, record: ParkedCell) -> str:
        if record.ordered is not None and record.due_at is not None:
            why = f"a {record.ordered} is ordered, due at {created_at_text(record.due_at)}"
        elif record.cause is Cause.WAITING:
            why = self._running_call(cell) or "its next attempt is due later, or its call takes long"
        else:
            command = f"schemaless parked retry {self.program} {self.shard}:{record.location}:{record.function_name}"
            return f"it is parked until somebody orders a retry or a discard: {command}"
        return "; ".join([why, *self._blockers()])

    def _why_not_reached(self, cell: RowCell) -> str:
        why = list(self._blockers())
        if self.checkpoint is None:
            return "; ".join(["the program has not begun this shard", *why])
        if not why and (running := self._running_call(cell)) is not None:
            return running
        before = cell.location.added_id - self._reached - 1
        ahead = f"{quantity(before, 'cell')} of its shard before it"
        next_one = ahead if before else "it is the next cell of its shard"
        return "; ".join([*why, next_one])

    def _running_call(self, cell: RowCell) -> str | None:
        key = str(CellKey(self.row_key, ColumnName(cell.column_name), RefKey(cell.ref_key)))
        for row in self.workers:
            call = row.report.oldest_call
            if call is not None and call.cell == key:
                return f"its call of {call.trigger} has run for {call.age_s + row.age_s:.0f} s"
        return None

    def _blockers(self) -> Iterator[str]:
        """Yields why nothing of the program is called now in this shard."""
        if self.checkpoint is not None and self.checkpoint.state is State.STOPPED:
            yield f"the shard has stopped: {self.checkpoint.reason}"
        if self.pause.paused:
            yield f"the program is paused: {self.pause.reason or 'no reason was given'}"
        elif self.shard in self.orders.paused:
            yield f"the shard is paused: {self.orders.paused[self.shard] or 'no reason was given'}"
        if not self.workers:
            yield "nobody runs the program"
        for row in self.workers:
            for waiting in (*row.report.unconfirmed, *row.report.refused, *row.report.failing_shards):
                if waiting.shard == self.shard:
                    yield f"its worker doesn't go on: {waiting.reason}"
            if row.report.tripped is not None:
                yield f"the breaker is open: {row.report.tripped}"
        seek = self.orders.seeks.get(self.shard)
        if seek is not None:
            yield f"a seek to {seek.to.location} is ordered"

    def _cell_view(self, cell: RowCell, state: str, why: str) -> dict[str, Any]:
        return {
            "location": f"{self.shard}:{cell.location}",
            "column_name": cell.column_name,
            "ref_key": cell.ref_key,
            "state": state,
            "why": why,
        }
