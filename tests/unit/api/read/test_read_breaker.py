"""The breaker of the read path: what opens it, what closes it."""

from types import SimpleNamespace

import pytest

from api.read.reader import ReadBreaker

MASTER = SimpleNamespace(node=SimpleNamespace(name="a1"))


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def health(clock):
    return ReadBreaker(lambda: clock.now)


def test_a_server_is_asked_until_it_fails(health):
    """Before anything is known of it, too."""
    assert health.answers(MASTER)
    assert health.answering([MASTER]) == [MASTER]


def test_one_failed_read_opens_and_a_sample_closes(health, clock):
    """The sampler's last answer came before the read began: the server has gone since."""
    health.sampled("a1", answered=True)
    clock.now = 101.0
    health.read_failed(MASTER, began=100.5)
    assert not health.answers(MASTER)
    assert health.answering([MASTER]) == []
    health.sampled("a1", answered=True)
    assert health.answers(MASTER)


def test_a_slow_server_is_not_left(health, clock):
    """It answered the sampler while the read waited: the next reader of its own writes goes there again."""
    clock.now = 101.0
    health.sampled("a1", answered=True)
    clock.now = 102.0
    health.read_failed(MASTER, began=100.0)
    assert health.answers(MASTER)


def test_a_failed_sample_opens(health):
    """Without any reader: the first one pays nothing."""
    health.sampled("a1", answered=False)
    assert not health.answers(MASTER)
    health.read_failed(MASTER, began=100.0)
    assert not health.answers(MASTER)


def test_a_read_of_a_server_never_sampled_opens(health):
    """A process that has just started believes its own read."""
    health.read_failed(MASTER, began=99.0)
    assert not health.answers(MASTER)
