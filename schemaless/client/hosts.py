"""Hosts: which one an attempt goes to. Pure but for its memory of how each host did; one for each client.

A host that failed rests, longer each time; one that answers much more slowly than the fastest is passed over for a
moment, then tried again. Among the others the one with the fewest requests under way is taken. When all rest, the one
whose rest ends first is taken all the same: a client never refuses to try.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from schemaless.errors import Misconfigured

REST_S = 0.25
REST_MAX_S = 8.0
SLOW_FACTOR = 4.0
SLOW_FLOOR_S = 0.1
SLOW_REST_S = 1.0
_SMOOTHING = 0.3


@dataclass(slots=True)
class _Host:
    url: str
    turn: int
    under_way: int = 0
    failures: int = 0
    rests_until: float = 0.0
    answer_s: float | None = None


class Hosts:
    """Times are of a monotonic clock and given by the caller. Safe to share between threads."""

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise Misconfigured("a client needs hosts: name them, or set SCHEMALESS_HOSTS")
        unique = dict.fromkeys(url.rstrip("/") for url in urls)
        self._hosts = {url: _Host(url, turn) for turn, url in enumerate(unique)}
        self._turn = len(self._hosts)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._hosts)

    def choose(self, now: float, tried: Collection[str] = ()) -> str:
        """The host for the next attempt; hosts that this request has `tried` come last."""
        with self._lock:
            host = min(self._hosts.values(), key=lambda host: _preference(host, now, tried))
            host.turn = self._turn
            self._turn += 1
            host.under_way += 1
            return host.url

    def answered(self, url: str, now: float, took_s: float | None) -> None:
        """The host did its work, whatever the status of its answer. None: it was to wait, that says nothing of it."""
        with self._lock:
            host = self._hosts[url]
            host.failures = 0
            host.rests_until = 0.0
            if took_s is None:
                return
            host.answer_s = _smoothed(host.answer_s, took_s)
            if self._is_slow(host):
                host.rests_until = now + SLOW_REST_S

    def failed(self, url: str, now: float, rest_s: float = 0.0) -> None:
        """The host couldn't be reached, broke off, hung, or said that it can't for `rest_s`."""
        with self._lock:
            host = self._hosts[url]
            rest = min(REST_S * 2**host.failures, REST_MAX_S)
            host.failures = min(host.failures + 1, 16)
            host.rests_until = now + max(rest, rest_s)

    def release(self, url: str) -> None:
        """The attempt that `choose` was asked for is over."""
        with self._lock:
            self._hosts[url].under_way -= 1

    def _is_slow(self, host: _Host) -> bool:
        known = [other.answer_s for other in self._hosts.values() if other.answer_s is not None]
        answer_s = host.answer_s or 0.0
        return answer_s > SLOW_FLOOR_S and answer_s > SLOW_FACTOR * min(known)


def _preference(host: _Host, now: float, tried: Collection[str]) -> tuple[bool, bool, float, int, int]:
    rests = host.rests_until > now
    return host.url in tried, rests, host.rests_until if rests else 0.0, host.under_way, host.turn


def _smoothed(before: float | None, seconds: float) -> float:
    return seconds if before is None else before + _SMOOTHING * (seconds - before)
