"""One way through the API: with middleware or without, mounted or not, every request is bounded, counted and answered
alike.
"""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from fastapi import Depends, HTTPException
from fastapi import Request as UserRequest
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from api.access.admission import Admission
from api.access.known_tokens import KnownTokens
from api.app import create_app
from api.http import response as http_response
from api.http.asgi import Route
from api.http.budget import PayloadBudget, ReadBudget, RequestsInFlight
from api.metrics import Metrics
from api.routes import ROUTES
from schemaless.access import Scope
from schemaless.config import ApiSettings
from schemaless.errors import NotFound, StorageUnavailable

ROW = "0b0b0b0b-0000-4000-8000-000000000000"
CELL = f"/v1/trips/cells/{ROW}/BASE/1"
ROW_OF_ALL = f"/v1/trips/cells/{ROW}"
REQUESTS = [
    ("PUT", CELL),
    ("GET", CELL),
    ("POST", "/v1/trips/batch/put"),
    ("GET", ROW_OF_ALL),
    ("GET", "/v1/trips/status"),
]


class EmptyCatalogue:
    """A catalogue without datastores; `wait` is awaited before it says so."""

    async def wait(self):
        pass

    async def datastore(self, name):
        await self.wait()
        raise NotFound(f"there is no datastore {name}")


@pytest.fixture
def state(settings):
    tokens = KnownTokens(None)
    tokens.learn([])
    return SimpleNamespace(
        settings=settings,
        tokens=tokens,
        admission=Admission(settings, tokens),
        in_flight=RequestsInFlight(),
        metrics=Metrics(),
        catalogue=EmptyCatalogue(),
        payload_budget=PayloadBudget(1 << 20),
        read_budget=ReadBudget(1 << 20, wait_s=1.0),
    )


@pytest.fixture
def settings(tmp_path):
    topology = tmp_path / "topology.json"
    topology.write_text('{"version": 2, "clusters": {}}')
    return ApiSettings(topology=topology, kafka="127.0.0.1:9", origins=("http://dashboard",))


@pytest.fixture
def app(settings, state):
    app = create_app(settings)
    app.api_state = state
    return app


