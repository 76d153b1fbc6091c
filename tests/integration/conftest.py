"""Fixtures of the integration tests: an API process for all that only ask it."""

import time

import pytest

from tests.integration.api_harness import api_process


@pytest.fixture(scope="session")
def api(running, make_datastore):
    """One API process over the session's servers."""
    make_datastore()  # with the first one come the tables
    with api_process(running.path) as started:
        yield started


@pytest.fixture(scope="module")
def shared_datastore(make_datastore):
    """For tests that write rows of their own and look at nothing else."""
    return make_datastore()


@pytest.fixture
def call(api, shared_datastore):
    """Calls of the shared datastore."""
    return api.at(shared_datastore)


@pytest.fixture
def eventually():
    """Asks again until the answer has a status, for what replication brings a moment later."""

    def ask(question, status, timeout_s=10.0):
        deadline = time.monotonic() + timeout_s
        while (answer := question()).status_code != status:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.02)
        return answer

    return ask
