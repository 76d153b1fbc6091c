"""What the benchmark's report is computed from."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import MET, NOT_MET, Comparison, Figure, Values, at_least, at_most, number, percentile

MOMENTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@given(MOMENTS, st.integers(1, 100))
def test_a_percentile_is_a_value_with_so_many_at_or_below_it(values, percent):
    """Nearest rank: never interpolated, and at least `percent` of the values are not above it."""
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) * 100 >= percent * len(values)


@given(MOMENTS)
def test_percentiles_never_decrease(values):
    """A higher percentile is never a lower value, and the last is the greatest."""
    ladder = [percentile(values, percent) for percent in (1, 50, 99, 100)]
    assert all(low <= high for low, high in pairwise(ladder))
    assert ladder[-1] == max(values)


def test_no_values_have_no_percentile():
    """An empty round is an error, not a zero."""
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    """A moment that slowed both halves of one round leaves the ratio alone."""
    row = Comparison("x", "puts/s", Values((4000.0, 400.0, 4400.0)), Values((1000.0, 100.0, 1000.0)), at_least(4))
    assert row.ratios.rounds == (4.0, 4.0, 4.4)
    assert row.ratios.median == 4.0
    assert row.verdict == MET


@pytest.mark.parametrize(
    ("floor", "value", "verdict"),
    [(at_least(4), 4.0, MET), (at_least(4), 3.99, NOT_MET), (at_most(50), 50.0, MET), (at_most(50), 50.1, NOT_MET)],
)
def test_a_floor_is_met_at_its_bound_and_not_beyond(floor, value, verdict):
    """Floors include their bound, in both directions."""
    assert Figure("x", "ms", Values((value,)), floor).verdict == verdict


def test_without_a_floor_there_is_no_verdict():
    """A figure that is only reported is neither met nor not met."""
    assert Figure("x", "ms", Values((1e9,))).verdict == ""


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (123.4, "123"), (4.567, "4.57"), (0.3333, "0.333"), (1000.0, "1,000")]
)
def test_numbers_carry_no_more_digits_than_they_deserve(value, text):
    """Three significant digits below a thousand, whole numbers above."""
    assert number(value) == text
