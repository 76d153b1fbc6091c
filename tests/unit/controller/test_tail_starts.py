"""Where a server's tail begins in each shard, from its own heads and generations and those of the present master."""

import pytest

from controller.tail import tail_starts
from schemaless.location import GenerationStart
from schemaless.storage.shard_head import Head

FIRST = (1, 1)


@pytest.mark.parametrize(
    ("head", "own", "present", "start"),
    [
        (9, [FIRST], [FIRST], None),
        (9, [FIRST], [FIRST, (5, 8)], 8),
        (7, [FIRST], [FIRST, (5, 8)], None),
        (9, [FIRST], [FIRST, (5, 8), (6, 8), (9, 20)], 8),
        (9, [FIRST], [FIRST, (5, 8), (9, 6)], 6),
        (12, [FIRST, (5, 10)], [FIRST, (9, 10)], 10),
        (9, [FIRST, (5, 8)], [FIRST, (5, 8)], None),
        (3, [FIRST], None, 1),
        (0, [FIRST], None, None),
    ],
    ids=[
        "one history",
        "the generation that ended its history",
        "a minion that lagged has none",
        "the first of several",
        "a later one may begin lower",
        "its own generation, which nobody received",
        "a generation that it knows",
        "a shard that nobody received",
        "and has no cell",
    ],
)
def test_where_a_tail_begins(head, own, present, start):
    """`present` None: the master has no such shard."""
    known = {7: [GenerationStart(*each) for each in own]}
    others = {} if present is None else {7: [GenerationStart(*each) for each in present]}
    assert tail_starts([Head(7, own[-1][0], head, 0)], known, others) == ({} if start is None else {7: start})
