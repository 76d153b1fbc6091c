"""The handler of trigger programs: it calls a program's functions for a shard's cells, in order.

It also decides what a failed call means. The call is tried again with growing delay. After the last attempt the shard
stops with the reason, and the other shards continue. Sync functions run in worker threads, a whole run of calls to a
hop; async ones run in the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

import msgspec
import structlog

from schemaless.cell import StoredCell
from schemaless.config import ConsumerSettings
from schemaless.consume.ports import Death, Effect, HungCall, Outcome, Run
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.location import Location
from schemaless.storage.worker_table import OldestCall
from schemaless.trigger import Context, Park, Retry, Skip, Stop, Trigger

log = structlog.get_logger()

_THREADS_MAX = 16
_LONG_CALLS = 10  # a call that takes this part of the limit is logged
_SHOWN_S = 2.0  # a call that takes longer is shown in status
_RUN_S = 0.25  # after that what is finished is recorded: a kill repeats no more than that


class _Attempts(msgspec.Struct):
    """The attempts at one cell: failed calls of the present function, and how many functions before it are done."""

    at: Location
    failed: int = 0
    done: int = 0


class _RunningCall(msgspec.Struct):
    """`finished` cells of the run come before its cell."""

    begun_at: float
    name: str
    run: Run
    finished: int
    logged_s: float = 0.0

    @property
    def cell(self) -> StoredCell:
        return self.run.cells[self.finished]


class _Call(msgspec.Struct, frozen=True):
    marked: Trigger
    cell: StoredCell
    context: Context

    def bound(self) -> Callable[[], Any]:
        arguments = self.marked.arguments(self.cell, self.context)
        return lambda: self.marked.function(*arguments)


_Plan = Generator[_Call, Exception | None, Outcome]
"""Yields one call after the other. It is sent the error of each, or None."""


class TriggerHandler:
    """Calls the functions of one program. `clock` counts seconds, as time.monotonic does."""

    together = False
    """A slow or failing shard must not hold up others."""

    record_within_s = 0.25
    """A kill repeats no more calls of a shard than those of this time."""

    def __init__(
        self,
        program: TriggerProgram,
        datastore: str,
        settings: ConsumerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program = program
        self._datastore = datastore
        self._settings = settings
        self._clock = clock
        self._attempts: dict[int, _Attempts] = {}
        self._running: dict[int, _RunningCall] = {}  # by shard, of which each has one call at a time
        self._threads = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="trigger")
        self._has_async = any(marked.is_async for found in program.triggers.values() for marked in found)

    async def handle(self, runs: Sequence[Run]) -> Effect:
        return Effect([await self._handle(run) for run in runs])

    @property
    def foreign_code(self) -> TriggerHandler:
        return self

    def calls(self, cell: StoredCell) -> bool:
        return cell.column_name in self._program.triggers

    def judge_suspect(self, cell: StoredCell, kills: int, death: Death) -> Outcome | None:
        """Stops the shard after the last attempt. When it is resumed, the cell has all its attempts again."""
        if kills < self._settings.kills_max:
            return None
        return self._stop(cell, 0, f"{death.value}: the call on {cell.key} ended {kills} processes")

    async def _handle(self, run: Run) -> Outcome:
        if not any([self.calls(cell) for cell in run.cells]):
            return Outcome(len(run.cells), idle=True)
        plan = self._plan(run)
        if not self._has_async:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, _drive, plan, loop)
        try:
            call = next(plan)
            while True:
                call = plan.send(await self._error_in_loop(call))
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def supersede(self, shard: int, starts_at: int, generation: int) -> Effect:
        """Calls that were made can't be taken back. The cells of the new generation come as any others."""
        self._attempts.pop(shard, None)
        return Effect([])

    def oldest_call(self) -> OldestCall | None:
        """Returns the call that has run longest."""
        calls = tuple(self._running.values())
        if not calls:
            return None
        oldest = min(calls, key=lambda call: call.begun_at)
        age_s = round(self._clock() - oldest.begun_at, 1)
        return OldestCall(oldest.name, str(oldest.cell.key), oldest.cell.shard, age_s) if age_s >= _SHOWN_S else None

    def hung_call(self) -> HungCall | None:
        """Returns a call above the limit. Logs calls that take long, again whenever their age has doubled."""
        now, limit_s = self._clock(), self._settings.call_limit_s
        for call in tuple(self._running.values()):
            age_s = now - call.begun_at
            if age_s > limit_s:
                last = call.run.cells[call.finished - 1] if call.finished else None
                text = f"{call.name} on {call.cell.key} hasn't returned for {age_s:.0f} s"
                return HungCall(call.cell, call.finished, last, text)
            if age_s > max(limit_s / _LONG_CALLS, 2 * call.logged_s):
                call.logged_s = age_s
                log.warning(
                    "a call takes long", trigger=call.name, cell=str(call.cell.key), shard=call.cell.shard,
                    age_s=round(age_s, 1), limit_s=limit_s,
                )  # fmt: skip
        return None

    def _plan(self, run: Run) -> _Plan:
        until = self._clock() + _RUN_S
        for finished, cell in enumerate(run.cells):
            if finished and self._clock() > until:
                return Outcome(finished)
            for position, marked in enumerate(self._program.triggers.get(cell.column_name, ())):
                attempts = self._attempts_at(cell)
                if position < attempts.done:
                    continue
                context = Context(self._program.name, self._datastore, attempts.failed + 1)
                self._running[cell.shard] = _RunningCall(self._clock(), marked.name, run, finished)
                try:
                    error = yield _Call(marked, cell, context)
                finally:
                    del self._running[cell.shard]
                outcome = None if error is None else self._judge(marked, cell, finished, error)
                if outcome is not None:
                    return outcome
                attempts.done, attempts.failed = position + 1, 0
        return Outcome(len(run.cells))

    def _attempts_at(self, cell: StoredCell) -> _Attempts:
        found = self._attempts.get(cell.shard)
        if found is None or found.at.added_id != cell.added_id or found.at.generation != cell.generation:
            found = self._attempts[cell.shard] = _Attempts(cell.location)
        return found

    def _judge(self, marked: Trigger, cell: StoredCell, finished: int, error: Exception) -> Outcome | None:
        """Returns what an error means for the run, or None: the cell needs nothing more of this function."""
        if isinstance(error, Skip):
            return None
        if isinstance(error, Retry):
            return Outcome(finished, retry_in_s=error.delay_s)
        if isinstance(error, Stop):
            return self._stop(cell, finished, f"{marked.name} on {cell.key}: {error.reason}")
        if isinstance(error, Park):
            return self._stop(
                cell, finished, f"{marked.name} parks {cell.key}: {error.reason} (parking is not built yet)"
            )
        attempts = self._attempts_at(cell)
        attempts.failed += 1
        if attempts.failed >= self._settings.attempts_max:
            tried = f"{marked.name} on {cell.key} failed {attempts.failed} times, the last time with {_text(error)}"
            return self._stop(cell, finished, tried)
        delay_s = min(self._settings.retry_delay_max_s, self._settings.retry_delay_s * 2 ** (attempts.failed - 1))
        log.info(
            "a call failed", trigger=marked.name, cell=str(cell.key), attempt=attempts.failed, why=_text(error),
            again_in_s=delay_s,
        )  # fmt: skip
        return Outcome(finished, retry_in_s=delay_s)

    def _stop(self, cell: StoredCell, finished: int, reason: str) -> Outcome:
        """Stops the shard. When it is resumed, the cell has all its attempts again."""
        self._attempts.pop(cell.shard, None)
        log.error("a shard stops", program=self._program.name, shard=cell.shard, why=reason)
        return Outcome(finished, stop_reason=reason)

    async def _error_in_loop(self, call: _Call) -> Exception | None:
        try:
            if call.marked.is_async:
                async with asyncio.timeout(self._settings.attempt_timeout_s):
                    await call.bound()()
            else:
                result = await self._in_a_thread(call)
                if inspect.isawaitable(result):
                    await result
        except Exception as error:
            return error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # it is our own task that ends
            return _cancelled()
        return None

    async def _in_a_thread(self, call: _Call) -> Any:
        """Calls a sync function in a thread. It begins when a thread is free: until then it can't hang."""
        running, bound = self._running[call.cell.shard], call.bound()
        running.begun_at = inf

        def begin() -> Any:
            running.begun_at = self._clock()
            return bound()

        return await asyncio.get_running_loop().run_in_executor(self._threads, begin)


def _drive(plan: _Plan, loop: asyncio.AbstractEventLoop) -> Outcome:
    """Makes the calls of a plan in this thread.

    What an async function behind a plain decorator returns is awaited in the event loop: it is the call.
    """
    try:
        call = next(plan)
        while True:
            error: Exception | None = None
            try:
                result = call.bound()()
                if inspect.isawaitable(result):
                    asyncio.run_coroutine_threadsafe(_awaited(result), loop).result()
            except Exception as raised:
                error = raised
            except asyncio.CancelledError:
                error = _cancelled()
            call = plan.send(error)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def _awaited(result: Awaitable[Any]) -> None:
    await result


def _text(error: Exception) -> str:
    """Returns the error of a user's function as text, whatever its own `__repr__` does."""
    try:
        return repr(error)
    except Exception:
        return f"{type(error).__name__}, whose text raises an error itself"


def _cancelled() -> Exception:
    """Makes an ordinary error of the cancellation of what a function awaited, which would end our task silently."""
    return RuntimeError("something that the function waited for was cancelled")