def client(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://api")


async def ask(app, method, path, **options):
    async with client(app) as asking:
        return await asking.request(method, path, **options)


def problem(response, status, name):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["type"] == f"urn:schemaless:problem:{name}"
    return response.json()


class Counting:
    """Middleware that remembers which paths it saw."""

    seen: list[str]

    def __init__(self, app, seen):
        self.app = app
        self.seen = seen

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            self.seen.append(scope["path"])
        await self.app(scope, receive, send)


async def test_middleware_sees_every_request(app):
    """Single cells, batches, health, the documentation, and paths that nobody serves."""
    seen = []
    app.add_middleware(Counting, seen=seen)
    paths = [path for _, path in REQUESTS] + ["/healthz", "/openapi.json", "/nowhere"]
    for method, path in [*REQUESTS, ("GET", "/healthz"), ("GET", "/openapi.json"), ("GET", "/nowhere")]:
        await ask(app, method, path)
    assert seen == paths


async def test_middleware_that_answers_or_adds_headers_works_as_in_any_app(app):
    """CORS: a preflight never reaches us, and our own answers have its headers."""
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"])

    @app.middleware("http")
    async def named(request, call_next):
        response = await call_next(request)
        response.headers["x-named"] = "yes"
        return response

    origin = {"origin": "http://dashboard"}
    preflight = await ask(app, "OPTIONS", CELL, headers={**origin, "access-control-request-method": "PUT"})
    assert preflight.status_code == 200
    for method, path in REQUESTS:
        response = await ask(app, method, path, headers=origin)
        problem(response, 404, "not-found")
        assert (response.headers["access-control-allow-origin"], response.headers["x-named"]) == ("*", "yes")


async def test_without_middleware_our_routes_pass_nothing_of_fastapi(app):
    """The stack of FastAPI isn't entered."""

    async def entered(scope, receive, send):
        raise AssertionError("FastAPI's stack was entered")

    app.middleware_stack = entered
    for method, path in REQUESTS:
        problem(await ask(app, method, path), 404, "not-found")
    alive = await ask(app, "GET", "/healthz")
    assert alive.json() == {"status": "alive"}
    assert alive.content.endswith(b"}\n")  # for whoever asks it from a shell


async def test_the_app_may_be_mounted_in_another_one(app):
    """Its prefix is not part of our paths."""
    outer = Starlette()
    outer.mount("/store", app)
    assert (await ask(outer, "GET", "/store/healthz")).json() == {"status": "alive"}
    for method, path in REQUESTS:
        problem(await ask(outer, method, f"/store{path}"), 404, "not-found")
    problem(await ask(outer, "GET", "/store/v1/trips/nowhere"), 404, "no-such-path")
    problem(await ask(outer, "DELETE", f"/store{CELL}"), 405, "method-not-allowed")
    document = (await ask(outer, "GET", "/store/openapi.json")).json()
    assert document["servers"][0] == {"url": "/store"}


@pytest.mark.parametrize("middleware", [False, True], ids=["alone", "behind middleware"])
async def test_a_route_of_the_user_is_served_counted_and_bounded(app, state, middleware, settings):
    """With its dependencies, also at a path of ours that has other methods; what it raises is a problem document."""
    if middleware:
        app.add_middleware(Counting, seen=[])

    async def caller(request: UserRequest):
        return request.headers.get("x-caller", "nobody")

    @app.get("/hello/{name}")
    async def hello(name: str, caller: str = Depends(caller)):
        return {"hello": name, "from": caller}

    @app.delete("/v1/{datastore}/status")
    async def reset(datastore: str):
        raise HTTPException(418, "no tea here", {"x-pot": "small"})

    @app.get("/of-ours")
    async def of_ours(request: UserRequest):
        await request.app.api_state.catalogue.datastore("trips")

    response = await ask(app, "GET", "/hello/you", headers={"x-caller": "me"})
    assert response.json() == {"hello": "you", "from": "me"}
    teapot = await ask(app, "DELETE", "/v1/trips/status")
    assert problem(teapot, 418, "http")["detail"] == "no tea here"
    assert teapot.headers["x-pot"] == "small"
    problem(await ask(app, "GET", "/of-ours"), 404, "not-found")
    assert (await ask(app, "POST", "/hello/you")).headers["allow"] == "GET"
    assert b'schemaless_api_requests_total{route="other",status="200"} 1.0' in generate_latest(state.metrics.registry)
    state.in_flight.count = settings.requests_max
    assert "too many concurrent requests" in problem(await ask(app, "GET", "/hello/you"), 503, "unavailable")["detail"]


async def test_an_error_handler_of_the_user_is_called_for_the_user_s_routes(app):
    """As FastAPI has it, with an answer of its own."""

    @app.exception_handler(ZeroDivisionError)
    async def explain(request, error):
        return Response(b"never by zero", 422)

    @app.get("/divide")
    async def divide():
        return 1 / 0

    assert (await ask(app, "GET", "/divide")).text == "never by zero"


@pytest.mark.parametrize("path", ["/v1", "/v2/x/shards", "/v1/trips/nope", "/v1/trips/cells", "/v1/trips/shards/"])
async def test_a_path_that_nobody_serves_is_a_404(app, path):
    """With its problem document, for HEAD without it."""
    problem(await ask(app, "GET", path), 404, "no-such-path")
    assert (await ask(app, "HEAD", path)).content == b""


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", CELL, "GET, HEAD, PUT"),
        ("PATCH", f"{ROW_OF_ALL}/BASE", "GET, HEAD, POST"),
        ("DELETE", f"{ROW_OF_ALL}/BASE/versions", "GET, HEAD, PUT"),
        ("PUT", "/v1/trips/shards", "GET, HEAD"),
        ("GET", "/v1/trips/batch/put", "POST"),
        ("POST", "/v1/trips/indexes/fares", "DELETE, GET, HEAD, PUT"),
        ("POST", "/healthz", "GET, HEAD"),
    ],
)
async def test_another_method_is_a_405_that_names_all_methods(app, method, path, allowed):
    """Those of every route that the path fits."""
    response = await ask(app, method, path)
    problem(response, 405, "method-not-allowed")
    assert response.headers["allow"] == allowed


async def test_a_head_is_a_get_without_body(app):
    """With the length that the body would have."""
    got, head = await ask(app, "GET", "/healthz"), await ask(app, "HEAD", "/healthz")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(got.content))


@pytest.mark.parametrize(("method", "path"), REQUESTS)
async def test_an_unforeseen_error_is_a_problem_document(app, state, method, path):
    """The caller has a 500 without details, and the server has the error to log."""
    del state.catalogue
    sent = []
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
    with pytest.raises(AttributeError, match="catalogue"):
        await app(scope, None, lambda message: gather(sent, message))
    start, body = sent
    assert start["status"] == 500
    assert (b"content-type", b"application/problem+json") in start["headers"]
    assert "unexpected error" in json.loads(body["body"])["detail"]
    assert state.in_flight.count == 0
    assert b'status="500"} 1.0' in generate_latest(state.metrics.registry)


