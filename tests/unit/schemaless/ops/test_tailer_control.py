"""Orders to tailers: of several clusters' answers the latest counts."""

import pytest

from schemaless.ops.tailers import latest
from schemaless.storage.tailer_order_table import TailerCommand

PAUSED, RESUMED = TailerCommand(True, 0, 10), TailerCommand(False, 0, 20)


@pytest.mark.parametrize(
    "answers", [[{"flights": PAUSED}, {"flights": RESUMED}], [{"flights": RESUMED}, {"flights": PAUSED}]]
)
def test_the_latest_order_counts_whoever_tells_it_first(answers):
    """A cluster that was away shows what was said before."""
    assert latest(answers) == {"flights": RESUMED}


def test_nobody_said_anything():
    """No answers, or empty ones: nothing is paused."""
    assert latest([]) == latest([{}, {}]) == {}
