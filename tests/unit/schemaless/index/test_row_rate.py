"""What a comparison costs the servers is bounded by how many rows a second it compares."""

from schemaless.index.check import RowRate


def test_rows_are_paid_for_in_time():
    """A page is followed by as long a wait as its rows take. A second that wasn't used is made up for, and no more."""
    now = 0.0
    rate = RowRate(500, clock=lambda: now)
    assert rate.wait_s(1000) == 2.0
    now = 2.0
    assert rate.wait_s(250) == 0.5
    now = 100.0
    assert rate.wait_s(500) == 0.0
    assert rate.wait_s(500) == 1.0


def test_without_a_rate_nothing_waits():
    """Somebody who compares an index by hand wants to know at once."""
    assert RowRate(None).wait_s(10**9) == 0.0
