"""The application: a FastAPI whose routes of the contract are served by a router of their own.

A user may mount it, or add routes, middleware, dependencies and handlers to it. Middleware sees every request. While
none was added, requests of the contract's routes pass nothing of FastAPI. docs/http.md says why.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi import Request as StarletteRequest
from fastapi.responses import Response as StarletteResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from api.access.issuer import issuer_of
from api.http.asgi import UNEXPECTED, Dispatcher, Router, WatchedSend, answered_at_stop, send_no_route
from api.http.openapi import DESCRIPTION, add_docs, document_of
from api.http.response import METHOD_NOT_ALLOWED, ProblemKind, Response, document_response, problem, problem_response
from api.routes import ROUTES
from api.state import ApiState, in_background, opened_state
from schemaless.config import ApiSettings
from schemaless.errors import SchemalessError
from schemaless.runtime.tls import ServedCertificate
from schemaless.topology import Topology, load_topology


def create_app(settings: ApiSettings) -> SchemalessApp:
    """Returns the application. Its lifespan opens what the handlers share, `app.api_state`, and closes it.

    Raises Misconfigured when the topology or the certificate can't be read, or the issuer of JWTs can't be asked.
    """
    topology, issuer = load_topology(settings.topology), issuer_of(settings)

    @asynccontextmanager
    async def lifespan(app: SchemalessApp) -> AsyncIterator[None]:
        looking = () if app.certificate is None else (app.certificate.run(),)
        async with opened_state(settings, topology, issuer) as state, in_background(*looking):
            app.api_state = state
            state.metrics.watch_certificate(app.certificate)
            yield

    app = SchemalessApp(
        topology,
        settings,
        title="Schemaless",
        summary="Append-only cells on sharded MySQL, and their log",
        description=DESCRIPTION,
        servers=[{"url": "/"}],
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error, SchemalessError: _error, Exception: _unexpected},
    )
    add_docs(app)
    return app


class SchemalessApp(FastAPI):
    """`api_state` is there once the lifespan began."""

    api_state: ApiState

    def __init__(self, topology: Topology, settings: ApiSettings, **options: Any) -> None:
        super().__init__(**options)
        self.topology = topology
        self.certificate = (
            None if (file := settings.tls_certificate) is None else ServedCertificate(file, settings.tls_key)
        )
        self._router = Router(ROUTES)
        self._requests_max = settings.requests_max
        self._public_paths = settings.public_paths
        self._dispatcher = self._dispatcher_before(super().__call__)
        self._not_http = self.router.default
        self.router.default = self._no_route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request: by our router at once, or by the user's middleware, which reaches the same router."""
        if scope["type"] == "lifespan" or (scope["type"] == "websocket" and self.user_middleware):
            await super().__call__(scope, receive, send)
        elif self.user_middleware:
            watched = WatchedSend(send)
            await answered_at_stop(super().__call__(scope, receive, watched), watched)
        else:
            if self.root_path:
                scope["root_path"] = self.root_path
            await self._dispatcher(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """Puts our dispatcher behind the user's middleware. Without any it is in front of the whole stack."""
        if not self.user_middleware:
            return super().build_middleware_stack()
        self.user_middleware.append(Middleware(self._dispatcher_before))
        try:
            return super().build_middleware_stack()
        finally:
            self.user_middleware.pop()

    def openapi(self) -> dict[str, Any]:
        """Returns the document of our routes and of the user's."""
        document = super().openapi()
        own = document_of(ROUTES, public_paths=self._public_paths)
        for path, operations in own["paths"].items():
            document["paths"][path] = {**operations, **document["paths"].get(path, {})}
        components = document.setdefault("components", {})
        for kind, named in own["components"].items():
            components[kind] = {**named, **components.get(kind, {})}
        return document

    def begin_drain(self) -> None:
        """Has /readyz tell load balancers that this process stops."""
        self.api_state.draining.set()

    def stop_following(self) -> None:
        """Ends the requests that follow a log. They would never end by themselves."""
        self.api_state.followers.close()

    def _dispatcher_before(self, app: ASGIApp) -> Dispatcher:
        return Dispatcher(self, self._router, app, requests_max=self._requests_max)

    async def _no_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send_no_route(self._router, scope, send)
        else:
            await self._not_http(scope, receive, send)


async def _http_error(request: StarletteRequest, error: HTTPException) -> StarletteResponse:
    """Answers what a user's route raised, with its headers."""
    kind = ProblemKind(error.status_code, "http", HTTPStatus(error.status_code).phrase)
    if error.status_code == METHOD_NOT_ALLOWED.status:
        kind = METHOD_NOT_ALLOWED
    response = _starlette_response(document_response(problem(kind, str(error.detail))))
    response.headers.update(error.headers or {})
    return response


async def _error(request: StarletteRequest, error: SchemalessError) -> StarletteResponse:
    return _starlette_response(problem_response(error))


async def _unexpected(request: StarletteRequest, error: Exception) -> StarletteResponse:
    """The server logs the error with its trace. The caller learns only that it is not theirs."""
    return _starlette_response(UNEXPECTED)


def _starlette_response(response: Response) -> StarletteResponse:
    headers = {name.decode(): value.decode() for name, value in response.headers}
    return StarletteResponse(response.body, response.status, headers)
