"""Watchdog: ends a process whose event loop, whose interpreter or whose end hangs, so that its supervisor starts it
again.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import threading
import time
from contextlib import suppress
from typing import NoReturn

import structlog

from schemaless.runtime.outputs import is_ready, settle, without_waiting

log = structlog.get_logger()

HANGS = 70
"""The exit status of a process whose event loop or whose end hangs."""

_TICK_S = 1.0
IDLE_LIMITS = 10
"""How many times the limit a process may hold the interpreter without using CPU."""
_HALTED_S = 10.0
"""How long a process that ends may be halted."""


class Watchdog:
    """Ends the process when its event loop hangs for `limit_s`, whatever it waits for.

    Kafka would not find out, because heartbeats have a thread of their own. A thread counts its own ticks and asks no
    clock: a process that was halted as a whole, with its machine or alone, doesn't hang when it continues.

    A call that holds the interpreter (a regular expression, a long sum) leaves none for this thread. So with each tick
    it winds up two timers that need none. The kernel's counts the CPU time of this process: after `limit_s` of it
    SIGPROF ends the process. For one that holds the interpreter and uses no CPU, faulthandler has a thread in C. It
    asks a clock, so it waits ten times as long, and then ends the process with status 1.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._silent_s = 0.0
        self._stderr, self._nowhere = without_waiting(2), os.open(os.devnull, os.O_WRONLY)
        self._end_in_s: float | None = None
        self._end_limit_s = 0.0

    def start(self) -> None:
        """Begins to watch, in the running event loop and until the process ends."""
        faulthandler.register(signal.SIGPROF, file=self._stderr, chain=True)
        self._wind_up()
        # A process that is forked has no such thread, and would wait for it.
        os.register_at_fork(before=faulthandler.cancel_dump_traceback_later, after_in_parent=self._wind_up)
        self._ticking = asyncio.create_task(self._tick())
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def end_within(self, limit_s: float) -> None:
        """Ends the process after `limit_s`, whatever its event loop and its threads do until then. The first counts."""
        if self._end_in_s is None:
            self._end_limit_s, self._end_in_s = limit_s, limit_s + _TICK_S
            self._wind_up()

    async def _tick(self) -> None:
        while True:
            self._silent_s = 0.0
            await asyncio.sleep(_TICK_S)

    def _watch(self) -> None:
        while True:
            tick_s = _TICK_S if self._end_in_s is None else min(_TICK_S, max(self._end_in_s, 0.01))
            time.sleep(tick_s)
            self._wind_up()
            self._silent_s += tick_s
            if self._end_in_s is not None:
                self._end_in_s -= tick_s
                if self._end_in_s <= 0.0:
                    self._end("the process did not end by itself and is cut off", self._end_limit_s)
            if self._silent_s > self._limit_s:
                self._end("the event loop hangs; the process ends", self._limit_s)

    def _wind_up(self) -> None:
        busy_s, idle_s = self._limit_s, self._limit_s * IDLE_LIMITS
        if self._end_in_s is not None:
            busy_s, idle_s = min(busy_s, self._end_in_s + _TICK_S), min(idle_s, self._end_in_s + _HALTED_S)
        signal.setitimer(signal.ITIMER_PROF, max(busy_s, 2 * _TICK_S))
        with suppress(RuntimeError):  # there are too many threads, and the next tick tries again
            faulthandler.dump_traceback_later(max(idle_s, 2 * _TICK_S), exit=True, file=self._trace())

    def _end(self, what: str, limit_s: float) -> NoReturn:
        """Says where each thread is, on stderr, and ends the process."""
        log.error(what, limit_s=limit_s)
        settle()
        faulthandler.dump_traceback(file=self._trace())
        os._exit(HANGS)

    def _trace(self) -> int:
        """Returns where traces go: to a socket that nobody reads they would wait, too."""
        return self._stderr if is_ready(self._stderr) else self._nowhere
