"""What the tests share that run Faust in their own process."""

import gc

import pytest


@pytest.fixture
def faust_garbage():
    """Faust leaves sockets of its threads' event loops to the collector: their warnings belong to the test."""
    yield
    gc.collect()


def pytest_itemcollected(item):
    """A test that runs Faust isn't failed by what that warns of, at any moment of the test."""
    if "faust_garbage" in item.fixturenames:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
