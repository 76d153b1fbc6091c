"""One is singular."""

import pytest

from schemaless.quantity import quantity


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "cell", "0 cells"),
        (1, "cell", "1 cell"),
        (2, "cell", "2 cells"),
        (1, "entry", "1 entry"),
        (2, "entry", "2 entries"),
        (2, "index", "2 indexes"),
        (2, "process", "2 processes"),
        (2, "key", "2 keys"),
        (2, "more shard", "2 more shards"),
    ],
)
def test_a_quantity(count, noun, text):
    assert quantity(count, noun) == text
