"""Pace: how long to wait between two batches, from what the last ones cost.

A batch costs nearly the same whatever is in it. So a busy machine does more with few large batches, and an idle one
should not wait at all. How long the last batches took tells which of the two it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

from schemaless.errors import SchemalessError

T = TypeVar("T")

COST_SHARE_MAX = 0.05
"""The part of the time that samples take at most."""

_WEIGHT = 0.2  # of the last batch in the moving average
_OUTLIER = 2.0  # averages that one batch counts as at most: a hiccup of a disk says nothing of the load
_STEEPNESS = 10.0  # pauses of the usual time, after batches that took twice the usual time


def pause_between(took_s: float, usual_s: float, *, pause_min_s: float, pause_max_s: float) -> float:
    """Returns the pause in seconds after batches that took `took_s`, where `usual_s` is the time on an idle machine.

    It grows with the square of what they took more than usual: twice the usual time makes a pause of ten times the
    usual time, and one and a half times the usual time makes a quarter of that. A pause in simple proportion would be
    too long for a machine that is half busy, or too short for one that is saturated.
    """
    excess = max(0.0, took_s / usual_s - 1)
    return min(pause_max_s, max(pause_min_s, _STEEPNESS * usual_s * excess**2))


class Sampled(Generic[T]):
    """The last answer to a question that is asked every `period_s`, so that readiness and metrics know it.

    An answer that costs much is asked for less often: it takes COST_SHARE_MAX of the time at most.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], period_s: float, first: T) -> None:
        self.last = first
        self.at = time.monotonic()
        self._ask = ask
        self._period_s = period_s

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await self.step()
            await asyncio.sleep(max(self._period_s, (time.monotonic() - began) / COST_SHARE_MAX))

    async def step(self) -> None:
        """Asks once. The answer of before is nearer to the truth than none."""
        with suppress(SchemalessError):
            self.last = await self._ask()
            self.at = time.monotonic()


class Pace:
    """The pause after a series of batches. It keeps no clock of its own.

    The usual time is that of the quickest batch so far, and at least `usual_min_s`.
    """

    def __init__(self, *, usual_min_s: float, pause_min_s: float, pause_max_s: float) -> None:
        self._usual_min_s = usual_min_s
        self._pause_min_s = pause_min_s
        self._pause_max_s = pause_max_s
        self._quickest_s = float("inf")
        self._average_s = 0.0

    def took(self, seconds: float) -> None:
        """Notes how long a batch took."""
        if self._quickest_s == float("inf"):
            self._average_s = seconds
        self._quickest_s = min(self._quickest_s, seconds)
        counted_s = min(seconds, _OUTLIER * max(self._average_s, self._usual_min_s))
        self._average_s = (1 - _WEIGHT) * self._average_s + _WEIGHT * counted_s

    @property
    def pause_s(self) -> float:
        """Returns how long to wait after the last batch, in seconds."""
        usual_s = self._usual_min_s if self._average_s == 0 else max(self._usual_min_s, self._quickest_s)
        return pause_between(self._average_s, usual_s, pause_min_s=self._pause_min_s, pause_max_s=self._pause_max_s)
