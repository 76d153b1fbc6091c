"""How long batches wait for one another, from what they cost."""

from hypothesis import given
from hypothesis import strategies as st

from schemaless.runtime.pace import Pace, pause_between

BOUNDS = {"pause_min_s": 0.0, "pause_max_s": 0.5}
times = st.floats(min_value=0.0, max_value=60.0)


def test_an_idle_machine_does_not_wait():
    """Batches that take the usual time are followed by no pause."""
    assert pause_between(0.004, 0.004, **BOUNDS) == 0.0
    assert pause_between(0.003, 0.004, **BOUNDS) == 0.0


def test_a_pause_grows_faster_than_its_cost():
    """A machine that is half busy waits a little, and a saturated one for as long as it may."""
    paused_ms = [round(1000 * pause_between(took, 0.004, **BOUNDS)) for took in (0.006, 0.008, 0.012, 0.018, 0.5)]
    assert paused_ms == [10, 40, 160, 490, 500]


@given(times, times)
def test_dearer_batches_never_wait_less(one, other):
    """The pause is monotonic, and within its bounds."""
    low, high = (pause_between(took, 0.004, pause_min_s=0.001, pause_max_s=0.5) for took in sorted((one, other)))
    assert 0.001 <= low <= high <= 0.5


def test_a_slow_broker_is_not_a_busy_machine():
    """Where every batch takes 30 ms, as with copies far away, that is the usual time."""
    pace = Pace(usual_min_s=0.004, **BOUNDS)
    for _ in range(10):
        pace.took(0.03)
    assert pace.pause_s == 0.0


def test_load_lengthens_the_pause_and_its_end_shortens_it():
    """One slow batch hardly counts, many do, and so do the quick ones afterwards."""
    pace = Pace(usual_min_s=0.004, **BOUNDS)
    pauses = []
    for took in [0.004, 0.008, *[0.016] * 20, *[0.004] * 20]:
        pace.took(took)
        pauses.append(pace.pause_s)
    assert pauses[0] == 0.0
    assert pauses[1] < 0.01
    assert pauses[21] > 0.3
    assert pauses[41] < 0.01


def test_a_hiccup_is_not_load():
    """A disk or a virtual machine that stops for a while makes one batch long, whatever the load. Load makes many."""
    pace = Pace(usual_min_s=0.004, **BOUNDS)
    for took in [*[0.004] * 20, 0.5]:
        pace.took(took)
    assert pace.pause_s < 0.005
    for _ in range(10):
        pace.took(0.5)
    assert pace.pause_s == 0.5


def test_before_the_first_batch_there_is_no_pause():
    """Nothing is known yet."""
    assert Pace(usual_min_s=0.004, **BOUNDS).pause_s == 0.0
