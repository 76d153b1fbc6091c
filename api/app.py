"""The application: FastAPI with every route of the contract, services opened and closed around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi import Request as StarletteRequest
from fastapi.responses import Response as StarletteResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from api.http.asgi import UNEXPECTED, Entrance, response_to, short_ways
from api.http.request import Request
from api.http.response import ProblemKind, document_response, problem, response_of
from api.http.route import Route
from api.routes import CONTRACT, OUTSIDE
from api.state import ApiState, opened_state
from schemaless.config import ApiSettings
from schemaless.topology import load_topology

PREFIX = "/v1/{datastore}"
_NO_SUCH_PATH = ProblemKind(404, "no-such-path", "There is no such path")
_OTHER_METHOD = ProblemKind(405, "method-not-allowed", "The path takes other methods")


def served_app(app: FastAPI, settings: ApiSettings) -> ASGIApp:
    """What the server runs: the entrance stands before FastAPI, whose middleware the short way spares."""
    return Entrance(app, short_ways=short_ways(CONTRACT), calls_max=settings.requests_max)


def stop_following(app: FastAPI) -> None:
    """Ends the calls that follow a log: they would never end by themselves."""
    state: ApiState = app.state.api
    state.followers.close()


def create_app(settings: ApiSettings) -> FastAPI:
    """Opens its services when it is started, closes them when it is stopped.

    Raises Misconfigured when the topology can't be read.
    """
    topology = load_topology(settings.topology)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with opened_state(settings, topology) as state:
            app.state.api = state
            yield

    app = FastAPI(
        title="Schemaless",
        summary="Append-only cells on sharded MySQL, and their log",
        version="1",
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        exception_handlers={
            HTTPException: _http_error,
            Exception: _unexpected,
        },
    )
    for route in CONTRACT:
        _add(app, PREFIX + route.path, route)
    for route in OUTSIDE:
        _add(app, route.path, route)
    return app


def _add(app: FastAPI, path: str, route: Route) -> None:
    app.add_api_route(
        path,
        _endpoint(route),
        methods=[route.method],
        name=route.name,
        summary=route.summary,
        response_class=StarletteResponse,
        openapi_extra=route.openapi(path),
        tags=[route.path.split("/")[1]],
    )


def _endpoint(route: Route) -> Callable[[StarletteRequest], Awaitable[StarletteResponse]]:
    async def endpoint(starlette_request: StarletteRequest) -> StarletteResponse:
        request = Request(
            starlette_request.app.state.api,
            starlette_request.scope,
            starlette_request.receive,
            starlette_request.path_params,
        )
        return response_of(await response_to(route, request))

    return endpoint


async def _http_error(starlette_request: StarletteRequest, error: HTTPException) -> StarletteResponse:
    kind = {404: _NO_SUCH_PATH, 405: _OTHER_METHOD}.get(error.status_code)
    kind = kind or ProblemKind(error.status_code, "http", str(error.detail))
    response = response_of(document_response(problem(kind, f"{starlette_request.method} {starlette_request.url.path}")))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _unexpected(starlette_request: StarletteRequest, error: Exception) -> StarletteResponse:
    """The server logs the error with its trace; the caller learns only that it is not theirs."""
    return response_of(UNEXPECTED)
