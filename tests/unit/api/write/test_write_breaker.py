"""The write breaker: closed, open, half-open, by a clock that the test turns."""

import gc
import weakref

import pytest

from api.write.queue import BreakerState, WriteBreaker
from schemaless.errors import AccountRefused, StorageUnavailable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rows(list):
    """A list that tells when it is gone."""


def raise_beside(rows):
    raise AccountRefused("why", "shown") from OSError("1045")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return WriteBreaker(1.0, clock)


def test_a_failure_keeps_everybody_away_for_a_while(breaker, clock):
    """Open: nobody waits for a node that just failed."""
    assert breaker.allows()
    breaker.failed()
    clock.now += 0.99
    assert not breaker.may_allow()
    assert not breaker.allows()
    assert breaker.state is BreakerState.OPEN


def test_what_opened_it_is_told_while_it_is_open_and_holds_no_rows(breaker):
    """The frames of the error are those of a batch."""
    rows = Rows()
    held = weakref.ref(rows)
    try:
        raise_beside(rows)
    except StorageUnavailable as error:
        breaker.failed(error)
    del rows
    gc.collect()
    assert (held(), type(breaker.failure), str(breaker.failure)) == (None, AccountRefused, "why")
    breaker.succeeded()
    assert breaker.failure is None


def test_one_probe_goes_through_and_closes_it(breaker, clock):
    """Half-open: of many callers one tries; its success lets all through."""
    breaker.failed()
    clock.now += 1.0
    assert breaker.may_allow()
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.succeeded()
    assert [breaker.allows() for _ in range(3)] == [True, True, True]


def test_a_failed_probe_opens_it_again(breaker, clock):
    """The wait begins anew."""
    breaker.failed()
    clock.now += 1.0
    assert breaker.allows()
    breaker.failed()
    clock.now += 0.5
    assert not breaker.allows()
    clock.now += 0.5
    assert breaker.allows()


def test_a_probe_that_never_reports_blocks_nobody_for_long(breaker, clock):
    """Its caller went away: after the same while the next one probes."""
    breaker.failed()
    clock.now += 1.0
    assert breaker.allows()
    clock.now += 0.5
    assert not breaker.allows()
    clock.now += 0.5
    assert breaker.allows()
