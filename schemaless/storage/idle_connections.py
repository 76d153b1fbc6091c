"""IdleConnections: a pool's connections that nobody uses, for either driver. The one used last is taken first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Connection = TypeVar("Connection")

IDLE_MAX_S = 30.0
"""Half of the session's wait_timeout: what lies here longer is closed before the server closes it under our hands."""


class IdleConnections(Generic[Connection]):
    """Safe to share between threads: each step is one atomic operation of a deque."""

    def __init__(self, close: Callable[[Connection], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._close = close
        self._clock = clock
        self._idle: deque[tuple[float, Connection]] = deque()  # oldest first

    def take(self) -> Connection | None:
        """None: there is none, open a new one."""
        self._close_older_than(self._clock() - IDLE_MAX_S)
        try:
            return self._idle.pop()[1]
        except IndexError:
            return None

    def give(self, connection: Connection) -> None:
        self._idle.append((self._clock(), connection))

    def close_all(self) -> None:
        """Also after a loss: where one connection was lost the others were, and must not fail once for each."""
        self._close_older_than(float("inf"))

    def _close_older_than(self, moment: float) -> None:
        while self._idle and self._idle[0][0] < moment:
            try:
                self._close(self._idle.popleft()[1])
            except IndexError:  # another thread was faster
                return
