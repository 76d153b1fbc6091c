"""CellCalls: calls the functions of a program for one cell, and decides what a failed call means (I12)."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import structlog

from schemaless.cell import StoredCell, row_key_text
from schemaless.config import ConsumerSettings
from schemaless.consume.breaker import Breaker
from schemaless.consume.parked_rows import FinishedCall, ParkedRows, Pass, Replay, counted, head_of
from schemaless.consume.ports import Run
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.error_text import error_summary, error_text
from schemaless.errors import Forbidden, Misdirected, SchemalessError, Unauthenticated, Unavailable
from schemaless.runtime import tracing
from schemaless.runtime.events import Event, emit
from schemaless.runtime.forks import caller, leave
from schemaless.storage import parked_table
from schemaless.storage.parked_table import Cause, Ending, ParkedCell
from schemaless.storage.worker_table import FAILING_ERROR_CHARACTERS_MAX, FailingCell, OldestCall
from schemaless.triggers.context import require_effects
from schemaless.triggers.decorator import Context, Park, ParkMode, Retry, Skip, Stop, Trigger
from schemaless.triggers.lazy_work import is_waited_for, require_done, waited_for
from schemaless.triggers.retry_policy import RetryPolicy

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = structlog.get_logger()

_REFUSED_PAUSE_MAX_S = 5.0  # of a cell that our API refused while others succeed
_CHAIN_MAX = 10

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
        self.failures: Counter[str] = Counter()
        """Those that failed, by cause."""
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
            return [marked.name for marked in found if marked.wants(cell)]
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
            added_id=record.added_id, cause=record.cause.value, why=error_summary(record.error),
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
            try:
                if not marked.wants(cell):
                    continue
            except SchemalessError as corrupt:
                return marked, corrupt
            if replay is not None and replay.result is not None:
                error, replay.result = replay.result.error, None  # it ended after its pass
            else:
                error = yield Call(marked, cell, self._context.of_attempt(attempt), place)
            attempt = 1
            self.attempts[marked.name, outcome := _outcome_of(error)] += 1
            if error is None:
                became = "called"
                self._breaker.succeeded(marked.name, cell.row_key, is_probe=made.is_probe)
            elif isinstance(error, Skip):
                became = "skipped" if became == "filtered" else became
            else:
                self.failures[cause_of(error)] += outcome == "failed"
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
        refusal = refusal_of(error)
        is_outage = not isinstance(error, Park | Retry) and self._breaker.failed(
            marked.name, cell.row_key, type(refusal or error).__name__, None if refusal is None else str(refusal)
        )
        if is_outage and self._breaker.stops:
            made.stop_reason = self._breaker.cause
            return False
        now_us = self._now_us()
        record = before or self.waiting_head(cell, marked.name, "")
        was = None if before is None and cell.added_id > rows.seen else "waiting" if before is None else counted(before)
        is_next = record.cause is Cause.WAITING and record.function_name == marked.name  # each has attempts of its own
        attempts = record.attempts if is_next else 0
        if refusal is not None and not (is_outage or isinstance(error, Park | Retry)):
            pause_s = (marked.retry or self._default_policy).delay_s(len(record.attempted_at) + 1, random.random)
            cause, delay_s = Cause.WAITING, min(_REFUSED_PAUSE_MAX_S, pause_s)
        else:
            cause, attempts, delay_s = self._judge(rows, cell, failed, attempts, is_outage=is_outage)
        record = msgspec.structs.replace(
            record, function_name=marked.name, cause=cause, error=_text(error), attempts=attempts, begun=False,
            attempted_at=[*record.attempted_at, now_us][-parked_table.ATTEMPTS_KEPT :], version=self.program.version,
            parked_at=now_us, holds_row=cell.added_id not in rows.apart, ordered=None, kills=0,
            again_in_us=round(delay_s * 1e6),
        )  # fmt: skip
        made.count(counted(record), was, of=cell.added_id)
        if before is not None and before.cause is not Cause.WAITING and not isinstance(error, Retry):
            made.keep(before, Ending.FAILED)
        if cause is Cause.WAITING:
            made.put(record)
            due_at = self._clock() + delay_s
            if is_outage:  # the breaker lets it wait for the end, and nothing but a pause of its own after that
                waited = rows.replays.get(cell.added_id)
                due_at = self._clock() if waited is None else waited.due_at
            rows.wait(record, due_at, is_asked=isinstance(error, Retry))
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


def refusal_of(error: BaseException) -> SchemalessError | None:
    """Returns what our own API refused, if a call failed for that: nobody let in, not allowed, too busy or away.

    The function may have raised another error from it, or a group of errors.
    """
    found: list[BaseException | None] = [error]
    for each in found:
        if isinstance(each, Unavailable | Unauthenticated | Forbidden | Misdirected) or (
            isinstance(each, SchemalessError) and each.retryable
        ):
            return each
        if each is not None and len(found) < _CHAIN_MAX:
            found += [each.__cause__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]
    return None


def _log_failure(record: ParkedCell, delay_s: float, before: ParkedCell | None) -> None:
    """Logs a call that is made again, with the traceback if the attempt before ended with another error."""
    why = error_summary(record.error)
    is_new = before is None or why != error_summary(before.error)
    key = f"{row_key_text(record.row_key)}/{record.column_name}/{record.ref_key}"
    log.warning(
        "a call failed", trigger=record.function_name, cell=key, attempt=record.attempts, why=why,
        again_in_s=round(delay_s, 3), **({"exception": record.error.rstrip()} if is_new else {}),
    )  # fmt: skip


def _outcome_of(error: Exception | None) -> str:
    if error is None:
        return "succeeded"
    return type(error).__name__.lower() if isinstance(error, Skip | Retry | Park | Stop) else "failed"


def cause_of(error: Exception) -> str:
    """Returns the class of an error, and the HTTP status that it has where libraries have one."""
    name = type(error).__name__
    with suppress(Exception):  # of a class of the user's
        for holder, attribute in (
            (getattr(error, "response", None), "status_code"),
            (error, "status"),
            (error, "code"),
        ):
            if isinstance(status := getattr(holder, attribute, None), int):
                return f"{name} {status:d}"
    return name


def _text(error: Exception) -> str:
    """Returns the error of a user's function with its chain, whatever its own `__repr__` does."""
    if isinstance(error, Park):
        return _stored(error.reason)
    try:
        return _stored(error_text(error, parked_table.ERROR_CHARACTERS_MAX))
    except Exception:
        return f"{type(error).__name__}, whose text raises an error itself"


