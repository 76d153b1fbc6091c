"""TriggerCalls: makes the calls of trigger functions, in worker threads or in the event loop, and knows which run."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any, TypeVar

import msgspec
import structlog

from schemaless.cell import StoredCell
from schemaless.runtime.events import Event, emit
from schemaless.storage.worker_table import OldestCall
from schemaless.triggers.decorator import Context, Trigger

log = structlog.get_logger()

Answer = TypeVar("Answer")
_THREADS_MAX = 64
_LONG_CALLS = 10  # a call that takes this part of the limit is logged
_SHOWN_S = 2.0  # a call that takes longer is shown in status


class Call(msgspec.Struct, frozen=True):
    """A call of one function. `place` is what the caller needs to know of it if it hangs."""

    marked: Trigger
    cell: StoredCell
    context: Context
    place: object

    def bound(self) -> Callable[[], Any]:
        arguments = self.marked.arguments(self.cell, self.context)
        return lambda: self.marked.function(*arguments)


class RunningCall(msgspec.Struct):
    """`begun_at` is infinite while it waits for a thread: until then it can't hang."""

    call: Call
    begun_at: float
    logged_s: float = 0.0


Plan = Generator[Call, Exception | None, Answer]
"""Yields one call after the other. It is sent the error of each, or None."""


class TriggerCalls:
    """The calls of one process. `clock` counts seconds, as time.monotonic does.

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
        self._running: dict[int, RunningCall] = {}
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
        running = self._running[id(call)] = RunningCall(call, self._clock())
        try:
            if call.marked.is_async:
                emit(Event.CALL_BEGINS)
                async with asyncio.timeout(self._timeout_s):
                    await call.bound()()
            else:
                result = await self._in_a_thread(running)
                if inspect.isawaitable(result):
                    await result
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # it is our own task that ends
            return _failure(error)
        except BaseException as error:
            return _failure(error)
        finally:
            del self._running[id(call)]
            emit(Event.CALL_ENDED)
        return None

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

    async def _in_a_thread(self, running: RunningCall) -> Any:
        bound = running.call.bound()
        running.begun_at = inf

        def begin() -> Any:
            running.begun_at = self._clock()
            emit(Event.CALL_BEGINS)
            return bound()

        return await asyncio.get_running_loop().run_in_executor(self._threads, begin)

    def _drive(self, plan: Plan[Answer], loop: asyncio.AbstractEventLoop) -> Answer:
        """What an async function behind a plain decorator returns is awaited in the event loop: it is the call."""
        try:
            call = next(plan)
            while True:
                error: Exception | None = None
                self._running[id(call)] = RunningCall(call, self._clock())
                try:
                    emit(Event.CALL_BEGINS)
                    result = call.bound()()
                    if inspect.isawaitable(result):
                        asyncio.run_coroutine_threadsafe(_awaited(result), loop).result()
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as raised:
                    error = _failure(raised)
                finally:
                    del self._running[id(call)]
                    emit(Event.CALL_ENDED)
                call = plan.send(error)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


async def _awaited(result: Awaitable[Any]) -> None:
    await result


def _failure(raised: BaseException) -> Exception:
    """Makes an ordinary error of what would end our task silently, as the cancellation of what a function awaited."""
    if isinstance(raised, Exception):
        return raised
    if isinstance(raised, asyncio.CancelledError):
        return RuntimeError("something that the function waited for was cancelled")
    failure = RuntimeError(f"the function raised {type(raised).__name__}, which is no Exception")
    failure.__cause__ = raised
    return failure
