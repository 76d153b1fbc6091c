"""Attempts: how often, on which host and for how long one request is tried. Keeps the client's part of I14.

Only what may succeed later is tried again: no response at all, and the statuses of RETRIED unless the problem document
says otherwise. Nothing is written twice, because every put is idempotent (I1).

A host that failed rests, longer each time. A host that is much slower than the fastest is skipped for a moment, then
tried again. Among the others the one with the fewest requests in flight is taken. When all rest, the one whose rest
ends first is taken: a client never refuses to try.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from schemaless.client.exchange import ClientRequest, ClientResponse, is_retryable
from schemaless.errors import Misconfigured, Unavailable
from schemaless.quantity import quantity

REST_S = 0.25
REST_MAX_S = 8.0
SLOW_FACTOR = 4.0
SLOW_FLOOR_S = 0.1
SLOW_REST_S = 1.0
_SMOOTHING = 0.3
RETRIED = frozenset({429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every request of a client."""

    attempts_max: int = 8
    total_timeout_s: float = 30.0
    attempt_timeout_s: float = 10.0  # a put is answered within 3 s even when its home hangs. A batch takes longer
    connect_timeout_s: float = 1.0
    pause_s: float = 0.05  # doubled from attempt to attempt, with jitter
    pause_max_s: float = 2.0
    connections_max: int = 64


@dataclass(slots=True)
class _Host:
    url: str
    last_choice: int
    """Number of the choice that took this host last: hosts take turns."""
    in_flight: int = 0
    failures: int = 0
    rests_until: float = 0.0
    response_s: float | None = None
    """Smoothed time of its responses."""


class Hosts:
    """The hosts of a client, and how each one did. Times are of a monotonic clock. Threads may share it."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises Misconfigured when there is no host, and for one that is no URL of an API."""
        if not urls:
            raise Misconfigured(
                "no API is known: name hosts (--hosts), set SCHEMALESS_HOSTS, or start a stack with `schemaless up`"
            )
        unique = dict.fromkeys(map(_parse_url, urls))
        self._hosts = {url: _Host(url, number) for number, url in enumerate(unique)}
        self._choices = len(self._hosts)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._hosts)

    def choose(self, now: float, tried: Collection[str] = ()) -> str:
        """Returns the host for the next attempt. Hosts that this request has `tried` come last."""

        def preference(host: _Host) -> tuple[bool, bool, float, int, int]:
            rests = host.rests_until > now
            return host.url in tried, rests, host.rests_until if rests else 0.0, host.in_flight, host.last_choice

        with self._lock:
            host = min(self._hosts.values(), key=preference)
            host.last_choice = self._choices
            self._choices += 1
            host.in_flight += 1
            return host.url

    def answered(self, url: str, now: float, took_s: float | None) -> None:
        """Records that the host answered, whatever the status. `took_s` is None if the host was asked to wait."""
        with self._lock:
            host = self._hosts[url]
            host.failures = 0
            host.rests_until = 0.0
            if took_s is None:
                return
            before = host.response_s
            host.response_s = took_s if before is None else before + _SMOOTHING * (took_s - before)
            fastest = min(other.response_s for other in self._hosts.values() if other.response_s is not None)
            if host.response_s > SLOW_FLOOR_S and host.response_s > SLOW_FACTOR * fastest:
                host.rests_until = now + SLOW_REST_S

    def failed(self, url: str, now: float, rest_s: float = 0.0) -> None:
        """Records that the host was unreachable, hung or closed the connection, or that it is busy for `rest_s`."""
        with self._lock:
            host = self._hosts[url]
            rest = min(REST_S * 2**host.failures, REST_MAX_S)
            host.failures = min(host.failures + 1, 16)
            host.rests_until = now + max(rest, rest_s)

    def release(self, url: str) -> None:
        """Ends the attempt for which `choose` returned the host."""
        with self._lock:
            self._hosts[url].in_flight -= 1


def _parse_url(text: str) -> str:
    """Returns the URL of a host, without a slash at its end. Raises Misconfigured."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and (parts.hostname or "").encode("idna") and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that isn't closed, or a name that no DNS takes
        good = False
    if not good or parts.query or parts.fragment or "@" in parts.netloc or not text.isprintable() or " " in text:
        raise Misconfigured(
            f"{text!r} is no URL of an API: hosts are given as http://127.0.0.1:8000, with http:// or https://,"
            " and without a user, a query or a fragment"
        )
    return parts.geturl().rstrip("/")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a request. If the server was asked to wait, its time says nothing about the host."""

    url: str
    timeout_s: float
    started: float
    waits: bool = False
    is_final: bool = False


class Attempts:
    """The attempts of one request. `now` is the time of a monotonic clock."""

    def __init__(self, hosts: Hosts, limits: Limits, now: float) -> None:
        self._hosts = hosts
        self._limits = limits
        self._deadline = now + limits.total_timeout_s
        self._tried: list[str] = []

    def begin(self, now: float, request: ClientRequest) -> Attempt:
        """Begins an attempt on the best host."""
        url = self._hosts.choose(now, self._tried)
        timeout_s = max(min(self._limits.attempt_timeout_s, self._deadline - now), 0.001)
        return Attempt(url, timeout_s + request.wait_s, now, request.wait_s > 0, request.is_final)

    def answered(self, attempt: Attempt, response: ClientResponse, now: float) -> float | None:
        """Returns the seconds to wait before the next attempt, or None if this response is final."""
        if attempt.is_final or response.status not in RETRIED or not is_retryable(response):
            self._hosts.answered(attempt.url, now, None if attempt.waits else now - attempt.started)
            return None
        self._hosts.failed(attempt.url, now, response.retry_after_s)
        return self._pause(attempt, now, response.retry_after_s)

    def broken(self, attempt: Attempt, why: str, now: float) -> float:
        """Returns the seconds to wait before the next attempt. Raises Unavailable after the last one."""
        self._hosts.failed(attempt.url, now)
        pause = self._pause(attempt, now, 0.0)
        if pause is None:
            tries = len(self._tried)
            raise Unavailable(
                f"no answer from {attempt.url} ({why}), the last of {quantity(tries, 'attempt')}",
                hint="check that an API runs there. Reads and puts may be sent again: they are idempotent",
            )
        return pause

    def end(self, attempt: Attempt) -> None:
        """Ends an attempt, also when the caller was interrupted while it waited."""
        self._hosts.release(attempt.url)

    def _pause(self, attempt: Attempt, now: float, at_least_s: float) -> float | None:
        fresh_host_left = attempt.url not in self._tried and len(set(self._tried)) + 1 < len(self._hosts)
        self._tried.append(attempt.url)
        if len(self._tried) >= self._limits.attempts_max:
            return None
        backoff: float = min(self._limits.pause_s * 2 ** len(self._tried), self._limits.pause_max_s)
        pause = 0.0 if fresh_host_left else max(backoff * random.uniform(0.5, 1.0), at_least_s)
        return pause if now + pause < self._deadline else None