def _stored(text: object) -> str:
    """Returns a text that MySQL can store: half a surrogate pair has no UTF-8. A verdict may have any reason."""
    return str(text).encode(errors="backslashreplace").decode()


# TriggerCalls: makes the calls of trigger functions, in worker threads or in the event loop, and knows which run.

Answer = TypeVar("Answer")
_THREADS_MAX = 64
_LONG_CALLS = 10  # a call that takes this part of the limit is logged
_ROW_PAUSE_S = 0.02
_SHOWN_S = 2.0  # a call that takes longer is shown in status


class Call(msgspec.Struct, frozen=True):
    """A call of one function. `place` is what the caller needs to know of it if it hangs."""

    marked: Trigger
    cell: StoredCell
    context: Context
    place: object


class RunningCall(msgspec.Struct):
    """`begun_at` is infinite while it waits for a thread: until then it can't hang."""

    call: Call
    begun_at: float
    logged_s: float = 0.0
    at_its_end: list[Callable[[], object]] = []


Plan = Generator[Call, Exception | None, Answer]
"""Yields one call after the other. It is sent the error of each, or None."""


class TriggerCalls:
    """The calls of one process, of each row one at a time. `clock` counts seconds, as time.monotonic does.

    Whoever gives a shard away, or undoes a pass, cancels its calls. A thread isn't ended by that, and an async function
    may take its time. So a call is in `_running` until it has ended, and the next one of its row waits for that.

    `limits` has the functions of which fewer calls are made at once in a shard than rows are called there.
    """

    def __init__(
        self,
        timeout_s: float,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._limit_s = limit_s
        self._clock = clock
        self._limits = limits or {}
        self._turns: dict[tuple[int, str], asyncio.Semaphore] = {}
        self._running: dict[bytes, RunningCall] = {}  # by row
        self._threads = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="trigger")

    async def drive_in_thread(self, plan: Plan[Answer]) -> Answer:
        """Makes all calls of a plan in one thread, which costs one hop. Its functions are sync."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._drive, plan, loop)

    async def drive(self, plan: Plan[Answer]) -> Answer:
        """Makes the calls of a plan, each where it belongs."""
        try:
            call = next(plan)
            while True:
                call = plan.send(await self.make(call))
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def make(self, call: Call) -> Exception | None:
        """Makes one call, when it is the turn of its function. Returns its error."""
        limit = self._limits.get(call.marked.name)
        if limit is None:
            return await self._make(call)
        async with self._turns.setdefault((call.cell.shard, call.marked.name), asyncio.Semaphore(limit)):
            return await self._make(call)

    async def _make(self, call: Call) -> Exception | None:
        row_key, running = call.cell.row_key, RunningCall(call, inf)
        loop = asyncio.get_running_loop()
        while (before := self._running.setdefault(row_key, running)) is not running:
            is_free = asyncio.Event()
            before.at_its_end.append(partial(loop.call_soon_threadsafe, is_free.set))
            if self._running.get(row_key) is before:  # or its thread may have ended just now, without a word to us
                await is_free.wait()
        work: Any = None
        try:
            if call.marked.is_async:
                ended = self._begin(running)
            else:
                work = self._threads.submit(self._begin, running)
                ended = await asyncio.wrap_future(work)
            if ended.work is None:
                return ended.error
            work = ended.work
            return await self._end_of(ended)
        finally:
            self._end(running, work)

    def _begin(self, running: RunningCall) -> _Ended:
        running.begun_at = self._clock()
        emit(Event.CALL_BEGINS)
        return _called(running.call)

    def _end(self, running: RunningCall, work: object) -> None:
        """Lets the next call of a row begin, once the work of this one is done that can't be cancelled."""
        if isinstance(work, Future) and not work.done():
            work.add_done_callback(lambda _: self._end(running, None))
            return
        del self._running[running.call.cell.row_key]
        for tell in running.at_its_end:
            tell()
        emit(Event.CALL_ENDED)

    def oldest(self) -> OldestCall | None:
        """Returns the call that has run longest, if it takes long."""
        calls = tuple(self._running.values())
        if not calls:
            return None
        oldest = min(calls, key=lambda running: running.begun_at)
        age_s, cell = round(self._clock() - oldest.begun_at, 1), oldest.call.cell
        return OldestCall(oldest.call.marked.name, str(cell.key), cell.shard, age_s) if age_s >= _SHOWN_S else None

    def hung(self) -> tuple[Call, float] | None:
        """Returns a call above the limit, with its age. Logs calls that take long, again when their age has doubled."""
        now = self._clock()
        for running in tuple(self._running.values()):
            age_s, call = now - running.begun_at, running.call
            if age_s > self._limit_s:
                return call, age_s
            if age_s > max(self._limit_s / _LONG_CALLS, 2 * running.logged_s):
                running.logged_s = age_s
                log.warning(
                    "a call takes long", trigger=call.marked.name, cell=str(call.cell.key), shard=call.cell.shard,
                    age_s=round(age_s, 1), limit_s=self._limit_s,
                )  # fmt: skip
        return None

    def _drive(self, plan: Plan[Answer], loop: asyncio.AbstractEventLoop) -> Answer:
        """What a plain function returns and can be waited for is waited for in the event loop."""
        try:
            call = next(plan)
            while True:
                running = RunningCall(call, inf)
                while self._running.setdefault(call.cell.row_key, running) is not running:
                    time.sleep(_ROW_PAUSE_S)
                work: Any = None
                try:
                    ended = self._begin(running)
                    error, work = ended.error, ended.work
                    if work is not None:
                        error = asyncio.run_coroutine_threadsafe(self._end_of(ended), loop).result()
                finally:
                    self._end(running, work)
                call = plan.send(error)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _end_of(self, ended: _Ended) -> Exception | None:
        """Waits for the work that a function returned. Returns the error of the call."""
        try:
            async with asyncio.timeout(self._timeout_s):
                error = await asyncio.create_task(_error_of(ended))
        except asyncio.CancelledError as cancelled:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # it is our own task that ends
            return _failure(cancelled)
        except TimeoutError as late:
            return late
        return None if error is None else _failure(error)


