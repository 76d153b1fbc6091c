"""A caller's rate, and how many callers are remembered (I14)."""

import pytest

from api.access import admission
from api.access.admission import RateLimit
from schemaless.errors import TooManyRequests


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def served(limit, caller="a", asked=100):
    """How many of so many requests at once are served."""
    count = 0
    for _ in range(asked):
        try:
            limit.count(caller)
        except TooManyRequests:
            return count
        count += 1
    return count


def test_a_caller_that_was_silent_saves_nothing_up(clock):
    """After an hour it may send what it may send in a second."""
    limit = RateLimit(4, clock=clock)
    assert served(limit) == 4
    clock.now += 3600
    assert served(limit) == 4
    clock.now += 0.5
    assert served(limit) == 2


def test_callers_that_are_silent_are_forgotten(monkeypatch, clock):
    """Addresses of a whole network don't fill the memory."""
    monkeypatch.setattr(admission, "CALLERS_MAX", 3)
    limit = RateLimit(5, clock=clock)
    for caller in "abc":
        limit.count(caller)
    clock.now += 1.0
    limit.count("d")
    assert list(limit._times) == ["d"]


def test_without_a_rate_nobody_is_limited(clock):
    assert served(RateLimit(None, clock=clock)) == 100
