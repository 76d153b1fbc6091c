"""What nobody foresaw is answered as a problem, on the short way and on FastAPI's, and is left to the server to log."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from api.app import create_app, served_app
from api.follow.followers import RequestsInFlight
from api.metrics import Metrics
from schemaless.config import ApiSettings

ROW = "0b0b0b0b-0000-4000-8000-000000000000"


class BrokenServices:
    """Any other service that a handler asks for is what nobody foresaw."""

    def __init__(self):
        self.in_flight = RequestsInFlight()
        self.metrics = Metrics()


@pytest.fixture
def services():
    return BrokenServices()


@pytest.fixture
def served(tmp_path, services):
    topology = tmp_path / "topology.json"
    topology.write_text('{"version": 1, "clusters": {}}')
    settings = ApiSettings(topology=topology, kafka="127.0.0.1:9")
    app = create_app(settings)
    app.state.api = services
    return served_app(app, settings)


async def call(app, path):
    """The messages that the server got, and what it was left to log."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [], "state": {}}
    with pytest.raises(AttributeError) as raised:
        await app(scope, None, send)
    return sent, raised.value


@pytest.mark.parametrize("path", [f"/v1/trips/cells/{ROW}/BASE", f"/v1/trips/cells/{ROW}"], ids=["short", "FastAPI's"])
async def test_an_unforeseen_error_is_a_problem_document(served, services, path):
    (start, body), error = await call(served, path)
    assert start["status"] == 500
    assert (b"content-type", b"application/problem+json") in start["headers"]
    assert "unexpected error" in json.loads(body["body"])["detail"]
    assert "catalogue" in str(error)
    assert services.in_flight.count == 0
    assert b'status="500"} 1.0' in services.metrics.exposition()


async def test_a_call_that_is_cancelled_may_be_tried_elsewhere(served, services):
    """A process that stops cancels what it has in hand: the caller learns that another one may be asked."""
    sent = []

    async def send(message):
        sent.append(message)

    async def wait_for_ever(name):
        await asyncio.Event().wait()

    services.catalogue = SimpleNamespace(datastore=wait_for_ever)
    scope = {"type": "http", "method": "GET", "path": f"/v1/trips/cells/{ROW}/BASE", "query_string": b"", "headers": []}
    running = asyncio.ensure_future(served(scope, None, send))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    start, body = sent
    assert (start["status"], json.loads(body["body"])["retryable"]) == (503, True)