async def _error_of(ended: _Ended) -> BaseException | None:
    """Waits for the work of a call in a task of its own: a function that cancels its task cancels nothing of ours.

    Returns the error: a task would pass some on to the event loop.
    """
    failure: BaseException | None = None
    try:
        with tracing.within(ended.span):
            require_done(await waited_for(ended.work))
        require_effects(ended.arguments)
    except BaseException as error:
        failure = error
        if isinstance(error, asyncio.CancelledError):
            raise
    finally:
        _end_span(ended.span, failure)
    return failure


class _Ended(msgspec.Struct, frozen=True):
    """The work that a function returned and that is to be waited for, or the error of its call, if there is one.

    `arguments`: what the function was called with.
    """

    work: Any = None
    error: Exception | None = None
    arguments: tuple[Any, ...] = ()
    span: Span | None = None


def _called(call: Call) -> _Ended:
    """Calls the function. Raises nothing: the future of an executor can't carry every exception, nor can a task.

    A future drops StopIteration, and its reader waits for ever. A task passes SystemExit on to the event loop.
    """
    span = tracing.call_of(call.cell, call.context.program, call.marked.name)
    error: Exception | None = None
    called_by = caller()
    try:
        arguments = call.marked.arguments(call.cell, call.context)
        with tracing.within(span):
            result = call.marked.function(*arguments)
        leave(called_by, None)
        if result is not None:
            if is_waited_for(result):
                return _Ended(result, arguments=arguments, span=span)
            require_done(result)
        require_effects(arguments)
    except BaseException as raised:
        leave(called_by, raised)
        error = _failure(raised)
    _end_span(span, error)
    return _Ended(error=error)


