"""The application: FastAPI with every route of the contract, services opened and closed around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from api.http.asgi import UNEXPECTED, Entrance, answer_of, short_ways
from api.http.problems import Kind, problem
from api.http.request import Call
from api.http.response import document_answer, response_of
from api.http.route import Route
from api.routes import CONTRACT, OUTSIDE
from api.state import Services, opened_services
from schemaless.config import ApiSettings
from schemaless.topology import load_topology

PREFIX = "/v1/{datastore}"
_NO_SUCH_PATH = Kind(404, "no-such-path", "There is no such path")
_OTHER_METHOD = Kind(405, "method-not-allowed", "The path takes other methods")


def served_app(app: FastAPI, settings: ApiSettings) -> ASGIApp:
    """What the server runs: the entrance stands before FastAPI, whose middleware the short way spares."""
    return Entrance(app, short_ways=short_ways(CONTRACT), calls_max=settings.calls_max)


def stop_following(app: FastAPI) -> None:
    """Ends the calls that follow a log: they would never end by themselves."""
    services: Services = app.state.services
    services.followers.close()


def create_app(settings: ApiSettings) -> FastAPI:
    """Opens its services when it is started, closes them when it is stopped.

    Raises Misconfigured when the topology can't be read.
    """
    topology = load_topology(settings.topology)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with opened_services(settings, topology) as services:
            app.state.services = services
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
        response_class=Response,
        openapi_extra=route.openapi(path),
        tags=[route.path.split("/")[1]],
    )


def _endpoint(route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        call = Call(request.app.state.services, request.scope, request.receive, request.path_params)
        return response_of(await answer_of(route, call))

    return endpoint


async def _http_error(request: Request, error: HTTPException) -> Response:
    kind = {404: _NO_SUCH_PATH, 405: _OTHER_METHOD}.get(error.status_code)
    kind = kind or Kind(error.status_code, "http", str(error.detail))
    response = response_of(document_answer(problem(kind, f"{request.method} {request.url.path}")))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _unexpected(request: Request, error: Exception) -> Response:
    """The server logs the error with its trace; the caller learns only that it is not theirs."""
    return response_of(UNEXPECTED)
