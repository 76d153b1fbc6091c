"""The dispatcher asks for admission before anything else looks at a request (I17)."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from fastapi import WebSocket

from api.access.admission import Admission
from api.access.known_tokens import KnownTokens
from api.app import create_app
from api.http.budget import RequestsInFlight
from api.metrics import Metrics
from schemaless.access import issue, now_us
from schemaless.config import ApiSettings
from schemaless.errors import NotFound

CELL = "/v1/trips/cells/0b0b0b0b-0000-4000-8000-000000000000/BASE/1"


class EmptyCatalogue:
    async def datastore(self, name):
        raise NotFound(f"there is no datastore {name}")


@pytest.fixture
def secrets():
    return {}


@pytest.fixture
def app(tmp_path, secrets):
    """With a token for all datastores that reads, one that writes, and one that reads another datastore."""
    topology = tmp_path / "topology.json"
    topology.write_text('{"version": 2, "clusters": {}}')
    settings = ApiSettings(topology=topology, kafka="127.0.0.1:9")
    tokens = KnownTokens(None)
    for name, scope, reach in (("reader", "read", ["*"]), ("writer", "write", ["*"]), ("narrow", "read", ["other"])):
        secrets[name], token = issue(name, reach, scope, "1h", now_us())
        tokens.learn([token])
    app = create_app(settings)
    app.api_state = SimpleNamespace(
        in_flight=RequestsInFlight(),
        metrics=Metrics(),
        catalogue=EmptyCatalogue(),
        tokens=tokens,
        admission=Admission(settings, tokens),
    )

    @app.get("/hello")
    async def hello():
        return {"hello": "you"}

    @app.post("/hello")
    async def say():
        return {"said": True}

    @app.websocket("/talk")
    async def talk(websocket: WebSocket):
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    return app


async def ask(app, method, path, secret=None):
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", CELL),
        ("HEAD", CELL),
        ("OPTIONS", CELL),
        ("GET", "/hello"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
        ("GET", "//healthz"),
        ("GET", "/healthz/"),
        ("GET", "/ui/session"),
        ("POST", "/ui"),
        ("GET", "/v1/trips/%74okens"),
    ],
)
async def test_nothing_but_health_is_served_without_a_token(app, method, path):
    """Whether the path is ours, a user's, FastAPI's or nobody's. A HEAD has the status of its GET."""
    answer = await ask(app, method, path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert (answer.content == b"") == (method == "HEAD")


async def test_a_user_s_routes_need_a_token_for_all_datastores(app, secrets):
    """GET needs read, everything else write."""
    assert (await ask(app, "GET", "/hello", secrets["reader"])).status_code == 200
    assert (await ask(app, "POST", "/hello", secrets["reader"])).status_code == 403
    assert (await ask(app, "POST", "/hello", secrets["writer"])).status_code == 200
    assert (await ask(app, "GET", "/hello", secrets["narrow"])).status_code == 403
    assert (await ask(app, "GET", CELL, secrets["narrow"])).status_code == 403
    assert (await ask(app, "GET", CELL, secrets["reader"])).status_code == 404
    page = await ask(app, "GET", "/docs", secrets["narrow"])
    assert (page.status_code, page.headers["x-frame-options"]) == (200, "DENY")


async def talk(app, headers):
    """Returns what a WebSocket of the user's route is sent."""
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message["type"])

    scope = {
        "type": "websocket",
        "path": "/talk",
        "raw_path": b"/talk",
        "query_string": b"",
        "root_path": "",
        "scheme": "ws",
        "headers": [(b"host", b"localhost"), *headers],
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1),
        "subprotocols": [],
    }
    await app(scope, receive, send)
    return sent


async def test_a_websocket_of_a_user_needs_a_token_that_writes(app, secrets):
    def bearer(name):
        return (b"authorization", f"Bearer {secrets[name]}".encode())

    assert await talk(app, []) == ["websocket.close"]
    assert await talk(app, [bearer("reader")]) == ["websocket.close"]
    assert await talk(app, [bearer("writer")]) == ["websocket.accept", "websocket.send", "websocket.close"]
    foreign = [bearer("writer"), (b"origin", b"http://evil.example")]
    assert await talk(app, foreign) == ["websocket.close"]


async def test_one_token_has_half_of_the_concurrent_requests(app, secrets):
    """A flood of valid requests gets 429, and honest tokens keep their share."""
    halfway, all_wait = asyncio.Event(), asyncio.Event()
    waiting = []

    @app.get("/wait")
    async def wait():
        waiting.append(1)
        if len(waiting) == places:
            all_wait.set()
        await halfway.wait()
        return {}

    places = ApiSettings.model_fields["requests_max"].default // 2
    flood = [asyncio.ensure_future(ask(app, "GET", "/wait", secrets["reader"])) for _ in range(places)]
    await all_wait.wait()
    assert (await ask(app, "GET", "/hello", secrets["reader"])).status_code == 429
    assert (await ask(app, "GET", "/hello", secrets["writer"])).status_code == 200
    halfway.set()
    await asyncio.gather(*flood)
    assert (await ask(app, "GET", "/hello", secrets["reader"])).status_code == 200
    assert app.api_state.in_flight.count == 0
