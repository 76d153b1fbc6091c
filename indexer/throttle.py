"""Throttle bounds how many cells a second this process delivers to one index (the token bucket)."""

from __future__ import annotations

import time
from collections.abc import Callable

_BURST_S = 0.1
"""What may come at once, in seconds of the rate: so a throttled index still writes batches."""

_WAIT_MIN_S = 0.001


class Throttle:
    """Belongs to one index of one process. Without a rate it bounds nothing. `clock` counts seconds."""

    def __init__(self, cells_per_s: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cells_per_s = cells_per_s
        self._left = 0.0
        self._filled_at = clock()

    @property
    def cells_per_s(self) -> int | None:
        return self._cells_per_s

    def limit_to(self, cells_per_s: int | None) -> None:
        """Changes the rate from now on."""
        if cells_per_s != self._cells_per_s:
            self._cells_per_s = cells_per_s
            self._left, self._filled_at = 0.0, self._clock()

    def take(self, cells: int) -> int:
        """Returns how many of these cells may be delivered now."""
        if self._cells_per_s is None:
            return cells
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._filled_at) * self._cells_per_s)
        self._filled_at = now
        taken = max(0, min(cells, int(self._left)))
        self._left -= taken
        return taken

    def correct(self, taken: int, cells: int) -> None:
        """Counts `cells` instead of what was taken. More of them are paid for later."""
        self._left += taken - cells

    @property
    def wait_s(self) -> float:
        """How long it takes until a burst may be delivered."""
        if self._cells_per_s is None:
            return 0.0
        return max(_WAIT_MIN_S, (self._burst - self._left) / self._cells_per_s)

    @property
    def _burst(self) -> float:
        return max(1.0, (self._cells_per_s or 0) * _BURST_S)
