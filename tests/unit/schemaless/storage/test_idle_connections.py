"""The idle connections of a pool: newest first, none older than the server tolerates."""

import pytest

from schemaless.storage.idle_connections import IDLE_MAX_S, IdleConnections


@pytest.fixture
def closed():
    return []


@pytest.fixture
def pool(closed):
    pool = IdleConnections(closed.append, lambda: pool.now)
    pool.now = 0.0
    return pool


def test_the_one_used_last_is_taken_first(pool, closed):
    """So that a quiet pool shrinks."""
    for name in "abc":
        pool.give(name)
    assert [pool.take() for _ in range(4)] == ["c", "b", "a", None]
    assert closed == []


def test_what_lay_too_long_is_closed_and_never_given(pool, closed):
    """The server would close it under our hands."""
    pool.give("old")
    pool.now = IDLE_MAX_S
    pool.give("young")
    pool.now = IDLE_MAX_S + 1
    assert [pool.take(), pool.take()] == ["young", None]
    assert closed == ["old"]


def test_after_a_loss_all_are_closed(pool, closed):
    """A server that came back doesn't fail once for each."""
    for name in "ab":
        pool.give(name)
    pool.close_all()
    assert (closed, pool.take()) == (["a", "b"], None)