def _end_span(span: Span | None, error: BaseException | None) -> None:
    """A verdict is no failure of the call."""
    if span is not None:
        failed = None if error is None or isinstance(error, Skip | Retry | Park) else _failure(error)
        tracing.ended(span, None if failed is None else (type(failed).__qualname__, error_summary(_text(failed))))


def _failure(raised: BaseException) -> Exception:
    """Makes an ordinary error of what isn't one: it would end a task, a thread or the process.

    A verdict of a class of the user's, with something else than a delay in it, is an error, too.
    """
    if isinstance(raised, Retry):
        try:
            Retry(raised.delay_s)
        except ValueError as wrong:
            return wrong
    if isinstance(raised, Exception):
        return raised
    is_cancelled = isinstance(raised, asyncio.CancelledError)
    why = "something that it waited for, or its task, was cancelled" if is_cancelled else "which is no Exception"
    failure = RuntimeError(f"the function raised {type(raised).__name__}, {why}")
    failure.__cause__ = raised
    return failure


# Lanes: how many rows of a shard are called at once, and what becomes of calls that outlast their pass.
#
# A pass over a shard doesn't wait for a call that takes long, whether it is a first one or a retry. So the call delays
# its own row only. It keeps its lane, and the next pass after its end decides what the end means. No I/O.

PASS_S = 0.25
"""After that a pass ends, and what is finished is recorded: a kill repeats no more than that."""


class Lanes:
    """The lanes of each shard of one program: `parallel` of them. `clock` counts seconds.

    `want` asks for another pass over shards.
    """

    def __init__(self, parallel: int, clock: Callable[[], float], want: Callable[[Iterable[int]], None]) -> None:
        self.parallel = parallel
        self._clock = clock
        self._want = want

    async def has_free(self, tasks: Collection[asyncio.Task[None]], rows: ParkedRows, made: Pass) -> bool:
        """Waits for a free lane until the pass ends. `tasks` are those of the pass. Those of others have lanes, too."""
        while True:
            running = [task for task in tasks if not task.done()]
            running += rows.tasks
            if len(running) < self.parallel:
                return True
            left_s = made.deadline - self._clock()
            if left_s <= 0:
                return False
            await asyncio.wait(running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def leave(self, replay: Replay, task: asyncio.Task[None], rows: ParkedRows) -> None:
        """Lets the call of a record go on beyond its pass. Whoever makes it calls `ended`."""
        replay.task = task
        rows.tasks.add(task)
        task.add_done_callback(rows.tasks.discard)

    def ended(self, replay: Replay, error: Exception | None, rows: ParkedRows) -> None:
        """Notes what such a call ended with."""
        replay.task, replay.result, replay.due_at = None, FinishedCall(error), self._clock()
        self._want([rows.shard])
