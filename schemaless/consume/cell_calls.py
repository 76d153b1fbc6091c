"""CellCalls: calls the functions of a program for one cell, and decides what a failed call means (I12)."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable

import msgspec
import structlog

from schemaless.cell import StoredCell, row_key_text
from schemaless.codec import decode_body
from schemaless.config import ConsumerSettings
from schemaless.consume.breaker import Breaker
from schemaless.consume.parked_rows import ParkedRows, Pass, Replay, counted, head_of
from schemaless.consume.ports import Run
from schemaless.consume.trigger_calls import Call, Plan
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.errors import SchemalessError
from schemaless.runtime.events import Event, emit
from schemaless.storage import parked_table
from schemaless.storage.parked_table import Cause, ParkedCell
from schemaless.storage.worker_table import FAILING_ERROR_CHARACTERS_MAX, FailingCell
from schemaless.triggers.decorator import Context, Park, ParkMode, Retry, Skip, Stop, Trigger
from schemaless.triggers.retry_policy import RetryPolicy

log = structlog.get_logger()

FailedCall = tuple[Trigger, Exception]


class Place(msgspec.Struct, frozen=True):
    """Where a call is made: for a cell of a run, or, with a record, for one that was set aside."""

    made: Pass
    run: Run
    finished: int
    record: ParkedCell | None = None


class CellCalls:
    """The functions of one program. `context` is that of its calls before any of them.

    `clock` counts seconds, and `now_us` microseconds since the epoch.
    """

    def __init__(
        self,
        program: TriggerProgram,
        context: Context,
        settings: ConsumerSettings,
        breaker: Breaker,
        clock: Callable[[], float],
        now_us: Callable[[], int],
    ) -> None:
        self.program = program
        self._context = context
        self._breaker = breaker
        self._clock = clock
        self._now_us = now_us
        self.attempts: Counter[tuple[str, str]] = Counter()
        """Calls by function and outcome. Passes in threads share it, so a count may be missed now and then."""
        self._default_policy = RetryPolicy(
            settings.attempts_max,
            settings.retry_delay_s,
            max_delay=max(settings.retry_delay_s, settings.retry_delay_max_s),
            jitter=0.0,
        )

    def wants(self, cell: StoredCell) -> bool:
        """Returns whether a function of the program is marked for the cell's column."""
        return cell.column_name in self.program.triggers

    def called_for(self, cell: StoredCell) -> list[str]:
        """Returns the names of the functions that are called for a cell. One whose body can't be read is a failure."""
        found = self.program.triggers.get(cell.column_name, ())
        try:
            return [m.name for m in found if m.where is None or m.where.holds(decode_body(cell.body))]
        except SchemalessError:
            return [marked.name for marked in found]

    def waiting_head(self, cell: StoredCell, function_name: str, why: str) -> ParkedCell:
        """Returns a record of a cell that no call has failed for yet."""
        return head_of(cell, function_name, Cause.WAITING, why, self._now_us(), self.program.version)

    def first_function(self, cell: StoredCell) -> Trigger:
        return self.program.triggers[cell.column_name][0]

    def function_of(self, record: ParkedCell) -> Trigger | None:
        found = [m for m in self.program.triggers.get(record.column_name, ()) if m.name == record.function_name]
        return found[0] if found else None

    def failing(self, replay: Replay) -> FailingCell:
        """Returns what people are shown of a cell that waits for its next attempt."""
        record, marked = replay.record, self.function_of(replay.record)
        policy = self._default_policy if marked is None else marked.retry or self._default_policy
        again_at = self._now_us() / 1e6 + replay.due_at - self._clock()
        return FailingCell(
            record.function_name,
            f"{row_key_text(record.row_key)}/{record.column_name}/{record.ref_key}",
            f"{record.shard}:{record.location}",
            record.attempts,
            policy.attempts,
            round(again_at),  # a report that differs in a fraction would be stored anew each second
            record.error[-FAILING_ERROR_CHARACTERS_MAX:],
        )

    def no_function(self, record: ParkedCell) -> str:
        return f"version {self.program.version} of the program has no function {record.function_name}"

    def park(self, rows: ParkedRows, made: Pass, record: ParkedCell) -> None:
        marked = self.function_of(record)
        made.put(record)
        made.durable = True
        rows.park(record, holds_row=marked is None or marked.park is ParkMode.ROW, now=self._clock())
        log.warning(
            "a cell is parked", program=self.program.name, trigger=record.function_name, shard=record.shard,
            added_id=record.added_id, cause=record.cause.value, why=_last_line(record.error),
        )  # fmt: skip
        emit(Event.CELL_PARKED)

    def plan(self, cell: StoredCell, made: Pass, place: Place, replay: Replay | None) -> Plan[FailedCall | None]:
        """Calls the functions for one cell, or those that its record still owes. Returns the one that failed."""
        found = self.program.triggers[cell.column_name]
        record = None if replay is None else replay.record
        first = 0 if record is None else next((n for n, m in enumerate(found) if m.name == record.function_name), 0)
        attempt = 1 + (record.attempts if record is not None and record.cause is Cause.WAITING else 0)
        became = "filtered"
        for marked in found[first:]:
            if marked.where is not None:
                try:
                    if not marked.where.holds(decode_body(cell.body)):
                        continue
                except SchemalessError as corrupt:
                    return marked, corrupt
            if replay is not None and replay.result is not None:
                error, replay.result = replay.result.error, None  # it ended after its pass
            else:
                error = yield Call(marked, cell, self._context.of_attempt(attempt), place)
            attempt = 1
            self.attempts[marked.name, _outcome_of(error)] += 1
            if error is None:
                became = "called"
                self._breaker.succeeded(marked.name, cell.row_key, is_probe=made.is_probe)
            elif isinstance(error, Skip):
                became = "skipped" if became == "filtered" else became
            else:
                return marked, error
        was = None if place.record is None else "waiting" if record is None else counted(record)
        made.count(became, was, of=cell.added_id)
        return None

    def set_aside(
        self,
        rows: ParkedRows,
        made: Pass,
        cell: StoredCell,
        failed: FailedCall,
        before: ParkedCell | None,
    ) -> bool:
        """Parks a cell whose call failed, or lets it wait for its next attempt.

        Returns False, and changes nothing of the cell, if the shard has to stop at it.
        """
        marked, error = failed
        if isinstance(error, Stop):
            made.stop_reason = f"{marked.name} on {cell.key}: {_stored(error.reason)}"
            log.error("a shard stops", program=self.program.name, shard=cell.shard, why=made.stop_reason)
            return False
        is_outage = not isinstance(error, Park | Retry) and self._breaker.failed(
            marked.name, cell.row_key, type(error).__name__
        )
        if is_outage and self._breaker.stops:
            made.stop_reason = self._breaker.cause
            return False
        now_us = self._now_us()
        record = before or self.waiting_head(cell, marked.name, "")
        was = None if before is None and cell.added_id > rows.seen else "waiting" if before is None else counted(before)
        is_next = record.cause is Cause.WAITING and record.function_name == marked.name  # each has attempts of its own
        attempts = record.attempts if is_next else 0
        cause, attempts, delay_s = self._judge(rows, cell, failed, attempts, is_outage=is_outage)
        record = msgspec.structs.replace(
            record, function_name=marked.name, cause=cause, error=_text(error), attempts=attempts, begun=False,
            attempted_at=[*record.attempted_at, now_us][-parked_table.ATTEMPTS_KEPT :], version=self.program.version,
            parked_at=now_us, holds_row=cell.added_id not in rows.apart, ordered=None, kills=0,
        )  # fmt: skip
        made.count(counted(record), was, of=cell.added_id)
        if cause is Cause.WAITING:
            made.put(record)
            rows.wait(record, self._clock() + delay_s)
            _log_failure(record, delay_s, before)
        else:
            self.park(rows, made, record)
        return True

    def _judge(
        self, rows: ParkedRows, cell: StoredCell, failed: FailedCall, attempts: int, *, is_outage: bool
    ) -> tuple[Cause, int, float]:
        """Returns what becomes of a cell whose call failed after `attempts` others.

        That is the cause of its record, the attempts that count, and the seconds until the next one.
        """
        marked, error = failed
        policy = marked.retry or self._default_policy
        if isinstance(error, Retry):
            return Cause.WAITING, attempts, error.delay_s
        if isinstance(error, Park):
            return Cause.VERDICT, attempts, 0.0
        if is_outage:
            return Cause.WAITING, attempts, policy.delay_s(max(1, attempts), random.random)
        attempts += 1
        replay = rows.replays.get(cell.added_id)
        if replay is not None and replay.inherited:  # there may be an outage that this process can't know of yet
            attempts = min(attempts, policy.attempts - 1)
        age_s = (self._now_us() - max(cell.created_at, rows.began_at)) / 1e6
        is_old = marked.max_age_s is not None and age_s > marked.max_age_s
        if attempts >= policy.attempts or is_old or not policy.retries(error):
            return Cause.ERROR, attempts, 0.0
        return Cause.WAITING, attempts, policy.delay_s(attempts, random.random)


