"""Orders to tailers: of several clusters' answers the latest counts, and a stack without the table has none."""

import pytest

from schemaless.errors import TableMissing
from schemaless.ops.tailer_control import latest
from schemaless.storage import tailer_order_table
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


def test_servers_made_before_the_table_have_no_orders():
    """The table comes with the first order; until then its absence is no failure."""
    operation = tailer_order_table.all_of()
    next(operation)
    with pytest.raises(StopIteration) as ended:
        operation.throw(TableMissing("1146: no such table"))
    assert ended.value.value == {}
