"""A consumer's process, indexer or trigger program: storage, an orderly end, and a watchdog that ends it when it hangs.

Nothing has to be saved at the end: checkpoints moved with the effects (I10), and whatever was in hand comes again.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

import structlog
import uvloop  # a fifth less work for each cell

from schemaless.config import FollowerSettings
from schemaless.errors import SchemalessError, Unavailable
from schemaless.lifecycle import run_service
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import load_topology

log = structlog.get_logger()

HANGS = 70
"""Exit status when the event loop stood still: Kafka would not find out, heartbeats have a thread of their own."""

_TICK_S = 1.0

Work = Callable[[AsyncStorage], Awaitable[None]]
"""Runs until it is cancelled."""


def run_consumer_process(name: str, settings: FollowerSettings, work: Work) -> NoReturn:
    """Ends the process: 0 after an orderly stop, 1 after a failure."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())  # also for the thread in which Faust fetches
    serve = partial(_serve, settings, work)
    status = run_service(name, serve, log_level=settings.log_level, loop_factory=uvloop.new_event_loop)
    sys.stdout.flush()
    os._exit(status)  # a call that hangs in a worker thread would keep the interpreter from ending


async def _serve(settings: FollowerSettings, work: Work, stop: asyncio.Event) -> None:
    topology = load_topology(settings.topology)
    async with (
        Watchdog(settings.hang_limit_s),
        AsyncStorage(
            topology,
            connections_max=settings.connections_max,
            connect_timeout_s=settings.connect_timeout_s,
            timeout_s=settings.statement_timeout_s,
        ) as storage,
    ):
        await _until_stopped(work(storage), stop)


async def _until_stopped(work: Awaitable[None], stop: asyncio.Event) -> None:
    task = asyncio.ensure_future(work)
    asked = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return
    try:
        task.result()
    except* SchemalessError as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[SchemalessError]) -> SchemalessError:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if isinstance(found, SchemalessError) else Unavailable(str(found))


class Watchdog:
    """A thread that ends the process when the event loop stands still for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ticked_at = time.monotonic()
        self._over = threading.Event()
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._ticking = asyncio.create_task(self._tick())
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        if self._ticking is not None:
            self._ticking.cancel()

    async def _tick(self) -> None:
        while True:
            self._ticked_at = time.monotonic()
            await asyncio.sleep(_TICK_S)

    def _watch(self) -> None:
        while not self._over.wait(_TICK_S):
            if time.monotonic() - self._ticked_at > self._limit_s:
                log.error("the event loop stands still; the process ends", limit_s=self._limit_s)
                os._exit(HANGS)
