"""RateLimit: how many requests a caller may send in a second to this process (I14).

It counts as a leaky bucket does: each request moves the caller's time on by its share of a second. A caller whose time
is a second ahead of the clock is refused until the clock has caught up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from schemaless.errors import TooManyRequests

CALLERS_MAX = 10_000
BURST_S = 1.0


class RateLimit:
    """Without `requests_per_s` nobody is limited."""

    def __init__(self, requests_per_s: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._share_s = 1.0 / requests_per_s if requests_per_s else 0.0
        self._clock = clock
        self._times: dict[Hashable, float] = {}

    def count(self, caller: Hashable) -> None:
        """Counts a request. Raises TooManyRequests."""
        if not self._share_s:
            return
        now = self._clock()
        at = max(self._times.get(caller, now), now) + self._share_s
        if at > now + max(BURST_S, self._share_s):
            raise TooManyRequests(f"at most {1 / self._share_s:g} requests a second are served to one caller")
        if len(self._times) >= CALLERS_MAX:
            self._times = {name: time_ for name, time_ in self._times.items() if time_ > now}
        self._times[caller] = at
