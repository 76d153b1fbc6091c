"""How long an audit waits for tailers and consumers to reach the heads that it fixed: while they get on."""

from __future__ import annotations

import time

STALL_S = 30.0
_POLL_S = 0.1


class Patience:
    """Ends after `stall_s` without progress, for good: what is stuck in one place is not waited for in the next."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._waited_s = 0.0

    def renew(self) -> None:
        """There was progress."""
        if self._waited_s < self._stall_s:
            self._waited_s = 0.0

    def wait(self) -> bool:
        """Sleeps for a moment; False, at once, when there is no patience left."""
        if self._waited_s >= self._stall_s:
            return False
        time.sleep(_POLL_S)
        self._waited_s += _POLL_S
        return True
