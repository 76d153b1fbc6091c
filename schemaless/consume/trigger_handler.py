"""TriggerHandler: calls a program's functions for a shard's cells, in order, and decides what a failed call means.

A call that fails is tried again with growing delay; after `attempts_max` the shard stops with the reason, and others go
on. Sync functions run in worker threads, a whole run of calls to a hop; async ones in the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import structlog

from schemaless.cell import StoredCell
from schemaless.config import ConsumerSettings
from schemaless.consume.ports import Effect, Outcome, Run
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.location import Location
from schemaless.trigger import Context, Park, Retry, Skip, Stop, Trigger

log = structlog.get_logger()

_THREADS_MAX = 16
_TURN_S = 0.25  # then what is finished is recorded: a kill repeats no more than that


class _Attempts(msgspec.Struct):
    """At one cell: failed calls of the trigger whose turn it is, and how many triggers before it are done."""

    at: Location
    failed: int = 0
    done: int = 0


class _Call(msgspec.Struct, frozen=True):
    marked: Trigger
    cell: StoredCell
    context: Context

    def bound(self) -> Callable[[], Any]:
        arguments = self.marked.arguments(self.cell, self.context)
        return lambda: self.marked.function(*arguments)


_Plan = Generator[_Call, Exception | None, Outcome]
"""Yields one call after the other and is sent how each failed, or None."""


class TriggerHandler:
    together = False
    """A slow or failing shard must not hold up others."""

    def __init__(self, program: TriggerProgram, datastore: str, settings: ConsumerSettings) -> None:
        self._program = program
        self._datastore = datastore
        self._settings = settings
        self._attempts: dict[int, _Attempts] = {}
        self._threads = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="trigger")
        self._in_loop = any(marked.is_async for found in program.triggers.values() for marked in found)

    async def handle(self, runs: Sequence[Run]) -> Effect:
        return Effect([await self._handle(run) for run in runs])

    async def _handle(self, run: Run) -> Outcome:
        if not any(cell.column_name in self._program.triggers for cell in run.cells):
            return Outcome(len(run.cells))
        if self._in_loop:
            return await self._drive_in_loop(self._plan(run))
        return await asyncio.get_running_loop().run_in_executor(self._threads, _drive, self._plan(run))

    def _plan(self, run: Run) -> _Plan:
        until = time.monotonic() + _TURN_S
        for finished, cell in enumerate(run.cells):
            if finished and time.monotonic() > until:
                return Outcome(finished)
            for position, marked in enumerate(self._program.triggers.get(cell.column_name, ())):
                attempts = self._attempts_at(cell)
                if position < attempts.done:
                    continue
                error = yield _Call(marked, cell, self._context(attempts))
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

    def _context(self, attempts: _Attempts) -> Context:
        return Context(self._program.name, self._datastore, attempts.failed + 1)

    def _judge(self, marked: Trigger, cell: StoredCell, finished: int, error: Exception) -> Outcome | None:
        """None: go on with the next."""
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
        return self._failed(marked, cell, finished, error)

    def _failed(self, marked: Trigger, cell: StoredCell, finished: int, error: Exception) -> Outcome:
        attempts = self._attempts_at(cell)
        attempts.failed += 1
        if attempts.failed >= self._settings.attempts_max:
            tried = f"{marked.name} on {cell.key} failed {attempts.failed} times, the last time with {error!r}"
            return self._stop(cell, finished, tried)
        delay_s = min(self._settings.retry_delay_max_s, self._settings.retry_delay_s * 2 ** (attempts.failed - 1))
        log.info(
            "a call failed", trigger=marked.name, cell=str(cell.key), attempt=attempts.failed, why=repr(error),
            again_in_s=delay_s,
        )  # fmt: skip
        return Outcome(finished, retry_in_s=delay_s)

    def _stop(self, cell: StoredCell, finished: int, reason: str) -> Outcome:
        """Whoever lets the shard run again gets all attempts anew."""
        self._attempts.pop(cell.shard, None)
        log.error("a shard stops", program=self._program.name, shard=cell.shard, why=reason)
        return Outcome(finished, stop_reason=reason)

    async def _drive_in_loop(self, plan: _Plan) -> Outcome:
        try:
            call = next(plan)
            while True:
                call = plan.send(await self._failure_in_loop(call))
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _failure_in_loop(self, call: _Call) -> Exception | None:
        try:
            if call.marked.is_async:
                async with asyncio.timeout(self._settings.attempt_timeout_s):
                    await call.bound()()
            else:
                await asyncio.get_running_loop().run_in_executor(self._threads, call.bound())
        except Exception as error:
            return error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # we are to end
            return _cancelled()
        return None


def _drive(plan: _Plan) -> Outcome:
    try:
        call = next(plan)
        while True:
            call = plan.send(_failure(call))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def _failure(call: _Call) -> Exception | None:
    try:
        call.bound()()
    except Exception as error:
        return error
    except asyncio.CancelledError:
        return _cancelled()
    return None


def _cancelled() -> Exception:
    """What a function awaited was cancelled, not the call. Let through, it would end our task without a word."""
    return RuntimeError("something that the function waited for was cancelled")