def _log_failure(record: ParkedCell, delay_s: float, before: ParkedCell | None) -> None:
    """Logs a call that is made again, with the traceback if the attempt before ended with another error."""
    why = _last_line(record.error)
    is_new = before is None or why != _last_line(before.error)
    key = f"{row_key_text(record.row_key)}/{record.column_name}/{record.ref_key}"
    log.warning(
        "a call failed", trigger=record.function_name, cell=key, attempt=record.attempts, why=why,
        again_in_s=round(delay_s, 3), **({"exception": record.error.rstrip()} if is_new else {}),
    )  # fmt: skip


def _outcome_of(error: Exception | None) -> str:
    if error is None:
        return "succeeded"
    return type(error).__name__.lower() if isinstance(error, Skip | Retry | Park | Stop) else "failed"


def _text(error: Exception) -> str:
    """Returns the error of a user's function with its chain, whatever its own `__repr__` does."""
    if isinstance(error, Park):
        return _stored(error.reason)
    try:
        return _stored("".join(traceback.format_exception(error))[-parked_table.ERROR_CHARACTERS_MAX :])
    except Exception:
        return f"{type(error).__name__}, whose text raises an error itself"


def _stored(text: str) -> str:
    """Returns a text that MySQL can store: half a surrogate pair has no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2][:300]
