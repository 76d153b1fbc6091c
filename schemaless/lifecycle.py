"""Lifecycle of a service process: from its start to its end, in one order.

SIGTERM or SIGINT asks it to stop: it takes no new work, finishes what is in hand by a deadline, flushes, records its
progress, releases what it owns and closes. The first failure ends the process with a message; the supervisor starts it
again, and everything it does may be done twice.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from schemaless.errors import SchemalessError

log = structlog.get_logger()

Serve = Callable[[asyncio.Event], Awaitable[None]]
"""Works until the event is set, then finishes and returns."""

FINISH_TIMEOUT_S = 10.0


def run_service(
    name: str,
    serve: Serve,
    *,
    log_level: str = "info",
    finish_timeout_s: float = FINISH_TIMEOUT_S,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Runs a service to its end. Returns the exit status: 0 after an orderly stop, 1 after a failure of ours."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(log_level.upper())))
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve_until_signalled(name, serve, finish_timeout_s))
    except SchemalessError as error:
        log.error("the service ends; its supervisor starts it again", service=name, error=str(error), hint=error.hint)
        return 1
    return 0


async def _serve_until_signalled(name: str, serve: Serve, finish_timeout_s: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    work = asyncio.ensure_future(serve(stop))
    asked = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    await asyncio.wait({work}, timeout=finish_timeout_s)
    if work.done():
        return work.result()
    log.warning("work in hand did not finish in time and is cut off", service=name, seconds=finish_timeout_s)
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Sleeps, but not longer than until the stop."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
