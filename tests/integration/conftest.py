"""Fixtures of the integration tests: an API process for all that only ask it, tailers, a minion that lags."""

import asyncio

import pytest

from schemaless.bus.topics import ensure_topics
from schemaless.config import TailerSettings
from tailer.service import TailerService
from tests.integration.api.api_harness import api_process
from tests.log_harness import replication_stopped
from tests.waiting import until


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

    def ask(question, status):
        def answer():
            answered = question()
            return answered if answered.status_code == status else None

        return until(answer, lambda: question().text)

    return ask


@pytest.fixture
async def tailing(running, kafka, async_storage):
    """Runs a tailer in this process: tailing(datastore, **settings) -> its service, stopped at the end."""
    started = []

    def start(datastore, **settings):
        service = TailerService(
            TailerSettings(**{"topology": running.path, "kafka": kafka, "datastores": (datastore.name,), **settings}),
            async_storage,
        )
        started.append((service, asyncio.create_task(service.run())))
        return service

    yield start
    for service, task in started:
        service.stop()
        await asyncio.wait_for(task, 60)


@pytest.fixture
def new_datastore(make_datastore, kafka):
    """As `make_datastore`, with its topics."""

    def make(**counts):
        datastore = make_datastore(**counts)
        ensure_topics(kafka, datastore)
        return datastore

    return make


@pytest.fixture
def stopped_replication(admin):
    """Cluster a's minion applies nothing until the test ends."""
    with replication_stopped(admin.minions("a")[0]):
        yield
