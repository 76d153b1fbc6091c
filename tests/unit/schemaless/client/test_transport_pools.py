"""The pools of a client's connections: few connections in each, made as they are needed, and bounded (I14)."""

from contextlib import ExitStack

from schemaless.client.transport import POOL_CONNECTIONS_MAX, TransportPools


class Transport:
    """Stands for a transport of httpx."""


def test_what_fits_one_pool_makes_no_second_one():
    pools = TransportPools(Transport, 4)
    for _ in range(3):
        with ExitStack() as held:
            first = {held.enter_context(pools.taken()) for _ in range(POOL_CONNECTIONS_MAX)}
            assert len(first) == 1
    assert len(pools.all()) == 1


def test_many_at_a_time_are_shared_among_pools_and_the_number_of_pools_is_bounded():
    """A place that becomes free is used before another pool is made."""
    pools = TransportPools(Transport, 2)
    with ExitStack() as held:
        taken = [held.enter_context(pools.taken()) for _ in range(2 * POOL_CONNECTIONS_MAX)]
        assert [taken.count(pool) for pool in pools.all()] == [POOL_CONNECTIONS_MAX, POOL_CONNECTIONS_MAX]
        more = [held.enter_context(pools.taken()) for _ in range(4)]
        assert sorted(more.count(pool) for pool in pools.all()) == [2, 2]
    with pools.taken() as pool:
        assert pool is pools.all()[0]
