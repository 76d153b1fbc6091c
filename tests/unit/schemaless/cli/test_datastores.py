"""`datastore create`: the counts that it takes where none are given."""

import pytest

from schemaless.cli.datastores import partitions_of


@pytest.mark.parametrize(
    ("shards", "partitions"), [(4096, 64), (64, 64), (32, 32), (100, 50), (1, 1), (67, 1), (130, 26)]
)
def test_without_a_number_of_partitions_it_is_the_largest_that_fits(shards, partitions):
    """`--shards 32` was refused, because the default of 64 partitions doesn't divide it."""
    assert partitions_of(shards) == partitions
