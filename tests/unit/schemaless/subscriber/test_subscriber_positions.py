"""What a Subscriber does with the function that it asks for positions."""

from types import SimpleNamespace

import pytest

from schemaless.location import Location
from schemaless.subscriber.subscriber import Subscriber


def test_a_function_for_positions_that_raises_stop_iteration_ends_nothing_silently():
    """`for batch in subscriber` would end as after `stop`."""
    made = Subscriber.__new__(Subscriber)
    made._stopped, made._steps, made._partition_count = False, None, 1
    made._reader = SimpleNamespace(fresh=[0], span=lambda partition: None)
    made._history = SimpleNamespace(heads=lambda: {0: Location(1, 0)})
    made._positions = lambda shards: next(iter([]))
    with pytest.raises(RuntimeError, match="positions raised StopIteration"):
        next(made)