async def gather(sent, message):
    sent.append(message)


@pytest.mark.parametrize(("arriving_max", "status"), [(0, 503), (1, 404)])
async def test_a_payload_that_there_is_no_room_for_ends_its_connection(app, state, arriving_max, status):
    """I14: its rest would keep the connection. A request that failed for another reason keeps its connection."""
    state.payload_budget = PayloadBudget(1 << 20, arriving_max=arriving_max)
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"{", "more_body": True}

    scope = {"type": "http", "method": "PUT", "path": CELL, "query_string": b"", "headers": []}
    await app(scope, receive, lambda message: gather(sent, message))
    assert sent[0]["status"] == status
    assert ((b"connection", b"close") in sent[0]["headers"]) == (status == 503)
    assert (state.in_flight.count, state.payload_budget.arriving) == (0, 0)


async def test_a_response_that_there_is_no_room_for_is_a_503(settings, state, monkeypatch):
    """Others haven't taken theirs. It holds nothing then, and comes when they have."""

    async def large(request):
        return http_response.Response(200, b"x" * 100_000, ())

    monkeypatch.setattr("api.app.ROUTES", (Route("GET", "/large", large, Scope.READ),))
    app = create_app(settings)
    app.api_state = state
    await state.read_budget.take(1 << 20, "somebody else")
    refused = problem(await ask(app, "GET", "/large"), 503, "unavailable")
    assert refused["retryable"]
    state.read_budget.give_back(1 << 20, "somebody else")
    assert len((await ask(app, "GET", "/large")).content) == 100_000
    assert state.read_budget.held_bytes == 0


def no_middleware(app):
    pass


def plain_middleware(app):
    app.add_middleware(Counting, seen=[])


def task_middleware(app):
    """Starlette runs what is behind it in a task of its own."""

    @app.middleware("http")
    async def passed_on(request, call_next):
        return await call_next(request)


@pytest.mark.parametrize("added", [no_middleware, plain_middleware, task_middleware])
@pytest.mark.parametrize(("method", "path"), [*REQUESTS, ("GET", "/slow")])
async def test_a_request_that_a_stop_cancels_may_be_tried_elsewhere(app, state, added, method, path):
    """On every route, the user's too: 503 with a problem document that says so."""
    added(app)
    waiting = asyncio.Event()

    async def wait():
        waiting.set()
        await asyncio.Event().wait()

    app.get("/slow")(wait)
    state.catalogue.wait = wait
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
    running = asyncio.ensure_future(app(scope, receive, lambda message: gather(sent, message)))
    await waiting.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    start, body = sent
    assert (start["status"], json.loads(body["body"])["retryable"]) == (503, True)
    assert state.in_flight.count == 0


@pytest.mark.parametrize(("headers", "retryable"), [({}, False), ({"idempotency-key": "k"}, True)])
async def test_a_post_without_idempotency_key_is_never_called_safe_to_repeat(app, state, headers, retryable):
    """Its version may be written although the answer is an error, and nothing would recognise a repeat."""

    async def away():
        raise StorageUnavailable("down")

    state.catalogue.wait = away
    response = await ask(app, "POST", f"{ROW_OF_ALL}/BASE", headers=headers)
    problem = response.json()
    assert (response.status_code, problem["retryable"]) == (503, retryable)
    assert ("retry-after" in response.headers) is retryable
    assert "same request again" not in problem["hint"] or retryable


async def test_the_documentation_lists_the_route_table_and_the_user_s_routes(app):
    """The same operations, each once, with the parameters of its path."""

    @app.get("/hello/{name}")
    async def hello(name: str):
        return name

    assert (await ask(app, "GET", "/docs")).status_code == 200
    paths = (await ask(app, "GET", "/openapi.json")).json()["paths"]
    listed = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert listed == {(route.method, route.path) for route in ROUTES} | {("GET", "/hello/{name}")}
    identities = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(set(identities)) == len(identities)
    put = paths["/v1/{datastore}/cells/{row_key}/{column}/{ref_key}"]["put"]
    in_path = [parameter["name"] for parameter in put["parameters"] if parameter["in"] == "path"]
    assert in_path == ["datastore", "row_key", "column", "ref_key"]
