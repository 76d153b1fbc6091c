"""WriteBreaker: the circuit breaker of one master, for puts.

It keeps puts from waiting for a master that just failed (I5: a put whose home hangs is answered within 3 s). It differs
from the read breaker (api/read/read_breaker.py): nothing samples the masters for writes, so one put at a time is the
probe that closes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum


class BreakerState(StrEnum):
    """A failure leads from any state to OPEN, a success to CLOSED, a probe from OPEN or HALF_OPEN to HALF_OPEN."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class WriteBreaker:
    """The circuit breaker of one master. It is open for `open_s` after each failure, then lets one probe through every
    `open_s`.

    A probe has no duty to report. One whose caller disappeared costs `open_s`, nothing more.
    """

    def __init__(self, open_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = BreakerState.CLOSED
        self._open_s = open_s
        self._clock = clock
        self._next_probe_at = 0.0

    def allows(self) -> bool:
        """Returns whether to try now. Unless it is closed, at most one caller in `open_s` gets True: the probe."""
        if self.state is BreakerState.CLOSED:
            return True
        now = self._clock()
        if now < self._next_probe_at:
            return False
        self.state = BreakerState.HALF_OPEN
        self._next_probe_at = now + self._open_s
        return True

    def may_allow(self) -> bool:
        """Returns what `allows` would return, without taking the probe."""
        return self.state is BreakerState.CLOSED or self._clock() >= self._next_probe_at

    def succeeded(self) -> None:
        self.state = BreakerState.CLOSED

    def failed(self) -> None:
        self.state = BreakerState.OPEN
        self._next_probe_at = self._clock() + self._open_s
