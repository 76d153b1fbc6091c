"""What tells the cleaner that a home may have lost what it showed (I13)."""

import pytest

from schemaless.storage.shard_head import Movement, ServerHistory

BEFORE = ServerHistory(1, {"trips": Movement(10, 4), "other": Movement(3, 4)})


@pytest.mark.parametrize(
    ("now", "continues"),
    [
        (BEFORE, True),
        (ServerHistory(1, {**BEFORE.movements, "trips": Movement(11, 4), "new": Movement(0, 4)}), True),
        (ServerHistory(1, {**BEFORE.movements, "trips": Movement(9, 4)}), False),
        (ServerHistory(1, {**BEFORE.movements, "trips": Movement(20, 5)}), False),
        (ServerHistory(2, BEFORE.movements), False),
        (ServerHistory(1, {"trips": Movement(10, 4)}), False),
    ],
    ids=["nothing moved", "heads grew", "a head fell", "a generation began", "another server", "a datastore is gone"],
)
def test_a_history_continues_only_where_nothing_can_be_lost(now, continues):
    assert now.continues(BEFORE) is continues
