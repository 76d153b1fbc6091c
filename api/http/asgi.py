"""Dispatcher: the one way of a request through the API.

It admits requests (api/access/admission.py), bounds the concurrent ones, counts and times them, finds the handler,
turns errors into problem documents, and answers 503 when a stop cancels a request. Requests of no route of ours go on
to FastAPI, which has what a user added.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, Protocol

import msgspec
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as ASGIScope

from api.access.admission import scope_of_other
from api.http.budget import share_of_token
from api.http.request import Handler, Request
from api.http.response import (
    METHOD_NOT_ALLOWED,
    NO_SUCH_PATH,
    Response,
    StreamResponse,
    document_response,
    problem,
    problem_of,
    problem_response,
    send_response,
)
from api.state import ApiState
from schemaless.access import Scope
from schemaless.contract.parameters import Parameter
from schemaless.errors import NotRepeatable, SchemalessError, TooManyRequests, Unavailable
from schemaless.ops.tokens import anybody, record_action
from schemaless.runtime import tracing
from schemaless.storage.admin_action_table import WHAT_CHARACTERS_MAX, AdminAction

OTHER = "other"
"""The metrics' name for requests of no route of ours."""
FOLLOW = "follow"
"""The metrics' name for requests that follow a log: their responses are late on purpose."""
REJECTED = "rejected"
"""The metrics' name for requests beyond the bound."""
REFUSED = "refused"
"""The metrics' name for requests that aren't admitted."""
UNEXPECTED = problem_response(SchemalessError("an unexpected error; the log of this process has it"))
"""The response when a handler raises what nobody foresaw. The server logs the error with its trace."""
_STOPS = Unavailable("this process stops, before the request had its outcome")
STOPPING = problem_response(_STOPS)


_CLOSE = (b"connection", b"close")
"""Sent where the rest of a payload would keep a connection: what this process has no room for, it doesn't wait for."""
_NO_ROOM = problem_response(Unavailable("too many large responses at once: earlier ones were not taken yet"))


class StateOwner(Protocol):
    api_state: ApiState


