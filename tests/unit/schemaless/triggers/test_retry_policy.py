"""RetryPolicy: delays that grow and stay within bounds, the errors it repeats, and the values it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless import RetryPolicy
from schemaless.errors import Misconfigured


def middle():
    return 0.5


def test_delays_grow_up_to_the_limit():
    """From attempt to attempt, and not beyond whatever number of attempts there were."""
    policy = RetryPolicy(delay=0.5, backoff=2, max_delay=3)
    assert [policy.delay_s(n, middle) for n in (1, 2, 3, 4, 1000)] == [0.5, 1, 2, 3, 3]
    assert RetryPolicy(delay=1, backoff=100, max_delay=7).delay_s(10_000, middle) == 7
    assert RetryPolicy(delay=0, backoff=100).delay_s(10_000, middle) == 0


def test_jitter_spreads_a_delay_to_both_sides():
    """Rows that failed together don't come back together."""
    policy = RetryPolicy(delay=10, jitter=0.1)
    assert [policy.delay_s(1, lambda n=n: n) for n in (0, 0.5, 1)] == [9, 10, 11]


@given(st.integers(1, 10**6), st.floats(0, 1), st.floats(0, 1), st.floats(1, 100), st.floats(0, 50))
def test_no_delay_is_negative_or_above_the_limit(attempt, drawn, jitter, backoff, delay):
    """Whatever the attempt and the dice."""
    policy = RetryPolicy(delay=delay, backoff=backoff, jitter=jitter, max_delay=60)
    assert 0 <= policy.delay_s(attempt, lambda: drawn) <= 60


def test_only_named_errors_are_repeated():
    """By class, so subclasses count too."""
    policy = RetryPolicy(retry_on=(OSError, TimeoutError))
    assert policy.retries(ConnectionResetError())
    assert not policy.retries(ValueError())
    assert RetryPolicy().retries(ValueError())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("attempts", value) for value in (0, -1, 1001, 2.0, True, "5", None)),
        *(("delay", value) for value in (-1, 86_401, float("nan"), True, "1", None)),
        *(("backoff", value) for value in (0.5, 101, float("inf"), "2")),
        *(("max_delay", value) for value in (0.1, -1, 86_401, float("nan"))),
        *(("jitter", value) for value in (-0.1, 1.1, False)),
        *(("retry_on", value) for value in ((), [TimeoutError], TimeoutError, (KeyboardInterrupt,), ("TimeoutError",))),
    ],
)
def test_a_value_that_makes_no_policy_is_refused_by_name(name, value):
    """When it is made, which is when the program's module is imported."""
    with pytest.raises(Misconfigured, match=name):
        RetryPolicy(**{name: value})
