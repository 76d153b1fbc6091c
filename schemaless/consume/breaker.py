"""Breaker: tells an outage of what trigger functions call from cells that they can't handle.

It counts rows and not calls, and shares and not numbers. So one poison row never trips it, nor do a thousand of them
among many good ones. While it is tripped, a process calls one cell now and then, to see whether the outage is over.
This module does no I/O.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from math import inf

from schemaless.config import BreakerMode

WINDOW_S = 10.0
ROWS_MIN = 10
"""How many rows must fail for one cause, within the window or with no good call since. What our own API refuses is
never the fault of a cell, so one row is enough."""
UNANSWERED_MAX_S = 600.0
"""How long a failed row counts while no call of its function succeeds. A slow program meets few rows in a window."""
SHARE = 0.5
"""Which part of the rows that a function was called for they must be."""
PROBE_FIRST_S = 0.5
PROBE_MAX_S = 1.0
"""The longest pause between two probes. Within five seconds of the end of an outage calls go on at full speed, also if
the first probes meet poison."""
ROWS_KEPT = 10_000
"""How many good rows of a function count at most, and how many failed ones: the last ones."""


class _Function:
    """The rows of one function: when the last call of each was good, or failed for which cause. The eldest come first.

    `good_at` is the time of the last good call. `alike` counts the failed rows by cause.
    """

    __slots__ = ("alike", "failed", "good", "good_at")

    def __init__(self) -> None:
        self.good: dict[bytes, float] = {}
        self.failed: dict[bytes, tuple[float, str]] = {}
        self.alike: Counter[str] = Counter()
        self.good_at = -inf

    def note_good(self, row_key: bytes, now: float) -> None:
        self._drop(row_key)  # so that it is the youngest again
        self.good[row_key] = self.good_at = now
        if len(self.good) > ROWS_KEPT:
            del self.good[next(iter(self.good))]

    def note_failed(self, row_key: bytes, now: float, kind: str) -> None:
        self._drop(row_key)
        self.failed[row_key] = now, kind
        self.alike[kind] += 1
        since = now - WINDOW_S
        while self.good and self.good[first := next(iter(self.good))] < since:
            del self.good[first]
        since = min(since, max(self.good_at, now - UNANSWERED_MAX_S))
        while self.failed and (
            self.failed[first := next(iter(self.failed))][0] < since or len(self.failed) > ROWS_KEPT
        ):
            self._drop(first)

    def _drop(self, row_key: bytes) -> None:
        self.good.pop(row_key, None)
        if (known := self.failed.pop(row_key, None)) is not None:
            self.alike[known[1]] -= 1


class Breaker:
    """Belongs to one process and program. `clock` counts seconds, as time.monotonic does."""

    def __init__(self, mode: BreakerMode, clock: Callable[[], float]) -> None:
        self._mode = mode
        self._clock = clock
        self._functions: dict[str, _Function] = {}
        self._failing = 0  # functions with failed rows: while there are none, a good call costs nothing
        self._lock = threading.Lock()  # sync functions run in threads
        self.cause: str | None = None
        self.function = ""
        self._excused: frozenset[bytes] = frozenset()
        self._excused_until = 0.0
        self._probe_at = 0.0
        self._probe_pause_s = PROBE_FIRST_S

    @property
    def is_tripped(self) -> bool:
        return self.cause is not None

    def succeeded(self, function: str, row_key: bytes, *, is_probe: bool = False) -> None:
        """Takes note of a call that succeeded. A probe of the function that failed ends the outage."""
        if self._failing:
            with self._lock:
                if self.cause is not None:
                    if is_probe and function == self.function:
                        excused = frozenset(self._functions[function].failed) - {row_key}
                        self.reset()
                        self._excused, self._excused_until = excused, self._clock() + WINDOW_S
                        self._functions[function] = _Function()
                        self._failing = 1  # what succeeds from now on counts against these rows
                elif (rows := self._functions.get(function)) is not None:
                    rows.note_good(row_key, self._clock())

    def reset(self) -> None:
        """Forgets what it counted. Calls go on."""
        self._functions.clear()
        self._failing, self.cause, self._probe_pause_s = 0, None, PROBE_FIRST_S
        self._excused = frozenset()

    def failed(self, function: str, row_key: bytes, kind: str, refusal: str | None = None) -> bool:
        """Takes note of a call that failed with an error of this kind. Returns whether there is an outage now.

        `refusal`: what our own API said, if it refused the call. A row that failed before an outage ended doesn't count
        for a while: others succeed, so it may be poison.
        """
        if self._mode is BreakerMode.OFF:
            return False
        with self._lock:
            return self.cause is not None or self._trips(function, row_key, kind, refusal)

    def _trips(self, function: str, row_key: bytes, kind: str, refusal: str | None) -> bool:
        now = self._clock()
        if row_key in self._excused and now < self._excused_until:
            return False
        rows = self._functions.setdefault(function, _Function())
        self._failing = len(self._functions)
        rows.note_failed(row_key, now, kind)
        alike, called = rows.alike[kind], len(rows.failed) + len(rows.good)
        rows_min = ROWS_MIN if refusal is None or self.stops else 1
        if alike < rows_min or alike < SHARE * called:
            return False
        why = "" if refusal is None else f". Our API refuses it: {refusal}"
        self.function, self.cause = function, f"{function} fails with {kind} for {alike} of {called} rows{why}"
        self._probe_at = now + self._probe_pause_s
        return True

    @property
    def stops(self) -> bool:
        """Whether a shard stops while it is tripped."""
        return self._mode is BreakerMode.STOP

    def take_probe(self) -> bool:
        """Returns whether a call may be tried now. The next one is later, with a pause that grows."""
        now = self._clock()
        if now < self._probe_at:
            return False
        self._probe_pause_s = min(PROBE_MAX_S, self._probe_pause_s * 2)
        self._probe_at = now + self._probe_pause_s
        return True

    @property
    def next_probe_s(self) -> float:
        return max(0.01, self._probe_at - self._clock())
