"""The start and the end of a service process, in one order for all of them.

SIGTERM or SIGINT asks a service to stop: it takes no new work, finishes what is in flight by a deadline, flushes,
records its progress, releases what it owns and closes. The first failure ends the process with one line that says what
to do. The supervisor starts it again, and everything that it does may be done twice.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import structlog
import uvloop  # a fifth less work for each cell

from schemaless.config import HANG_LIMIT_S, ConsumerSettings, MeasuredSettings, read_settings
from schemaless.errors import SchemalessError
from schemaless.runtime import tracing
from schemaless.runtime.events import log_event, observing
from schemaless.runtime.logs import configure_logging
from schemaless.runtime.open_files import clients_within_limit
from schemaless.runtime.outputs import settle, wait_for_nobody
from schemaless.runtime.service_metrics import ServiceMetrics
from schemaless.runtime.watchdog import Watchdog
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import load_topology

log = structlog.get_logger()

S = TypeVar("S", bound=MeasuredSettings)


@dataclass(frozen=True, slots=True)
class ServiceParts(Generic[S]):
    """What every service process has."""

    settings: S
    storage: AsyncStorage
    metrics: ServiceMetrics
    stop: asyncio.Event


Serve = Callable[[ServiceParts[S]], Awaitable[None]]
"""Works until the stop is set, then finishes and returns."""

FINISH_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0  # for work that was cut off, and as much again for connections and ports
_YOUNG_OBJECTS_MAX = 20_000  # Python's default is 700, and a page of cells has thousands of objects


def run_service(
    name: str,
    kind: type[S],
    serve: Serve[S],
    *,
    finish_timeout_s: float = FINISH_TIMEOUT_S,
    given: Mapping[str, Any] | None = None,
) -> NoReturn:
    """Runs a service with settings of this kind and the storage of its topology, and ends the process.

    Settings that are `given` go before the environment.

    The exit status is 0 after an orderly stop, 1 after a failure, and 70 when the event loop hangs for its limit or the
    end itself hangs, whatever holds them up. SIGPROF ends a process whose interpreter is held (Watchdog).
    """
    wait_for_nobody()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())  # also for the thread in which Faust fetches
    status = 1
    try:
        settings = read_settings(kind, given)
        configure_logging(settings.log_level, name, settings.log_format)
        tracing.begin(name, settings.traces)
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_serve_until_signalled(name, settings, serve, finish_timeout_s))
        status = 0
    except BaseException as error:  # SystemExit, too: a task of a user's program may raise it through the event loop
        failures = list(_leaves(error))
        if all(isinstance(failure, SchemalessError) for failure in failures):
            report_failure(name, failures[0])
        else:
            log.exception("the process ends by a defect", service=name)
    tracing.end()
    settle()
    # A call that hangs in a worker thread would keep the interpreter from ending. The loop isn't closed either: Faust's
    # thread may still wake it, and the process would crash.
    os._exit(status)


def collect_rarely() -> None:
    """Lets Python's collector of cycles look less often, in a process that makes many objects and hardly any cycle.

    It never looks again at what exists now.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS_MAX, 20, 20)


def report_failure(name: str, error: BaseException) -> None:
    """Logs the one line that a service process ends with."""
    hint = error.hint if isinstance(error, SchemalessError) else ""
    log.error("the process ends", service=name, error=str(error), hint=hint)


async def pause(event: asyncio.Event, seconds: float) -> None:
    """Waits for the event, most often the stop, but no longer than `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def cancelled_at(stop: asyncio.Event, work: Awaitable[None]) -> None:
    """Runs work that doesn't end by itself, and cancels it at the stop. Raises what the work raises."""
    task = asyncio.ensure_future(work)
    asked = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if task.done():
        return task.result()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _serve_until_signalled(name: str, settings: S, serve: Serve[S], finish_timeout_s: float) -> None:
    stop = asyncio.Event()
    watchdog = Watchdog(settings.hang_limit_s if isinstance(settings, ConsumerSettings) else HANG_LIMIT_S)
    watchdog.start()

    def ask_to_stop() -> None:
        watchdog.end_within(finish_timeout_s + 2 * CLOSE_TIMEOUT_S)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ask_to_stop)
    topology = load_topology(settings.topology)
    clients_within_limit(settings.connections_max * sum(len(cluster.nodes) for cluster in topology.clusters.values()))
    storage = AsyncStorage(
        topology,
        connections_max=settings.connections_max,
        lossy_masters=settings.lossy_masters,
    )
    async with AsyncExitStack() as opened:
        if settings.log_level.lower() == "debug":
            opened.enter_context(observing(log_event))
        await opened.enter_async_context(storage)
        metrics = ServiceMetrics(name)
        metrics.watch_storage(storage)
        await opened.enter_async_context(metrics.served(settings))
        work = asyncio.ensure_future(serve(ServiceParts(settings, storage, metrics, stop)))
        asked = asyncio.ensure_future(stop.wait())
        await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        watchdog.end_within(finish_timeout_s + 2 * CLOSE_TIMEOUT_S)
        await asyncio.wait({work}, timeout=finish_timeout_s)
        if work.done():
            return work.result()
        log.warning("the work in flight did not finish in time and is cut off", service=name, seconds=finish_timeout_s)
        work.cancel()
        await asyncio.wait({work}, timeout=CLOSE_TIMEOUT_S)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
