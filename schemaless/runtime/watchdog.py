"""Watchdog: ends a process whose event loop hangs, so that its supervisor starts it again."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
import time
from typing import NoReturn

import structlog

log = structlog.get_logger()

HANGS = 70
"""The exit status of a process whose event loop or whose end hangs."""

_TICK_S = 1.0


class Watchdog:
    """A thread that ends the process when the event loop hangs for `limit_s`.

    Kafka would not find out, because heartbeats have a thread of their own.
    """

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
                _end("the event loop hangs; the process ends", self._limit_s)


def end_within(limit_s: float) -> None:
    """Ends the process after `limit_s`, whatever its event loop and its threads do until then."""
    timer = threading.Timer(limit_s, _end, ["the process did not end by itself and is cut off", limit_s])
    timer.daemon = True
    timer.start()


def _end(what: str, limit_s: float) -> NoReturn:
    """Says where each thread is, on stderr, and ends the process."""
    log.error(what, limit_s=limit_s)
    faulthandler.dump_traceback()
    os._exit(HANGS)