class Dispatcher:
    """An ASGI app in front of another one, `app_of_user`. `owner` has the state once its lifespan began."""

    def __init__(self, owner: StateOwner, router: Router, app_of_user: ASGIApp, *, requests_max: int) -> None:
        self._owner = owner
        self._router = router
        self._app_of_user = app_of_user
        self._requests_max = requests_max

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._serve_no_http(scope, receive, send)
            return
        state = self._owner.api_state
        in_flight = state.in_flight
        if in_flight.count >= self._requests_max:
            state.metrics.answered(REJECTED, 503, 0.0)
            error = Unavailable(f"too many concurrent requests: {in_flight.count} are in flight")
            await send_response(problem_response(error), send)
            return
        path = route_path(scope) if scope.get("root_path") else scope["path"]
        found = self._router.find(scope["method"], path)
        began = time.perf_counter()
        if found is None:
            needed, datastore = scope_of_other(path, scope["method"])
        else:
            needed, datastore = found[0].scope, found[1].get("datastore")
        try:
            token = await state.admission.admit(scope, path, needed, datastore)
            if token is not None and in_flight.of(token) >= share_of_token(self._requests_max):
                raise TooManyRequests(f"too many concurrent requests with the token {token.name!r}")
        except SchemalessError as error:
            response = problem_response(error)
            state.metrics.answered(REFUSED, response.status, time.perf_counter() - began)
            await send_response(response, send, headers_only=scope["method"] == "HEAD")
            return
        in_flight.begin(token)
        try:
            if found is None:
                await self._serve_other(state, scope, receive, send, began)
            else:
                match, parameters = found
                request = Request(state, scope, receive, parameters, token)
                given = request.header(b"traceparent")
                if tracing.is_on() and tracing.is_sampled(given, writes=match.scope is Scope.WRITE):
                    url = scope["scheme"], request.header(b"host").decode("latin-1"), scope["path"]
                    with tracing.serving(scope["method"], match.path, url, given):
                        await self._serve_route(match, request, scope, send, began)
                else:
                    await self._serve_route(match, request, scope, send, began)
        finally:
            in_flight.end(token)

    async def _serve_route(
        self, match: RouteMatch, request: Request, scope: ASGIScope, send: Send, began: float
    ) -> None:
        state = request.state
        response = UNEXPECTED
        try:
            if not request.is_whole:
                await request.arrives()
            response = await match.handler(request)
        except SchemalessError as error:
            response = _problem(request, error)
        except asyncio.CancelledError:
            response = _problem(request, _STOPS)
            raise
        finally:
            try:
                if response.status in (429, 503) and (request.arriving or not request.is_whole):
                    response = msgspec.structs.replace(response, headers=(*response.headers, _CLOSE))
                request.finish()
                if match.scope is Scope.ADMIN and scope["method"] not in ("GET", "HEAD") and not request.is_dry_run:
                    await record_action(state.storage, action_of(scope, request, response.status))
                if isinstance(response, StreamResponse):
                    await self._serve_stream(state, response, send, began)
                else:
                    if not request.hold_response(len(response.body)) and match.scope is Scope.READ:
                        response = _NO_ROOM
                    await send_response(response, send, headers_only=scope["method"] == "HEAD")
                    name = FOLLOW if request.following else match.name
                    state.metrics.answered(name, response.status, time.perf_counter() - began)
            finally:
                request.release()

    async def _serve_no_http(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Serves the lifespan, and a WebSocket of a user's route to those who may write."""
        if scope["type"] == "websocket":
            path = route_path(scope)
            asked = {**scope, "method": "POST"}
            try:
                await self._owner.api_state.admission.admit(asked, path, *scope_of_other(path, "POST"))
            except SchemalessError as error:
                await receive()
                await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:100]})
                return
        await self._app_of_user(scope, receive, send)

    async def _serve_stream(self, state: ApiState, response: StreamResponse, send: Send, began: float) -> None:
        watched = WatchedSend(send)
        try:
            await answered_at_stop(response.stream(watched), watched)
        finally:
            if watched.status is None:
                await send_response(UNEXPECTED, watched)
            state.metrics.answered(FOLLOW, watched.status or 500, watched.started_at - began)

    async def _serve_other(self, state: ApiState, scope: ASGIScope, receive: Receive, send: Send, began: float) -> None:
        watched = WatchedSend(page_send(send))
        try:
            await answered_at_stop(self._app_of_user(scope, receive, watched), watched)
        finally:
            state.metrics.answered(OTHER, watched.status or 500, watched.started_at - began)


def _problem(request: Request, error: SchemalessError) -> Response:
    """Returns the problem of an error. A request that may write twice is never called safe to repeat."""
    if error.retryable and not request.repeatable:
        error = NotRepeatable(problem_of(error)["detail"])
    return problem_response(error)


class WatchedSend:
    """A `send` that remembers the status, None before the response started, and when it started."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.started_at = time.perf_counter()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.started_at = time.perf_counter()
        await self._send(message)


async def answered_at_stop(work: Awaitable[None], send: WatchedSend) -> None:
    """Awaits what sends its response itself. A stop that cancels it before its response started is a 503."""
    try:
        await work
    except asyncio.CancelledError:
        if send.status is None:
            await send_response(STOPPING, send)
        raise


_PAGE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"frame-ancestors 'none'; base-uri 'none'; object-src 'none'; form-action 'none'"),
)


def page_send(send: Send) -> Send:
    """Wraps `send` so that pages get the headers of security that they don't set themselves."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message.get("headers", ())}
            added = [header for header in _PAGE_HEADERS if header[0] not in given]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return send_with_headers


def action_of(scope: ASGIScope, request: Request, status: int) -> AdminAction:
    """Returns what the log of admin actions says of a request. `at` is the server's."""
    client = scope.get("client")
    who = (request.token or anybody()).name
    what = f"{scope['method']} {scope['path']} {request.action}".rstrip()
    return AdminAction(0, who, what[:WHAT_CHARACTERS_MAX], client[0] if client else "", str(status))


def route_path(scope: ASGIScope) -> str:
    """Returns the path below the prefix that the app is mounted under."""
    path: str = scope["path"]
    root_path = scope.get("root_path")
    return path[len(root_path) :] if root_path and path.startswith(root_path + "/") else path


