"""Verdicts: what a trigger function raises to say what is to happen with its cell.

Any other exception means "again later".
"""

from __future__ import annotations


class Verdict(Exception):  # not an error of ours
    """A trigger function raises one to say what is to happen with the cell."""


class Retry(Verdict):
    """Call again after `delay_s` seconds. It does not count as a failed attempt."""

    def __init__(self, delay_s: float = 1.0) -> None:
        super().__init__(f"again in {delay_s} s")
        self.delay_s = delay_s


class _WithReason(Verdict):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Park(_WithReason):
    """Set the cell aside. Parking is not built yet: for now the shard stops with this reason."""


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
