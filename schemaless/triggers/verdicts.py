"""Verdicts: what a trigger function raises to say what is to happen with its cell.

Any other exception means "again later".
"""

from __future__ import annotations

import math

DELAY_MAX_S = 366 * 86_400.0
"""The longest delay of a Retry."""


DOUBT_PREFIX = "doubt: "
"""How the reason of a Doubt begins. So doubts are found among the parked cells."""


class Verdict(Exception):  # not an error of ours
    """A trigger function raises one to say what is to happen with the cell."""


class Retry(Verdict):
    """Call again after `delay_s` seconds. It does not count as a failed attempt.

    Raises ValueError for anything but a finite number. A time in the past means at once.
    """

    delay_s: float = 1.0  # of a class that derives from it and makes itself

    def __init__(self, delay_s: float = 1.0) -> None:
        if not isinstance(delay_s, int | float) or not math.isfinite(delay_s) or delay_s > DELAY_MAX_S:
            raise ValueError(f"Retry: delay_s must be seconds up to {DELAY_MAX_S:g}, not {delay_s!r:.100}")
        super().__init__(f"again in {delay_s} s")
        self.delay_s = max(0.0, delay_s)


class _WithReason(Verdict):
    reason: str = ""  # of a class that derives from it and makes itself

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = str(reason)


class Park(_WithReason):
    """Set the cell aside with this reason, until somebody orders a retry or a discard."""


class Skip(_WithReason):
    """The cell needs nothing. Continue with the next function or cell."""


class Stop(_WithReason):
    """Something is wrong beyond this cell. Stop the shard here, with this reason, until somebody resumes it."""


class Doubt(Park):
    """An outside effect may have happened or not: it was begun, and no result is known. People decide."""


class DidNotHappen(Exception):  # not an error of ours
    """Raised by the call of `context.once`, or by `resolve`: the effect surely did not happen. It may be made again.

    The function that lets it pass has failed, and is called again as after any other exception.
    """
