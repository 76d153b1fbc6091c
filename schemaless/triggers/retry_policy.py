"""RetryPolicy: how often a failed call of a trigger function is repeated, how soon, and for which errors.

The delay grows from attempt to attempt up to a limit. Jitter spreads the calls of rows that failed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from schemaless.errors import Misconfigured

ATTEMPTS_MAX = 1_000
DELAY_MAX_S = 86_400.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`delay` and `max_delay` are in seconds. `jitter` is the part of a delay by which it may differ.

    An error that is in none of `retry_on` isn't repeated: the cell is parked at once.
    """

    attempts: int = 5
    delay: float = 0.5
    backoff: float = 2.0
    max_delay: float = 60.0
    jitter: float = 0.1
    retry_on: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or not 1 <= self.attempts <= ATTEMPTS_MAX:
            raise _wrong("attempts", f"a whole number from 1 to {ATTEMPTS_MAX}", self.attempts)
        _require_number("delay", self.delay, 0, DELAY_MAX_S)
        _require_number("backoff", self.backoff, 1, 100)
        _require_number("max_delay", self.max_delay, 0, DELAY_MAX_S)
        _require_number("jitter", self.jitter, 0, 1)
        if self.max_delay < self.delay:
            raise _wrong("max_delay", f"at least delay, which is {self.delay}", self.max_delay)
        given: object = self.retry_on
        if not (isinstance(given, tuple) and given and all(_is_error_class(kind) for kind in given)):
            raise _wrong("retry_on", "a tuple of exception classes, such as (TimeoutError,)", given)

    def delay_s(self, attempt: int, random: Callable[[], float]) -> float:
        """Returns the seconds from the failure of an attempt, counted from 1, to the next one.

        `random` returns a number from 0 to 1. No delay is above `max_delay`.
        """
        try:
            delay = min(self.max_delay, self.delay * self.backoff ** (attempt - 1))
        except OverflowError:
            delay = self.max_delay if self.delay else 0.0
        return min(self.max_delay, delay * (1 + self.jitter * (2 * random() - 1)))

    def retries(self, error: Exception) -> bool:
        """Returns whether a call that raised this error is repeated."""
        return isinstance(error, self.retry_on)


def _require_number(name: str, value: object, least: float, most: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and least <= value <= most):  # type: ignore[arg-type, operator]
        raise _wrong(name, f"a number from {least:g} to {most:g}", value)


def _is_error_class(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)


def _wrong(name: str, wanted: str, given: object) -> Misconfigured:
    return Misconfigured(f"RetryPolicy: {name} must be {wanted}, not {given!r}")
