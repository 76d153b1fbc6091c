"""How tests wait: until something holds, for two minutes at most, and with what was seen last in the failure."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx

from schemaless.errors import SchemalessError

LIMIT_S = 120.0
"""Far longer than what is waited for takes on a machine that stands still now and then, and below pytest-timeout's."""
_PAUSE_S = 0.02
_REFUSALS = (SchemalessError, httpx.TransportError)

T = TypeVar("T")


def until(holds: Callable[[], T], saying: Callable[[], object] = lambda: "") -> T:
    """Returns the first answer of `holds` that is true. A refusal on the way is an answer that isn't.

    `saying` tells in the failure what else there is to know, as the state of a process or the end of its log.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        seen: object
        try:
            if seen := (found := holds()):
                return found
        except _REFUSALS as error:
            seen = error
        assert time.monotonic() < deadline, f"last seen: {seen!r} {saying()}"
        time.sleep(_PAUSE_S)


async def async_until(holds: Callable[[], T | Awaitable[T]], saying: Callable[[], object] = lambda: "") -> T:
    """As `until`, in an event loop. `holds` may be a coroutine function. If not, it is called in a thread, because what
    it asks may need the loop.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        seen: object
        try:
            found = holds() if inspect.iscoroutinefunction(holds) else await asyncio.to_thread(holds)
            if seen := (answer := await found if inspect.isawaitable(found) else found):
                return answer
        except _REFUSALS as error:
            seen = error
        assert time.monotonic() < deadline, f"last seen: {seen!r} {saying()}"
        await asyncio.sleep(_PAUSE_S)
