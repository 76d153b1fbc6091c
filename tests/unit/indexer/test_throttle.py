"""The throttle of an index bounds the cells a second, and can be changed while it runs."""

from indexer.throttle import Throttle


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def delivered(throttle, clock, seconds):
    """What a delivery that always has more gets in some seconds, waiting as it is told."""
    until, cells = clock.now + seconds, 0
    while clock.now < until:
        taken = throttle.take(1000)
        cells += taken
        clock.now += throttle.wait_s if not taken else 0.0
        assert taken or throttle.wait_s > 0
    return cells


def test_a_rate_is_kept_and_a_change_counts_at_once():
    """At most the rate and one burst of a tenth of a second, at rates below one cell a burst too."""
    clock = Clock()
    throttle = Throttle(500, clock=clock)
    assert 9 * 500 <= delivered(throttle, clock, 10) <= 10 * 500 + 50
    throttle.limit_to(3)
    assert 27 <= delivered(throttle, clock, 10) <= 31
    throttle.limit_to(None)
    assert throttle.take(10**6) == 10**6
    assert throttle.wait_s == 0.0


def test_time_without_work_saves_up_one_burst_at_most():
    """After an idle hour no more than a tenth of a second's cells come at once."""
    clock = Clock()
    throttle = Throttle(100, clock=clock)
    clock.now += 3600
    assert throttle.take(1000) == 10
    assert throttle.take(1000) == 0