async def send_no_route(router: Router, scope: ASGIScope, send: Send) -> None:
    """Sends a 404, or a 405 for a path that has other methods."""
    methods = router.methods(route_path(scope))
    kind = METHOD_NOT_ALLOWED if methods else NO_SUCH_PATH
    response = document_response(problem(kind, f"{scope['method']} {scope['path']}"))
    if methods:
        response = msgspec.structs.replace(
            response, headers=(*response.headers, (b"allow", ", ".join(methods).encode()))
        )
    await send_response(response, send, headers_only=scope["method"] == "HEAD")


# Route and Router: the table of calls, each with what its documentation says, and how a path finds its handler.
#
# Every call of the contract is a `Route`. FastAPI's router sees none of them: it serves only what a user adds.


class Route(msgspec.Struct, frozen=True):
    """One call: method, path, handler, the scope that a caller's token needs (I17), and its documentation.

    `payload` is the shape of what the call takes, `optional` where it may be left out. `answers` has the shape of each
    status that is no problem, None where there is no JSON. `text` has examples of other answers, by media type.
    `problems` lists the statuses that the call has beside those of all calls.
    """

    method: str
    path: str
    handler: Handler
    scope: Scope
    parameters: tuple[Parameter[Any], ...] = ()
    payload: Any = None
    optional: bool = False
    answers: Mapping[int, Any] = {}
    headers: tuple[Parameter[Any], ...] = ()
    text: Mapping[str, str] = {}
    problems: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The handler's name. It is the route's label in the metrics, and its name in generated clients."""
        return getattr(self.handler, "__name__", self.path)

    @property
    def path_parameters(self) -> tuple[str, ...]:
        return tuple(name for _, name in _parameters(self.path))


class RouteMatch(msgspec.Struct, frozen=True, gc=False):
    """What the router knows of a route: `parameters` are the positions and names of the variable segments."""

    handler: Handler
    name: str
    path: str
    scope: Scope
    parameters: tuple[tuple[int, str], ...]


class _Shape(msgspec.Struct, frozen=True):
    """Paths of one method and length whose literal segments have the same positions."""

    literals_of: Callable[[list[str]], Any]
    matches: dict[Any, RouteMatch]
    """By literal segments."""


class Router:
    """Finds the route of a method and a path. A literal segment goes before a parameter. HEAD is served as GET."""

    def __init__(self, routes: Iterable[Route]) -> None:
        shapes: dict[tuple[str, int], dict[tuple[int, ...], _Shape]] = {}
        for route in routes:
            segments = route.path.split("/")
            parameters = _parameters(route.path)
            variable = {position for position, _ in parameters}
            literal = tuple(position for position in range(len(segments)) if position not in variable)
            for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
                same_length = shapes.setdefault((method, len(segments)), {})
                shape = same_length.setdefault(literal, _Shape(itemgetter(*literal), {}))
                shape.matches[shape.literals_of(segments)] = RouteMatch(
                    route.handler, route.name, route.path, route.scope, parameters
                )
        self._shapes = {
            key: tuple(shape for _, shape in sorted(same_length.items(), key=lambda item: -len(item[0])))
            for key, same_length in shapes.items()
        }
        self._methods = sorted({method for method, _ in shapes})

    def find(self, method: str, path: str) -> tuple[RouteMatch, dict[str, str]] | None:
        """Returns the route and the path's parameters as text, or None."""
        segments = path.split("/")
        for shape in self._shapes.get((method, len(segments)), ()):
            match = shape.matches.get(shape.literals_of(segments))
            if match is not None:
                parameters = {name: segments[position] for position, name in match.parameters}
                return None if "" in parameters.values() else (match, parameters)
        return None

    def methods(self, path: str) -> list[str]:
        """Returns every method that the path has, none for a path of no route."""
        return [method for method in self._methods if self.find(method, path) is not None]


def _parameters(path: str) -> tuple[tuple[int, str], ...]:
    """Returns position and name of each `{name}` segment."""
    segments = enumerate(path.split("/"))
    return tuple((position, segment[1:-1]) for position, segment in segments if segment.startswith("{"))
