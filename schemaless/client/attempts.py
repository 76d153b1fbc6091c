"""Attempts: how often, where and for how long one call is tried. Keeps the client's part of I14: all is bounded.

Only what may succeed later is tried again: no answer at all, and the statuses of RETRIED whose problem doesn't say
otherwise. Nothing is written twice by it, because every put is idempotent (I1).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from schemaless.client.call import Answer
from schemaless.client.hosts import Hosts
from schemaless.client.problems import is_retryable
from schemaless.errors import Unavailable

RETRIED = frozenset({429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every call of a client."""

    attempts_max: int = 8
    total_timeout_s: float = 30.0
    attempt_timeout_s: float = 10.0  # a put is answered within 3 s even when its home hangs; a batch has more to do
    connect_timeout_s: float = 1.0
    pause_s: float = 0.05  # doubled from attempt to attempt, and spread
    pause_max_s: float = 2.0
    connections_max: int = 64


@dataclass(frozen=True, slots=True)
class Attempt:
    url: str
    timeout_s: float
    started: float
    waits: bool = False
    """The server was asked to wait, so the time that it takes says nothing about it."""


class Attempts:
    """Of one call. `now` is the time of a monotonic clock."""

    def __init__(self, hosts: Hosts, limits: Limits, now: float) -> None:
        self._hosts = hosts
        self._limits = limits
        self._deadline = now + limits.total_timeout_s
        self._tried: list[str] = []

    def begin(self, now: float, wait_s: float = 0.0) -> Attempt:
        """`wait_s`: how long the server may take on purpose."""
        url = self._hosts.choose(now, self._tried)
        timeout_s = max(min(self._limits.attempt_timeout_s, self._deadline - now), 0.001)
        return Attempt(url, timeout_s + wait_s, now, wait_s > 0)

    def answered(self, attempt: Attempt, answer: Answer, now: float) -> float | None:
        """Seconds to wait before the next attempt, or None: this answer is the last word."""
        if answer.status not in RETRIED or not is_retryable(answer):
            self._hosts.answered(attempt.url, now, None if attempt.waits else now - attempt.started)
            return None
        self._hosts.failed(attempt.url, now, answer.retry_after_s)
        return self._pause(attempt, now, answer.retry_after_s)

    def broken(self, attempt: Attempt, why: str, now: float) -> float:
        """Seconds to wait before the next attempt. Raises Unavailable when there is none."""
        self._hosts.failed(attempt.url, now)
        pause = self._pause(attempt, now, 0.0)
        if pause is None:
            tries = len(self._tried)
            raise Unavailable(f"no answer from {attempt.url} ({why}), the last of {tries} attempts")
        return pause

    def end(self, attempt: Attempt) -> None:
        """However it ended: also when the caller was interrupted while it waited."""
        self._hosts.release(attempt.url)

    def _pause(self, attempt: Attempt, now: float, at_least_s: float) -> float | None:
        fresh_host_left = attempt.url not in self._tried and len(set(self._tried)) + 1 < len(self._hosts)
        self._tried.append(attempt.url)
        if len(self._tried) >= self._limits.attempts_max:
            return None
        pause = 0.0 if fresh_host_left else max(self._spread(), at_least_s)
        return pause if now + pause < self._deadline else None

    def _spread(self) -> float:
        whole: float = min(self._limits.pause_s * 2 ** len(self._tried), self._limits.pause_max_s)
        return whole * random.uniform(0.5, 1.0)
