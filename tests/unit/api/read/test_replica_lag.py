"""How fresh a minion is, from samples of sums of heads."""

from collections import deque

import pytest

from api.read.replica_lag import fresh_until
from schemaless.storage.shard_head import ServerPosition

MASTER = deque([(100.0, 10), (101.0, 10), (102.0, 25), (103.0, 40)])


@pytest.mark.parametrize(
    ("shown", "expected"), [(40, 103.0), (99, 103.0), (39, 102.0), (25, 102.0), (24, 101.0), (10, 101.0)]
)
def test_a_minion_is_as_fresh_as_the_last_moment_whose_cells_it_shows(shown, expected):
    """The latest sample at which the master showed no more than the minion does now."""
    assert fresh_until(MASTER, ServerPosition(shown, 0)) == expected


def test_a_minion_behind_all_samples_is_judged_by_its_newest_cell():
    """Further back than the samples go, and right after the start with the master away."""
    assert fresh_until(MASTER, ServerPosition(9, 55_000_000)) == 55.0
    assert fresh_until(deque(), ServerPosition(9, 55_000_000)) == 55.0
