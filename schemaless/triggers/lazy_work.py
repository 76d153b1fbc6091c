"""Lazy work: what a function returned in place of doing it, say a generator. Nobody would ever do it."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import Future
from contextlib import AsyncContextDecorator, ContextDecorator
from functools import partial
from types import AsyncGeneratorType, FunctionType, GeneratorType, MethodType
from typing import Any

from schemaless.runtime.forks import InOneProcess

_LAZY = (
    GeneratorType, AsyncGeneratorType, map, filter, partial, FunctionType, MethodType, ContextDecorator,
    AsyncContextDecorator,
)  # fmt: skip


class WorkNotDone(TypeError):
    """A function returned work that isn't done. It has failed, because nobody would know what becomes of the work."""


def is_waited_for(result: object) -> bool:
    """Returns whether a result is work whose end can be waited for: an awaitable, or the future of an executor."""
    return isinstance(result, Future) or inspect.isawaitable(result)


def is_lazy(result: object) -> bool:
    """Returns whether a result is work that hasn't begun."""
    return isinstance(result, _LAZY) or inspect.iscoroutine(result)


def require_done(result: Any) -> None:
    """Raises WorkNotDone for a result that is work, or a list, tuple or set with such a thing in it."""
    members = result if isinstance(result, list | tuple | set) else ()
    for each in (result, *members):
        if is_lazy(each) or is_waited_for(each):
            if inspect.iscoroutine(each):
                each.close()  # so that Python says nothing of it later
            raise WorkNotDone(
                f"the function returned {'' if each is result else 'a list with '}{type(each).__name__}, which is work"
                " that nobody does: do it, or wait for it, in the function"
            )


async def waited_for(result: Any) -> Any:
    """Waits for the work that a function returned, and for the work that this returns. Raises what it raises."""
    while is_waited_for(result):
        if isinstance(result, Future):
            result = _future_result(result)
        result = await (InOneProcess(result) if inspect.iscoroutine(result) else result)
    return result


async def _future_result(future: Future[Any]) -> Any:
    """Returns the result of an executor's future. asyncio.wrap_future would never end for some exceptions."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    try:
        await done.wait()
        return future.result()
    finally:
        future.cancel()  # which only ends work that didn't begin in time
